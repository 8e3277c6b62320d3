"""A leader that stands still in the middle of its writes, and a worker that comes back meanwhile:
what was planned before is not written any more.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import LeaseMoved, MoveRefused
from tests.support.leader_world import World, settled

SHARDS = [f"shardId-{number:012d}" for number in range(4)]


def hanging(world, operation, seconds, *, then=lambda _key: None):
    """The first call of this kind takes so many seconds; `then` runs before it is applied."""
    calls = []

    def wait(called, key):
        if called == operation:
            calls.append(key)
            if len(calls) == 1:
                world.clock.advance(seconds)
                then(key)

    world.leases.store.before_call = wait
    return calls


def lock_seconds(world):
    return world.settings.leader.leader_lease_duration_millis / 1000


@pytest.mark.parametrize(("share", "written"), [(0.9, 4), (1.1, 1)])
def test_a_plan_is_written_only_as_long_as_the_lock_may_last(share, written):
    world = settled(World(shards=4), "a")
    world.workers["a"].stop()
    world.join("b")
    world.workers["b"].report()
    calls = hanging(world, "UpdateItem", share * lock_seconds(world))
    world.events.clear()
    world.leaders["leader"].run_once()
    assert calls == SHARDS[:written]
    assert [event.lease_key for event in world.happened(LeaseMoved)] == SHARDS[:written]
    assert [event.lease_key for event in world.happened(MoveRefused)] == SHARDS[written:]
    world.run_until(lambda: len(world.held()["b"]) == 4, limit=60)


def test_a_paused_leader_creates_no_lease_after_another_has_led():
    """The other leader's fleet has finished and deleted the leases meanwhile."""
    world = World(shards=4)
    other = world.leader("other")

    def takes_over(_key):
        assert not other.run_once().led
        world.clock.advance(1.1 * lock_seconds(world))
        assert other.run_once().led
        assert sorted(world.table()) == SHARDS
        for lease in world.table().values():
            world.leases.delete(lease)

    leader = world.leader()
    calls = hanging(world, "TransactWriteItems", 0.0, then=takes_over)
    assert not leader.run_once().led
    assert len(calls) == 2, "one by the old leader, one by the new"
    assert world.table() == {}


def test_a_paused_leader_fills_no_hole_after_another_has_led():
    world = settled(World(shards=4), "a")
    lost = world.table()[SHARDS[2]]
    world.leases.delete(lost)
    other = world.leader("other")

    def takes_over(_key):
        assert not other.run_once().led
        world.clock.advance(1.1 * lock_seconds(world))
        assert other.run_once().led

    calls = hanging(world, "TransactWriteItems", 0.0, then=takes_over)
    world.run_until(lambda: calls, limit=500)
    assert lost.lease_key not in world.table()


def test_the_lock_is_looked_at_again_before_the_next_deletion():
    world = settled(World(shards=2, shard_sync={"completed_lease_cleanup_interval_millis": 0}), "a")
    worker = world.workers["a"]
    worker.start_reading()
    for key in SHARDS[:2]:
        middle = world.table()[key].hash_key_range.start + 1000
        world.model.call(
            "SplitShard", StreamName="orders", ShardToSplit=key, NewStartingHashKey=str(middle)
        )
        world.clock.advance(1)
        worker.renew()
        worker.finish(key)
    world.run_until(lambda: len(world.held()["a"]) == 4)
    other = world.leader("other")

    def takes_over(_key):
        assert not other.run_once().led
        world.clock.advance(1.1 * lock_seconds(world))
        assert other.run_once().led

    worker.start_reading()
    calls = hanging(world, "DeleteItem", 0.0, then=takes_over)
    assert not world.leaders["leader"].run_once().led
    assert calls == [SHARDS[0], *SHARDS[:2]], "one by the old leader, two by the new"


def expired(world, *names):
    """The leases of these workers have expired, and the leader is about to see it."""
    for name in names:
        world.workers[name].renews = False
    world.run(9)
    world.clock.advance(3)


@pytest.mark.parametrize("answer_lost", [False, True])
def test_a_worker_that_renews_before_its_expired_lease_is_given_away_keeps_it(answer_lost):
    world = settled(World(shards=4), "a", "b")
    mine = list(world.workers["b"].held)
    expired(world, "b")
    owner = world.leases.view()
    renewed = []

    def comes_back(_key):
        renewed.extend(owner.renew(world.workers["b"].held[key]) for key in mine)

    hanging(world, "UpdateItem", 0.0, then=comes_back)
    if answer_lost:
        failures = [UnavailableError("the answer was lost")]
        world.leases.store.after_call = lambda operation, _key: (
            (_ for _ in ()).throw(failures.pop())
            if operation == "UpdateItem" and failures
            else None
        )
    world.events.clear()
    world.leaders["leader"].run_once()
    assert len(renewed) == 2
    assert {world.owners()[key] for key in mine} == {"b"}
    assert not world.happened(LeaseMoved)
    world.leases.store.after_call = lambda *_: None
    world.workers["b"].held = {row.lease_key: row for row in renewed}
    world.workers["b"].renews = True
    world.run(30)
    assert {world.owners()[key] for key in mine} == {"b"}
