"""Cutting a batch from what the prefetcher has, and parts of it by lease."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Batch, ShardRange
from kcl_pipeline.kinesis.client import NO_RECORDS, Chunk
from kcl_pipeline.position import Position


def cut(batch_id: str, chunks: Iterable[Chunk], committed: Mapping[str, Position | None]) -> Batch:
    """Join chunks into a batch with one range per lease, in the order given.

    A chunk that does not follow on from what is committed (or from the chunk before it) belongs to
    an earlier incarnation of the lease and is left out.
    """
    tables: dict[str, list[pa.Table]] = {}
    ranges: dict[str, ShardRange] = {}
    for chunk in chunks:
        known = ranges.get(chunk.lease_key)
        expected = known.through if known else committed.get(chunk.lease_key)
        if expected is None or chunk.after != expected:
            continue
        ranges[chunk.lease_key] = ShardRange(
            chunk.lease_key, known.after if known else chunk.after, chunk.through
        )
        tables.setdefault(chunk.lease_key, []).append(chunk.records)
    moved = {key: part for key, part in ranges.items() if part.after != part.through}
    rows = [table for key in moved for table in tables[key]]
    records = pa.concat_tables(rows) if rows else NO_RECORDS
    return Batch(batch_id, tuple(moved.values()), records)


def records_of(records: pa.Table, lease_keys: Sequence[str]) -> pa.Table:
    """The rows that belong to these leases, in their order."""
    if not lease_keys:
        return records.slice(0, 0)
    mask: pa.ChunkedArray | None = None
    for key in lease_keys:
        one = _is_of(records, key)
        mask = one if mask is None else pc.or_(mask, one)
    return records.filter(mask)


def _is_of(records: pa.Table, lease_key: str) -> pa.ChunkedArray:
    fields = lease_key.split(":")
    of_shard = pc.equal(records["shard_id"], fields[-1])
    return (
        of_shard if len(fields) == 1 else pc.and_(of_shard, pc.equal(records["stream"], fields[1]))
    )


def without(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """The batch less the ranges and records of some leases."""
    if not lease_keys:
        return batch
    ranges = tuple(r for r in batch.ranges if r.lease_key not in lease_keys)
    return replace(
        batch, ranges=ranges, records=records_of(batch.records, [r.lease_key for r in ranges])
    )
