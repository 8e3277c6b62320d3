"""The rows of the coordinator-state table (protocol §3): leader lock and client version.

The client-version row also has the records of the application, see `application`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.leases.application import (
    PAUSE,
    REPLAY,
    ApplicationIdentity,
    ApplicationRecord,
    Control,
    Losses,
    Pause,
    ReplayRecord,
    application_from_text,
    application_text,
    control_of,
    losses_from_text,
    losses_text,
    replay_from_text,
    replay_text,
)
from kcl_pipeline.leases.codec import (
    LEADER_KEY,
    MAX_KEY_BYTES,
    MIGRATION_KEY,
    int_of,
    list_of,
    name_of,
    number,
    readable,
    required,
    string,
    text_of,
)
from kcl_pipeline.leases.row import ENTITY_TYPE
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
from kcl_pipeline.text import printable


@dataclass(frozen=True, slots=True)
class LeaderLock:
    """The leader lock (protocol §3.3).

    Attributes:
        owner_name: Name of the leader.
        lease_duration_millis: Time without a heartbeat after which the lock is expired.
        version: Unique string that every heartbeat changes. No time is stored.
        is_released: Whether the owner has released the lock.
    """

    owner_name: str
    lease_duration_millis: int
    version: str
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableLock:
    """A lock row that cannot be read. An unknown process may hold the lock.

    Attributes:
        reason: What is wrong with the row.
        attributes: The attributes of a lock that the row has. If they are equal in two reads, the
            row has not changed.
    """

    reason: str
    attributes: Item


StateChange = tuple[str, str, int]
"""A state, the worker that wrote it, and when, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The client-version row `Migration3.0` (protocol §3.5).

    Attributes:
        client_version: The client version (`cv`).
        modified_by: The worker that wrote it (`mb`).
        modified_millis: When, in epoch milliseconds (`mts`).
        history: Former states (cv, mb, mts), newest first, at most ten.
    """

    client_version: str
    modified_by: str
    modified_millis: int
    history: tuple[StateChange, ...] = ()


LEADER_ENTITY: Final = "LEADER"
LOCK_OWNER: Final = "ownerName"
LOCK_DURATION: Final = "leaseDuration"
LOCK_VERSION: Final = "recordVersionNumber"
LOCK_RELEASED: Final = "isReleased"
LOCK_ATTRIBUTES: Final = (LOCK_OWNER, LOCK_DURATION, LOCK_VERSION, LOCK_RELEASED)

MIGRATION_ENTITY: Final = "CLIENT_VERSION_MIGRATION"
CLIENT_VERSION: Final = "cv"
MODIFIED_BY: Final = "mb"
MODIFIED_MILLIS: Final = "mts"
HISTORY: Final = "h"
HISTORY_LENGTH: Final = 10
APPLICATION: Final = "kclpApplication"
LOSSES: Final = "kclpLosses"
MAX_HISTORY: Final = 100
"""Largest number of past client versions (our own limit; KCL keeps ten)."""
_DURATION: Final = re.compile(r"[0-9]{1,19}")


def lock_to_item(lock: LeaderLock, key_name: str) -> Item:
    """Return the complete lock row. The duration is a string, as in the Java lock library."""
    return {
        key_name: string(LEADER_KEY),
        ENTITY_TYPE: string(LEADER_ENTITY),
        LOCK_OWNER: string(lock.owner_name),
        LOCK_DURATION: string(str(lock.lease_duration_millis)),
        LOCK_VERSION: string(lock.version),
        **({LOCK_RELEASED: string("1")} if lock.is_released else {}),
    }


def lock_from_item(item: Item) -> LeaderLock:
    """Parse the lock row.

    Raises:
        UnreadableRowError: Owner, duration or version are missing or outside their limits. A
            duration above `MAX_LOCK_DURATION_MILLIS` would prevent a new leader for too long.
    """
    with readable(f"the row {LEADER_KEY} is not a leader lock that can be read"):
        return LeaderLock(
            owner_name=required(name_of(item, LOCK_OWNER, MAX_KEY_BYTES), LOCK_OWNER),
            lease_duration_millis=_duration(required(text_of(item, LOCK_DURATION), LOCK_DURATION)),
            version=required(name_of(item, LOCK_VERSION), LOCK_VERSION),
            is_released=text_of(item, LOCK_RELEASED) == "1",
        )


def _duration(text: str) -> int:
    millis = int(text) if _DURATION.fullmatch(text) else 0
    if not 0 < millis <= MAX_LOCK_DURATION_MILLIS:
        raise ValueError(
            f"{LOCK_DURATION} is '{printable(text, 50)}', not milliseconds from 1 to "
            f"{MAX_LOCK_DURATION_MILLIS}"
        )
    return millis


def migration_attributes(state: MigrationState) -> Item:
    """Return the attributes of the client-version row. The history is cut to ten entries."""
    current = (state.client_version, state.modified_by, state.modified_millis)
    return changed_state_attributes(MIGRATION_ENTITY, CLIENT_VERSION, current, state.history)


def migration_from_item(item: Item) -> MigrationState:
    """Parse the client-version row. A missing history is empty.

    Raises:
        UnreadableRowError: `cv`, `mb` or `mts` are missing or invalid.
    """
    with readable(f"the row {MIGRATION_KEY} is not a client version that can be read"):
        current, history = changed_state_of(item, CLIENT_VERSION)
        return MigrationState(*current, history=history)


def changed_state_attributes(
    entity: str, name: str, current: StateChange, history: Sequence[StateChange]
) -> Item:
    """Return the attributes of a row with a state, who wrote it, when, and the states before.

    Args:
        entity: Type of the row.
        name: Attribute of the state.
        current: The state.
        history: The states before, newest first. It is cut to ten entries.
    """
    before = [{"M": _change_attributes(name, change)} for change in history[:HISTORY_LENGTH]]
    return {
        ENTITY_TYPE: string(entity),
        **_change_attributes(name, current),
        HISTORY: {"L": before},
    }


def changed_state_of(item: Item, name: str) -> tuple[StateChange, tuple[StateChange, ...]]:
    """Return the state of such a row and the states before. Use in `readable`."""
    entries = list_of(item, HISTORY, MAX_HISTORY)
    history = tuple(_change_of(entry["M"], name) for entry in entries if "M" in entry)
    return _change_of(item, name), history


def _change_attributes(name: str, change: StateChange) -> Item:
    state, modified_by, modified_millis = change
    return {
        name: string(state),
        MODIFIED_BY: string(modified_by),
        MODIFIED_MILLIS: number(modified_millis),
    }


def _change_of(item: Item, name: str) -> StateChange:
    return (
        required(name_of(item, name), name),
        required(name_of(item, MODIFIED_BY, MAX_KEY_BYTES), MODIFIED_BY),
        required(int_of(item, MODIFIED_MILLIS), MODIFIED_MILLIS),
    )


LOSS_ATTEMPTS: Final = 10


class CoordinatorStateTable:
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
            return lock_from_item(item)
        except UnreadableRowError as error:
            known: Item = {name: item[name] for name in LOCK_ATTRIBUTES if name in item}
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
        item = lock_to_item(lock, key)
        outcome = self._store.put(item, _replaceable(key, replacing))
        return outcome.applied or same_item(outcome.item, item)

    def heartbeat_lock(self, lock: LeaderLock, version: str) -> bool:
        """Set a new version and the duration, if version and owner equal those of `lock`.

        Applied if the row has owner and new version.
        """
        put = {
            LOCK_DURATION: string(str(lock.lease_duration_millis)),
            LOCK_VERSION: string(version),
        }
        outcome = self._store.update(LEADER_KEY, self.held_conditions(lock), Changes(put))
        return outcome.applied or _has(outcome, {LOCK_OWNER: string(lock.owner_name), **put})

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
            or text_of(outcome.item, LOCK_OWNER) != lock.owner_name
        )

    def held_conditions(self, lock: LeaderLock) -> list[Condition]:
        """Return the conditions that version and owner equal those of `lock`."""
        return [
            Present(self._store.key_name),
            Equals(LOCK_VERSION, string(lock.version)),
            Equals(LOCK_OWNER, string(lock.owner_name)),
        ]

    def read_migration(self) -> MigrationState | None:
        """Return the client version; None if there is no row. Strongly consistent.

        Raises:
            UnreadableRowError: The row cannot be read.
        """
        item = self._store.get(MIGRATION_KEY)
        return None if item is None else migration_from_item(item)

    def put_migration(self, state: MigrationState, *, replacing: MigrationState | None) -> bool:
        """Write the client version, if the row has the `cv` of `replacing`.

        `replacing` None: there must be no row.

        Applied if the row has these attributes.
        """
        key = self._store.key_name
        attributes = migration_attributes(state)
        if replacing is None:
            outcome = self._store.put({key: string(MIGRATION_KEY), **attributes}, [Absent(key)])
        else:
            conditions: list[Condition] = [
                Present(key),
                Equals(CLIENT_VERSION, string(replacing.client_version)),
            ]
            outcome = self._store.update(MIGRATION_KEY, conditions, Changes(attributes))
        return outcome.applied or _has(outcome, attributes)

    def read_application(self) -> ApplicationRecord | None:
        """Return the identity of the application; None if none is recorded. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        item = self._store.get(MIGRATION_KEY)
        if item is None or APPLICATION not in item:
            return None
        found = application_from_text(text_of(item, APPLICATION) or "")
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
        return self._put_attribute(APPLICATION, string(application_text(identity)), before)

    def proof_of_application(self, record: ApplicationRecord) -> ConditionCheck:
        """Return the condition that the recorded identity is the one that was read."""
        return self._store.check(MIGRATION_KEY, [Equals(APPLICATION, string(record.text))])

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
            if changed == read or self._put_attribute(LOSSES, string(losses_text(changed)), before):
                return changed
        raise UnavailableError(
            f"the lost records were not recorded in the row Migration3.0 of the table {self.name}: "
            f"it changed {LOSS_ATTEMPTS} times, or is missing",
            operation="UpdateItem",
        )

    def _losses_text(self) -> str | None:
        item = self._store.get(MIGRATION_KEY)
        if item is None or LOSSES not in item:
            return None
        return text_of(item, LOSSES) or ""

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
            return [Present(key), *(_unchanged(lock, name) for name in LOCK_ATTRIBUTES)]
        case LeaderLock(is_released=True):
            return [Present(key), Equals(LOCK_RELEASED, string("1"))]
        case LeaderLock():
            return [Present(key), Equals(LOCK_VERSION, string(lock.version))]


def _unchanged(lock: UnreadableLock, name: str) -> Condition:
    value = lock.attributes.get(name)
    return Absent(name) if value is None else Equals(name, value)


def _has(outcome: Outcome, attributes: Item) -> bool:
    return outcome.item is not None and all(
        same_value(outcome.item.get(name), value) for name, value in attributes.items()
    )
