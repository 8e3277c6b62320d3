"""Select or remove the part of a batch that belongs to given leases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Batch


def records_of(batch: Batch, lease_keys: Collection[str]) -> pa.Table:
    """Return the rows of a batch that belong to these leases, in the order of the batch.

    The number of rows of each range decides. The columns `stream` and `shard_id` do not: two
    leases of a worker can have the same values, if one of them is of a former stream.
    """
    records, parts = batch.records, batch.ranges
    ends = list(accumulate(part.rows or 0 for part in parts))
    if any(part.rows is None for part in parts) or (ends or [0])[-1] != records.num_rows:
        return _by_columns(records, lease_keys)
    found = [
        records.slice(end - (part.rows or 0), part.rows)
        for part, end in zip(parts, ends, strict=True)
        if part.lease_key in lease_keys
    ]
    return pa.concat_tables(found) if found else records.slice(0, 0)


def _by_columns(records: pa.Table, lease_keys: Collection[str]) -> pa.Table:
    if not lease_keys:
        return records.slice(0, 0)
    mask: pa.ChunkedArray | None = None
    for key in lease_keys:
        one = _is_of(records, key)
        mask = one if mask is None else pc.or_(mask, one)
    return records.filter(mask)


def _is_of(records: pa.Table, lease_key: str) -> pa.ChunkedArray:
    """Return which rows belong to a lease. The column `stream` is a name, or an ARN."""
    fields = lease_key.split(":")
    of_shard = pc.equal(records["shard_id"], fields[-1])
    if len(fields) == 1:
        return of_shard
    account, name = fields[:2]
    is_named = pc.equal(records["stream"], name)
    has_arn = pc.ends_with(records["stream"], f":{account}:stream/{name}")
    return pc.and_(of_shard, pc.or_(is_named, has_arn))


def without(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch without the ranges and records of these leases."""
    if not lease_keys:
        return batch
    ranges = tuple(r for r in batch.ranges if r.lease_key not in lease_keys)
    records = records_of(batch, [part.lease_key for part in ranges])
    return replace(batch, ranges=ranges, records=records)
