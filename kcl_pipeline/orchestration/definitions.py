"""Build the Dagster definitions of a pipeline."""

from collections.abc import Callable
from typing import Any

import dagster as dg

from kcl_pipeline.orchestration.checks import build_checks
from kcl_pipeline.orchestration.leader import build_leader_sensor
from kcl_pipeline.orchestration.names import Names, aws_of
from kcl_pipeline.orchestration.operate import build_operate_job
from kcl_pipeline.orchestration.options import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.resources import (
    ApplicationResource,
    AwsResource,
    CoordinatorStateTableResource,
    LeaseTableResource,
    WorkerMetricsTableResource,
)
from kcl_pipeline.orchestration.specs import (
    changed_spec,
    code_version,
    fleet_spec,
    output_spec,
    stream_specs,
)
from kcl_pipeline.orchestration.worker_op import build_consume_job, build_output_asset


def build_definitions(
    pipeline: PipelineLike,
    options: DagsterOptions | None = None,
    get_asset_spec: Callable[[dg.AssetSpec], dg.AssetSpec] = lambda spec: spec,
) -> dg.Definitions:
    """Build the assets, checks, jobs, leader sensor and resources of one pipeline.

    Args:
        pipeline: The pipeline.
        options: How it appears in Dagster. None: the defaults.
        get_asset_spec: Returns the spec that an asset gets, after `options.asset_attributes`.

    Raises:
        SettingsError: Two assets have one key, or a function changed a key.
    """
    options = options or DagsterOptions()
    names = Names.of(pipeline).with_resources(options)
    names.check_keys(is_derived=pipeline.output_asset_key is None)
    version = code_version(pipeline)
    output, *others = (
        changed_spec(spec, options, get_asset_spec, is_output=spec.key == names.output)
        for spec in (
            output_spec(pipeline, names, options, version),
            *stream_specs(names, options),
            fleet_spec(pipeline, names, options),
        )
    )
    return dg.Definitions(
        assets=[build_output_asset(pipeline, names, options, output), *others],
        asset_checks=[build_checks(pipeline, names, options)],
        jobs=[
            build_consume_job(pipeline, names, options, version),
            build_operate_job(pipeline, names),
        ],
        sensors=[build_leader_sensor(pipeline, names, options)],
        resources=build_resources(pipeline, names, options),
    )


def build_resources(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> dict[str, Any]:
    """Build the resources of one pipeline, except those that the user has already.

    Their keys contain the name of the pipeline.
    """
    resources: dict[str, Any] = {}
    if not isinstance(options.aws, str):
        resources[names.aws] = options.aws or AwsResource()
    if names.spark is not None and not isinstance(options.spark, str):
        from kcl_pipeline.orchestration.spark import SparkResource  # noqa: PLC0415 (it is slow)

        resources[names.spark] = options.spark or SparkResource(
            app_name=pipeline.name, spark_config=dict(pipeline.spark_config)
        )
    for key, kind in (
        (names.leases_resource, LeaseTableResource),
        (names.workers_resource, WorkerMetricsTableResource),
        (names.coordinator_resource, CoordinatorStateTableResource),
    ):
        aws = resources.get(names.aws)
        resources[key] = (
            _table_on(names.aws, kind, pipeline) if aws is None else kind.of(pipeline.settings, aws)
        )
    return resources


def _table_on(key: str, kind: type[ApplicationResource], pipeline: PipelineLike) -> Any:
    """A table on the AWS session of another resource, which Dagster has only at run time."""

    @dg.resource(required_resource_keys={key}, description=kind.__doc__)
    def table(context: dg.InitResourceContext) -> ApplicationResource:
        return kind.of(pipeline.settings, aws_of(context.resources, key))

    return table
