"""Move an application from three tables to the single table, as its leader (protocol §4.5).

Each call performs at most one transition. Every write is conditional on the status that was read,
and is in one transaction with the check of the leader lock. So a call whose answer was lost is
repeated by the next one, and two leaders never undo each other's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leases.application.control import BALANCE, PAUSE
from kcl_pipeline.leases.application.replay_record import REPLAY
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY, MIGRATION_KEY, TABLE_MIGRATION_KEY
from kcl_pipeline.leases.layout.layout import SUPPORT_SECONDS, Layout, seconds_of
from kcl_pipeline.leases.layout.migration_row import (
    STATUS,
    MigrationStatus,
    TableMigration,
    migration_attributes,
    migration_from_item,
)
from kcl_pipeline.leases.layout.placement import Where
from kcl_pipeline.leases.lease.serialization import ENTITY_TYPE, string
from kcl_pipeline.leases.state.serialization import (
    APPLICATION,
    LAST_UPDATE,
    LOSSES,
    MIGRATION_ENTITY,
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
)
from kcl_pipeline.leases.store import (
    Absent,
    Changes,
    Check,
    Condition,
    Elsewhere,
    Equals,
    Item,
    Put,
    Update,
    Write,
)

INIT_SECONDS: Final = 3600.0
"""Time from INIT to DEPLOYED, in which no worker of an older version may appear."""
ACTIVE_SECONDS: Final = 60
"""A worker is active if its row is younger: two reports of a Java worker (protocol §2.4)."""
ROWS_PER_MOVE: Final = 25
_MAY_APPEAR: Final = (APPLICATION, LOSSES, PAUSE, BALANCE, REPLAY)
"""Attributes that another process may add to the row `Migration3.0` at any time."""


@dataclass(frozen=True, slots=True)
class Leading:
    """The leader that performs a transition.

    Attributes:
        name: Its name in the lock row.
        proof: The condition that it has the lock.
    """

    name: str
    proof: Check


class TableMigrator:
    """Performs the transitions of one application.

    Args:
        layout: The layout.
        bake_seconds: The setting `table_migration_complete_bake_time_seconds`.
        clock: The clock.
    """

    def __init__(self, layout: Layout, bake_seconds: float, clock: Clock) -> None:
        self._layout = layout
        self._leases = layout.leases
        self._state = layout.coordinator
        self._bake_seconds = bake_seconds
        self._clock = clock

    def advance(self, leading: Leading, owners: frozenset[str]) -> MigrationStatus | None:
        """Perform the next transition if it is due.

        Args:
            leading: The leader. Its lock is in the coordinator-state table.
            owners: The workers that own leases.

        Returns:
            The new status. None: nothing has changed.

        Raises:
            AwsError: A call failed. It may have been applied; the next call continues.
        """
        if self._layout.placement().is_single:
            return None
        item = self._state.get(TABLE_MIGRATION_KEY)
        if item is None:
            return self._begin(leading, owners)
        found = migration_from_item(item)
        self._layout.note(found)
        match found.status:
            case MigrationStatus.INIT:
                return self._after_init(leading, found, owners)
            case MigrationStatus.DEPLOYED:
                return self._after_deployed(leading, found, owners)
            case MigrationStatus.PENDING:
                return self._after_pending(leading, found)
        return MigrationStatus.COMPLETE

    def _begin(self, leading: Leading, owners: frozenset[str]) -> MigrationStatus | None:
        if not self._layout.migrates or not self._all_support(owners):
            return None
        state = TableMigration(MigrationStatus.INIT, leading.name, self._now_millis())
        key = self._state.key_name
        item = {key: string(TABLE_MIGRATION_KEY), **migration_attributes(state)}
        if self._state.transact([leading.proof, Put(item, [Absent(key)])]):
            return None
        self._layout.note(state)
        return state.status

    def _after_init(
        self, leading: Leading, found: TableMigration, owners: frozenset[str]
    ) -> MigrationStatus | None:
        if not self._all_support(owners):
            unchanged = [Equals(STATUS, string(found.status))]
            withdrawn = Elsewhere(self._state, TABLE_MIGRATION_KEY, unchanged)
            self._state.transact([leading.proof, withdrawn])
            return None
        if self._now_millis() - found.modified_millis < INIT_SECONDS * 1000:
            return None
        return self._write(leading, found, MigrationStatus.DEPLOYED)

    def _after_deployed(
        self, leading: Leading, found: TableMigration, owners: frozenset[str]
    ) -> MigrationStatus | None:
        """Move the rows when every worker reports into the lease table."""
        if self._layout.placement().where is not Where.PENDING:
            return None
        if self._has_active_former_worker() or not self._all_are_in_lease_table(owners):
            return None
        former = self._former_rows()
        for first in range(0, len(former), ROWS_PER_MOVE):
            moves = self._moves(former[first : first + ROWS_PER_MOVE])
            if self._leases.transact([leading.proof, *moves]):
                return None
        if self._former_rows():
            return None
        return self._write(leading, found, MigrationStatus.PENDING)

    def _after_pending(self, leading: Leading, found: TableMigration) -> MigrationStatus | None:
        """Complete the migration after the bake time, or take it back."""
        if self._former_rows() or self._has_active_former_worker():
            return self._write(leading, found, MigrationStatus.DEPLOYED)
        waited = self._now_millis() - found.modified_millis
        if not self._layout.migrates or waited < self._bake_seconds * 1000:
            return None
        done = found.followed_by(MigrationStatus.COMPLETE, leading.name, self._now_millis())
        attributes = migration_attributes(done)
        key = self._leases.key_name
        refused = self._leases.transact(
            [
                leading.proof,
                Put({key: string(TABLE_MIGRATION_KEY), **attributes}, [Absent(key)]),
                Elsewhere(
                    self._state,
                    TABLE_MIGRATION_KEY,
                    [Equals(STATUS, string(found.status))],
                    Changes(attributes),
                ),
            ]
        )
        if refused:
            return None
        # The lock is now in the lease table; nobody holds it there yet.
        self._state.delete(LEADER_KEY, leading.proof.conditions)
        self._layout.note(done)
        return done.status

    def _write(
        self, leading: Leading, found: TableMigration, status: MigrationStatus
    ) -> MigrationStatus | None:
        following = found.followed_by(status, leading.name, self._now_millis())
        unchanged: list[Condition] = [Equals(STATUS, string(found.status))]
        changes = Changes(migration_attributes(following))
        if self._state.transact([leading.proof, Update(TABLE_MIGRATION_KEY, unchanged, changes)]):
            return None
        self._layout.note(following)
        return status

    def _moves(self, rows: list[Item]) -> list[Write]:
        """Return the writes that move rows into the lease table, unless they have changed."""
        key = self._state.key_name
        writes: list[Write] = []
        for row in rows:
            moved = {name: value for name, value in row.items() if name != key}
            name = text_of(row, key) or ""
            if name == MIGRATION_KEY:  # a version before 3.5 wrote it without the type
                moved.setdefault(ENTITY_TYPE, string(MIGRATION_ENTITY))
            unchanged = [Equals(one, value) for one, value in row.items() if one != key]
            absent = [Absent(one) for one in _MAY_APPEAR if one not in row]
            writes += (
                Put(
                    {self._leases.key_name: string(name), **moved}, [Absent(self._leases.key_name)]
                ),
                Elsewhere(self._state, name, [*unchanged, *absent]),
            )
        return writes

    def _former_rows(self) -> list[Item]:
        """Return the rows of the coordinator-state table that have to move."""
        key, stay = self._state.key_name, {LEADER_KEY, TABLE_MIGRATION_KEY}
        return [row for row in self._state.scan(consistent=True) if text_of(row, key) not in stay]

    def _former_workers(self) -> list[Item]:
        try:
            return list(self._layout.workers.scan(consistent=True))
        except NotFoundError:
            return []

    def _has_active_former_worker(self) -> bool:
        return any(self._is_active(row) for row in self._former_workers())

    def _all_are_in_lease_table(self, owners: frozenset[str]) -> bool:
        return bool(owners) and owners <= {
            text_of(row, self._layout.workers.key_name)
            for row in self._layout.shared_workers.scan(consistent=True)
            if self._is_active(row) and self._supports(row)
        }

    def _all_support(self, owners: frozenset[str]) -> bool:
        """Return whether every owner of a lease can work on the single table."""
        key = self._layout.workers.key_name
        rows = [*self._former_workers(), *self._layout.shared_workers.scan(consistent=True)]
        return bool(owners) and owners <= {text_of(row, key) for row in rows if self._supports(row)}

    def _is_active(self, row: Item) -> bool:
        return self._clock.wall() - (seconds_of(row, LAST_UPDATE) or 0) <= ACTIVE_SECONDS

    def _supports(self, row: Item) -> bool:
        age = self._clock.wall() - (seconds_of(row, SUPPORT_CODE_UPDATE) or 0)
        return (seconds_of(row, SUPPORT_CODE) or 0) >= 1 and age <= SUPPORT_SECONDS

    def _now_millis(self) -> int:
        return int(self._clock.wall() * 1000)
