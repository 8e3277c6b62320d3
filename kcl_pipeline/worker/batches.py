"""Cutting a batch from what the prefetcher has, and finding the records that the transform cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Batch, BatchWriter, ShardRange, Written
from kcl_pipeline.errors import TransformFailed
from kcl_pipeline.records.kinesis import RECORD_SCHEMA, Chunk
from kcl_pipeline.sequence import Position

MAX_FAILED_RECORDS: Final = 100
"""More failing records than this in one batch: the transform is broken, not the input."""

DEAD_LETTER_SCHEMA: Final = RECORD_SCHEMA.append(pa.field("lease_key", pa.string())).append(pa.field("error", pa.string()))


def cut(batch_id: str, chunks: Iterable[Chunk], committed: Mapping[str, Position | None]) -> Batch:
    """Join chunks into a batch with one range per lease, in the order given.

    A chunk that does not follow on from what is committed (or from the chunk before it) belongs to an earlier incarnation of the lease and is left out.
    """
    tables: dict[str, list[pa.Table]] = {}
    ranges: dict[str, ShardRange] = {}
    for chunk in chunks:
        known = ranges.get(chunk.lease_key)
        expected = known.through if known else committed.get(chunk.lease_key)
        if expected is None or chunk.after != expected:
            continue
        ranges[chunk.lease_key] = ShardRange(chunk.lease_key, known.after if known else chunk.after, chunk.through)
        tables.setdefault(chunk.lease_key, []).append(chunk.records)
    moved = {key: part for key, part in ranges.items() if part.after != part.through}
    rows = [table for key in moved for table in tables[key]]
    records = pa.concat_tables(rows) if rows else RECORD_SCHEMA.empty_table()
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
    return of_shard if len(fields) == 1 else pc.and_(of_shard, pc.equal(records["stream"], fields[1]))


def lease_key_of(batch: Batch, row: int) -> str:
    """The lease that a row of the batch came from."""
    one = batch.records.slice(row, 1)
    return next(r.lease_key for r in batch.ranges if _is_of(one, r.lease_key)[0].as_py())


@dataclass(frozen=True, slots=True)
class Sifted:
    """The batch without its failed records, what was written of it, and the failed ones as (row number in the original batch, error)."""

    batch: Batch
    written: Written
    failed: tuple[tuple[int, str], ...]


def write_or_sift(writer: BatchWriter, batch: Batch) -> Sifted:
    """Write the batch; when its transform fails, find the failing records by bisection and write the rest in one piece.

    The files of trial writes are in no commit and disappear with the next vacuum. Raises `TransformFailed` when more than
    `MAX_FAILED_RECORDS` records fail, when not even an empty batch passes, or when the rest fails although each half passed.
    """
    try:
        return Sifted(batch, writer.write(batch), ())
    except TransformFailed as error:
        failed = _failing_rows(writer, batch, error)
    keep = pa.array([True] * batch.records.num_rows).to_numpy(zero_copy_only=False)
    keep[[row for row, _ in failed]] = False
    rest = replace(batch, records=batch.records.filter(pa.array(keep)))
    return Sifted(rest, writer.write(rest), tuple(failed))


def _failing_rows(writer: BatchWriter, batch: Batch, error: TransformFailed) -> list[tuple[int, str]]:
    """Rows that fail on their own, in order. A part that fails although both its halves pass is not a matter of single records."""
    writer.write(replace(batch, batch_id=f"{batch.batch_id}-probe", records=batch.records.slice(0, 0)))
    failed: list[tuple[int, str]] = []
    parts = [(0, batch.records.num_rows, error)]
    while parts:
        start, length, why = parts.pop()
        if length == 1:
            failed.append((start, str(why)))
            if len(failed) > MAX_FAILED_RECORDS:
                raise TransformFailed(f"more than {MAX_FAILED_RECORDS} records of one batch fail; the first error is: {error}") from error
            continue
        for begin, size in ((start + length // 2, length - length // 2), (start, length // 2)):
            trial = replace(batch, batch_id=f"{batch.batch_id}-probe-{begin}-{size}", records=batch.records.slice(begin, size))
            try:
                writer.write(trial)
            except TransformFailed as part_error:
                parts.append((begin, size, part_error))
    return sorted(failed)


def dead_letters(batch: Batch, failed: Sequence[tuple[int, str]]) -> pa.Table:
    """The failed records with their lease and error, as the dead-letter table takes them."""
    rows = batch.records.take(pa.array([row for row, _ in failed], pa.int64()))
    keys = pa.array([lease_key_of(batch, row) for row, _ in failed], pa.string())
    return rows.append_column("lease_key", keys).append_column("error", pa.array([error for _, error in failed], pa.string()))
