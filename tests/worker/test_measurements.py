"""The events of a worker and a leader that only carry measured values."""

from __future__ import annotations

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.memory import MIB, MemoryBudget
from kcl_pipeline.metrics.instruments import observations
from kcl_pipeline.testing.tables import InMemoryLeaseTable
from tests.support.worker_world import World, numbered


def of(world, kind):
    return [event for event in world.events if isinstance(event, kind)]


def test_a_worker_measures_its_tasks():
    world = World(shards=2)
    world.run(20)
    tasks = {
        task: [one for one in of(world, ev.TaskFinished) if one.task is task]
        for task in ev.LeaseTask
    }
    assert all(len(found) >= 2 for found in tasks.values())
    assert all(one.succeeded and one.milliseconds >= 0 for found in tasks.values() for one in found)
    assert tasks[ev.LeaseTask.RENEWAL][-1].leases == 2
    assert sum(one.leases for one in tasks[ev.LeaseTask.DISCOVERY]) <= 2
    assert {one.worker_id for one in of(world, ev.TaskFinished)} == {"w-1"}


def test_a_task_that_fails_is_measured_as_such(monkeypatch: pytest.MonkeyPatch):
    world = World(shards=1)
    world.run(5)

    def refuse(*_args, **_kwargs):
        raise UnavailableError("no network")

    monkeypatch.setattr(InMemoryLeaseTable, "lease_keys_of", refuse)
    world.events.clear()
    world.run(5)
    found = [one for one in of(world, ev.TaskFinished) if one.task is ev.LeaseTask.DISCOVERY]
    assert found
    assert not any(one.succeeded for one in found)
    assert "discovery" in {one.operation for one in of(world, ev.AwsTrouble)}


@pytest.mark.parametrize("buffered", [True, False])
def test_the_lag_of_every_lease_is_measured_with_each_renewal(buffered):
    world = World(shards=2, buffered=buffered)
    world.put(*numbered(10))
    world.run(20)
    world.events.clear()
    world.run(5)
    measured = of(world, ev.StatusMeasured)
    renewals = [one for one in of(world, ev.TaskFinished) if one.task is ev.LeaseTask.RENEWAL]
    assert len(measured) == len(renewals) >= 5
    assert {lag.lease_key: lag.millis for lag in measured[-1].status.lags} == {
        "shardId-000000000000": 0,
        "shardId-000000000001": 0,
    }
    assert measured[-1].status.unknown_lags == 0


def test_the_memory_of_records_is_measured_with_each_renewal():
    class LimitedWorld(World):
        memory = MemoryBudget(64 * MIB)

    world = LimitedWorld(buffered=True)
    world.run(5)
    world.events.clear()
    with world.memory.counting("result", 5 * MIB):
        world.run(5)
    found = of(world, ev.StatusMeasured)
    assert len(found) >= 3
    assert {(one.worker_id, one.status.memory_limit_bytes) for one in found} == {("w-1", 64 * MIB)}
    assert max(one.status.memory_bytes for one in found) >= 5 * MIB
    values = {one.instrument.name: one.value for one in observations(found[-1])}
    assert values["RecordMemory"] == found[-1].status.memory_bytes
    assert values["RecordMemoryLimit"] == 64 * MIB


def test_reads_of_polled_shards_are_measured():
    world = World(shards=1, buffered=True)
    world.put(*numbered(10))
    world.run(10)
    reads = of(world, ev.ReadFinished)
    assert len(reads) > 5
    assert {(one.lease_key, one.succeeded) for one in reads} == {("shardId-000000000000", True)}


@pytest.mark.parametrize("buffered", [True, False])
def test_a_committed_batch_has_the_records_and_bytes_of_each_lease(buffered):
    world = World(shards=2, buffered=buffered)
    world.put(*numbered(30))
    world.run(20)
    batches = of(world, ev.BatchCommitted)
    assert all(one.records == sum(one.records_by_lease.values()) for one in batches)
    assert sum(one.records for one in batches) == 30
    assert sum(sum(one.data_bytes_by_lease.values()) for one in batches) == sum(
        len(value) for value in world.sent
    )
    assert {key for one in batches for key in one.records_by_lease} == {
        "shardId-000000000000",
        "shardId-000000000001",
    }


def test_a_leader_measures_its_cycles():
    world = World(shards=2)
    world.run(20)
    cycles = of(world, ev.CycleFinished)
    last = cycles[-1]
    assert (last.owner_name, last.led, last.succeeded) == ("w-1", True, True)
    assert (last.leases, last.expired, last.unowned, last.unreadable) == (2, 0, 0, 0)
    assert (last.workers, last.failing_workers, last.invalid_workers) == (1, 0, 0)
    assert (last.streams, last.incomplete_streams, last.unavailable_streams) == (1, 0, 0)


def test_a_candidate_measures_that_it_does_not_lead():
    world = World(shards=2)
    world.run(5)
    other = world.make_leader("w-2")
    assert not other.run_once().led
    (cycle,) = [one for one in of(world, ev.CycleFinished) if one.owner_name == "w-2"]
    assert (cycle.led, cycle.succeeded, cycle.leases) == (False, True, 0)
