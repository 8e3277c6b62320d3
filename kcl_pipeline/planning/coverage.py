"""Check whether leases cover all hash keys of a stream (protocol §7.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, Shard, StreamId


@dataclass(frozen=True, slots=True)
class Hole:
    """The lowest range of hash keys without a lease; both ends are inclusive.

    Audits compare holes for equality.
    """

    start: int
    end: int

    def __str__(self) -> str:
        if (self.start, self.end) == (0, MAX_HASH_KEY):
            return "no lease covers any hash key"
        return f"no lease covers the hash keys {self.start} to {self.end}"


def find_hole(ranges: Iterable[HashKeyRange]) -> Hole | None:
    """Return the first gap in 0..2^128-1. Ranges may overlap."""
    covered = -1
    for item in sorted(ranges, key=attrgetter("start")):
        if item.start > covered + 1:
            return Hole(covered + 1, item.start - 1)
        covered = max(covered, item.end)
    return None if covered >= MAX_HASH_KEY else Hole(covered + 1, MAX_HASH_KEY)


def hole_in_leases(leases: Iterable[Lease]) -> Hole | None:
    """Return the first gap between leases that are not at SHARD_END.

    Leases without a hash range are ignored; see `ranges_to_fill`.
    """
    return find_hole(
        lease.hash_key_range
        for lease in leases
        if not lease.ended and lease.hash_key_range is not None
    )


def ranges_to_fill(
    leases: Iterable[Lease], shards: Iterable[Shard], stream: StreamId
) -> Mapping[str, HashKeyRange]:
    """Return hash ranges, by lease key, of unfinished leases that have none in their row."""
    known = {stream.lease_key(shard.shard_id): shard.hash_key_range for shard in shards}
    return {
        lease.lease_key: known[lease.lease_key]
        for lease in leases
        if lease.hash_key_range is None and not lease.ended and lease.lease_key in known
    }
