"""Read and write the leader lock, the client version, the identity of the application, its losses.

These are rows of the coordinator-state table (protocol §3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.leases.application.control import (
    PAUSE,
    Control,
    Pause,
    control_of,
)
from kcl_pipeline.leases.application.identity import (
    ApplicationIdentity,
    ApplicationRecord,
    application_from_text,
    application_text,
)
from kcl_pipeline.leases.application.losses import Losses, losses_from_text, losses_text
from kcl_pipeline.leases.application.replay_record import (
    REPLAY,
    ReplayRecord,
    replay_from_text,
    replay_text,
)
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY, MIGRATION_KEY
from kcl_pipeline.leases.lease.serialization import string
from kcl_pipeline.leases.state import serialization as rows
from kcl_pipeline.leases.state.values import LeaderLock, MigrationState, UnreadableLock
from kcl_pipeline.leases.store import (
    Absent,
    AttributeValue,
    Changes,
    Condition,
    ConditionCheck,
    Equals,
    Item,
    Outcome,
    Present,
    RowStore,
    same_item,
    same_value,
)

LOSS_ATTEMPTS: Final = 10


class CoordinatorRows:
    """The coordinator-state table of one application, on a row store.

    Lock versions are unique, so a retried write recognises the result of its first attempt.

    Args:
        store: The rows.
    """

    def __init__(self, store: RowStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._store.name

    def ensure_exists(self) -> bool:
        """Create the table if it is missing, wait for it, and return whether it was created."""
        return self._store.ensure_exists()

    def read_lock(self) -> LeaderLock | None:
        """Return the leader lock; None if there is no row. Strongly consistent.

        Raises:
            UnreadableRowError: The row cannot be read.
        """
        found = self.observe_lock()
        if isinstance(found, UnreadableLock):
            raise UnreadableRowError(found.reason)
        return found

    def observe_lock(self, *, consistent: bool = True) -> LeaderLock | UnreadableLock | None:
        """Return the leader lock, also if its row cannot be read."""
        item = self._store.get(LEADER_KEY, consistent=consistent)
        if item is None:
            return None
        try:
            return rows.lock_from_item(item)
        except UnreadableRowError as error:
            known: Item = {name: item[name] for name in rows.LOCK_ATTRIBUTES if name in item}
            return UnreadableLock(str(error), known)

    def put_lock(self, lock: LeaderLock, *, replacing: LeaderLock | UnreadableLock | None) -> bool:
        """Write the whole row.

        Applied if the row equals this one.

        Args:
            lock: The new lock.
            replacing: None: there must be no row. A released lock: the row must be released.
                Another lock: the row must have its version. An unreadable lock: the row must have
                its attributes.

        Returns:
            Whether the condition held.
        """
        key = self._store.key_name
        item = rows.lock_to_item(lock, key)
        outcome = self._store.put(item, _replaceable(key, replacing))
        return outcome.applied or same_item(outcome.item, item)

    def heartbeat_lock(self, lock: LeaderLock, version: str) -> bool:
        """Set a new version and the duration, if version and owner equal those of `lock`.

        Applied if the row has owner and new version.
        """
        put = {
            rows.LOCK_DURATION: string(str(lock.lease_duration_millis)),
            rows.LOCK_VERSION: string(version),
        }
        outcome = self._store.update(LEADER_KEY, self.held_conditions(lock), Changes(put))
        return outcome.applied or _has(outcome, {rows.LOCK_OWNER: string(lock.owner_name), **put})

    def proof_of_lock(self, lock: LeaderLock) -> ConditionCheck:
        """Return the condition that version and owner equal those of `lock`."""
        return self._store.check(LEADER_KEY, self.held_conditions(lock))

    def release_lock(self, lock: LeaderLock) -> bool:
        """Delete the row, if version and owner are those of `lock`. False if it is held after.

        Applied if there is no row, or another owner's.

        A row with the same owner name and another version is still held: False.
        """
        outcome = self._store.delete(LEADER_KEY, self.held_conditions(lock))
        return (
            outcome.applied
            or outcome.item is None
            or text_of(outcome.item, rows.LOCK_OWNER) != lock.owner_name
        )

    def held_conditions(self, lock: LeaderLock) -> list[Condition]:
        """Return the conditions that version and owner equal those of `lock`."""
        return [
            Present(self._store.key_name),
            Equals(rows.LOCK_VERSION, string(lock.version)),
            Equals(rows.LOCK_OWNER, string(lock.owner_name)),
        ]

    def read_migration(self) -> MigrationState | None:
        """Return the client version; None if there is no row. Strongly consistent.

        Raises:
            UnreadableRowError: The row cannot be read.
        """
        item = self._store.get(MIGRATION_KEY)
        return None if item is None else rows.migration_from_item(item)

    def put_migration(self, state: MigrationState, *, replacing: MigrationState | None) -> bool:
        """Write the client version, if the row has the `cv` of `replacing`.

        `replacing` None: there must be no row.

        Applied if the row has these attributes.
        """
        key = self._store.key_name
        attributes = rows.migration_attributes(state)
        if replacing is None:
            outcome = self._store.put({key: string(MIGRATION_KEY), **attributes}, [Absent(key)])
        else:
            conditions: list[Condition] = [
                Present(key),
                Equals(rows.CLIENT_VERSION, string(replacing.client_version)),
            ]
            outcome = self._store.update(MIGRATION_KEY, conditions, Changes(attributes))
        return outcome.applied or _has(outcome, attributes)

    def read_application(self) -> ApplicationRecord | None:
        """Return the identity of the application; None if none is recorded. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        item = self._store.get(MIGRATION_KEY)
        if item is None or rows.APPLICATION not in item:
            return None
        found = application_from_text(text_of(item, rows.APPLICATION) or "")
        return replace(found, control=control_of(item))

    def put_application(
        self, identity: ApplicationIdentity, *, replacing: ApplicationRecord | None
    ) -> bool:
        """Record the identity, if the record equals `replacing`.

        `replacing` None: there must be no record. False also if there is no client-version row,
        which contains the record.

        Applied if the attribute has this value.
        """
        before = None if replacing is None else string(replacing.text)
        return self._put_attribute(rows.APPLICATION, string(application_text(identity)), before)

    def proof_of_application(self, record: ApplicationRecord) -> ConditionCheck:
        """Return the condition that the recorded identity is the one that was read."""
        return self._store.check(MIGRATION_KEY, [Equals(rows.APPLICATION, string(record.text))])

    def read_control(self) -> Control:
        """Return the request of an operator. Strongly consistent."""
        return control_of(self._store.get(MIGRATION_KEY) or {})

    def put_pause(self, pause: Pause | None, *, replacing: Control) -> bool:
        """Pause the application, or resume it with None, if the pause is as in `replacing`.

        False also if there is no client-version row.

        Applied if the attribute has this value, or is absent after None.
        """
        value = None if pause is None else pause.value
        return self._put_attribute(PAUSE, value, replacing.pause_value)

    def proof_of_pause(self, paused: Control) -> ConditionCheck:
        """Return the condition that the pause is the one that was read.

        Raises:
            ValueError: There was none.
        """
        if paused.pause is None:
            raise ValueError("the application is not paused")
        unchanged = Equals(PAUSE, paused.pause_value or paused.pause.value)
        return self._store.check(MIGRATION_KEY, [unchanged])

    def read_replay(self) -> ReplayRecord | None:
        """Return what this application replays; None if it is no replay. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        item = self._store.get(MIGRATION_KEY)
        if item is None or REPLAY not in item:
            return None
        return replay_from_text(text_of(item, REPLAY) or "")

    def put_replay(self, record: ReplayRecord, *, replacing: ReplayRecord | None) -> bool:
        """Record what this application replays, if the record equals `replacing`.

        `replacing` None: there must be no record. False also if there is no client-version row,
        which contains the record.

        Applied if the attribute has this value.
        """
        before = None if replacing is None else string(replay_text(replacing))
        return self._put_attribute(REPLAY, string(replay_text(record)), before)

    def read_losses(self) -> Losses:
        """Return the recorded losses; without a record an empty one. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        text = self._losses_text()
        return Losses() if text is None else losses_from_text(text)

    def change_losses(self, change: Callable[[Losses], Losses]) -> Losses:
        """Change the record of losses by conditional writes, and return it.

        Each write is applied only if the record is the one that `change` got. It is not applied
        without a client-version row, which contains the record.

        Args:
            change: Called again with the new record if another process wrote meanwhile.

        Raises:
            AwsError: The record is not known to be written.
            UnreadableRowError: The record cannot be read.
        """
        for _ in range(LOSS_ATTEMPTS):
            text = self._losses_text()
            read = Losses() if text is None else losses_from_text(text)
            changed = change(read)
            before = None if text is None else string(text)
            if changed == read or self._put_attribute(
                rows.LOSSES, string(losses_text(changed)), before
            ):
                return changed
        raise UnavailableError(
            f"the lost records were not recorded in the row Migration3.0 of the table {self.name}: "
            f"it changed {LOSS_ATTEMPTS} times, or is missing",
            operation="UpdateItem",
        )

    def _losses_text(self) -> str | None:
        item = self._store.get(MIGRATION_KEY)
        if item is None or rows.LOSSES not in item:
            return None
        return text_of(item, rows.LOSSES) or ""

    def _put_attribute(
        self, name: str, value: AttributeValue | None, before: AttributeValue | None
    ) -> bool:
        """Write an attribute of the client-version row, or remove it, if it is `before`."""
        condition: Condition = Absent(name) if before is None else Equals(name, before)
        changes = Changes(remove=(name,)) if value is None else Changes({name: value})
        outcome = self._store.update(
            MIGRATION_KEY, [Present(self._store.key_name), condition], changes
        )
        if outcome.applied or outcome.item is None:
            return outcome.applied
        return same_value(outcome.item.get(name), value)


def _replaceable(key: str, lock: LeaderLock | UnreadableLock | None) -> list[Condition]:
    """Return the conditions of replacing the lock that was found."""
    match lock:
        case None:
            return [Absent(key)]
        case UnreadableLock():
            return [Present(key), *(_unchanged(lock, name) for name in rows.LOCK_ATTRIBUTES)]
        case LeaderLock(is_released=True):
            return [Present(key), Equals(rows.LOCK_RELEASED, string("1"))]
        case LeaderLock():
            return [Present(key), Equals(rows.LOCK_VERSION, string(lock.version))]


def _unchanged(lock: UnreadableLock, name: str) -> Condition:
    value = lock.attributes.get(name)
    return Absent(name) if value is None else Equals(name, value)


def _has(outcome: Outcome, attributes: Item) -> bool:
    return outcome.item is not None and all(
        same_value(outcome.item.get(name), value) for name, value in attributes.items()
    )
