"""What must hold after every step (safety) and after the storm (liveness)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa

from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.memory import InMemoryLeaseTable
from kcl_pipeline.leases.serialization import lease_from_item
from kcl_pipeline.sequence import TRIM_HORIZON, Position
from kcl_pipeline.testing.sink import LogEntry, MemoryTable

EVENT_SCHEMA = pa.schema([("id", pa.string()), ("key", pa.string()), ("number", pa.int64()), ("lease_key", pa.string()), ("sequence_number", pa.string())])
POISON = "poison"


class BrokenInvariant(BaseException):
    """A safety invariant does not hold; no production code may catch it."""


@dataclass
class Ledger:
    """What was published: `numbers` counts per key; `ids` are acknowledged; `poison` are those that the transform cannot take."""

    numbers: Counter[str] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    poison: set[str] = field(default_factory=set)


@dataclass
class Checks:
    """Sees every change of the lease table and of the sink's log, and raises `BrokenInvariant` at once."""

    table: InMemoryLeaseTable
    ledger: Ledger = field(default_factory=Ledger)
    repeats_allowed: bool = False
    committed: Counter[str] = field(default_factory=Counter)
    _last_number: dict[str, int] = field(default_factory=dict)
    _settled: dict[str, Position] = field(default_factory=dict)
    _rows: dict[str, Lease] = field(default_factory=dict)
    edited: set[str] = field(default_factory=set)

    def lease(self, key: str) -> Lease | None:
        """The row now; None when there is none."""
        item = self.table.store._rows.get(key)  # noqa: SLF001 (a copy of every row at every step would be most of the simulation's time)
        return None if item is None else lease_from_item(item)

    def row_written(self, key: str) -> None:
        """S2, S3, S5, S6, S8 on one row of the lease table."""
        before, now = self._rows.get(key), self.lease(key)
        if now is None:
            if before is not None and not self.repeats_allowed:
                self._may_be_deleted(before)
            self._rows.pop(key, None)
            return
        if before is None and now.parent_shard_ids and any(self.lease(now.key_of_sibling(p)) for p in now.parent_shard_ids) and now.checkpoint != TRIM_HORIZON:
            raise BrokenInvariant(f"S6: {key} was created at {now.checkpoint} although a parent has a lease")
        if before is not None and now.counter < before.counter and key not in self.edited:
            raise BrokenInvariant(f"S1: the counter of {key} went back from {before.counter} to {now.counter}")
        if before is not None and now.checkpoint < before.checkpoint:
            raise BrokenInvariant(f"S3: the checkpoint of {key} went back from {before.checkpoint} to {now.checkpoint}")
        if not now.checkpoint.is_sentinel and now.checkpoint > self._settled.get(key, TRIM_HORIZON):
            raise BrokenInvariant(f"S2: the checkpoint of {key} is {now.checkpoint}, past the table at {self._settled.get(key)}")
        self._rows[key] = now

    def _may_be_deleted(self, lease: Lease) -> None:
        if not lease.ended:
            raise BrokenInvariant(f"S8: {lease.lease_key} was deleted at {lease.checkpoint}")
        for child in lease.child_shard_ids:
            row = self.lease(lease.key_of_sibling(child))
            if row is None or row.checkpoint == TRIM_HORIZON:
                raise BrokenInvariant(f"S8: {lease.lease_key} was deleted before its child {child} had begun")

    def dead_lettered(self, records: pa.Table) -> None:
        """Records set aside count as settled."""
        for key, number in zip(records["lease_key"].to_pylist(), records["sequence_number"].to_pylist(), strict=True):
            self._settle(key, number)

    def landed(self, entry: LogEntry, table: MemoryTable) -> None:
        """S4 (nothing twice), S5 (parents first, order per key) on one commit."""
        for file in entry.files:
            rows = table.objects[file.path]
            columns = (rows[name].to_pylist() for name in EVENT_SCHEMA.names)
            for one, key, number, lease_key, sequence_number in zip(*columns, strict=True):
                self._row_landed(one, key, number, lease_key)
                self._settle(lease_key, sequence_number)
        for lease_key in entry.data:
            self._parents_ended(lease_key)

    def _row_landed(self, one: str, key: str, number: int, lease_key: str) -> None:
        self.committed[one] += 1
        if self.repeats_allowed:
            return
        if self.committed[one] > 1:
            raise BrokenInvariant(f"S4: {one} of {lease_key} is in the table twice")
        if number <= self._last_number.get(key, -1):
            raise BrokenInvariant(f"S5: {one} of {lease_key} entered the table after number {self._last_number[key]} of its key")
        self._last_number[key] = number

    def _settle(self, lease_key: str, sequence_number: str) -> None:
        position = Position(sequence_number)
        self._settled[lease_key] = max(position, self._settled.get(lease_key, TRIM_HORIZON))

    def _parents_ended(self, lease_key: str) -> None:
        lease = self.lease(lease_key)
        for parent in lease.parent_shard_ids if lease is not None and not self.repeats_allowed else ():
            row = self.lease(lease.key_of_sibling(parent)) if lease is not None else None
            if row is not None and not row.ended:
                raise BrokenInvariant(f"S5: {lease_key} was committed before its parent {parent} had ended")

    def missing(self) -> set[str]:
        """Published events that neither the table has nor the transform refuses."""
        return self.ledger.ids - self.ledger.poison - self.committed.keys()


class CheckedTable(MemoryTable):
    """A table whose every new entry is looked at."""

    checks: Checks

    def append(self, entry: LogEntry) -> bool:
        """See `MemoryTable.append`."""
        landed = super().append(entry)
        if landed:
            self.checks.landed(entry, self)
        return landed
