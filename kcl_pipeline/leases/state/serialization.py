"""Convert worker metrics rows, lock rows and client-version rows to values and back.

See protocol §2.2, §3.3, §3.5 and appendix A. The caller passes the name of the primary key, which
is `wid` or `key` in the three-table layout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.leases.attributes import (
    MAX_KEY_BYTES,
    checked_name,
    float_of,
    int_of,
    list_of,
    map_of,
    name_of,
    readable,
    required,
    text_of,
)
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY, MIGRATION_KEY
from kcl_pipeline.leases.lease.serialization import ENTITY_TYPE, number, string
from kcl_pipeline.leases.state.values import LeaderLock, MigrationState, StateChange, WorkerMetrics
from kcl_pipeline.leases.state.worker_status import status_of, status_text
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.text import printable

LAST_UPDATE: Final = "lut"
STATS: Final = "sts"
OPERATING_RANGE: Final = "opr"
SUPPORT_CODE: Final = "sup"
SUPPORT_CODE_UPDATE: Final = "slu"
DRAIN: Final = "kclpDrain"
DRAIN_REASON: Final = "kclpDrainReason"
FOR_PAUSE: Final = "pause"
RUN_ID: Final = "kclpRunId"
STATUS: Final = "kclpStatus"
OWN_CPU: Final = "kclpCpu"
REPLACES: Final = "kclpReplaces"
OPTIONAL_ATTRIBUTES: Final = (
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
    DRAIN,
    DRAIN_REASON,
    RUN_ID,
    STATUS,
    OWN_CPU,
    REPLACES,
)
"""Attributes that a worker metrics row may have in addition to those of every report."""
WORKER_ENTITY: Final = "WORKER_METRIC_STATS"

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

MAX_METRICS: Final = 32
"""Largest number of metrics of one worker (our own limit; KCL has five)."""
MAX_METRIC_VALUES: Final = 100
"""Largest number of averages of one metric (our own limit; KCL keeps ten)."""
MAX_METRIC_VALUE: Final = 1e9
"""Largest average or limit of a metric (our own limit; KCL: percentages, -1 for failures)."""
MAX_HISTORY: Final = 100
"""Largest number of past client versions (our own limit; KCL keeps ten)."""
_DURATION: Final = re.compile(r"[0-9]{1,19}")


def worker_attributes(row: WorkerMetrics) -> Item:
    """Return the attributes that a report writes, without the key and the drain request.

    `slu` is the time of the same report.
    """
    attributes: Item = {
        ENTITY_TYPE: string(WORKER_ENTITY),
        LAST_UPDATE: number(row.last_update_seconds),
        STATS: _number_lists(row.stats),
        OPERATING_RANGE: _number_lists(row.operating_range),
    }
    if row.support_code is not None:
        attributes |= {
            SUPPORT_CODE: number(row.support_code),
            SUPPORT_CODE_UPDATE: number(row.last_update_seconds),
        }
    if row.run_id is not None:
        attributes[RUN_ID] = string(row.run_id)
    if row.status is not None:
        attributes[STATUS] = string(status_text(row.status))
    if row.own_cpu:
        attributes |= _number_lists({OWN_CPU: row.own_cpu})["M"]
    if row.replaces is not None:
        attributes[REPLACES] = string(row.replaces)
    return attributes


def worker_from_item(item: Item, key_name: str) -> WorkerMetrics:
    """Parse a worker metrics row. Missing maps are empty.

    Raises:
        UnreadableRowError: Key or `lut` are missing, or a value is invalid.
    """
    key = printable(text_of(item, key_name) or "without a key")
    with readable(f"the row {key} is not a worker metrics row that can be read"):
        return WorkerMetrics(
            worker_id=required(name_of(item, key_name, MAX_KEY_BYTES), key_name),
            last_update_seconds=required(int_of(item, LAST_UPDATE), LAST_UPDATE),
            stats=_lists_of(item, STATS, least=-1.0),
            operating_range={
                name: tuple(int(v) for v in values)
                for name, values in _lists_of(item, OPERATING_RANGE, least=0.0).items()
            },
            support_code=int_of(item, SUPPORT_CODE),
            drain_requested=int_of(item, DRAIN) == 1,
            drains_for_pause=text_of(item, DRAIN_REASON) == FOR_PAUSE,
            run_id=name_of(item, RUN_ID, MAX_KEY_BYTES),
            status=None if (text := text_of(item, STATUS)) is None else status_of(text),
            own_cpu=_averages_of(item, OWN_CPU, least=-1.0),
            replaces=name_of(item, REPLACES, MAX_KEY_BYTES),
        )


def is_worker(item: Item) -> bool:
    """Return whether the row is a worker metrics row: by `entityType`, missing before KCL 3.5."""
    return text_of(item, ENTITY_TYPE) in (None, WORKER_ENTITY)


def heartbeat_of(item: Item) -> str:
    """Return a digest of the attributes that every report of a worker changes.

    It needs no valid values. A drain request, which others write, does not change it.
    """
    try:
        text = repr((item.get(LAST_UPDATE), item.get(STATS)))
    except RecursionError:  # only from an endpoint that is not DynamoDB
        text = ""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


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


def _number_lists(
    lists: Mapping[str, tuple[float, ...]] | Mapping[str, tuple[int, ...]],
) -> AttributeValue:
    return {
        "M": {name: {"L": [number(value) for value in values]} for name, values in lists.items()}
    }


def _lists_of(item: Item, name: str, *, least: float) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for metric in (lists := map_of(item, name, MAX_METRICS)):
        found[checked_name(metric, name)] = _averages_of(lists, metric, least=least)
    return found


def _averages_of(item: Item, name: str, *, least: float) -> tuple[float, ...]:
    averages = (
        float_of({name: value}, name, least=least, most=MAX_METRIC_VALUE)
        for value in list_of(item, name, MAX_METRIC_VALUES)
    )
    return tuple(value for value in averages if value is not None)
