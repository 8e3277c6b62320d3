"""Build the Dagster definitions of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from kcl_pipeline.arguments import check_texts
from kcl_pipeline.orchestration.assets.checks import build_checks
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, output_key
from kcl_pipeline.orchestration.assets.pipeline_version import pipeline_version
from kcl_pipeline.orchestration.assets.specs import fleet_spec, stream_specs
from kcl_pipeline.orchestration.ops.operate import build_operate_job
from kcl_pipeline.orchestration.ops.output import (
    build_consume_job,
    build_output_asset,
)
from kcl_pipeline.orchestration.resources import (
    AwsResource,
    CoordinatorStateTableResource,
    LeaseTableResource,
    SparkSource,
    WorkerMetricsTableResource,
)
from kcl_pipeline.orchestration.resources.spark import check_spark, spark_resource
from kcl_pipeline.orchestration.sensors.leader import build_leader_sensor
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.status.limits import CheckLimits


def build_definitions(
    pipeline: PipelineLike,
    *,
    aws: AwsResource | None = None,
    spark: SparkSource | None = None,
    leader_default_running: bool = False,
    progress_seconds: float = 60.0,
    group_name: str | None = None,
    output_asset_key: dg.AssetKey | Sequence[str] | str | None = None,
    owners: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    lag_threshold_seconds: float = 60.0,
    scale_up_lag_seconds: float | None = 120.0,
    scale_up_cpu_percent: float | None = None,
    check_limits: CheckLimits | None = None,
) -> dg.Definitions:
    """Build the assets, checks, jobs, leader sensor and resources of one pipeline.

    Combine the result with other definitions by `Definitions.merge`.

    Args:
        pipeline: The pipeline.
        aws: Region, endpoint and credentials. None: the standard environment.
        spark: A `SparkResource`, or a `PySparkResource` or `LazyPySparkResource` of
            dagster-pyspark. None: a `SparkResource` with `spark_config`.
        leader_default_running: Whether the sensor runs, and starts workers, as soon as Dagster
            loads the code. Otherwise a user starts it in the Dagster UI.
        progress_seconds: Time between two reports of the output, at least 9 seconds. Each is
            one event, about 9 kB of Dagster's event log.
        group_name: Group of the assets. None: the pipeline's name.
        output_asset_key: Asset key of the output, such as `["lake", "orders"]` or
            `"lake/orders"`. None: the pipeline's name and the folder of the table.
        owners: E-mail addresses or `team:...`.
        tags: Tags of the assets.
        lag_threshold_seconds: The lag check fails above this lag.
        scale_up_lag_seconds: The sensor starts more workers above this lag. None: it keeps
            `workers.min` workers.
        scale_up_cpu_percent: The sensor starts more workers above this mean CPU of the workers.
            None: 80, or no limit with Dagster's default launcher, whose runs share one machine.
            100: no limit.
        check_limits: When the other checks fail. None: the defaults of `CheckLimits`.

    Raises:
        SettingsError: An argument is wrong.
    """
    _check_resources(aws, spark)
    check_texts("owners", owners, "Write owners=['team:data', 'me@example.com']")
    options = DagsterOptions(
        leader_default_running=leader_default_running,
        progress_seconds=progress_seconds,
        group_name=group_name,
        owners=tuple(owners),
        tags={} if tags is None else tags,
        lag_threshold_seconds=lag_threshold_seconds,
        scale_up_lag_seconds=scale_up_lag_seconds,
        scale_up_cpu_percent=scale_up_cpu_percent,
        check_limits=CheckLimits() if check_limits is None else check_limits,
    )
    names = Names.of(pipeline, output_key(output_asset_key))
    names.check_keys(is_derived=output_asset_key is None)
    output = build_output_asset(pipeline, names, options)
    job = build_consume_job(pipeline, names, options, pipeline_version(pipeline))
    return dg.Definitions(
        assets=[output, *stream_specs(names, options), fleet_spec(pipeline, names, options)],
        asset_checks=[build_checks(pipeline, names, options)],
        jobs=[job, build_operate_job(pipeline, names)],
        sensors=[build_leader_sensor(pipeline, names, options)],
        resources=build_resources(pipeline, names, aws or AwsResource(), spark),
    )


def _check_resources(aws: object, spark: object) -> None:
    if aws is not None and not isinstance(aws, AwsResource):
        raise wrong("aws", aws, "is not an AwsResource", "Write AwsResource(...), or None")
    if spark is not None:
        check_spark(spark)


def build_resources(
    pipeline: PipelineLike, names: Names, aws: AwsResource, spark: SparkSource | None = None
) -> dict[str, Any]:
    """Build the resources of one pipeline. Their keys contain its name."""
    return {
        names.aws: aws,
        names.leases_resource: LeaseTableResource.of(pipeline.settings, aws),
        names.workers_resource: WorkerMetricsTableResource.of(pipeline.settings, aws),
        names.coordinator_resource: CoordinatorStateTableResource.of(pipeline.settings, aws),
        names.spark: spark
        or spark_resource(pipeline.name, dict(getattr(pipeline, "spark_config", {}))),
    }
