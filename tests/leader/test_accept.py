"""Changing the streams or the sink of an application on purpose, while leaders and workers run."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest

from kcl_pipeline.errors import ApplicationInUseError
from kcl_pipeline.events import RowRejected, ignore_events
from kcl_pipeline.leader.accept import ApplicationChange
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.position import Position
from tests.support.leader_world import World, settled


def identity(world, *streams, sink=None):
    found = [
        world.kinesis.resolve_stream(stream, multi_stream=len(streams) > 1) for stream in streams
    ]
    return ApplicationIdentity.of(found, is_multi_stream=len(streams) > 1, sink=sink)


def recorded(world):
    return world.coordinator.read_application().identity


def change(world):
    election = LeaderElection(
        world.coordinator,
        "kcl-pipeline-application",
        world.clock,
        ignore_events,
        world.settings.leader,
        Random(1),
    )
    world.told = []
    return ApplicationChange(
        world.settings,
        world.leases,
        world.rows,
        world.coordinator,
        world.clock,
        election,
        world.told.append,
    )


@pytest.fixture
def world():
    """A leader at work, no worker, and a second stream."""
    made = World(shards=6)
    made.leader()
    made.run(6)
    made.model.create_stream("other", 2)
    advance = made.clock.sleep

    def sleep(seconds):
        """While the command waits, the leader goes on."""
        advance(seconds)
        for leader in list(made.leaders.values()):
            leader.run_once()

    made.clock.sleep = sleep
    return made


def test_a_running_leader_gives_way_and_does_not_bring_the_leases_back(world):
    before = recorded(world)
    done = change(world).accept_streams(identity(world, "other"))
    assert (done.before, done.deleted) == (before, 6)
    assert recorded(world) == identity(world, "other")
    assert world.table() == {}
    assert world.coordinator.read_lock() is None
    world.run(60)
    assert world.table() == {}, "the leader of the former stream is refused"
    world.settings = world.settings.model_copy(update={"streams": ("other",)})
    world.leader("new")
    world.run(60)
    assert len(world.table()) == 2


def test_a_stream_that_was_created_again_is_accepted(world):
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(60)
    world.model.create_stream("orders", 3)
    world.clock.advance(60)
    change(world).accept_streams(identity(world, "orders"))
    world.run(60)
    assert len(world.table()) == 3, "the same leader goes on with the new stream"


def test_one_stream_becomes_several_with_new_leases(world):
    change(world).accept_streams(identity(world, "orders", "other"))
    assert recorded(world).mode == "multi_stream"
    assert world.table() == {}


def test_several_streams_are_replaced_without_touching_leases():
    world = World(shards=2, streams=("orders", "clicks"))
    world.leader().run_once()
    leases = world.table()
    world.model.create_stream("third", 1)
    change(world).accept_streams(identity(world, "clicks", "third"))
    assert [stream.name for stream in recorded(world).streams] == ["clicks", "third"]
    assert world.table() == leases


@pytest.mark.parametrize("what", ["streams", "sink"])
def test_running_workers_are_left_alone(what):
    world = settled(World(shards=2), "a")
    world.model.create_stream("other", 2)
    before, leases = recorded(world), world.table()
    made = change(world)
    accept = made.accept_streams if what == "streams" else partial(made.accept_sink, token="t")
    stream = "other" if what == "streams" else "orders"
    with pytest.raises(ApplicationInUseError, match="belongs to a: stop all workers"):
        accept(identity(world, stream, sink="delta:/elsewhere"))
    assert (recorded(world), world.table()) == (before, leases)


def test_a_worker_without_a_lease_is_found_by_its_reports(world):
    world.join("idle")
    world.workers["idle"].report()
    advance = world.clock.sleep

    def sleep(seconds):
        advance(seconds)
        world.workers["idle"].report()

    world.clock.sleep = sleep
    with pytest.raises(ApplicationInUseError, match="the worker idle is running"):
        change(world).accept_streams(identity(world, "other"))
    assert not recorded(world).changing


@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_whose_row_cannot_be_read_is_found_by_its_changes(world, lives):
    reports = [0]

    def report():
        reports[0] += 1
        world.rows.plant(
            {"wid": {"S": "odd"}, "lut": {"N": str(reports[0])}, "kclpDrain": {"N": "1E+200"}}
        )

    report()
    advance = world.clock.sleep

    def sleep(seconds):
        advance(seconds)
        if lives:
            report()

    world.clock.sleep = sleep
    if lives:
        with pytest.raises(ApplicationInUseError, match="the worker odd is running"):
            change(world).accept_streams(identity(world, "other"))
        assert not recorded(world).changing
    else:
        change(world).accept_streams(identity(world, "other"))
        assert recorded(world) == identity(world, "other")
    mine = [event for event in world.told if isinstance(event, RowRejected)]
    assert [(event.table, event.key) for event in mine] == [(world.rows.name, "odd")]


def test_a_row_that_becomes_readable_meanwhile_is_a_running_worker(world):
    world.rows.plant({"wid": {"S": "odd"}, "lut": {"N": "1"}, "kclpDrain": {"N": "1E+200"}})
    advance = world.clock.sleep

    def sleep(seconds):
        advance(seconds)
        world.rows.plant({"wid": {"S": "odd"}, "lut": {"N": "1"}})

    world.clock.sleep = sleep
    with pytest.raises(ApplicationInUseError, match="the worker odd is running"):
        change(world).accept_streams(identity(world, "other"))


def test_the_row_of_a_dead_worker_does_not_hinder(world):
    world.leaders.clear()
    world.coordinator.erase("Leader")
    world.join("dead")
    world.workers["dead"].report()
    world.kill("dead")
    change(world).accept_streams(identity(world, "other"))
    assert recorded(world) == identity(world, "other")


def test_a_worker_that_takes_a_lease_meanwhile_stops_the_change_half_way(world):
    (lease, *_) = world.table().values()
    advance = world.clock.sleep

    def sleep(seconds):
        advance(seconds)
        world.leases.assign(world.leases.get(lease.lease_key), "late")

    world.clock.sleep = sleep
    with pytest.raises(ApplicationInUseError, match="belongs to late"):
        change(world).accept_streams(identity(world, "other"))
    assert recorded(world).changing, "nobody starts before it is finished"
    world.clock.sleep = advance
    world.leases.evict(world.leases.get(lease.lease_key))
    change(world).accept_streams(identity(world, "other"))
    assert recorded(world) == identity(world, "other")
    assert world.table() == {}


def test_a_pending_checkpoint_of_a_java_worker_stays_when_the_sink_changes(world):
    key = min(world.table())
    held = world.leases.assign(world.leases.get(key), "w")
    held = world.leases.update_checkpoint(
        held, checkpoint=held.checkpoint, pending=Position("7"), pending_state=b"2"
    )
    world.leases.evict(held)
    leases = world.table()
    change(world).accept_sink(identity(world, "orders", sink="delta:/elsewhere"), "token")
    assert recorded(world).sink == "delta:/elsewhere"
    assert world.table() == leases


def marked(world):
    """Return a lease whose row has a mark of the former table."""
    held = world.leases.assign(world.leases.get(min(world.table())), "w")
    held = world.leases.update_checkpoint(held, checkpoint=Position("7"), table_mark=Position("7"))
    return world.leases.evict(held)


def test_leases_have_no_mark_of_the_former_table_afterwards(world):
    """A mark of another table would let every lease stand still."""
    before = marked(world)
    change(world).accept_sink(identity(world, "orders", sink="delta:/elsewhere"), "token")
    after = world.leases.get(before.lease_key)
    assert (after.table_mark, after.checkpoint) == (None, Position("7"))
    assert [lease for lease in world.table().values() if lease.table_mark] == []


def test_marks_stay_if_a_lease_is_taken_meanwhile(world):
    row = marked(world)
    made, seek = change(world), world.leases.seek

    def taken_first(*given):
        world.leases.assign(world.leases.get(row.lease_key), "late")
        return seek(*given)

    world.leases.seek = taken_first
    with pytest.raises(ApplicationInUseError, match=f"changed the lease {row.lease_key}"):
        made.accept_sink(identity(world, "orders", sink="delta:/elsewhere"), "token")
    assert recorded(world).sink is None
    assert world.leases.get(row.lease_key).table_mark is not None
