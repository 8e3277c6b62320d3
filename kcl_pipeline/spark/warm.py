"""The first batch of a session is slow: classes are loaded, code is generated.

A worker pays for that before it takes a lease.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException

from kcl_pipeline.kinesis.client import RECORD_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def warm_up(session: SparkSession) -> None:
    """Take one made-up record from Arrow to a Parquet file that is thrown away.

    Whatever is wrong with the session shows with the first batch, not here.
    """
    record: dict[str, Any] = dict.fromkeys(RECORD_SCHEMA.names)
    record |= {
        "stream": "warm-up",
        "shard_id": "",
        "sequence_number": "0",
        "sub_sequence_number": 0,
        "partition_key": "",
        "data": b"{}",
    }
    record["approximate_arrival_timestamp"] = datetime.fromtimestamp(0, UTC)
    with tempfile.TemporaryDirectory() as folder:
        try:
            frame = session.createDataFrame(pa.Table.from_pylist([record], schema=RECORD_SCHEMA))
            frame.selectExpr(
                "*", "from_json(cast(data as string), 'a string') as parsed"
            ).write.parquet((Path(folder) / "warm").as_uri())
        except PySparkException:
            return
