"""The move from three tables to the single table: states that are followed, and transitions."""

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.leases.application.control import Control, Pause
from kcl_pipeline.leases.dynamodb.opening import open_dynamodb
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.leases.tables import LeaderLock, WorkerMetrics
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.layouts import LayoutWorld
from tests.support.lease_tables import FRESH
from tests.support.lease_tables import aws_fixture as aws_fixture  # noqa: PLC0414
from tests.support.lease_tables import client_fixture as client_fixture  # noqa: PLC0414

LOCK = LeaderLock("w1", 8_000, "v1")
INIT, DEPLOYED, PENDING, COMPLETE = (
    f"TABLE_MIGRATION_STATUS_{name}" for name in ("INIT", "DEPLOYED", "PENDING", "COMPLETE")
)


def status_row(status, millis=0, key="key"):
    return {
        key: {"S": "TableMigration3.5"},
        "entityType": {"S": "TABLE_MIGRATION"},
        "tm": {"S": status},
        "mb": {"S": "java"},
        "mts": {"N": str(millis)},
        "h": {"L": []},
    }


class MigrationWorld(LayoutWorld):
    """Three tables with a lock and a client version."""

    def __init__(self):
        super().__init__()
        tables = self.start()
        ensure_client_version(tables.coordinator, "w1", self.clock)
        assert tables.coordinator.put_lock(LOCK, replacing=None)

    def report(self, tables, name="w1"):
        tables.workers.report(WorkerMetrics(name, int(self.clock.wall())))

    def status(self):
        found = self.state.rows().get("TableMigration3.5")
        return None if found is None else found["tm"]["S"]

    def places(self, key):
        stores = (self.workers, self.state, self.leases)
        return [store.name for store in stores if key in store.rows()]


@pytest.mark.parametrize(
    ("status", "migrates", "written", "lock_in"),
    [
        (None, False, "app-WorkerMetricStats", "app-CoordinatorState"),
        (INIT, False, "app-WorkerMetricStats", "app-CoordinatorState"),
        (INIT, True, "app-WorkerMetricStats", "app-CoordinatorState"),
        (DEPLOYED, False, "app-WorkerMetricStats", "app-CoordinatorState"),
        (DEPLOYED, True, "app", "app-CoordinatorState"),
        (PENDING, False, "app-WorkerMetricStats", "app-CoordinatorState"),
        (PENDING, True, "app", "app-CoordinatorState"),
        (COMPLETE, False, "app", "app"),
        (COMPLETE, True, "app", "app"),
    ],
)
def test_rows_are_written_where_the_status_says(status, migrates, written, lock_in):
    world = MigrationWorld()
    if status is not None:
        world.state.plant(status_row(status))
    if lock_in == "app":
        world.state.erase("Leader")
    else:
        assert world.open().coordinator.release_lock(LOCK)
    tables = world.start(migrates=migrates)
    world.report(tables)
    assert world.places("w1") == [written]
    assert tables.coordinator.put_lock(LOCK, replacing=None)
    assert world.places("Leader") == [lock_in]
    assert [one.worker_id for one in tables.workers.scan_workers().workers] == ["w1"]
    proof = tables.coordinator.proof_of_lock(LOCK)
    assert tables.lease.create_leases([FRESH], proof) == (FRESH.lease_key,)


@pytest.mark.parametrize("status", [DEPLOYED, PENDING])
def test_a_fleet_whose_workers_write_to_different_tables(status):
    world = MigrationWorld()
    world.state.plant(status_row(status))
    former, moving = world.start(), world.start(migrates=True)
    world.report(former, "former")
    world.report(moving, "moving")
    for tables in (former, moving):
        names = sorted(one.worker_id for one in tables.workers.scan_workers().workers)
        assert names == ["former", "moving"]
        assert tables.coordinator.read_lock() == LOCK
    assert former.workers.request_drain("moving")
    assert moving.workers.request_drain("former")
    world.clock.advance(10)
    world.report(moving, "former")  # restarted with the setting
    found = {one.worker_id: one for one in former.workers.scan_workers().workers}
    assert found["former"].last_update_seconds == int(world.clock.wall())
    assert former.workers.delete(found["former"])
    moving.workers.deregister("moving")
    moving.workers.deregister("former")
    assert former.workers.scan_workers().workers == ()


def test_a_row_that_java_has_moved_is_changed_where_it_is():
    world = MigrationWorld()
    world.state.plant(status_row(PENDING))
    moved = dict(world.state.rows()["Migration3.0"])
    world.state.erase("Migration3.0")
    world.leases.plant({"leaseKey": moved.pop("key"), **moved})
    tables = world.start()
    pause = Pause("ann", 1, "test")
    assert tables.coordinator.put_pause(pause, replacing=Control())
    assert world.places("Migration3.0") == ["app"]
    proof = tables.coordinator.proof_of_pause(tables.coordinator.read_control())
    assert tables.lease.create_leases([FRESH], proof) == (FRESH.lease_key,)


def test_a_process_follows_a_migration_that_completes():
    world = MigrationWorld()
    world.state.plant(status_row(PENDING))
    tables = world.start(migrates=True)
    assert tables.coordinator.read_lock() == LOCK
    world.state.plant(status_row(COMPLETE))
    world.state.erase("Leader")
    new = LeaderLock("java", 120_000, "v9")
    assert tables.coordinator.put_lock(new, replacing=None)  # it looks at the status first
    assert world.places("Leader") == ["app"]
    other = world.open()
    assert other.coordinator.read_lock() == new


def test_an_unknown_status_is_refused():
    world = MigrationWorld()
    world.state.plant(status_row("TABLE_MIGRATION_STATUS_NEW"))
    with pytest.raises(UnreadableRowError, match=r"TableMigration3\.5"):
        world.start()


class Fleet:
    """A leader and a worker with the setting, which report and check every 30 s."""

    def __init__(self):
        self.world = MigrationWorld()
        self.tables = self.world.start(migrates=True)
        self.others = []

    def run(self, seconds, owners=("w1",)):
        """Return each new status."""
        found = []
        for _ in range(int(seconds / 30)):
            self.world.report(self.tables)
            for tables, name in self.others:
                self.world.report(tables, name)
            lock = self.tables.coordinator.read_lock()
            status = self.tables.coordinator.migrate(lock, frozenset(owners)) if lock else None
            if status is not None:
                found.append(status)
            self.world.clock.advance(30)
        return found


def test_the_leader_moves_the_application():
    fleet = Fleet()
    world = fleet.world
    assert fleet.run(60) == [INIT]
    assert fleet.run(3500) == []
    assert fleet.run(90) == [DEPLOYED]
    assert world.places("Migration3.0") == ["app-CoordinatorState"]
    before = dict(world.state.rows()["Migration3.0"])
    assert fleet.run(300) == [PENDING]
    moved = dict(world.leases.rows()["Migration3.0"])
    assert world.places("Migration3.0") == ["app"]
    assert {"key": moved.pop("leaseKey"), **moved} == before
    assert fleet.run(3500) == []
    assert fleet.run(120) == [COMPLETE]
    assert world.places("Leader") == []
    row, copy = world.leases.rows()["TableMigration3.5"], world.state.rows()["TableMigration3.5"]
    assert row.pop("leaseKey") == copy.pop("key") == {"S": "TableMigration3.5"}
    assert row == copy
    assert [one["M"]["tm"]["S"] for one in row["h"]["L"]] == [PENDING, DEPLOYED, INIT]
    assert fleet.tables.coordinator.put_lock(LOCK, replacing=None)
    assert world.places("Leader") == world.places("w1")[-1:] == ["app"]
    assert fleet.tables.coordinator.migrate(LOCK, frozenset(("w1",))) is None
    joined = world.start()
    assert joined.layout.placement().is_single
    assert joined.coordinator.read_lock() == LOCK


def test_an_old_worker_takes_the_migration_back():
    fleet = Fleet()
    world = fleet.world
    assert fleet.run(30) == [INIT]
    assert fleet.run(30, owners=("w1", "java")) == []
    assert world.status() is None
    assert fleet.run(3720) == [INIT, DEPLOYED]
    former = world.start()
    fleet.others.append((former, "w2"))
    assert fleet.run(300, owners=("w1", "w2")) == []
    assert world.status() == DEPLOYED
    fleet.others.clear()
    assert fleet.run(180) == [PENDING]
    fleet.others.append((world.start(), "w2"))
    assert fleet.run(60) == [DEPLOYED]
    fleet.others.clear()
    assert fleet.run(120) == [PENDING]
    assert fleet.run(3700) == [COMPLETE]


def test_nothing_moves_without_the_setting_or_the_lock():
    fleet = Fleet()
    world = fleet.world
    plain = world.start()
    world.report(plain)
    assert plain.coordinator.migrate(LOCK, frozenset({"w1"})) is None
    assert world.status() is None
    stale = LeaderLock("w1", 8_000, "v0")
    world.report(fleet.tables)
    assert fleet.tables.coordinator.migrate(stale, frozenset({"w1"})) is None
    assert world.status() is None
    assert fleet.tables.coordinator.migrate(LOCK, frozenset()) is None
    assert world.status() is None


@pytest.mark.parametrize("status", [None, INIT, DEPLOYED, PENDING])
def test_a_leader_that_has_lost_the_lock_changes_nothing(status):
    world = MigrationWorld()
    if status is not None:
        world.state.plant(status_row(status))
    tables = world.start(migrates=True)
    world.report(tables)
    before = world.state.rows(), world.leases.rows()
    stale = LeaderLock("w1", 8_000, "v0")
    assert tables.coordinator.migrate(stale, frozenset({"w1"})) is None
    assert (world.state.rows(), world.leases.rows()) == before


def test_a_row_that_changes_while_it_moves_is_moved_by_the_next_check():
    fleet = Fleet()
    world = fleet.world
    world.state.plant(status_row(DEPLOYED))
    fleet.tables = tables = world.start(migrates=True)
    operator = world.open()
    pause = Pause("ann", 1, "test")

    def change(operation, key):
        if operation == "TransactWriteItems" and operator.coordinator.read_control().pause is None:
            assert operator.coordinator.put_pause(pause, replacing=Control())

    tables.layout.leases.before_call = change
    assert fleet.run(30) == []
    assert world.places("Migration3.0") == ["app-CoordinatorState"]
    assert fleet.run(30) == [PENDING]
    assert world.places("Migration3.0") == ["app"]
    assert operator.coordinator.read_control().pause == pause


@pytest.mark.parametrize("status", [None, INIT, DEPLOYED, PENDING])
def test_a_transition_whose_answer_was_lost_is_continued(status):
    fleet = Fleet()
    world = fleet.world
    if status is not None:
        world.state.plant(status_row(status))
    fleet.tables = tables = world.start(migrates=True)
    lost = []

    def lose(operation, _key):
        if operation == "TransactWriteItems" and not lost:
            lost.append(operation)
            raise UnavailableError("no answer", operation=operation)

    for store in (tables.layout.leases, tables.layout.coordinator):
        store.after_call = lose
    world.report(tables)
    with pytest.raises(UnavailableError):
        tables.coordinator.migrate(LOCK, frozenset({"w1"}))
    for _ in range(3):
        fleet.run(3720)
    assert world.status() == COMPLETE
    assert world.places("Migration3.0") == ["app"]


def test_the_whole_move_in_dynamodb(client):
    """The requests are those that DynamoDB accepts."""
    clock = VirtualClock()
    settings = ConsumerSettings(
        application_name="moves",
        streams=("s",),
        leader={
            "migrate_all_entities_to_lease_table": True,
            "table_migration_complete_bake_time_seconds": 3600,
        },
    )
    tables = open_dynamodb(client, settings, clock)
    for table in (tables.lease, tables.workers, tables.coordinator):
        table.ensure_exists()
    ensure_client_version(tables.coordinator, "w1", clock)
    assert tables.coordinator.put_lock(LOCK, replacing=None)
    found = []
    for _ in range(8):
        tables.workers.report(WorkerMetrics("w1", int(clock.wall())))
        found.append(tables.coordinator.migrate(LOCK, frozenset({"w1"})))
        clock.advance(3600 if found[-1] in (INIT, PENDING) else 130)
    assert [one for one in found if one is not None] == [INIT, DEPLOYED, PENDING, COMPLETE]
    assert tables.coordinator.put_lock(LOCK, replacing=None)
    rows = {one["leaseKey"]["S"] for one in client.scan(TableName="moves")["Items"]}
    assert rows == {"Leader", "Migration3.0", "TableMigration3.5", "w1"}
