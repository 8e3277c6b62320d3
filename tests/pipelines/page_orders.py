"""The pipeline that the tests of the Dagster UI run: Arrow in, Arrow out, the sensor on.

The table's place comes from FLEET_LAKE.
"""

import json
import os

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import Fleet, KinesisPipeline


def ids(records: pa.Table) -> pa.Table:
    return pa.table(
        {
            "id": [json.loads(data)["id"] for data in records["data"].to_pylist()],
            "shard_id": records["shard_id"],
        }
    )


orders = KinesisPipeline(
    name="orders",
    streams=["orders"],
    transform_arrow=ids,
    sink=DeltaSink(os.environ["FLEET_LAKE"] + "/events"),
    workers=Fleet(min=1, max=2),
    settings_overrides={
        "lease": {"failover_time_millis": 6_000, "lease_discovery_interval_millis": 1_000},
        "assignment": {"lease_assignment_interval_millis": 2_000},
        "worker": {"worker_metrics_reporter_freq_in_millis": 2_000},
        "batch": {"min_batch_interval_millis": 100},
    },
)
defs = orders.definitions(leader_default_running=True, progress_seconds=2.0)
