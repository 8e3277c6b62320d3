"""Rows of the three tables that others wrote (protocol §1.2, §2.2, §3.3, §3.5)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.coordinator import lock_from_item, migration_from_item
from kcl_pipeline.leases.row import is_lease, lease_from_item
from kcl_pipeline.leases.workers import is_worker, worker_from_item
from tests.fuzz import values
from tests.fuzz.boundary import Boundary

READ: Final = "read"
REFUSED: Final = "refused"
OTHER: Final = "of another type"

SHARD: Final = "shardId-000000000001"
STREAM: Final = "123456789012:orders:1700000000"
LEASE: Final[dict[str, Any]] = {
    "leaseKey": {"S": SHARD},
    "entityType": {"S": "LEASE"},
    "leaseOwner": {"S": "w1"},
    "checkpointOwner": {"S": "w0"},
    "leaseCounter": {"N": "7"},
    "ownerSwitchesSinceCheckpoint": {"N": "1"},
    "checkpoint": {"S": "49650000000000000000000000000000000000000000000000000001"},
    "checkpointSubSequenceNumber": {"N": "3"},
    "pendingCheckpoint": {"S": "49650000000000000000000000000000000000000000000000000009"},
    "pendingCheckpointSubSequenceNumber": {"N": "0"},
    "pendingCheckpointState": {"B": b"8/7,-"},
    "parentShardId": {"SS": ["shardId-000000000000"]},
    "childShardIds": {"SS": ["shardId-000000000003", "shardId-000000000004"]},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": str(2**127 - 1)},
    "throughputKBps": {"N": "12.345678"},
}
MULTI_STREAM_LEASE: Final[dict[str, Any]] = {
    **LEASE,
    "leaseKey": {"S": f"{STREAM}:{SHARD}"},
    "streamName": {"S": STREAM},
    "shardId": {"S": SHARD},
}
WORKER: Final[dict[str, Any]] = {
    "wid": {"S": "w1"},
    "entityType": {"S": "WORKER_METRIC_STATS"},
    "lut": {"N": "1760000000"},
    "sts": {"M": {"C": {"L": [{"N": "10.5"}, {"N": "-1"}]}, "M": {"L": [{"N": "3"}]}}},
    "opr": {"M": {"C": {"L": [{"N": "100"}]}}},
    "sup": {"N": "1"},
    "slu": {"N": "1760000000"},
    "kclpDrain": {"N": "1"},
    "kclpRunId": {"S": "run-1"},
    "kclpCpu": {"L": [{"N": "10.5"}, {"N": "-1"}]},
    "kclpReplaces": {"S": "w0"},
    "kclpFormerRun": {"S": "run-0"},
    "kclpFormerEnded": {"N": "1760000000000"},
}
LOCK: Final[dict[str, Any]] = {
    "key": {"S": "Leader"},
    "entityType": {"S": "LEADER"},
    "ownerName": {"S": "w1"},
    "leaseDuration": {"S": "120000"},
    "recordVersionNumber": {"S": "5b1f6f3e-0000-4000-8000-000000000000"},
    "isReleased": {"S": "1"},
}
MIGRATION: Final[dict[str, Any]] = {
    "key": {"S": "Migration3.0"},
    "entityType": {"S": "CLIENT_VERSION_MIGRATION"},
    "cv": {"S": "CLIENT_VERSION_3X"},
    "mb": {"S": "w1"},
    "mts": {"N": "1760000000123"},
    "h": {
        "L": [
            {
                "M": {
                    "cv": {"S": "CLIENT_VERSION_INIT"},
                    "mb": {"S": "w1"},
                    "mts": {"N": "1760000000100"},
                }
            }
        ]
    },
}


def attribute(random: Random, depth: int = 2) -> dict[str, Any]:
    """An attribute value of any type, as DynamoDB's API has it."""
    kind = random.choice(("S", "S", "N", "N", "B", "SS", "NS", "BS", "BOOL", "NULL", "L", "M"))
    match kind:
        case "S":
            made: Any = random.choice((values.text, values.number_text))(random)
        case "N":
            made = values.number_text(random)
        case "B":
            made = values.data(random)
        case "SS":
            made = [values.text(random)[:200] for _ in range(random.choice((1, 2, 3, 500)))]
        case "NS":
            made = [values.number_text(random) for _ in range(random.randrange(1, 4))]
        case "BS":
            made = [values.data(random) for _ in range(random.randrange(1, 4))]
        case "L":
            made = [attribute(random, depth - 1) for _ in range(random.randrange(4 * depth + 1))]
        case "M":
            names = ("C", "T", "x", values.text(random)[:20])
            made = {name: attribute(random, depth - 1) for name in names} if depth else {}
        case _:
            made = True
    return {kind: made}


def row_like(row: dict[str, Any]) -> Callable[[Random], dict[str, Any]]:
    """Draws rows that are nearly this one: up to four attributes are replaced, changed or gone."""

    def draw(random: Random) -> dict[str, Any]:
        item = {name: value for name, value in row.items() if random.random() < 0.9}
        for _ in range(random.randrange(4)):
            name = random.choice([*row, "somethingElse"])
            kind = random.randrange(4)
            if kind == 0:
                item.pop(name, None)
            elif kind == 1 and name in item:
                item[name] = changed(random, item[name])
            elif kind == 2 and name in item:
                ((kind_of, inner),) = item[name].items()
                item[name] = {kind_of: values.damaged(random, inner, values.json_leaf)}
            else:
                item[name] = attribute(random)
        return item

    return draw


def changed(random: Random, value: dict[str, Any]) -> dict[str, Any]:
    """The attribute with another value of the same type."""
    match value:
        case {"S": str()}:
            return {"S": random.choice((values.text, values.number_text))(random)}
        case {"N": str()}:
            return {"N": values.number_text(random)}
        case {"B": bytes()}:
            return {"B": values.data(random)}
        case {"SS": list()}:
            return {"SS": [values.text(random)[:200] for _ in range(random.choice((1, 3, 2_000)))]}
        case _:
            return value


def _read_or_refused(read: Callable[[], object]) -> str:
    try:
        read()
    except UnreadableRowError as error:
        said = str(error)
    else:
        return READ
    assert said.startswith("the row ")
    return REFUSED


def check_lease(item: dict[str, Any]) -> str:
    """A row is a lease within the limits, unreadable, or of another type."""
    return _read_or_refused(lambda: lease_from_item(item)) if is_lease(item) else OTHER


def check_worker(item: dict[str, Any]) -> str:
    """A row is a worker's within the limits, unreadable, or of another type."""
    return _read_or_refused(lambda: worker_from_item(item, "wid")) if is_worker(item) else OTHER


def check_lock(item: dict[str, Any]) -> str:
    """A lock row is read or unreadable."""
    return _read_or_refused(lambda: lock_from_item(item))


def check_migration(item: dict[str, Any]) -> str:
    """A client-version row is read or unreadable."""
    return _read_or_refused(lambda: migration_from_item(item))


def _lease_row(random: Random) -> dict[str, Any]:
    return row_like(random.choice((LEASE, MULTI_STREAM_LEASE)))(random)


_BOTH: Final = frozenset({READ, REFUSED})

BOUNDARIES: Final = (
    Boundary("lease_row", _lease_row, check_lease, _BOTH),
    Boundary("worker_row", row_like(WORKER), check_worker, _BOTH),
    Boundary("lock_row", row_like(LOCK), check_lock, _BOTH),
    Boundary("migration_row", row_like(MIGRATION), check_migration, _BOTH),
)
