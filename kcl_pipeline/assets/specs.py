"""External assets: the streams and the three tables. Dagster does not compute them; the leader
sensor reports what it sees of them.
"""

from typing import Any

import dagster as dg

from kcl_pipeline.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.assets.names import Names, stream_key, stream_name

STREAM_GROUP = "kinesis"


def group_of(names: Names, options: DagsterOptions) -> str:
    """The asset group of a pipeline: its own name unless set."""
    return options.group_name or names.prefix


def stream_spec(name_or_arn: str) -> dg.AssetSpec:
    """A stream.

    It depends on nothing but the stream's name, so that pipelines with a common stream can be
    merged into one code location.
    """
    name = stream_name(name_or_arn)
    return dg.AssetSpec(
        stream_key(name_or_arn),
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
    """The lease table (fed by the streams), and beside it the worker-metrics and the
    coordinator-state table.
    """
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
            deps=list(names.streams_keys),
            description="One row per shard: who reads it, and up to where it is "
            "checkpointed. Written by leader and workers, Java peers among them.",
            metadata={"dagster/uri": f"dynamodb://{settings.lease_table_name}"},
            **common,
        ),
        dg.AssetSpec(
            names.worker_metrics_table,
            description="One row per worker with its recent CPU averages; the leader "
            "balances by them.",
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
