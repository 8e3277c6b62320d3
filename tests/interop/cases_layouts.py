"""Cases of the move to a single table, of KCL before 3.5, and of a stream that is created again."""

from __future__ import annotations

from typing import Any

from .cases import Found
from .checks import all_held, hand_over, mixed
from .fleet import SIDES, CaseFailedError, InteropFleet

VERSION_KEY = {"key": {"S": "Migration3.0"}}
STATE_KEY = "TableMigration3.5"
STATUS = "TABLE_MIGRATION_STATUS_"
HOUR_MILLIS = 3_600_000
BAKE_MILLIS = 25 * HOUR_MILLIS
"""More than the default bake time."""
STAYS_SECONDS = 150
"""Longer than Java needs from DEPLOYED to PENDING when no worker of ours runs."""


def begin_deployed(fleet: InteropFleet) -> None:
    """Create three tables whose Java fleet has published for an hour that it can move."""
    begin_at(fleet, "DEPLOYED")


def begin_moving(fleet: InteropFleet) -> None:
    """Do the same for a Java fleet that is set to move, and keep it from that until `moved`."""
    begin_deployed(fleet)
    fleet.stand_in.start()


def begin_init(fleet: InteropFleet) -> None:
    """Create three tables whose Java fleet has just published that it can move."""
    begin_at(fleet, "INIT")


def begin_at(fleet: InteropFleet, status: str) -> None:
    """Create three tables with a status of Java."""
    for rows in (fleet.tables.workers, fleet.tables.coordinator, fleet.tables.lease):
        rows.ensure_exists()
    now = int(fleet.clock.wall() * 1000)
    item = {
        "key": {"S": STATE_KEY},
        "entityType": {"S": "TABLE_MIGRATION"},
        "tm": {"S": f"{STATUS}{status}"},
        "mb": {"S": "interop"},
        "mts": {"N": str(now - HOUR_MILLIS)},
        "h": {"L": []},
    }
    fleet.dynamodb.put_item(TableName=f"{fleet.application.name}-CoordinatorState", Item=item)


def state(fleet: InteropFleet, table: str, key_name: str) -> dict[str, Any]:
    """Return the migration item of a table; empty if there is none."""
    found = fleet.dynamodb.get_item(
        TableName=table, Key={key_name: {"S": STATE_KEY}}, ConsistentRead=True
    )
    return found.get("Item", {})


def _status(item: dict[str, Any]) -> str:
    return item.get("tm", {"S": ""})["S"].removeprefix(STATUS)


def stays(fleet: InteropFleet) -> Found:
    """Java workers that want to move the application do not, while a worker of ours lives."""
    mixed(fleet)
    fleet.stand_in.stop()
    table = f"{fleet.application.name}-CoordinatorState"
    try:
        for _ in range(STAYS_SECONDS):
            if (found := _status(state(fleet, table, "key"))) != "DEPLOYED":
                raise CaseFailedError(f"the status is {found} beside a worker of ours")
            fleet.clock.sleep(1)
    finally:
        fleet.stand_in.start()
    for side in SIDES:
        hand_over(fleet, side)
    return Found(f"DEPLOYED after {STAYS_SECONDS} s")


def moved(fleet: InteropFleet) -> Found:
    """Java moves the application while none of ours runs; ours joins the single table after it.

    The bake time is the only part of the move that the suite does not wait for.
    """
    mixed(fleet)
    _begin_move(fleet)
    for ours in fleet.of("ours"):
        fleet.stop(ours)
    fleet.stand_in.stop()
    name = fleet.application.name
    old = f"{name}-CoordinatorState"
    fleet.wait("PENDING", lambda: _status(state(fleet, old, "key")) == "PENDING", 300)
    said = _refused(fleet)
    _bake(fleet)
    took = fleet.wait(
        "COMPLETE", lambda: _status(state(fleet, name, "leaseKey")) == "COMPLETE", 180
    )
    fleet.tables = fleet.open()
    fleet.wait("a leader on the single table", lambda: fleet.leader() is not None, 180)
    fleet.start("ours")
    mixed(fleet)
    for side in SIDES:
        hand_over(fleet, side)
    return Found(said, took)


def _bake(fleet: InteropFleet) -> None:
    """Make everything older that the bake time makes older: the status, and rows of ended workers.

    A row of a killed worker of ours is from before the move. While it is young, ours refuses to
    start on the single table, as beside a worker that cannot work there.
    """
    name = fleet.application.name
    rows = fleet.dynamodb.scan(TableName=f"{name}-WorkerMetricStats")["Items"]
    old = [(f"{name}-WorkerMetricStats", {"wid": row["wid"]}, "lut", 1_000) for row in rows]
    old.append((f"{name}-CoordinatorState", {"key": {"S": STATE_KEY}}, "mts", 1))
    for table, key, attribute, unit in old:
        fleet.dynamodb.update_item(
            TableName=table,
            Key=key,
            UpdateExpression=f"ADD {attribute} :less",
            ExpressionAttributeValues={":less": {"N": str(-BAKE_MILLIS // unit)}},
        )


def _begin_move(fleet: InteropFleet) -> None:
    """Leave the client version in the lease table, as Java does that sees a worker of ours start.

    A worker of ours that starts then moves it back. Java moves no row that both tables have.
    """
    name = fleet.application.name
    old = f"{name}-CoordinatorState"
    item = fleet.dynamodb.get_item(TableName=old, Key=VERSION_KEY, ConsistentRead=True)["Item"]
    moved = {"leaseKey": item["key"], **{key: one for key, one in item.items() if key != "key"}}
    fleet.dynamodb.transact_write_items(
        TransactItems=[
            {"Put": {"TableName": name, "Item": moved}},
            {"Delete": {"TableName": old, "Key": VERSION_KEY}},
        ]
    )
    fleet.start("ours")

    def is_back() -> bool:
        gone = fleet.dynamodb.get_item(TableName=name, Key={"leaseKey": item["key"]})
        return bool(_version(fleet)) and "Item" not in gone

    fleet.wait("the client version in one table", is_back)
    mixed(fleet)


def _version(fleet: InteropFleet) -> str:
    item = fleet.dynamodb.get_item(
        TableName=f"{fleet.application.name}-CoordinatorState", Key=VERSION_KEY, ConsistentRead=True
    ).get("Item", {})
    return item.get("cv", {"S": ""})["S"].removeprefix("CLIENT_VERSION_")


def upgrade(fleet: InteropFleet) -> Found:
    """The last worker of KCL 2.x stops, a leader assigns after ten minutes; then a rollback."""
    mixed(fleet)
    fleet.wait("the version while 2.x is there", lambda: _version(fleet) == "UPGRADE_FROM_2X")
    fleet.stop(fleet.of("java")[0])
    fleet.start("ours")
    took = fleet.wait("a leader", lambda: _version(fleet) == "3X_WITH_ROLLBACK", 800)
    fleet.wait("leases", lambda: all_held(fleet))
    fleet.dynamodb.update_item(
        TableName=f"{fleet.application.name}-CoordinatorState",
        Key=VERSION_KEY,
        UpdateExpression="SET cv = :two, mb = :tool, mts = :now",
        ConditionExpression="cv = :three",
        ExpressionAttributeValues={
            ":two": {"S": "CLIENT_VERSION_2X"},
            ":three": {"S": "CLIENT_VERSION_3X_WITH_ROLLBACK"},
            ":tool": {"S": "KclMigrationTool-rollback"},
            ":now": {"N": str(int(fleet.clock.wall() * 1000))},
        },
    )
    fleet.start("java")
    fleet.wait("leases of KCL 2.x", lambda: bool(fleet.held_by("java")), 180)
    fleet.stop(fleet.of("ours")[0])
    return Found("3X_WITH_ROLLBACK, and 2X again", took)


def older(fleet: InteropFleet) -> Found:
    """A version that does not know the single table joins.

    A Java worker before 3.5 meets rows that are no leases. It ends by itself, with or without its
    two tables. With them, or with a row of a worker without `sup`, our start is refused.
    """
    fleet.start("ours")
    fleet.wait("leases", lambda: all_held(fleet))
    java = fleet.start("java")
    process = fleet.workers.pop(java)
    name = fleet.application.name
    added = {f"{name}-CoordinatorState", f"{name}-WorkerMetricStats"}

    def created() -> set[str]:
        return added & set(fleet.dynamodb.list_tables()["TableNames"])

    fleet.wait("the end of the older worker", lambda: process.poll() is not None or bool(created()))
    process.kill()
    process.wait()
    fleet.logs.clear()
    fleet.stop(fleet.of("ours")[0])
    said = _refused(fleet) if created() else ""
    for one in created():
        fleet.dynamodb.delete_table(TableName=one)
    row = {
        "leaseKey": {"S": "older-1"},
        "entityType": {"S": "WORKER_METRIC_STATS"},
        "lut": {"N": str(int(fleet.clock.wall()))},
        "sts": {"M": {}},
        "opr": {"M": {}},
    }
    fleet.dynamodb.put_item(TableName=name, Item=row)
    said = f"{said} {_refused(fleet)}".strip()
    fleet.dynamodb.delete_item(TableName=name, Key={"leaseKey": row["leaseKey"]})
    fleet.start("ours")
    return Found(said)


def _refused(fleet: InteropFleet) -> str:
    """Start our worker, which must be refused before it writes; return its sentence."""
    tables = {
        one
        for one in fleet.dynamodb.list_tables()["TableNames"]
        if one.startswith(fleet.application.name)
    }
    before = _sizes(fleet, tables)
    ours = fleet.start("ours", layout="auto")
    if (code := fleet.workers.pop(ours).wait(60)) != 1:
        raise CaseFailedError(f"our worker ended with {code}")
    if (after := _sizes(fleet, tables)) != before:
        raise CaseFailedError(f"rows before {before}, after {after}")
    return (fleet.folder / f"{ours}.log").read_text().strip().splitlines()[-1]


def _sizes(fleet: InteropFleet, tables: set[str]) -> dict[str, int]:
    return {one: len(fleet.dynamodb.scan(TableName=one)["Items"]) for one in sorted(tables)}


def recreated(fleet: InteropFleet) -> Found:
    """The stream is deleted and created again while both sides read it, and ours leads."""
    mixed(fleet, "ours")
    stream = fleet.streams[0]
    fleet.traffic.stop()
    before = fleet.traffic.sent.copy()
    fleet.wait("the records of the first stream", lambda: fleet.is_delivered(before))
    fleet.kinesis.delete_stream(StreamName=stream)
    fleet.clock.sleep(5)
    fleet.kinesis.create_stream(StreamName=stream, ShardCount=fleet.application.shards)
    probes = fleet.traffic.probe()
    took = fleet.wait("the records of the second stream", lambda: fleet.is_delivered(probes), 240)
    return Found("read from the beginning", took)
