"""Split a chunk of records into two consecutive chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.sizes import payload_bytes
from kcl_pipeline.position import Position


def split(chunk: Chunk, max_records: int, max_bytes: int) -> tuple[Chunk | None, Chunk | None]:
    """Split off the first part that fits both limits.

    Returns:
        The first part and the rest. None for an empty part. The rest keeps `shard_end`.
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
    """Split a chunk after `rows` rows, which are more than 0 and fewer than all."""
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
    """Return the chunk with `oldest_at`: when its first record arrived.

    The last record is `millis_behind_latest` behind the latest record of the shard. The first one
    arrived before the last one by the difference of their arrival times.

    Args:
        chunk: The chunk.
        now: When it was read, in monotonic seconds.
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
    """Return the cumulative payload bytes of the rows."""
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
