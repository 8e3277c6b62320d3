"""Warm up a Spark session before a worker takes leases.

The first batch of a session is slow, because classes are loaded and code is generated.
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
    """Write one artificial record from Arrow to a temporary Parquet file.

    It never raises: the first batch will report an unusable session.
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
            _log.warning("cannot warm up the Spark session: %s", printable(str(error)))
