"""Pipeline of `benchmarks.failover`: ids and the worker that committed them, default settings.

Environment variables: FAILOVER_NAME names application and stream. FAILOVER_TABLE is the Delta
table. FAILOVER_WORKER is the id of this worker. FAILOVER_SETTINGS is a JSON object of settings.
"""

from __future__ import annotations

import json
import os

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import Fleet, KinesisPipeline

WORKER = os.environ.get("FAILOVER_WORKER", "")
NAME = os.environ.get("FAILOVER_NAME", "failover")


def ids(records: pa.Table) -> pa.Table:
    """Return id and shard of every record, and the worker that commits it."""
    data = records["data"].to_pylist()
    return pa.table(
        {
            "id": pa.array([one.partition(b" ")[0].decode() for one in data], pa.string()),
            "shard_id": records["shard_id"].cast(pa.string()),
            "worker": pa.array([WORKER] * len(data), pa.string()),
        }
    )


failover = KinesisPipeline(
    name=NAME,
    streams=[NAME],
    transform_arrow=ids,
    sink=DeltaSink(os.environ.get("FAILOVER_TABLE", ".run/failover/table")),
    workers=Fleet(min=1, max=4),
    settings_overrides=json.loads(os.environ.get("FAILOVER_SETTINGS", "{}")),
)
