"""Rows of the worker-metrics and coordinator-state tables as values and back (protocol §2.2, §3.3, §3.5, appendix A).

The name of the primary key is the table's business: `wid` and `key` in the three-table layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kcl_pipeline.leases.serialization import ENTITY_TYPE, int_of, number, readable, required, string, text_of
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.leases.tables import LeaderLock, MigrationState, WorkerMetrics

LAST_UPDATE: Final = "lut"
STATS: Final = "sts"
OPERATING_RANGE: Final = "opr"
SUPPORT_CODE: Final = "sup"
SUPPORT_CODE_UPDATE: Final = "slu"
DRAIN: Final = "kclpDrain"
RUN_ID: Final = "kclpRunId"
WORKER_ENTITY: Final = "WORKER_METRIC_STATS"

LEADER_KEY: Final = "Leader"
LEADER_ENTITY: Final = "LEADER"
LOCK_OWNER: Final = "ownerName"
LOCK_DURATION: Final = "leaseDuration"
LOCK_VERSION: Final = "recordVersionNumber"
LOCK_RELEASED: Final = "isReleased"

MIGRATION_KEY: Final = "Migration3.0"
MIGRATION_ENTITY: Final = "CLIENT_VERSION_MIGRATION"
TABLE_MIGRATION_KEY: Final = "TableMigration3.5"
CLIENT_VERSION: Final = "cv"
MODIFIED_BY: Final = "mb"
MODIFIED_MILLIS: Final = "mts"
HISTORY: Final = "h"
HISTORY_LENGTH: Final = 10


def worker_attributes(row: WorkerMetrics) -> Item:
    """What a report writes, without the key; `slu` is the time of the same report. The drain request is not the worker's to write."""
    attributes: Item = {
        ENTITY_TYPE: string(WORKER_ENTITY),
        LAST_UPDATE: number(row.last_update_seconds),
        STATS: _number_lists(row.stats),
        OPERATING_RANGE: _number_lists(row.operating_range),
    }
    if row.support_code is not None:
        attributes |= {SUPPORT_CODE: number(row.support_code), SUPPORT_CODE_UPDATE: number(row.last_update_seconds)}
    if row.run_id is not None:
        attributes[RUN_ID] = string(row.run_id)
    return attributes


def worker_from_item(item: Item, key_name: str) -> WorkerMetrics:
    """Read a worker's row; missing maps read as empty. Raises `ValueError` when key or `lut` are missing, or a number is none."""
    with readable(f"the row {text_of(item, key_name) or 'without a key'} is not a worker's that can be read"):
        return _worker(item, key_name)


def _worker(item: Item, key_name: str) -> WorkerMetrics:
    return WorkerMetrics(
        worker_id=required(text_of(item, key_name), key_name),
        last_update_seconds=required(int_of(item, LAST_UPDATE), LAST_UPDATE),
        stats=_lists_of(item, STATS),
        operating_range={name: tuple(int(v) for v in values) for name, values in _lists_of(item, OPERATING_RANGE).items()},
        support_code=int_of(item, SUPPORT_CODE),
        drain_requested=int_of(item, DRAIN) == 1,
        run_id=text_of(item, RUN_ID),
    )


def is_worker(item: Item) -> bool:
    """Whether the row is a worker's: by `entityType`, which KCL before 3.5 does not write."""
    return text_of(item, ENTITY_TYPE) in (None, WORKER_ENTITY)


def lock_to_item(lock: LeaderLock, key_name: str) -> Item:
    """The whole lock item; the duration is a text, as the lock library writes it."""
    item: Item = {
        key_name: string(LEADER_KEY),
        ENTITY_TYPE: string(LEADER_ENTITY),
        LOCK_OWNER: string(lock.owner_name),
        LOCK_DURATION: string(str(lock.lease_duration_millis)),
        LOCK_VERSION: string(lock.version),
    }
    if lock.is_released:
        item[LOCK_RELEASED] = string("1")
    return item


def lock_from_item(item: Item) -> LeaderLock:
    """Read the lock item. Raises `ValueError` when owner, duration or version are missing."""
    with readable(f"the row {LEADER_KEY} is not a leader's lock that can be read"):
        return LeaderLock(
            owner_name=required(text_of(item, LOCK_OWNER), LOCK_OWNER),
            lease_duration_millis=int(required(text_of(item, LOCK_DURATION), LOCK_DURATION)),
            version=required(text_of(item, LOCK_VERSION), LOCK_VERSION),
            is_released=text_of(item, LOCK_RELEASED) == "1",
        )


def migration_attributes(state: MigrationState) -> Item:
    """The client-version item without its key; the history is cut at ten."""
    history = [{"M": _state_attributes(*entry)} for entry in state.history[:HISTORY_LENGTH]]
    return {
        ENTITY_TYPE: string(MIGRATION_ENTITY),
        **_state_attributes(state.client_version, state.modified_by, state.modified_millis),
        HISTORY: {"L": history},
    }


def migration_from_item(item: Item) -> MigrationState:
    """Read the client-version item; a missing history is empty. Raises `ValueError` when `cv`, `mb` or `mts` are missing."""
    with readable(f"the row {MIGRATION_KEY} is not a client version that can be read"):
        entries = item.get(HISTORY, {}).get("L") or []
        return MigrationState(*_state_of(item), history=tuple(_state_of(entry["M"]) for entry in entries if "M" in entry))


def _state_attributes(client_version: str, modified_by: str, modified_millis: int) -> Item:
    return {CLIENT_VERSION: string(client_version), MODIFIED_BY: string(modified_by), MODIFIED_MILLIS: number(modified_millis)}


def _state_of(item: Item) -> tuple[str, str, int]:
    return (
        required(text_of(item, CLIENT_VERSION), CLIENT_VERSION),
        required(text_of(item, MODIFIED_BY), MODIFIED_BY),
        required(int_of(item, MODIFIED_MILLIS), MODIFIED_MILLIS),
    )


def _number_lists(lists: Mapping[str, tuple[float, ...]] | Mapping[str, tuple[int, ...]]) -> AttributeValue:
    return {"M": {name: {"L": [number(value) for value in values]} for name, values in lists.items()}}


def _lists_of(item: Item, name: str) -> dict[str, tuple[float, ...]]:
    maps: dict[str, Any] = item.get(name, {}).get("M") or {}
    return {metric: tuple(float(value["N"]) for value in values.get("L", ()) if "N" in value) for metric, values in maps.items()}
