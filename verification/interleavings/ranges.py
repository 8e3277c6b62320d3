"""Files named after the ranges that they contain, and the check that these are contiguous."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Batch, DataFile, PartFailure
from kcl_pipeline.position import Position

SCHEMA: Final = pa.schema([("id", pa.int64())])


class RangeWriter:
    """A batch writer whose file names contain the ranges; it ignores the records."""

    def __init__(self) -> None:
        self._serial = itertools.count()

    def write(self, batch: Batch) -> Batch:
        """Write one file per range."""
        files = tuple(
            DataFile(
                f"{r.lease_key}/{number_of(r.after)}-{number_of(r.through)}~{next(self._serial)}",
                1,
                1,
            )
            for r in batch.ranges
        )
        return replace(batch, files=files, output_schema=SCHEMA)

    def probe(self, parts: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Return no failures."""
        return [None for _ in parts]


def number_of(position: Position) -> int:
    """Number of records up to a position; sequence numbers count from 1."""
    return 0 if position.is_sentinel else int(position.sequence_number)


def range_of(path: str) -> tuple[str, int, int]:
    """Lease key, after and through of a file name that a `RangeWriter` created."""
    key, _, span = path.partition("~")[0].rpartition("/")
    after, _, through = span.partition("-")
    return key, int(after), int(through)


def contiguous(ranges: Sequence[tuple[str, int, int]]) -> dict[str, int]:
    """Return the number of the last committed record of each lease.

    Raises `AssertionError` at the first range that does not continue the previous one.
    """
    reached: dict[str, int] = {}
    for key, after, through in ranges:
        at = reached.get(key, 0)
        if after != at:
            raise AssertionError(
                f"the range ({after},{through}] of {key} was committed after {at}: "
                f"{'repeated' if after < at else 'lost'} records"
            )
        reached[key] = through
    return reached
