"""Our side of the interop suite: a pipeline that writes the id of each record.

Environment variables: INTEROP_NAME names the application. INTEROP_STREAMS has stream names,
separated by commas. INTEROP_TABLE is the Delta table. INTEROP_WORKER is the id of this worker.
INTEROP_SETTINGS is a JSON object of settings. INTEROP_PAUSE is the seconds that each batch takes.
"""

from __future__ import annotations

import json
import os
import time

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import KinesisPipeline

WORKER = os.environ.get("INTEROP_WORKER", "")
PAUSE_SECONDS = float(os.environ.get("INTEROP_PAUSE", "0"))


def ids(records: pa.Table) -> pa.Table:
    """Return id and shard of every record, and the worker that commits it."""
    time.sleep(PAUSE_SECONDS)
    data = records["data"].to_pylist()
    return pa.table(
        {
            "id": pa.array([one.partition(b" ")[0].decode() for one in data], pa.string()),
            "shard_id": records["shard_id"].cast(pa.string()),
            "worker": pa.array([WORKER] * len(data), pa.string()),
        }
    )


interop = KinesisPipeline(
    name=os.environ.get("INTEROP_NAME", "interop"),
    streams=os.environ.get("INTEROP_STREAMS", "interop").split(","),
    transform_arrow=ids,
    sink=DeltaSink(os.environ.get("INTEROP_TABLE", ".run/interop/table")),
    settings_overrides=json.loads(os.environ.get("INTEROP_SETTINGS", "{}")),
)
