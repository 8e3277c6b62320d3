"""A lease leaves with its checkpoint: what its worker has committed is in the row before the row
changes hands.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, HandoffCompleted
from kcl_pipeline.position import TRIM_HORIZON
from tests.support.worker_world import World, numbered


@pytest.fixture
def world():
    """One shard. Its last batch is in the table, and its checkpoint is not in the row yet."""
    lease = {"failover_time_millis": 1000, "checkpoint_lag_millis": 100_000}
    world = World(shards=1, lease=lease)
    world.run(3)
    world.put(*numbered(20))
    world.run(0.05)
    (consumer,) = world.worker.lifecycle.consumers.values()
    while not consumer.flush_needed:
        world.run(0.05)
    assert row(world).checkpoint == TRIM_HORIZON
    return world


def row(world):
    (lease,) = world.leases.list_leases().leases
    return lease


def work(world, seconds):
    """Let the worker work, and nobody lead: the worker that gets the lease is only a name."""
    until = world.clock.monotonic() + seconds
    while world.clock.monotonic() < until:
        world.worker.lease_tick()
        world.worker.process_tick()
        world.clock.advance(0.05)


def hand_to(world, worker_id):
    """As the leader does it; the worker notices with its next renewal."""
    world.leases.view().initiate_handoff(row(world), worker_id)
    world.worker.leases.renew_all()


def failing(world, error, *, after=False):
    """The next write of a lease row fails; with `after` once it has been applied."""
    errors = [error]

    def fail(operation, _key):
        if operation == "UpdateItem" and errors:
            raise errors.pop()

    world.leases.hook(None if after else fail, fail if after else None)


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ThrottledError("slow down"), False),
        (UnavailableError("server error"), False),
        (UnavailableError("the answer was lost"), True),
    ],
)
def test_a_checkpoint_that_fails_during_a_handoff_is_written_before_the_transfer(
    world, error, after
):
    (consumer,) = world.worker.lifecycle.consumers.values()
    committed = consumer.committed
    consumer.failures = 10
    hand_to(world, "w-2")
    failing(world, error, after=after)
    world.worker.process_tick()
    assert [t.operation for t in world.of(AwsTrouble)] == ["handoff of shardId-000000000000"]
    assert (row(world).owner, row(world).checkpoint_owner) == ("w-2", "w-1"), "not handed over yet"
    work(world, 1)
    assert (row(world).owner, row(world).checkpoint_owner) == ("w-2", None)
    assert row(world).checkpoint == committed
    assert len(world.of(HandoffCompleted)) == 1
    assert world.worker.lifecycle.consumers == {}


def test_a_shard_that_is_leaving_is_not_read_any_more(world):
    hand_to(world, "w-2")
    failing(world, UnavailableError("server error"))
    world.put(*numbered(5, "s"))
    work(world, 2)
    assert row(world).owner == "w-2"
    assert world.data() == numbered(20)


def test_a_handoff_that_the_leader_withdraws_leaves_the_shard_with_its_worker(world):
    hand_to(world, "w-2")
    failing(world, ThrottledError("slow down"))
    world.worker.process_tick()
    world.leases.view().assign(row(world), "w-1")
    assert world.worker.leases.renew_all() == 1, "it is held all the time"
    world.put(*numbered(5, "s"))
    work(world, 3)
    assert (row(world).owner, row(world).checkpoint_owner) == ("w-1", None)
    assert world.data() == sorted(world.sent)
