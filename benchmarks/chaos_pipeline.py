"""Pipeline of `benchmarks.chaos`: ids of two streams, with short intervals.

Environment variables: CHAOS_LAKE is the parent directory of the table. CHAOS_SPARK=1 selects a
Spark transform. CHAOS_RUNS is the number of workers that the sensor keeps.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.pipeline import Fleet, KinesisPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPARK = os.environ.get("CHAOS_SPARK") == "1"
RUNS = int(os.environ.get("CHAOS_RUNS", "1"))


def ids(records: pa.Table) -> pa.Table:
    """Return the id and the position of every record."""
    return pa.table(
        {
            "id": pa.array(
                [json.loads(data)["id"] for data in records["data"].to_pylist()], pa.string()
            ),
            "stream": records["stream"],
            "shard_id": records["shard_id"],
            "sequence_number": records["sequence_number"],
        }
    )


def ids_in_spark(records: DataFrame) -> DataFrame:
    """Return the same columns with Spark."""
    from pyspark.sql import functions as f  # noqa: PLC0415 (a fleet without Spark does not load it)

    return records.select(
        f.get_json_object(f.col("data").cast("string"), "$.id").alias("id"),
        "stream",
        "shard_id",
        "sequence_number",
    )


chaos = KinesisPipeline(
    name="chaos",
    streams=["orders", "telemetry"],
    transform=ids_in_spark if SPARK else None,
    transform_arrow=None if SPARK else ids,
    sink=DeltaSink(os.environ.get("CHAOS_LAKE", ".run/chaos/lake") + "/events"),
    workers=Fleet(min=RUNS, max=RUNS),
    settings_overrides={
        "lease": {"failover_time_millis": 3_000, "lease_discovery_interval_millis": 400},
        "assignment": {"lease_assignment_interval_millis": 1_000},
        # Dagster ticks every five seconds. The lock stays valid if one tick is late.
        "leader": {"leader_lease_duration_millis": 12_000, "leader_heartbeat_period_millis": 4_000},
        "worker": {
            "worker_metrics_reporter_freq_in_millis": 1_000,
            "parent_shard_poll_interval_millis": 300,
        },
        "shard_sync": {"completed_lease_cleanup_interval_millis": 5_000},
        "batch": {"min_batch_interval_millis": 100},
    },
    spark_config={"spark.master": "local[1]", "spark.driver.memory": "512m"},
)
defs = chaos.definitions(leader_default_running=True, progress_seconds=5.0)
