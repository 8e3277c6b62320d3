"""The stream `orders` in a Delta table, exactly once. An Arrow function needs no JVM."""

import json
from datetime import datetime
from typing import Any

import pyarrow as pa

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline
from resources import LAKE, aws

COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("user", pa.string()),
        ("amount", pa.float64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("shard_id", pa.string()),
        ("sequence_number", pa.string()),
        ("sub_sequence_number", pa.int64()),
        ("_error", pa.string()),
    ]
)
POSITION = ["shard_id", "sequence_number", "sub_sequence_number"]


def parse(records: pa.Table) -> pa.Table:
    """Return one row per record.

    A row with a text in `_error` is not written to the table. Its record becomes a dead letter.
    """
    rows = records.select([*POSITION, "data"]).to_pylist()
    return pa.Table.from_pylist([_row(row) for row in rows], schema=COLUMNS)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    data = record.pop("data")
    try:
        order = json.loads(data)
        return record | {
            "id": str(order["id"]),
            "user": order.get("user"),
            "amount": float(order["amount"]),
            "time": datetime.fromisoformat(order["time"]),
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return record | {"_error": f"{type(error).__name__}: {error}"}


orders = KinesisPipeline(
    name="orders",  # the KCL application name: it names the three DynamoDB tables
    streams=["orders"],
    transform_arrow=parse,
    sink=DeltaSink(f"{LAKE}/orders"),
    workers=Fleet(min=2, max=4),
)
defs = orders.definitions(aws=aws, leader_default_running=True)
