"""Rows of a dead-letter table, and a pipeline whose transform fails for chosen records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from kcl_pipeline.worker.failures import DEAD_LETTER_SCHEMA

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
BASE = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
"""As large as the sequence numbers of Kinesis are."""


def letter(number: int | str, sub: int = 0, **more: Any) -> dict[str, Any]:
    """One row. The position is the sequence number, from `BASE` if it is an int."""
    return {
        "stream": "orders",
        "shard_id": "shardId-000000000000",
        "sequence_number": number if isinstance(number, str) else str(BASE + number),
        "sub_sequence_number": sub,
        "partition_key": "k",
        "data": f"{number}/{sub}".encode(),
        "approximate_arrival_timestamp": NOON,
        "lease_key": "shardId-000000000000",
        "error": "no",
        "batch_id": "b",
        "failed_at": NOON + timedelta(seconds=1),
        **more,
    }


def store(uri: str, *rows: Mapping[str, Any]) -> None:
    """Append rows to a dead-letter table."""
    schema = pa.schema([pa.field(one.name, one.type) for one in DEAD_LETTER_SCHEMA])
    write_deltalake(uri, pa.Table.from_pylist(list(rows), schema=schema), mode="append")


class Strict:
    """A transform that returns the records as dead letters whose data `fails` accepts."""

    def __init__(self) -> None:
        self.fails: Callable[[bytes], bool] = lambda _: False

    def __call__(self, records: pa.Table) -> pa.Table:
        errors = ["no" if self.fails(one) else None for one in records["data"].to_pylist()]
        found = records.select(["shard_id", "sequence_number", "sub_sequence_number", "data"])
        return found.append_column("_error", pa.array(errors, pa.string()))
