"""A worker names the positions of new shards as its application is recorded."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.control.seek.downgrade import Downgrade
from kcl_pipeline.control.seek.run import Seeking
from kcl_pipeline.control.seek.target import SeekTarget
from kcl_pipeline.errors import SinkError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.sink import InMemorySink
from tests.support.operator_world import OperatorWorld
from tests.worker.test_recorded_protocol import RecordedWorld, batch, use


class NamingSink(InMemorySink):
    """Notes what it is told about names."""

    def __init__(self, world):
        super().__init__(world.table, clock=world.clock)
        self.world = world

    def prefers_short_names(self):
        if self.world.failing:
            raise SinkError("the table cannot be read on demand")
        return not self.world.has_long_names

    def name_positions(self, *, short):
        self.world.told.append("short" if short else "long")

    def use_long_names(self):
        self.world.told.append("all long")


class NamingWorld(RecordedWorld):
    has_long_names = False
    failing = False

    def __init__(self, **settings):
        self.told: list[str] = []
        super().__init__(shards=2, **settings)

    def make_sink(self):
        return NamingSink(self)

    def recorded(self):
        found = self.coordinator.read_application().identity
        return found.positions, found.short_names


class WithLongNames(NamingWorld):
    has_long_names = True


class Failing(NamingWorld):
    failing = True


@pytest.mark.parametrize(
    ("make", "name"), [(NamingWorld, "short"), (WithLongNames, "long"), (Failing, "long")]
)
def test_the_first_worker_asks_the_table_and_the_others_follow(make, name):
    world = make()
    assert world.recorded() == (True, name == "short")
    failures = [one.error for one in world.of(AwsTrouble) if "names of positions" in one.operation]
    assert failures == ["the table cannot be read on demand"] * (make is Failing)
    world.has_long_names, world.failing = not world.has_long_names, False
    world.start("w-2")
    assert world.recorded() == (True, name == "short")
    assert world.told == [name, name]


def test_a_sink_without_names_is_recorded_for_all_versions():
    world = RecordedWorld(shards=2)
    found = world.coordinator.read_application().identity
    assert (found.positions, found.short_names) == (True, False)
    assert isinstance(world, OperatorWorld)


def test_an_application_with_two_phase_gets_names_when_it_changes():
    world = NamingWorld(batch={"commit_protocol": "two_phase"})
    assert (world.recorded(), world.told) == ((False, False), ["long"])
    world.end("w-1")
    use(world, "positions")
    world.start("w-2")
    assert (world.recorded(), world.told) == ((True, True), ["long", "short"])


@pytest.mark.parametrize("make", [NamingWorld, WithLongNames])
def test_a_lost_record_is_written_again_as_the_table_is(make):
    """The coordinator-state table is deleted while a worker runs."""
    world = make()
    values = batch(world, "a")
    before = world.recorded()
    world.told.clear()
    world.coordinator.store.drop()
    values += batch(world, "b")
    world.work_until(lambda: world.told)
    assert world.recorded() == before
    assert set(world.told) == {"long" if world.has_long_names else "short"}
    assert Counter(world.data()) == Counter(values)


@pytest.mark.parametrize("make", [NamingWorld, WithLongNames])
def test_a_seek_names_positions_as_recorded(make):
    world = make()
    batch(world, "a")
    world.told.clear()
    target = SeekTarget("TRIM_HORIZON", TRIM_HORIZON)
    seeking = Seeking(world.app, world.kinesis, target, sink=world.make_sink())
    assert seeking.write("token", pause=True, wait_seconds=60).written
    assert world.told[0] == ("long" if world.has_long_names else "short")


def test_a_downgrade_leaves_names_that_all_versions_read():
    world = NamingWorld()
    batch(world, "a")
    world.told.clear()
    positions = world.table._positions
    downgrade = Downgrade(world.app, world.kinesis, world.make_sink())
    downgrade.write("token", pause=True, wait_seconds=60, stay_paused=True)
    assert world.told[-1] == "all long"
    assert {one.position for one in positions.values()} == {None}
    assert world.recorded() == (False, False)
