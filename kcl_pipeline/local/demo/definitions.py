"""Dagster definitions of the demonstration's pipeline, as a user writes them.

The environment variable KCL_DEMO_LAKE contains the parent directory of the table.
"""

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline

EVENT = "id string, user string, amount double, metric string, value double, time timestamp"


def events(records: DataFrame) -> DataFrame:
    """Parse orders and telemetry into one table of events.

    Orders have id, user, amount and time. Telemetry has id, metric, value and time.
    """
    parsed = records.withColumn(
        "event", f.from_json(f.col("data").cast("string"), EVENT, {"mode": "FAILFAST"})
    )
    return parsed.select(
        "stream", "event.*", "shard_id", "sequence_number", f.to_date("event.time").alias("day")
    )


orders = KinesisPipeline(
    name="orders",
    streams=["orders", "telemetry"],
    transform=events,
    sink=DeltaSink(os.environ.get("KCL_DEMO_LAKE", ".run/lake") + "/events"),
    workers=Fleet(min=2, max=4),
)
defs = orders.definitions(leader_default_running=True)
