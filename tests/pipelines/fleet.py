"""The pipeline that the process tests run: Arrow in, Arrow out, short times.

The table's place comes from FLEET_LAKE. With FLEET_DEFAULTS=1 all settings have their defaults.
FLEET_STREAMS names the streams, separated by commas.
"""

import json
import os

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import KinesisPipeline


def ids(records: pa.Table) -> pa.Table:
    return pa.table(
        {
            "id": pa.array(
                [json.loads(data)["id"] for data in records["data"].to_pylist()], pa.string()
            ),
            "key": records["partition_key"],
            "lease": records["shard_id"],
            "sequence_number": records["sequence_number"],
        }
    )


FAILOVER_MILLIS = 3_000

SETTINGS = {
    "lease": {"failover_time_millis": FAILOVER_MILLIS, "lease_discovery_interval_millis": 400},
    "assignment": {"lease_assignment_interval_millis": 1_000},
    "leader": {"leader_lease_duration_millis": 3_000, "leader_heartbeat_period_millis": 1_000},
    "worker": {
        "worker_metrics_reporter_freq_in_millis": 1_000,
        "parent_shard_poll_interval_millis": 300,
    },
    "shard_sync": {"completed_lease_cleanup_interval_millis": 2_000},
    "batch": {"min_batch_interval_millis": 100},
}

events = KinesisPipeline(
    name="fleet",
    streams=os.environ.get("FLEET_STREAMS", "events").split(","),
    transform_arrow=ids,
    sink=DeltaSink(os.environ["FLEET_LAKE"] + "/events"),
    settings_overrides={} if os.environ.get("FLEET_DEFAULTS") == "1" else SETTINGS,
)
