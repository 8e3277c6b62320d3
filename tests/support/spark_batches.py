"""Batches and writers for tests of the sinks' writers."""

from __future__ import annotations

import datetime as dt
import gc
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from kcl_pipeline.batch import RECORD_SCHEMA, Batch, BatchWriter
from kcl_pipeline.spark.writer import SparkBatchWriter

NOW = dt.datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=dt.UTC)


def records(*payloads: bytes) -> pa.Table:
    rows = [
        {
            "stream": "orders",
            "shard_id": "shardId-000000000001",
            "sequence_number": str(
                49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898 + number
            ),
            "sub_sequence_number": 0,
            "partition_key": f"key-{number}",
            "explicit_hash_key": None,
            "data": payload,
            "approximate_arrival_timestamp": NOW,
            "encryption_type": None,
        }
        for number, payload in enumerate(payloads)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


def batch(*payloads: bytes) -> Batch:
    return Batch("orders/1", (), records(*payloads))


def spark_writer(spark, tmp_path: Path, transform) -> BatchWriter:
    return SparkBatchWriter(spark, transform, str(tmp_path / "t"))


GIVEN = records(*(bytes([number % 256]) * (number % 7) for number in range(1000)))
"""A thousand records of several lengths."""


def open_files() -> int:
    """Those in memory: what other threads of the process open is their own."""
    gc.collect()  # writers of other tests keep files for their next batch
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if "memfd:" in str(link.readlink()):
                found.add(link.stat().st_ino)  # a mapping has a descriptor of its own
    return len(found)
