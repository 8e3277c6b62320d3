"""The single-table layout of KCL 3.5: the exact rows, and what is refused before a write."""

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    IncompatibleTableError,
    NotFoundError,
    SettingsError,
    UnavailableError,
)
from kcl_pipeline.leases.application import ApplicationIdentity, Control, Pause
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.dynamodb import deletions, open_dynamodb
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.layouts import LEGACY_STATE, LEGACY_WORKERS, LayoutWorld
from tests.support.lease_tables import FRESH, FRESH_ITEM, KEY
from tests.support.lease_tables import aws_fixture as aws_fixture  # noqa: PLC0414
from tests.support.lease_tables import client_fixture as client_fixture  # noqa: PLC0414

LOCK = LeaderLock("w1", 120_000, "v1")
LOCK_ITEM = {
    "leaseKey": {"S": "Leader"},
    "entityType": {"S": "LEADER"},
    "ownerName": {"S": "w1"},
    "leaseDuration": {"S": "120000"},
    "recordVersionNumber": {"S": "v1"},
}
WORKER_ITEM = {
    "leaseKey": {"S": "w1"},
    "entityType": {"S": "WORKER_METRIC_STATS"},
    "lut": {"N": "1760000000"},
    "sts": {"M": {"C": {"L": [{"N": "10.5"}]}}},
    "opr": {"M": {"C": {"L": [{"N": "100"}]}}},
    "sup": {"N": "1"},
    "slu": {"N": "1760000000"},
}
VERSION_ITEM = {
    "leaseKey": {"S": "Migration3.0"},
    "entityType": {"S": "CLIENT_VERSION_MIGRATION"},
    "cv": {"S": "CLIENT_VERSION_3X"},
    "mb": {"S": "w1"},
}
W1 = WorkerMetrics("w1", 1760000000, {"C": (10.5,)}, {"C": (100,)})


def fill(tables, clock):
    """What a worker that leads writes."""
    ensure_client_version(tables.coordinator, "w1", clock)
    assert tables.coordinator.put_lock(LOCK, replacing=None)
    tables.workers.report(W1)
    proof = tables.coordinator.proof_of_lock(LOCK)
    assert tables.lease.create_leases([FRESH], proof) == (KEY,)


def check_rows(rows):
    version = rows.pop("Migration3.0")
    assert {name: version.pop(name) for name in VERSION_ITEM} == VERSION_ITEM
    assert sorted(version) == ["h", "mts"]
    assert rows == {"Leader": LOCK_ITEM, "w1": WORKER_ITEM, KEY: FRESH_ITEM}


def test_all_rows_are_those_of_the_java_kcl_in_memory():
    world = LayoutWorld()
    tables = world.start("single")
    fill(tables, world.clock)
    check_rows(world.leases.rows())
    assert world.existing() == ["app"]


@pytest.fixture(name="app")
def app_fixture(client):
    """An application in DynamoDB whose settings ask for the single table."""
    settings = ConsumerSettings(application_name="one", streams=("s",), table_layout="single")
    clock = VirtualClock()
    tables = open_dynamodb(client, settings, clock)
    for table in (tables.lease, tables.workers, tables.coordinator):
        table.ensure_exists()
    fill(tables, clock)
    return tables


def test_the_single_table_in_dynamodb(app, client):
    """Rows, reads by another process, a proof on the same table, and the retirement."""
    rows = client.scan(TableName="one")["Items"]
    check_rows({row["leaseKey"]["S"]: row for row in rows})
    assert [name for name in client.list_tables()["TableNames"] if "one" in name] == ["one"]

    joined = open_dynamodb(
        client, ConsumerSettings(application_name="one", streams=("s",)), VirtualClock()
    )
    joined.lease.ensure_exists()
    assert [one.lease_key for one in joined.lease.list_leases().leases] == [KEY]
    assert joined.lease.list_leases().bad_rows == ()
    assert joined.workers.scan_workers().bad_rows == ()
    assert [one.worker_id for one in joined.workers.scan_workers().workers] == ["w1"]
    assert joined.coordinator.read_lock() == LOCK
    assert joined.lease.get("Leader") is joined.lease.get("w1") is None
    assert joined.workers.name == joined.coordinator.name == "one"
    other = Lease("shardId-2", TRIM_HORIZON)
    stale = joined.coordinator.proof_of_lock(LeaderLock("w1", 1, "v0"))
    assert joined.lease.create_leases([other], stale) is None

    first, last = deletions(client, joined.layout, VirtualClock())
    assert [one.find() for one in first] == [None, None]
    found = last.find()
    assert (found.name, found.rows, found.foreign_rows) == ("one", 4, 0)
    last.delete(found)
    assert "one" not in client.list_tables()["TableNames"]


def test_a_process_joins_the_layout_that_it_finds():
    world = LayoutWorld()
    fill(world.start("single"), world.clock)
    joined = world.start()
    assert joined.coordinator.heartbeat_lock(LOCK, "v2")
    assert joined.coordinator.read_lock().version == "v2"
    assert world.existing() == ["app"]
    assert joined.workers.request_drain("w1")
    assert not joined.workers.request_drain("w2")
    assert joined.workers.report(W1).drain_requested
    assert joined.workers.delete(W1)
    assert joined.workers.scan_workers().workers == ()

    three = LayoutWorld()
    fill(three.start(), three.clock)
    assert three.existing() == ["app", LEGACY_WORKERS, LEGACY_STATE]
    assert sorted(three.leases.rows()) == [KEY]
    assert three.open().coordinator.read_lock() == LOCK


def test_requests_of_an_operator_are_in_the_single_table():
    world = LayoutWorld()
    tables = world.start("single")
    fill(tables, world.clock)
    pause = Pause("ann", 1, "test")
    assert tables.coordinator.put_pause(pause, replacing=Control())
    control = world.open().coordinator.read_control()
    assert control.pause == pause
    proof = tables.coordinator.proof_of_pause(control)
    assert tables.lease.create_leases([Lease("shardId-2", TRIM_HORIZON)], proof) == ("shardId-2",)
    identity = ApplicationIdentity("multi_stream", ())
    assert tables.coordinator.put_application(identity, replacing=None)
    assert world.open().coordinator.read_application().identity == identity
    assert tables.coordinator.release_lock(LOCK)


@pytest.mark.parametrize("name", ["Leader", KEY, "orders"])
def test_a_worker_id_never_changes_another_row(name):
    world = LayoutWorld()
    tables = world.start("single")
    fill(tables, world.clock)
    world.leases.plant({"leaseKey": {"S": "orders"}, "entityType": {"S": "STREAM"}})
    old = {name: value for name, value in FRESH_ITEM.items() if name != "entityType"}
    world.leases.plant(old)
    before = world.leases.rows()
    with pytest.raises(SettingsError, match="give the worker another id"):
        tables.workers.report(WorkerMetrics(name, 1))
    tables.workers.deregister(name)
    assert world.leases.rows() == before


@pytest.mark.parametrize(
    ("wanted", "built", "match"),
    [
        ("three", "single", "table_layout='three', but the application has all rows"),
        ("single", "three", "table_layout='single', but the application has the table"),
    ],
)
def test_a_layout_that_the_settings_do_not_want_is_refused(wanted, built, match):
    world = LayoutWorld()
    fill(world.start(built), world.clock)
    before = [one.rows() for one in (world.leases, world.workers, world.state)]
    with pytest.raises(IncompatibleTableError, match=match):
        world.start(wanted)
    assert [one.rows() for one in (world.leases, world.workers, world.state)] == before


OLD = {name: value for name, value in WORKER_ITEM.items() if name not in ("sup", "slu")}


@pytest.mark.parametrize(
    "row",
    [
        OLD,
        WORKER_ITEM | {"sup": {"N": "0"}},
        WORKER_ITEM | {"lut": {"N": "1760000200"}},  # a Java worker before 3.5 under the same id
    ],
)
def test_a_worker_before_3_5_is_refused_before_anything_is_written(row):
    world = LayoutWorld()
    fill(world.start("single"), world.clock)
    world.leases.plant(row)
    before = world.leases.rows()
    with pytest.raises(IncompatibleTableError, match=r"the worker w1 in the table app is of a ve"):
        world.start()
    assert world.leases.rows() == before
    assert world.existing() == ["app"]


def test_a_worker_before_3_5_that_has_made_its_own_tables_is_refused():
    world = LayoutWorld()
    fill(world.start("single"), world.clock)
    world.workers.ensure_exists()
    world.workers.plant({"wid": {"S": "w9"}, "lut": {"N": "1000"}, "sts": {"M": {}}})
    world.start()  # the row is old: the application has moved since
    now = {"N": str(int(world.clock.wall()))}
    world.workers.plant({"wid": {"S": "w9"}, "lut": now, "sts": {"M": {}}})
    with pytest.raises(IncompatibleTableError, match="the worker w9 in the table app-W"):
        world.start()
    world.state.ensure_exists()
    with pytest.raises(IncompatibleTableError, match=f"table {LEGACY_STATE} without a migration"):
        world.start()


@pytest.mark.parametrize("wanted", ["auto", "single"])
def test_without_permission_to_look_for_older_workers_only_the_setting_helps(wanted):
    """With `single` in the settings, the former tables need no permission (docs/iam.md)."""
    world = LayoutWorld()
    fill(world.start("single"), world.clock)
    tables = world.open(wanted)

    def deny(operation, _key):
        if operation == "Scan":
            raise AccessDeniedError("no", code="AccessDeniedException", operation="Scan")

    tables.layout.workers.before_call = deny
    if wanted == "single":
        assert not tables.lease.ensure_exists()
        return
    with pytest.raises(AccessDeniedError):
        tables.lease.ensure_exists()


def test_a_start_waits_while_another_program_may_be_creating_a_single_table():
    """Java creates the lease table first, and its first row some seconds later."""
    world = LayoutWorld()
    world.leases.ensure_exists()
    tables = world.open()
    with pytest.raises(UnavailableError, match="may be creating the application"):
        tables.lease.ensure_exists()
    world.leases.plant(VERSION_ITEM | {"mts": {"N": "1"}})
    tables.lease.ensure_exists()
    assert tables.layout.is_single()

    other = LayoutWorld()
    other.leases.ensure_exists()
    tables = other.open()
    with pytest.raises(UnavailableError):
        tables.lease.ensure_exists()
    other.clock.advance(10)
    assert not tables.lease.ensure_exists()
    assert other.existing() == ["app", LEGACY_WORKERS, LEGACY_STATE]


def test_leases_of_kcl_2_get_three_tables():
    world = LayoutWorld()
    world.leases.ensure_exists()
    world.leases.plant(FRESH_ITEM)
    tables = world.start()
    assert world.existing() == ["app", LEGACY_WORKERS, LEGACY_STATE]
    assert [one.lease_key for one in tables.lease.list_leases().leases] == [KEY]


def test_the_layout_is_found_anew_after_a_retirement():
    world = LayoutWorld()
    tables = world.start("single")
    fill(tables, world.clock)
    sensor = world.open()
    assert sensor.coordinator.read_lock() == LOCK
    world.leases._rows.clear()
    world.leases._state["exists"] = False
    with pytest.raises(NotFoundError):
        sensor.coordinator.read_lock()
    world.start()
    assert sensor.coordinator.read_lock() is None
    assert not sensor.layout.is_single()
