"""The rows of the coordinator-state table (protocol §3): leader lock and client version.

The client-version row also has the records of the application, see `application`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.leases.application import (
    APPLICATION,
    LOSSES,
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
)
from kcl_pipeline.leases.row import (
    ENTITY_TYPE,
    LEADER_KEY,
    MAX_KEY_BYTES,
    MIGRATION_KEY,
    REQUIRED,
    Attribute,
    RowCodec,
    a_name,
    a_whole,
    list_of,
    readable,
    required,
    string,
    text_of,
)
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
MAX_HISTORY: Final = 100
"""Largest number of past client versions (our own limit; KCL keeps ten)."""
_MILLIS: Final = re.compile(r"[0-9]{1,19}")


def _read_duration(item: Item) -> int | None:
    text = text_of(item, LOCK_DURATION)
    if text is None:
        return None
    millis = int(text) if _MILLIS.fullmatch(text) else 0
    # A longer one would prevent a new leader for too long
    if not 0 < millis <= MAX_LOCK_DURATION_MILLIS:
        raise ValueError(
            f"{LOCK_DURATION} is '{printable(text, 50)}', not milliseconds from 1 to "
            f"{MAX_LOCK_DURATION_MILLIS}"
        )
    return millis


_DURATION: Final = Attribute(
    # A string, as in the Java lock library
    LOCK_DURATION,
    _read_duration,
    lambda millis: {LOCK_DURATION: string(str(millis))},
)
_RELEASED: Final = Attribute(
    LOCK_RELEASED,
    lambda item: text_of(item, LOCK_RELEASED) == "1",
    lambda is_released: {LOCK_RELEASED: string("1")} if is_released else {},
)


@dataclass(frozen=True, slots=True)
class LeaderLock:
    """The leader lock (protocol §3.3).

    Attributes:
        owner_name: Name of the leader.
        lease_duration_millis: Time without a heartbeat after which the lock is expired.
        version: Unique string that every heartbeat changes. No time is stored.
        is_released: Whether the owner has released the lock.
    """

    owner_name: Annotated[str, a_name(LOCK_OWNER, MAX_KEY_BYTES), REQUIRED]
    lease_duration_millis: Annotated[int, _DURATION, REQUIRED]
    version: Annotated[str, a_name(LOCK_VERSION), REQUIRED]
    is_released: Annotated[bool, _RELEASED] = False


LOCK_ROW: Final = RowCodec(LeaderLock)


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
_CHANGE: Final = (
    a_name(CLIENT_VERSION),
    a_name(MODIFIED_BY, MAX_KEY_BYTES),
    a_whole(MODIFIED_MILLIS),
)
"""How a state change is stored: in the row, and in each entry of its history."""


def _read_history(item: Item) -> tuple[StateChange, ...]:
    maps = [entry["M"] for entry in list_of(item, HISTORY, MAX_HISTORY) if "M" in entry]
    changes: Any = [tuple(required(one.read(map_), one.name) for one in _CHANGE) for map_ in maps]
    return tuple(changes)


def _write_history(history: Sequence[StateChange]) -> Item:
    entries: list[Item] = []
    for change in history[:HISTORY_LENGTH]:
        entry: Item = {}
        for one, value in zip(_CHANGE, change, strict=True):
            entry |= one.write(value)
        entries.append(entry)
    return {HISTORY: {"L": [{"M": entry} for entry in entries]}}


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The client-version row `Migration3.0` (protocol §3.5).

    Attributes:
        client_version: The client version (`cv`).
        modified_by: The worker that wrote it (`mb`).
        modified_millis: When, in epoch milliseconds (`mts`).
        history: Former states (cv, mb, mts), newest first. At most ten are written.
    """

    client_version: Annotated[str, _CHANGE[0], REQUIRED]
    modified_by: Annotated[str, _CHANGE[1], REQUIRED]
    modified_millis: Annotated[int, _CHANGE[2], REQUIRED]
    history: Annotated[
        tuple[StateChange, ...], Attribute(HISTORY, _read_history, _write_history)
    ] = ()


MIGRATION_ROW: Final = RowCodec(MigrationState)


def lock_from_item(item: Item) -> LeaderLock:
    """Parse the lock row.

    Raises:
        UnreadableRowError: Owner, duration or version are missing or outside their limits.
    """
    with readable(f"the row {LEADER_KEY} is not a leader lock that can be read"):
        return LOCK_ROW.read(item)


def migration_from_item(item: Item) -> MigrationState:
    """Parse the client-version row. A missing history is empty.

    Raises:
        UnreadableRowError: `cv`, `mb` or `mts` are missing or invalid.
    """
    with readable(f"the row {MIGRATION_KEY} is not a client version that can be read"):
        return MIGRATION_ROW.read(item)


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
        names = {key: string(LEADER_KEY), ENTITY_TYPE: string(LEADER_ENTITY)}
        item = names | LOCK_ROW.write(lock)
        outcome = self._store.put(item, _replaceable(key, replacing))
        return outcome.applied or same_item(outcome.item, item)

    def heartbeat_lock(self, lock: LeaderLock, version: str) -> bool:
        """Set a new version and the duration, if version and owner equal those of `lock`.

        Applied if the row has owner and new version.
        """
        put = LOCK_ROW.attributes(lease_duration_millis=lock.lease_duration_millis, version=version)
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
        attributes = {ENTITY_TYPE: string(MIGRATION_ENTITY)} | MIGRATION_ROW.write(state)
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
        item = self._store.get(MIGRATION_KEY) or {}
        text = _document_of(item, APPLICATION)
        return (
            None if text is None else replace(application_from_text(text), control=control_of(item))
        )

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
        text = self._document(REPLAY.name)
        return None if text is None else REPLAY.parsed(text)

    def put_replay(self, record: ReplayRecord, *, replacing: ReplayRecord | None) -> bool:
        """Record what this application replays, if the record equals `replacing`.

        `replacing` None: there must be no record. False also if there is no client-version row,
        which contains the record.

        Applied if the attribute has this value.
        """
        before = None if replacing is None else string(REPLAY.text(replacing))
        return self._put_attribute(REPLAY.name, string(REPLAY.text(record)), before)

    def read_losses(self) -> Losses:
        """Return the recorded losses; without a record an empty one. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        text = self._document(LOSSES.name)
        return Losses() if text is None else LOSSES.parsed(text)

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
            text = self._document(LOSSES.name)
            read = Losses() if text is None else LOSSES.parsed(text)
            changed = change(read)
            before, after = None if text is None else string(text), string(LOSSES.text(changed))
            if changed == read or self._put_attribute(LOSSES.name, after, before):
                return changed
        raise UnavailableError(
            f"the lost records were not recorded in the row Migration3.0 of the table {self.name}: "
            f"it changed {LOSS_ATTEMPTS} times, or is missing",
            operation="UpdateItem",
        )

    def _document(self, name: str) -> str | None:
        return _document_of(self._store.get(MIGRATION_KEY) or {}, name)

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


def _document_of(item: Item, name: str) -> str | None:
    """Return the text of a document in a row; empty if it has another type. None: there is none."""
    return text_of(item, name) or "" if name in item else None


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
