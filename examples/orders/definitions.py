"""Orders per minute: from a Kinesis stream to a Delta table, exactly once.

Environment variables configure AWS (`AWS_ENDPOINT_URL`, `AWS_REGION`, ...).
"""

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline


def per_minute(records: DataFrame) -> DataFrame:
    """Count and sum the orders of a batch per minute; a later query adds up the batches."""
    order = f.from_json(
        f.col("data").cast("string"),
        "id string, user string, amount double, time timestamp",
        {"mode": "FAILFAST"},
    )
    orders = records.select(order.alias("order")).select("order.*")
    return orders.groupBy(f.date_trunc("minute", "time").alias("minute")).agg(
        f.count("*").alias("orders"), f.sum("amount").alias("amount")
    )


orders = KinesisPipeline(
    name="orders_per_minute",
    streams=["orders"],
    transform=per_minute,
    sink=DeltaSink(os.environ.get("ORDERS_TABLE", ".run/lake/orders_per_minute")),
    workers=Fleet(min=2, max=8),
)
defs = orders.definitions()
