"""Define the output asset and its job: materializing the asset runs one worker."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, Mode, PipelineLike
from kcl_pipeline.orchestration.assets.names import (
    CONTINUOUS,
    VERSION_TAG,
    Names,
    table_uri,
)
from kcl_pipeline.orchestration.assets.specs import group_of
from kcl_pipeline.orchestration.ops.consume import consume_shards


class ConsumeConfig(dg.Config):
    """What a run of the output asset does."""

    mode: Mode = Field(
        default="drain",
        description="drain: read up to the current end of every shard, commit, and stop. "
        "continuous: consume until the run is terminated.",
    )


def build_output_asset(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> dg.AssetsDefinition:
    """The asset whose computation is one KCL worker."""
    uri = table_uri(pipeline.sink)
    metadata: dict[str, Any] = {"dagster/uri": uri} if uri else {}
    letters = dead_letter_address(pipeline.sink)
    if letters is not None:
        metadata["dead_letters"] = dg.MetadataValue.path(letters)

    @dg.asset(
        key=names.output,
        deps=[names.lease_table],
        group_name=group_of(names, options),
        kinds={"kinesis", "spark", "deltalake"}
        if pipeline.transform is not None
        else {"kinesis", "arrow", "deltalake"},
        owners=list(options.owners),
        tags=dict(options.tags),
        metadata=metadata,
        required_resource_keys={names.aws, names.spark},
        output_required=False,
        description=(
            f"Output of `{names.application}`, which reads "
            f"{', '.join(f'`{s}`' for s in names.streams)}. A materialization runs one worker "
            "that reads up to the current end of every shard, commits, and stops. "
            f"The sensor `{names.leader_sensor}` keeps continuous workers running. Each "
            "record is in the table exactly once, with any number of workers. "
            "The values below are those of the last period in which data was committed, with its "
            "time. While nothing arrives, the plots go on, and the check `lag_below_threshold` "
            "says since when nothing has arrived, and whether records wait."
        ),
    )
    def consume(
        context: dg.AssetExecutionContext, config: ConsumeConfig
    ) -> Iterator[dg.MaterializeResult[None]]:
        resources = PipelineResources(names, context)
        result = consume_shards(
            context,
            pipeline,
            options,
            config.mode,
            spark=resources.spark,
            clients=resources.aws.clients(pipeline.settings),
        )
        # A generator, because a returned value is always a materialization.
        if result is not None:
            yield result

    return consume


def continuous_config(asset: dg.AssetsDefinition) -> dict[str, Any]:
    """Run config for a continuous worker."""
    return {"ops": {asset.node_def.name: {"config": {"mode": CONTINUOUS}}}}


def build_consume_job(asset: dg.AssetsDefinition, names: Names, version: str) -> Any:
    """The job that the leader sensor starts: one continuous worker.

    The worker runs in the process of the run, so that it cannot outlive a killed run.
    """
    return dg.define_asset_job(
        names.consume_job,
        selection=dg.AssetSelection.assets(names.output).without_checks(),
        config=continuous_config(asset),
        executor_def=dg.in_process_executor,
        tags={**names.worker_run_tags, VERSION_TAG: version},
        description=f"One continuous worker of {names.application}. A manual run adds one "
        "worker. A terminated run releases its leases.",
    )
