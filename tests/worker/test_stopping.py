"""A worker that stops in good order: nothing in the tables carries its name afterwards, whatever
was under way.
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import CommitStoppedError, ThrottledError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.stopping.leaving import LEAVE_SECONDS
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import World, numbered


def stop(world):
    began = world.clock.monotonic()
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)
    return world.clock.monotonic() - began


def owners(world):
    return {
        lease.lease_key: (lease.owner, lease.checkpoint_owner)
        for lease in world.leases.list_leases().leases
    }


def nobody(world):
    return dict.fromkeys(owners(world), (None, None))


@pytest.fixture
def world():
    world = World(shards=2)
    world.run(5)
    assert set(owners(world).values()) == {("w-1", None)}
    return world


def test_its_row_is_gone_before_the_first_lease_is_free(world):
    """Or the next leader, which finds free leases and a worker that is there, may give them back to
    it.
    """
    rows = []

    def note(operation, _key):
        rows.append((operation, len(world.rows.scan_workers().workers)))

    world.leases.hook(note, None)
    assert stop(world) < 1
    assert {count for operation, count in rows if operation == "UpdateItem"} == {0}
    assert owners(world) == nobody(world)
    assert world.coordinator.read_lock() is None


def test_a_lease_whose_time_ran_out_while_the_threads_ended_is_free_as_well(world):
    """The threads are joined, so nothing is renewed; the row still says who has it."""
    world.clock.advance(world.settings.lease.failover_time_millis / 1000)
    assert world.worker.leases.held() == ()
    stop(world)
    assert owners(world) == nobody(world)


def test_a_lease_that_is_being_handed_to_it_is_waited_for(world):
    (key, *_) = owners(world)
    other = world.leases.view()
    stop_other(world, key, other)
    sleep = world.clock.sleep
    world.clock.sleep = lambda seconds: (sleep(seconds), other.assign(other.get(key), "w-1"))
    assert stop(world) < 1
    assert owners(world) == nobody(world)


def test_but_not_for_ever(world):
    (key, *_) = owners(world)
    stop_other(world, key, world.leases.view())
    assert LEAVE_SECONDS <= stop(world) < LEAVE_SECONDS + 1
    assert owners(world) == {**nobody(world), key: ("w-1", "w-2")}


def stop_other(world, key, table):
    """The lease is w-2's and on its way to w-1, which does not have it yet."""
    table.assign(table.get(key), "w-2")
    table.initiate_handoff(table.get(key), "w-1")
    world.worker.lease_tick()


def test_one_that_is_assigned_while_it_stops_is_given_back(world):
    (key, *_) = owners(world)
    leader = world.leases.view()
    deregister = world.rows.deregister

    def late(worker_id, run_id):
        leader.evict(leader.get(key))
        deregister(worker_id, run_id)
        leader.assign(leader.get(key), worker_id)

    world.rows.deregister = late
    assert stop(world) < 1
    assert owners(world) == nobody(world)


def test_what_another_process_under_the_same_name_holds_on_to_is_not_fought_for(world):
    """A worker that was started again before the old one had ended: the old one releases once,
    and goes.
    """
    (key, *_) = owners(world)
    other, evict = world.leases.view(), world.leases.evict

    def take_again(lease):
        row = evict(lease)
        other.assign(other.get(key), "w-1") if lease.lease_key == key else None
        return row

    world.leases.evict = take_again
    assert stop(world) == 0
    assert owners(world) == {**nobody(world), key: ("w-1", None)}


def test_a_release_that_fails_is_made_again(world):
    failures = [ThrottledError("slow down"), ThrottledError("slow down")]

    def fail(operation, _key):
        if operation == "UpdateItem" and failures:
            raise failures.pop()

    world.leases.hook(fail, None)
    assert stop(world) < 1
    assert owners(world) == nobody(world)


@pytest.mark.parametrize("failures", [1, 3, 1000])
def test_a_checkpoint_that_fails_is_written_before_its_lease_is_free(failures):
    """Until it has to go, the worker tries again: what it knows to be committed is not repeated."""
    world = World(shards=1, lease={"failover_time_millis": 20_000})
    world.run(3)
    world.put(*numbered(20))
    while not any(c.flush_needed for c in world.worker.lifecycle.consumers.values()):
        world.run(0.05)
    (consumer,) = world.worker.lifecycle.consumers.values()
    errors = [ThrottledError("slow down")] * failures
    checkpoint = world.leases.update_checkpoint

    def fail(*args, **kwargs):
        if errors:
            raise errors.pop()
        return checkpoint(*args, **kwargs)

    world.leases.update_checkpoint = fail
    seconds = stop(world)
    (row,) = world.leases.list_leases().leases
    assert owners(world) == nobody(world)
    assert (row.checkpoint == consumer.committed) == (failures < 1000)
    given_up = [t for t in world.of(AwsTrouble) if t.operation.startswith("last checkpoint of ")]
    assert len(given_up) == (failures == 1000)
    assert seconds <= LEAVE_SECONDS + 1


def test_an_index_that_cannot_be_asked_is_asked_again(world):
    """A lease on its way to a worker that stops is found although the first look is throttled."""
    (key, *_) = owners(world)
    other = world.leases.view()
    stop_other(world, key, other)
    failures = [ThrottledError("slow down")] * 3

    def fail(operation, _key):
        if operation == "Query" and failures:
            raise failures.pop()

    world.leases.hook(fail, None)
    sleep = world.clock.sleep
    world.clock.sleep = lambda seconds: (
        sleep(seconds),
        failures or other.assign(other.get(key), "w-1"),
    )
    assert stop(world) < 2
    assert owners(world) == nobody(world)


def test_leases_that_are_to_be_kept_are_not_waited_for():
    world = World(
        shards=2, lease={"failover_time_millis": 1000, "release_leases_on_shutdown": False}
    )
    world.run(5)
    assert stop(world) == 0
    assert set(owners(world).values()) == {("w-1", None)}


def test_a_batch_that_is_read_again_does_not_delay_a_stop():
    """The executors have rejected records, and Kinesis throttles the driver."""
    world = World(shards=1)
    world.run(3)
    world.put(*numbered(5))
    world.clock.advance(2)
    committed = {key: one.committed for key, one in world.worker.lifecycle.consumers.items()}
    batch = world.worker.source.next("b", committed)
    signal, calls = world.clock.signal(), []

    def throttled(*_args, **_names):
        calls.append(None)
        if len(calls) == 2:
            signal.set()
        raise ThrottledError("slow down")

    world.worker._stop.signal = signal
    world.kinesis.get_records = throttled
    began = world.clock.monotonic()
    with pytest.raises(CommitStoppedError):
        world.worker.source.load(batch)
    assert world.clock.monotonic() - began < 5.0
