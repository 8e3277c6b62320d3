"""Three tables whose row `TableMigration3.5` has a status that Java workers write."""

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import IncompatibleTableError, NotFoundError, UnreadableRowError
from kcl_pipeline.leases.application import Control, Pause
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.dynamodb import open_dynamodb
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.layouts import LayoutWorld
from tests.support.lease_tables import FRESH
from tests.support.lease_tables import aws_fixture as aws_fixture  # noqa: PLC0414
from tests.support.lease_tables import client_fixture as client_fixture  # noqa: PLC0414

LOCK = LeaderLock("w1", 8_000, "v1")
INIT, DEPLOYED, PENDING, COMPLETE = (
    f"TABLE_MIGRATION_STATUS_{name}" for name in ("INIT", "DEPLOYED", "PENDING", "COMPLETE")
)
JAVA_ROW = {
    "leaseKey": {"S": "java"},
    "entityType": {"S": "WORKER_METRIC_STATS"},
    "lut": {"N": "1760000000"},
    "sts": {"M": {}},
    "opr": {"M": {}},
    "sup": {"N": "1"},
    "slu": {"N": "1760000000"},
}


def status_row(status, key="key"):
    return {
        key: {"S": "TableMigration3.5"},
        "entityType": {"S": "TABLE_MIGRATION"},
        "tm": {"S": status},
        "mb": {"S": "java"},
        "mts": {"N": "0"},
        "h": {"L": []},
    }


class StatusWorld(LayoutWorld):
    """Three tables with a lock and a client version."""

    def __init__(self, status=None):
        super().__init__()
        tables = self.start()
        ensure_client_version(tables.coordinator, "w1", self.clock)
        assert tables.coordinator.put_lock(LOCK, replacing=None)
        if status is not None:
            self.state.plant(status_row(status))

    def report(self, tables, name="w1"):
        return tables.workers.report(WorkerMetrics(name, int(self.clock.wall())))

    def places(self, key):
        stores = (self.workers, self.state, self.leases)
        return [store.name for store in stores if key in store.rows()]

    def rows(self):
        return [store.rows() for store in (self.workers, self.state, self.leases)]


@pytest.mark.parametrize(
    ("status", "written", "lock_in", "support"),
    [
        (None, "app-WorkerMetricStats", "app-CoordinatorState", None),
        (INIT, "app-WorkerMetricStats", "app-CoordinatorState", None),
        (DEPLOYED, "app-WorkerMetricStats", "app-CoordinatorState", None),
        (COMPLETE, "app", "app", {"N": "1"}),
    ],
)
def test_rows_are_written_where_the_status_says(status, written, lock_in, support):
    """In three tables no support code is published: Java would complete a move."""
    world = StatusWorld(status)
    world.state.erase("Leader")
    tables = world.start()
    world.report(tables)
    assert world.places("w1") == [written]
    [row] = [store.rows()["w1"] for store in (world.workers, world.leases) if store.name == written]
    assert row.get("sup") == support
    assert tables.coordinator.put_lock(LOCK, replacing=None)
    assert world.places("Leader") == [lock_in]
    assert [one.worker_id for one in tables.workers.scan_workers().workers] == ["w1"]
    proof = tables.coordinator.proof_of_lock(LOCK)
    assert tables.lease.create_leases([FRESH], proof) == (FRESH.lease_key,)


def test_a_java_worker_that_reports_in_the_lease_table_counts():
    """It runs with migrateAllEntitiesToLeaseTable, while the status is DEPLOYED."""
    world = StatusWorld(DEPLOYED)
    tables = world.start()
    world.report(tables)
    world.leases.plant(JAVA_ROW)

    def names():
        return [one.worker_id for one in tables.workers.scan_workers().workers]

    assert names() == ["w1", "java"]
    assert tables.lease.list_leases().bad_rows == ()
    # A worker that has changed its setting has a row in both tables, and counts once.
    world.leases.plant(JAVA_ROW | {"leaseKey": {"S": "w1"}})
    assert names() == ["w1", "java"]
    found = {one.worker_id: one for one in tables.workers.scan_workers().workers}
    assert tables.workers.delete(found["java"])
    tables.workers.deregister("w1")
    assert names() == []
    assert world.places("w1") == world.places("java") == []


def test_the_lease_table_is_not_scanned_for_workers_in_every_cycle():
    world = StatusWorld(DEPLOYED)
    tables = world.start()
    world.report(tables)
    scans = []
    tables.layout.leases.before_call = lambda operation, _key: scans.append(operation)
    for _ in range(10):
        assert len(tables.workers.scan_workers().workers) == 1
        world.clock.advance(1)
    assert scans.count("Scan") == 1
    world.leases.plant(JAVA_ROW)
    world.clock.advance(30)
    assert len(tables.workers.scan_workers().workers) == 2


def test_an_application_that_is_moved_now_is_refused_before_anything_is_written():
    world = StatusWorld(PENDING)
    before = world.rows()
    for call in (
        world.start,
        world.open().coordinator.read_lock,
        lambda: world.report(world.open()),
    ):
        with pytest.raises(IncompatibleTableError, match="move the application to the single tab"):
            call()
    assert world.rows() == before


@pytest.mark.parametrize(
    ("status", "match"),
    [
        (PENDING, "start this worker when the row is at TABLE_MIGRATION_STATUS_COMPLETE"),
        (COMPLETE, "have moved the application to the single table app while this process ran"),
    ],
)
def test_a_worker_ends_when_the_application_is_moved(status, match):
    """The status is read with every report, so nothing is written where nobody reads it."""
    world = StatusWorld()
    tables = world.start()
    world.report(tables)
    world.state.plant(status_row(DEPLOYED))
    world.report(tables)
    world.state.plant(status_row(status))
    before = world.rows()
    with pytest.raises(IncompatibleTableError, match=match):
        world.report(tables)
    # A process without reports, as the sensor, does not become a second leader.
    world.state.erase("Leader")
    with pytest.raises(IncompatibleTableError, match=match):
        tables.coordinator.put_lock(LOCK, replacing=None)
    world.state.plant(before[1]["Leader"])
    assert world.rows() == before


def test_a_process_that_starts_after_a_move_uses_the_single_table():
    world = StatusWorld(COMPLETE)
    world.leases.plant(status_row(COMPLETE, "leaseKey"))
    moved = dict(world.state.rows()["Migration3.0"])
    world.state.erase("Migration3.0")
    world.leases.plant({"leaseKey": moved.pop("key"), **moved})
    tables = world.start()
    pause = Pause("ann", 1, "test")
    assert tables.coordinator.put_pause(pause, replacing=Control())
    assert world.places("Migration3.0") == ["app"]
    proof = tables.coordinator.proof_of_pause(tables.coordinator.read_control())
    assert tables.lease.create_leases([FRESH], proof) == (FRESH.lease_key,)
    assert tables.layout.is_single()


def begun_move():
    """A Java leader has moved the client version, and not yet written PENDING."""
    world = StatusWorld(DEPLOYED)
    assert world.start().coordinator.put_pause(Pause("ann", 1, "test"), replacing=Control())
    world.report(world.start())
    before = world.state.rows()["Migration3.0"]
    java_moves(world)
    return world, before


def java_moves(world):
    moved = world.state.rows()["Migration3.0"]
    world.state.erase("Migration3.0")
    world.leases.plant({"leaseKey": moved.pop("key"), **moved})


def test_a_worker_that_starts_in_a_move_creates_no_second_client_version():
    """Java moves no row that both tables have, so it could never move the application again."""
    world, before = begun_move()
    tables = world.start()
    assert ensure_client_version(tables.coordinator, "w2", world.clock).modified_by == "w1"
    assert world.places("Migration3.0") == ["app-CoordinatorState"]
    assert world.state.rows()["Migration3.0"] == before


def test_a_report_moves_the_client_version_back():
    """Java has begun the move between two reports. The pause in the row is kept."""
    world, before = begun_move()
    tables = world.start()
    world.report(tables)
    java_moves(world)
    world.report(tables)
    assert world.places("Migration3.0") == ["app-CoordinatorState"]
    assert world.state.rows()["Migration3.0"] == before
    assert tables.coordinator.read_control().pause == Pause("ann", 1, "test")


def test_a_move_that_goes_on_wins_over_a_client_version_that_is_moved_back():
    """The row changes between the read and the write of the worker: the next report repeats it."""
    world, _ = begun_move()
    tables = world.start()
    row = world.leases.rows()["Migration3.0"]

    def change(operation, _key):
        if operation == "TransactWriteItems":
            world.leases.plant(row | {"mb": {"S": "java-2"}})
            tables.layout.leases.before_call = lambda _operation, _key: None

    tables.layout.leases.before_call = change
    world.report(tables)
    assert world.places("Migration3.0") == ["app"]
    world.report(tables)
    assert world.places("Migration3.0") == ["app-CoordinatorState"]
    assert world.state.rows()["Migration3.0"]["mb"] == {"S": "java-2"}


def test_an_unknown_status_is_refused():
    world = StatusWorld("TABLE_MIGRATION_STATUS_NEW")
    with pytest.raises(UnreadableRowError, match=r"TableMigration3\.5.*STATUS_NEW"):
        world.start()


def test_a_deleted_coordinator_table_is_no_move():
    world = StatusWorld(DEPLOYED)
    tables = world.start()
    world.report(tables)

    def missing(operation, _key):
        raise NotFoundError("no such table", operation=operation)

    tables.layout.coordinator.before_call = missing
    assert world.report(tables).worker_id == "w1"


def test_each_status_in_dynamodb(client):
    """The requests are those that DynamoDB accepts."""
    clock = VirtualClock()
    settings = ConsumerSettings(application_name="status", streams=("s",))

    def start():
        tables = open_dynamodb(client, settings, clock)
        for table in (tables.lease, tables.workers, tables.coordinator):
            table.ensure_exists()
        tables.workers.report(WorkerMetrics("w1", int(clock.wall())))
        return tables

    start()
    for status, count in ((INIT, 1), (DEPLOYED, 2)):
        client.put_item(TableName="status-CoordinatorState", Item=status_row(status))
        client.put_item(TableName="status", Item=JAVA_ROW)
        assert len(start().workers.scan_workers().workers) == count
    client.put_item(TableName="status-CoordinatorState", Item=status_row(PENDING))
    with pytest.raises(IncompatibleTableError):
        start()
    client.put_item(TableName="status-CoordinatorState", Item=status_row(COMPLETE))
    clock.advance(700)  # the row in the former table is that of a worker that has ended
    found = start().workers.scan_workers().workers
    assert sorted(one.worker_id for one in found) == ["java", "w1"]
