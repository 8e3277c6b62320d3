"""Cases of positions and attributes that one side writes and the other reads."""

from __future__ import annotations

from collections.abc import Callable

from .cases import Found
from .checks import hand_over, mixed, other
from .fleet import SIDES, CaseFailedError, InteropFleet

FOREIGN = "interopForeign"
KEPT_SECONDS = 15.0
NOTICED_SECONDS = 4.0
"""The failover time: until then a worker has renewed its leases, or knows that they are lost."""
TRIES = 3
AGGREGATE = 12
LONG_AGGREGATE = 60
"""So that our worker, with small batches, is still at it when the handoff begins."""


def restarted(fleet: InteropFleet, side: str, **extra: str) -> str:
    """Replace the worker of a side by one with settings of its own, and wait for leases."""
    mixed(fleet)
    fleet.stop(fleet.of(side)[0])
    fleet.start(side, **extra)
    mixed(fleet)
    return fleet.of(side)[0]


def aggregate_from_java(fleet: InteropFleet) -> Found:
    """Java checkpoints in the middle of a KPL aggregate and is killed; ours continues."""
    worker = restarted(fleet, "java", checkpoint="middle")
    key = fleet.held_by("java")[0]
    if fleet.application.leaderless:
        # Java has taken it, and our worker reads and commits until its next renewal.
        fleet.clock.sleep(NOTICED_SECONDS)
    ids = fleet.traffic.put_aggregate(
        fleet.streams[0], fleet.traffic.open_shards(fleet.streams[0])[key], AGGREGATE
    )
    log = fleet.logs[worker]
    fleet.wait(
        "a checkpoint in the aggregate",
        lambda: any(int(one.words[3]) > 0 for one in log.seen("checkpoint")),
    )
    fleet.kill(worker)
    fleet.wait("the rest", lambda: fleet.is_delivered(ids))
    by_java = sum(one in log.stored() for one in ids)
    again = [one for one in ids if one in log.stored() and one in fleet.commits.ids]
    if again or not 0 < by_java < AGGREGATE:
        raise CaseFailedError(f"{by_java} of {AGGREGATE} by Java, {len(again)} of them again")
    mixed(fleet)
    return Found(f"{by_java} of {AGGREGATE} records by Java, the rest by ours")


def aggregate_from_ours(fleet: InteropFleet) -> Found:
    """Our batch ends in the middle of a KPL aggregate, and the lease is handed to Java."""
    restarted(fleet, "ours", batch_records="5", pause="0.5")
    key, ids = _begun_by_ours(fleet)
    hand_over(fleet, "ours", key)
    fleet.wait("the rest", lambda: fleet.is_delivered(ids))
    by_ours = sum(one in fleet.commits.ids for one in ids)
    again = fleet.counted().repeated & set(ids)
    if again or not 0 < by_ours < LONG_AGGREGATE:
        raise CaseFailedError(f"{by_ours} of {LONG_AGGREGATE} by ours, {len(again)} again")
    restarted(fleet, "ours")
    return Found(f"{by_ours} of {LONG_AGGREGATE} records by ours, the rest by Java")


def _begun_by_ours(fleet: InteropFleet) -> tuple[str, list[str]]:
    """Put an aggregate, and wait for its first records in our table; return its lease and ids.

    The leader may move the lease at this moment. Then the next aggregate is tried.
    """
    stream = fleet.streams[0]
    for _ in range(TRIES):
        key = fleet.held_by("ours")[0]
        ids = fleet.traffic.put_aggregate(
            stream, fleet.traffic.open_shards(stream)[key], LONG_AGGREGATE
        )
        if _is_begun(fleet, ids):
            return key, ids
    raise CaseFailedError("each aggregate was read by Java alone")


def _is_begun(fleet: InteropFleet, ids: list[str]) -> bool:
    """Wait for the first record; return whether ours has processed it."""
    fleet.wait("the first record", lambda: fleet.is_delivered(ids[:1]))
    return ids[0] in fleet.commits.ids


def prepared_by_java(fleet: InteropFleet) -> Found:
    """Java prepares checkpoints and stores none; ours takes over at the last stored one."""
    worker = restarted(fleet, "java", checkpoint="prepare")
    log = fleet.logs[worker]

    def prepared() -> list[str]:
        held = fleet.held_by("java")
        return [one.lease for one in log.seen("prepared") if one.lease in held]

    fleet.wait("a prepared checkpoint", lambda: bool(prepared()))
    key = prepared()[-1]
    hand_over(fleet, "java", key)
    first = [one.words[2] for one in log.seen("record") if one.lease == key]
    fleet.wait("the prepared records", lambda: all(one in fleet.commits.ids for one in first))
    restarted(fleet, "java")
    return Found(f"{len(first)} prepared records read by ours")


def prepared_for(taker: str, by: str) -> Callable[[InteropFleet], Found]:
    """Return a case: the record processor of the other side prepares checkpoints.

    Args:
        taker: The side whose processor must get the position and the state.
        by: `handoff`, or `kill` of the worker that has prepared.
    """

    def run(fleet: InteropFleet) -> Found:
        giving = other(taker)
        worker = restarted(fleet, giving, checkpoint="prepare")
        log, next_log = fleet.logs[worker], fleet.logs[fleet.of(taker)[0]]
        fleet.wait(
            "a prepared checkpoint",
            lambda: any(it.lease in fleet.held_by(giving) for it in log.seen("prepared")),
        )
        key = [it.lease for it in log.seen("prepared") if it.lease in fleet.held_by(giving)][-1]
        began = fleet.clock.monotonic()
        if by == "handoff":
            hand_over(fleet, giving, key)
        else:
            fleet.kill(worker)

        def starts() -> list[tuple[str, ...]]:
            return [it.words for it in next_log.seen("initialize", began) if it.lease == key]

        fleet.wait("the next processor", lambda: bool(starts()))
        prepared = {it.words[2] for it in log.seen("prepared") if it.lease == key}
        _, position, _, pending, state = starts()[0]
        if pending not in prepared or state != "010203" or position in prepared:
            raise CaseFailedError(f"{next_log.path.name} began with {starts()[0]}")
        first = [it.words[2] for it in log.seen("record") if it.lease == key]
        fleet.wait("the prepared records", lambda: set(first) <= next_log.stored().keys())
        if by == "handoff":
            fleet.stop(worker)
        mixed(fleet)
        return Found(f"{len(first)} prepared records were delivered again, with their state")

    return run


def foreign(fleet: InteropFleet) -> Found:
    """Attributes that nobody knows stay in leases, worker rows and the client version."""
    mixed(fleet)
    put = _put_foreign(fleet)
    for side in () if fleet.application.leaderless else SIDES:
        hand_over(fleet, side)
    before = {key: one.counter for key, one in fleet.leases().items()}
    fleet.wait(
        "renewals",
        lambda: all(one.counter > before.get(key, -1) + 2 for key, one in fleet.leases().items()),
    )
    fleet.clock.sleep(KEPT_SECONDS)  # both sides report once at least
    for table, key in put:
        item = fleet.dynamodb.get_item(TableName=table, Key=key, ConsistentRead=True).get("Item")
        if item is not None and FOREIGN not in item:
            raise CaseFailedError(f"a worker removed an attribute of {key} in {table}")
    return Found(f"{len(put)} rows")


def _put_foreign(fleet: InteropFleet) -> list[tuple[str, dict[str, dict[str, str]]]]:
    """Add an attribute to each row of the application but the lock, which Java puts as a whole."""
    name = fleet.application.name
    found = []
    for table in fleet.dynamodb.list_tables()["TableNames"]:
        if table not in {name, f"{name}-WorkerMetricStats", f"{name}-CoordinatorState"}:
            continue
        described = fleet.dynamodb.describe_table(TableName=table)["Table"]
        key_name = described["KeySchema"][0]["AttributeName"]
        for item in fleet.dynamodb.scan(TableName=table)["Items"]:
            key = {key_name: item[key_name]}
            if item[key_name]["S"] == "Leader":
                continue
            fleet.dynamodb.update_item(
                TableName=table,
                Key=key,
                UpdateExpression=f"SET {FOREIGN} = :one",
                ExpressionAttributeValues={":one": {"S": "kept"}},
            )
            found.append((table, key))
    return found
