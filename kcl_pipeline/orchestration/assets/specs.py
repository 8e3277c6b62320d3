"""Define the external assets: the streams and the fleet.

Dagster does not compute them. The leader sensor reports their state.
"""

import dagster as dg

from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, stream_keys
from kcl_pipeline.status.streams import stream_name

STREAM_GROUP = "kinesis"


def group_of(names: Names, options: DagsterOptions) -> str:
    """The asset group of a pipeline. Default: the pipeline's name."""
    return options.group_name or names.prefix


def stream_specs(names: Names, options: DagsterOptions) -> list[dg.AssetSpec]:
    """The assets of the streams: of those in the settings, or of the selected ones."""
    if names.selects_streams:
        return [
            dg.AssetSpec(
                names.selected_streams,
                description="The Kinesis streams that are selected at run time, one partition per "
                "stream. The leader sensor adds and removes partitions. Each stream also has the "
                "page `kinesis/<name>`.",
                partitions_def=dg.DynamicPartitionsDefinition(name=names.stream_partitions),
                group_name=group_of(names, options),
                owners=list(options.owners),
                tags=dict(options.tags),
                kinds={"kinesis"},
            )
        ]
    return [_stream_spec(name, key) for name, key in stream_keys(names.streams).items()]


def _stream_spec(name_or_arn: str, key: dg.AssetKey) -> dg.AssetSpec:
    """The asset of a stream.

    It depends only on the stream, so that pipelines with a common stream can be in one code
    location.
    """
    name = stream_name(name_or_arn)
    return dg.AssetSpec(
        key,
        description=f"The Kinesis stream `{name}`.",
        group_name=STREAM_GROUP,
        kinds={"kinesis"},
        metadata={
            "dagster/uri": name_or_arn if name_or_arn.startswith("arn:") else f"kinesis://{name}"
        },
    )


def fleet_spec(pipeline: PipelineLike, names: Names, options: DagsterOptions) -> dg.AssetSpec:
    """The asset of the leases, the workers and the leader.

    It is beside the data, not in its lineage: no row of the output comes from a lease.
    """
    settings = pipeline.settings
    return dg.AssetSpec(
        names.fleet,
        description=f"What reads the streams of `{names.application}`: one lease per shard with "
        "its owner and checkpoint, the workers, also Java workers, and the leader. The sensor "
        f"`{names.leader_sensor}` reports it from the tables "
        f"`{settings.lease_table_name}`, `{settings.worker_metrics_table_name}` and "
        f"`{settings.coordinator_state_table_name}`.",
        metadata={"dagster/uri": f"dynamodb://{settings.lease_table_name}"},
        group_name=group_of(names, options),
        owners=list(options.owners),
        tags=dict(options.tags),
        kinds={"dynamodb"},
    )
