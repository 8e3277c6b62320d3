"""A fleet in memory on the single-table layout of KCL 3.5."""

import pytest

from kcl_pipeline.errors import IncompatibleTableError
from tests.support.layouts import LayoutWorld
from tests.support.operator_world import OperatorWorld


class SingleTableFleet(OperatorWorld):
    """Workers whose rows are all in the lease table."""

    def make_tables(self):
        self.one = LayoutWorld()
        self.one.clock = self.clock
        for store in (self.one.leases, self.one.workers, self.one.state):
            store._clock = self.clock
        tables = self.one.start("single")
        return tables.lease, tables.workers, tables.coordinator

    def kinds(self):
        found = {}
        for key, row in self.one.leases.rows().items():
            found.setdefault(row["entityType"]["S"], []).append(key)
        return found


def test_a_fleet_goes_on_after_a_crash_a_join_and_a_drain():
    world = SingleTableFleet(shards=4, workers=("w-1", "w-2"))
    world.put(*(b"%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) == 20)
    world.work_until(lambda: sorted(world.owners().values()) == ["w-1", "w-1", "w-2", "w-2"])
    assert world.kinds()["WORKER_METRIC_STATS"] == ["w-1", "w-2"]
    assert sorted(world.kinds()) == [
        "CLIENT_VERSION_MIGRATION",
        "LEADER",
        "LEASE",
        "WORKER_METRIC_STATS",
    ]
    leader = world.coordinator.read_lock().owner_name
    world.crash(leader)
    other = "w-2" if leader == "w-1" else "w-1"
    world.put(*(b"a%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) == 40)
    assert set(world.owners().values()) == {other}
    assert world.coordinator.read_lock().owner_name == other

    world.start("w-3")
    world.work_until(lambda: sorted(world.owners().values()).count("w-3") == 2)
    world.put(*(b"b%d" % n for n in range(20)))
    assert world.rows.request_drain("w-3")
    world.work_until(lambda: len(world.data()) == 60 and "w-3" in world.ended)
    world.work_until(lambda: set(world.owners().values()) == {other})
    assert world.data() == sorted(world.sent)
    assert [one for one in (world.one.workers, world.one.state) if one.exists()] == []
    assert "w-3" not in world.one.leases.rows()


def test_a_worker_before_3_5_that_joins_later_is_refused_at_the_next_start():
    world = SingleTableFleet()
    row = {"leaseKey": {"S": "old"}, "entityType": {"S": "WORKER_METRIC_STATS"}, "lut": {"N": "1"}}
    world.one.leases.plant(row)
    with pytest.raises(IncompatibleTableError, match="the worker old in the table"):
        world.one.start()


class ThreeTableFleet(OperatorWorld):
    """Workers whose application has three tables, beside Java workers."""

    def make_tables(self):
        self.stores = LayoutWorld()
        self.stores.clock = self.clock
        for store in (self.stores.leases, self.stores.workers, self.stores.state):
            store._clock = self.clock
        tables = self.stores.start()
        return tables.lease, tables.workers, tables.coordinator

    def plant_status(self, name):
        self.stores.state.plant(
            {"key": {"S": "TableMigration3.5"}, "tm": {"S": f"TABLE_MIGRATION_STATUS_{name}"}}
        )


def test_a_fleet_works_at_deployed_and_ends_when_java_moves_the_application():
    world = ThreeTableFleet(shards=2, workers=("w-1",))
    world.plant_status("DEPLOYED")
    world.put(*(b"%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) == 20)
    world.plant_status("PENDING")
    with pytest.raises(IncompatibleTableError, match="move the application to the single table"):
        world.work_until(lambda: False, seconds=120)
    assert all(row.get("sup") is None for row in world.stores.workers.rows().values())
