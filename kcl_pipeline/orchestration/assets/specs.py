"""Define the external assets: the streams and the three tables.

Dagster does not compute them. The leader sensor reports their state.
"""

from typing import Any

import dagster as dg

from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, stream_keys, stream_name

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


def table_specs(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> list[dg.AssetSpec]:
    """The lease table (downstream of the streams) and the two other tables."""
    settings = pipeline.settings
    common: dict[str, Any] = {
        "group_name": group_of(names, options),
        "owners": list(options.owners),
        "tags": dict(options.tags),
        "kinds": {"dynamodb"},
    }
    return [
        dg.AssetSpec(
            names.lease_table,
            deps=[names.selected_streams] if names.selects_streams else list(names.streams_keys),
            description="One row per shard with its owner and its checkpoint. Written by the "
            "leader and the workers, including Java workers.",
            metadata={"dagster/uri": f"dynamodb://{settings.lease_table_name}"},
            **common,
        ),
        dg.AssetSpec(
            names.worker_metrics_table,
            description="One row per worker with its recent CPU averages, which the leader uses "
            "to balance the load.",
            metadata={"dagster/uri": f"dynamodb://{settings.worker_metrics_table_name}"},
            **common,
        ),
        dg.AssetSpec(
            names.coordinator_state_table,
            description="The leader's lock and the client version.",
            metadata={"dagster/uri": f"dynamodb://{settings.coordinator_state_table_name}"},
            **common,
        ),
    ]
