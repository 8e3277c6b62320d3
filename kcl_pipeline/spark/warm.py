"""The first batch of a session is slow: classes are loaded, code is generated.

A worker pays for that before it takes a lease.
"""

from __future__ import annotations

import logging
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException

from kcl_pipeline.kinesis.client import RECORD_SCHEMA
from kcl_pipeline.text import printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


def warm_up(session: SparkSession) -> None:
    """Take one made-up record from Arrow to a Parquet file that is thrown away.

    Does not raise: whatever is wrong with the session shows with the first batch.
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
        except PySparkException as error:
            _log.warning("the Spark session could not be warmed up: %s", printable(str(error)))
