"""Select or remove the part of a batch that belongs to given leases."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from kcl_pipeline.batch import Batch


def records_of(batch: Batch, lease_keys: Collection[str]) -> pa.Table:
    """Return the rows of a batch that belong to these leases, in the order of the batch.

    The number of rows of each range decides. The columns `stream` and `shard_id` do not: two
    leases of a worker can have the same values, if one of them is of a former stream.

    Raises:
        ValueError: The ranges have another number of rows than the batch.
    """
    records = batch.records
    ends = list(accumulate((part.rows or 0 for part in batch.ranges), initial=0))
    if ends[-1] != records.num_rows:
        raise ValueError(f"{batch.batch_id} has {records.num_rows} rows, not {ends[-1]}")
    found = [
        records.slice(end, part.rows or 0)
        for part, end in zip(batch.ranges, ends, strict=False)
        if part.lease_key in lease_keys
    ]
    return pa.concat_tables(found) if found else records.slice(0, 0)


def without(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch without the ranges and records of these leases."""
    if not lease_keys:
        return batch
    ranges = tuple(r for r in batch.ranges if r.lease_key not in lease_keys)
    records = records_of(batch, [part.lease_key for part in ranges])
    return replace(batch, ranges=ranges, records=records)


def only(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch with the ranges and records of these leases alone."""
    return without(batch, [r.lease_key for r in batch.ranges if r.lease_key not in lease_keys])
