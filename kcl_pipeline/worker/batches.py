"""Select or remove the part of a batch that belongs to given leases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Batch


def records_of(records: pa.Table, lease_keys: Sequence[str]) -> pa.Table:
    """Return the rows that belong to these leases, in the order of the table."""
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
    return replace(
        batch, ranges=ranges, records=records_of(batch.records, [r.lease_key for r in ranges])
    )
