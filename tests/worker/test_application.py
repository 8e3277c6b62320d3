"""A worker whose streams or sink are not those of the application does not start."""

from __future__ import annotations

import dataclasses

import pytest

from kcl_pipeline.errors import OtherApplicationError, ThrottledError, UnreadableRowError
from kcl_pipeline.events import AwsTrouble, WorkerIdShared
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from kcl_pipeline.worker.worker import Worker
from tests.support.kpl_encoder import aggregate_of
from tests.support.worker_world import World, numbered


def started(world, name, sink_address=None):
    """A worker as another process would start it."""
    worker = world.make_worker(name)
    parts = dataclasses.replace(worker._dependencies, sink_address=sink_address)
    return Worker(parts)


def test_a_worker_of_another_stream_does_not_start_and_leaves_no_trace():
    world = World()
    world.put(*numbered(10))
    world.run()
    world.model.create_stream("other", 1)
    leases, rows = world.leases.rows(), world.rows.rows()
    world.settings = world.settings.model_copy(update={"streams": ("other",)})
    with pytest.raises(OtherApplicationError, match="the two streams have the same lease keys"):
        started(world, "w-2").start_up()
    assert (world.leases.rows(), world.rows.rows()) == (leases, rows)


def test_two_workers_with_two_tables_do_not_share_the_rows():
    world = World()
    started(world, "w-2", "delta:/lake/a").start_up()
    with pytest.raises(OtherApplicationError, match=r"writes to delta:/lake/a.*do accept .*--sink"):
        started(world, "w-3", "delta:/lake/b").start_up()
    started(world, "w-4", "delta:/lake/a").start_up()
    assert world.coordinator.read_application().identity.sink == "delta:/lake/a"


@pytest.mark.parametrize("skips", [False, True])
def test_a_worker_that_treats_aggregates_in_another_way_does_not_start(skips):
    """Positions may be inside of an aggregate: its rest would be skipped, or read twice."""
    world = World(shards=1, buffered=True, retrieval={"skip_kpl_deaggregation": skips})
    world.run(3.0)
    world.put(aggregate_of([("k", None, b"one"), ("k", None, b"two")]), key="a")
    world.run()
    found = world.data()
    changed = world.settings.retrieval.model_copy(update={"skip_kpl_deaggregation": not skips})
    world.settings = world.settings.model_copy(update={"retrieval": changed})
    with pytest.raises(OtherApplicationError, match=rf"write skip_kpl_deaggregation={skips}"):
        started(world, "w-2").start_up()
    assert world.data() == found


def test_an_application_of_java_with_a_checkpoint_in_an_aggregate_keeps_reading_user_records():
    world = World(shards=1, retrieval={"skip_kpl_deaggregation": True})
    data = aggregate_of([("k", None, b"one"), ("k", None, b"two")])
    put = world.model.call("PutRecord", StreamName="orders", PartitionKey="a", Data=data)
    create_lease(world.leases, Lease(put["ShardId"], Position(put["SequenceNumber"], 1)))
    world.coordinator = type(world.coordinator)(clock=world.clock, exists=False)
    with pytest.raises(OtherApplicationError, match="is inside of a KPL aggregate"):
        started(world, "w-2").start_up()


def test_the_process_that_starts_last_has_the_worker_id():
    world = World(shards=1)
    world.run(3.0)
    first = world.worker
    second = world.worker = world.make_worker("w-1", run_id="run-2")
    world.worker.start_up()
    world.put(*numbered(20))
    world.run(5.0)
    assert second.reporter.taken is None
    assert world.data() == numbered(20)
    leases, (row,) = world.leases.list_leases(), world.rows.scan_workers().workers
    for _ in range(30):  # the former one goes on until its next report
        first.lease_tick()
        first.process_tick()
        world.clock.advance(0.5)
    assert first.reporter.taken is not None
    assert first.reporter.taken.other_run_id == "run-2"
    assert first.lease_tick() > 0, "it does not spin"
    first.shut_down(Background(world.clock), StopReason.ID_TAKEN)
    assert world.leases.list_leases() == leases, "it writes no lease"
    noted = dataclasses.replace(
        row, former_run_id="w-1-run", former_ended_millis=round(world.clock.wall() * 1000)
    )
    assert world.rows.scan_workers().workers == (noted,), "it notes its end, and deletes nothing"
    assert [event.other_run_id for event in world.of(WorkerIdShared)] == ["run-2"]
    summary = first.summary(StopReason.ID_TAKEN)
    assert all(text in summary.error for text in ("'w-1'", "w-1-run", "run-2", "code 4"))
    world.put(*numbered(20, "s"))
    world.run(5.0)
    assert world.data() == sorted(numbered(20) + numbered(20, "s")), "each record once"


def test_two_supervised_processes_of_one_id_lose_and_repeat_nothing():
    """Each start ends the other process, whose supervisor starts it again, also after code 4."""
    world = World(shards=2)
    world.run(3.0)
    expected, run_ids = [], ["w-1-run"]
    for start in range(6):
        former, run_id = world.worker, f"host-{start % 2}:1@{start}"
        run_ids.append(run_id)
        world.worker = world.make_worker("w-1", run_id=run_id)
        world.worker.start_up()
        records = numbered(10, f"{start}-")
        world.put(*records)
        expected += records
        while former.reporter.taken is None:  # until then both run
            former.lease_tick()
            former.process_tick()
            world.run(0.5)
        former.shut_down(Background(world.clock), StopReason.ID_TAKEN)
        (row,) = world.rows.scan_workers().workers
        assert row.run_id == run_id
        assert row.former_run_id == run_ids[start]
    world.run(5.0)
    assert world.data() == sorted(expected), "each record once"


def test_a_lease_write_that_is_refused_shows_that_the_worker_id_is_taken():
    """Before the next report, which may be 10 s away."""
    world = World(shards=1)
    world.run(3.0)
    first, world.worker = world.worker, world.make_worker("w-1", run_id="run-2")
    world.worker.start_up()  # it recovers the leases
    world.clock.advance(0.5)
    for _ in range(8):
        first.lease_tick()
        world.clock.advance(0.3)
    assert first.reporter.taken is not None
    assert first.leases.held() == ()


def replaced(world, *streams):
    """The record as `kcl-pipeline do accept --streams` leaves it."""
    found = world.coordinator.read_application()
    wanted = ApplicationIdentity.of(
        [world.kinesis.resolve_stream(stream, multi_stream=False) for stream in streams],
        is_multi_stream=False,
    )
    assert world.coordinator.put_application(wanted, replacing=found)


def own_lease(world, stream):
    """A lease of this stream that a leader gave to the worker."""
    (shard,) = world.kinesis.list_shards(world.kinesis.resolve_stream(stream, multi_stream=False))
    create_lease(
        world.leases,
        Lease(shard.shard_id, TRIM_HORIZON, hash_key_range=shard.hash_key_range, owner="w-1"),
    )


def test_a_worker_that_stood_still_while_the_stream_was_changed_reads_no_lease_of_the_new_one():
    """It had no lease, and gains one of the new stream under the key of its own."""
    world = World(shards=1, buffered=True)
    world.put(*numbered(10))
    world.model.create_stream("other", 1)
    replaced(world, "other")
    own_lease(world, "other")
    with pytest.raises(OtherApplicationError, match="stream/other"):
        world.run_without_leader(5.0)
    assert world.data() == []


@pytest.mark.parametrize(
    ("error", "admitted"),
    [(ThrottledError("slow down"), False), (UnreadableRowError("garbage"), True)],
)
def test_a_record_that_cannot_be_read_delays_or_does_not_hinder(error, admitted):
    world = World(shards=1, buffered=True)
    world.put(*numbered(10))
    own_lease(world, "orders")
    read = world.coordinator.read_application

    def refuse():
        raise error

    world.coordinator.read_application = refuse
    world.run_without_leader(5.0)
    assert world.data() == (sorted(world.sent) if admitted else [])
    assert any("identity" in event.operation for event in world.of(AwsTrouble))
    world.coordinator.read_application = read
    world.run_without_leader(5.0)
    assert world.data() == sorted(world.sent)
    assert len(world.of(AwsTrouble)) <= 20
