"""Records of JSON text, and the Spark function that parses them into four columns.

Two consumers use it: a worker of this project, and Spark Structured Streaming in an environment of
its own. So it imports nothing but pyspark.
"""

from __future__ import annotations

import json
import random

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

SCHEMA = "order_id string, customer long, amount double, note string"


def texts(size: int, records: int) -> list[bytes]:
    """Return JSON objects of exactly `size` bytes; 100 bytes are enough for the four fields."""
    rng, found = random.Random(size), []
    for number in range(records):
        order = {
            "order_id": f"o-{number:08d}",
            "customer": rng.randrange(10**7, 10**8),
            "amount": rng.randrange(1000, 10_000) / 100,
            "note": "",
        }
        room = size - len(json.dumps(order))
        order["note"] = rng.randbytes(room // 2 + 1).hex()[:room]
        found.append(json.dumps(order).encode())
    return found


def four_columns(frame: DataFrame) -> DataFrame:
    """Parse the column `data`, which is binary or a string."""
    order = f.from_json(f.col("data").cast("string"), SCHEMA)
    return frame.select(order.alias("order")).select("order.*")
