"""Cutting a chunk in two that follow each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.decode.bodies import payload_bytes
from kcl_pipeline.position import Position


def split(chunk: Chunk, max_records: int, max_bytes: int) -> tuple[Chunk | None, Chunk | None]:
    """The first part that fits both limits, and the rest; None for a part without anything.

    The rest keeps the shard's end.
    """
    rows = chunk.records.num_rows
    if rows <= max_records and chunk.bytes <= max_bytes:
        return chunk, None
    fitting = min(
        int(np.searchsorted(_running_bytes(chunk.records), max_bytes, side="right")), max_records
    )
    if fitting >= rows:
        return chunk, None
    return cut_at(chunk, fitting) if fitting > 0 else (None, chunk)


def cut_at(chunk: Chunk, rows: int) -> tuple[Chunk, Chunk]:
    """The first `rows` rows (above 0, below all of them) and the rest."""
    first = chunk.records.slice(0, rows)
    last = first.slice(rows - 1)
    through = Position(
        last.column("sequence_number")[0].as_py(), last.column("sub_sequence_number")[0].as_py()
    )
    size = payload_bytes(first)
    head = replace(chunk, records=first, through=through, bytes=size, shard_end=None)
    rest = chunk.records.slice(rows)
    later = _arrival_seconds(rest, 0) - _arrival_seconds(first, 0)
    return head, replace(
        chunk,
        records=rest,
        after=through,
        bytes=max(chunk.bytes - size, 0),
        oldest_at=None if chunk.oldest_at is None else chunk.oldest_at + later,
    )


def with_oldest(chunk: Chunk, now: float) -> Chunk:
    """The chunk with the time at which its first record arrived; it was read at `now`.

    Its last record is `millis_behind_latest` behind the tip, and the first one by as much more as
    it arrived earlier.
    """
    rows = chunk.records.num_rows
    if not rows:
        return chunk
    span = _arrival_seconds(chunk.records, rows - 1) - _arrival_seconds(chunk.records, 0)
    behind = (chunk.millis_behind_latest or 0) / 1000
    return replace(chunk, oldest_at=now - behind - max(span, 0.0))


def _arrival_seconds(records: pa.Table, row: int) -> float:
    return float(records.column("approximate_arrival_timestamp")[row].value) / 1e6


def _running_bytes(records: pa.Table) -> npt.NDArray[np.int64]:
    """Payload bytes of the first row, the first two rows, and so on."""
    sizes = np.zeros(records.num_rows, np.int64)
    for name in ("data", "partition_key"):
        start = 0
        for chunk in records.column(name).chunks:
            if len(chunk):
                offsets = np.frombuffer(chunk.buffers()[1], np.int32)[
                    chunk.offset : chunk.offset + len(chunk) + 1
                ]
                sizes[start : start + len(chunk)] += np.diff(offsets)
            start += len(chunk)
    return np.cumsum(sizes)
