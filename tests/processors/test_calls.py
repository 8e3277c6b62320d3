"""Which methods of a record processor are called, in which order, and what their errors do."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from kcl_pipeline.batch import NO_RECORDS
from kcl_pipeline.events import (
    BatchCommitted,
    ProcessorCalled,
    ReadFinished,
    RecordsDeadLettered,
    ShardPaused,
    ShardResumed,
    WorkerHung,
)
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.processors.log import Calls, row_of, rows_of, world_of
from tests.support.worker_world import numbered


@pytest.fixture
def calls():
    return Calls()


def boom(_given):
    raise ValueError("boom")


def checkpoint(given):
    given.checkpointer.checkpoint()


def hand_over(world, to="w-9"):
    row = row_of(world)
    assert world.leases.view().initiate_handoff(row, to) is not None
    world.run_without_leader(2)


def stop(world):
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)


def test_the_order_of_the_calls(calls):
    world = world_of(calls)
    world.run(5)
    assert calls.names() == ["initialize"], "before the first record"
    world.put(*numbered(10))
    world.run(5)
    stop(world)
    order = ["initialize", "process_records", "shutdown_requested", "lease_lost"]
    assert calls.names() == order
    assert calls.data() == numbered(10)


def test_a_processor_for_each_shard(calls):
    world = world_of(calls, shards=3)
    world.put(*numbered(60))
    world.run(5)
    assert len(calls.made) == 3
    assert {given.shard_id for given in calls.inputs("initialize")} == {
        f"shardId-{number:012}" for number in range(3)
    }
    by_processor = {}
    for number, name, given in calls.calls:
        if name == "process_records":
            by_processor.setdefault(number, []).extend(given.records)
    assert len(by_processor) == 3
    assert sorted(calls.data()) == numbered(60)
    for records in by_processor.values():
        numbers = [int(record.sequence_number) for record in records]
        assert numbers == sorted(numbers)


def test_a_record(calls):
    world = world_of(calls)
    world.put(b"\x00hello", key="k")
    world.run(5)
    (given,) = calls.inputs("process_records")
    (record,) = given.records
    assert (record.binary_data, record.data, record.partition_key) == (
        b"\x00hello",
        "AGhlbGxv",
        "k",
    )
    assert record.get("data") == record["data"] == "AGhlbGxv"
    assert record.get("sequenceNumber") == record.sequence_number
    assert record.get("subSequenceNumber") == record.sub_sequence_number == 0
    arrival = record.approximate_arrival_timestamp
    assert arrival.tzinfo is None
    assert abs(arrival.timestamp() * 1000 - record.timestamp_millis) < 1
    assert record.get("approximateArrivalTimestamp") == record.timestamp_millis
    assert given.millis_behind_latest is None or given.millis_behind_latest >= 0


def test_a_call_has_at_most_max_records(calls):
    world = world_of(calls, retrieval={"max_records": 10})
    world.put(*numbered(25))
    world.run(10)
    assert max(len(given.records) for given in calls.inputs("process_records")) <= 10
    assert calls.data() == numbered(25)


def test_calls_without_records(calls):
    setting = {"call_process_records_even_for_empty_record_list": True}
    world = world_of(calls, worker=setting)
    world.run(10)
    given = calls.inputs("process_records")
    assert {len(one.records) for one in given} == {0}
    reads = len(world.of(ReadFinished))
    assert reads - 1 <= len(given) <= reads, "one call for each read"
    assert reads > 5
    assert given[-1].millis_behind_latest == 0
    world.put(*numbered(10))
    world.run(10)
    assert calls.data() == numbered(10)
    calls.acts["process_records"] = lambda given: given.checkpointer.checkpoint()
    world.run(3)
    last = [one.records[-1] for one in calls.inputs("process_records") if one.records][-1]
    assert row_of(world).checkpoint == Position(last.sequence_number)
    calls.acts["process_records"] = boom
    world.run(3)
    assert world.worker.paused() == {}, "no record would be delivered again"


def test_a_call_without_records_does_not_checkpoint_records_whose_call_failed(calls):
    world = world_of(calls, worker={"call_process_records_even_for_empty_record_list": True})
    get_records, empty = world.kinesis.get_records, []

    def read(stream, shard_id, iterator, limit):
        page = get_records(stream, shard_id, iterator, limit)
        if calls.data() and len(empty) < 5:
            empty.append(iterator)
            return replace(page, records=NO_RECORDS, next_iterator=iterator)
        return page

    def act(given):
        if given.records:
            raise ValueError("boom")
        given.checkpointer.checkpoint()

    world.kinesis.get_records = read
    calls.acts["process_records"] = act
    world.put(*numbered(3))
    world.run(10)
    assert len(empty) == 5
    assert len(calls.data()) > 3
    assert row_of(world).checkpoint == TRIM_HORIZON


def test_a_handoff(calls):
    calls.acts["shutdown_requested"] = checkpoint
    world = world_of(calls)
    world.put(*numbered(10))
    world.run(5)
    hand_over(world)
    assert calls.names()[-2:] == ["shutdown_requested", "lease_lost"]
    row = row_of(world)
    assert (row.owner, row.checkpoint_owner) == ("w-9", None)
    (given,) = calls.inputs("process_records")
    assert row.checkpoint == Position(given.records[-1].sequence_number)
    (given,) = calls.inputs("shutdown_requested")
    assert calls.refusal(given.checkpointer.checkpoint) == "ShutdownException"


def test_a_stop_checkpoints_what_the_processor_says(calls):
    calls.acts["shutdown_requested"] = checkpoint
    world = world_of(calls, shards=2)
    world.put(*numbered(20))
    world.run(5)
    stop(world)
    assert {lease.owner for lease in rows_of(world).values()} == {None}
    assert TRIM_HORIZON not in {lease.checkpoint for lease in rows_of(world).values()}
    assert len(calls.inputs("shutdown_requested")) == len(calls.inputs("lease_lost")) == 2


def test_a_lost_lease(calls):
    world = world_of(calls)
    world.put(*numbered(10))
    world.run(5)
    world.leases.view().assign(row_of(world), "w-9")
    world.run_without_leader(2)
    assert calls.names() == ["initialize", "process_records", "lease_lost"]


def test_a_lease_that_comes_back_gets_a_new_processor(calls):
    world = world_of(calls)
    world.put(*numbered(10))
    world.run(5)
    world.leases.view().assign(row_of(world), "w-9")
    world.run(30)
    assert len(calls.made) == 2
    assert calls.data() == numbered(10) * 2, "the first one has not checkpointed"


def test_a_handoff_that_is_withdrawn_gets_a_new_processor(calls):
    """After `shutdown_requested` there is only `lease_lost`."""
    world = world_of(calls)
    world.put(*numbered(10))
    world.run(5)
    calls.acts["shutdown_requested"] = lambda given: world.leases.view().assign(
        row_of(world), "w-1"
    )
    hand_over(world)
    world.run(5)
    assert calls.names()[:4] == [
        "initialize",
        "process_records",
        "shutdown_requested",
        "lease_lost",
    ]
    assert len(calls.made) == 2
    assert row_of(world).owner == "w-1"


# -- errors


def test_an_error_of_initialize_is_repeated_on_a_new_processor(calls):
    calls.acts["initialize"] = boom
    world = world_of(calls)
    world.put(*numbered(3))
    world.run(5)
    assert len(calls.made) > 1
    assert calls.data() == []
    del calls.acts["initialize"]
    world.run(20)
    assert calls.data() == numbered(3)


def test_an_error_of_process_records_pauses_its_shard_and_repeats_the_records(calls):
    world = world_of(calls, shards=3)
    world.run(5)

    def fails(given):
        if any(record.binary_data == b"r0007" for record in given.records):
            raise ValueError("boom")

    calls.acts["process_records"] = fails
    world.put(*numbered(60))
    world.run(10)
    assert len(world.worker.paused()) == 1
    reasons = {event.reason.partition(" (")[0] for event in world.of(ShardPaused)}
    assert reasons == {"process_records failed: ValueError: boom"}
    world.put(*numbered(60, "s"))
    world.run(5)
    del calls.acts["process_records"]
    world.run(70)
    assert len(world.of(ShardResumed)) == 1
    data = calls.data()
    assert set(data) == set(world.sent)
    failed = [r.binary_data for g in calls.inputs("process_records") for r in g.records]
    others = [value for value in data if failed.count(value) == 1]
    assert len(others) > 60, "the shards that did not fail get nothing twice"
    assert len(calls.made) == 3, "the processor stays"


def test_each_call_is_measured(calls):
    world = world_of(calls, retrieval={"max_records": 10})
    world.put(*numbered(25))
    world.run(10)
    calls.acts["process_records"] = boom
    world.put(*numbered(3))
    world.run(5)
    measured = world.of(ProcessorCalled)
    assert len(measured) == len(calls.inputs("process_records"))
    sizes = [len(given.records) for given in calls.inputs("process_records")]
    assert [event.records for event in measured] == sizes
    assert {(event.records, event.succeeded) for event in measured} >= {(10, True), (3, False)}
    assert {event.lease_key for event in measured} == {"shardId-000000000000"}
    committed = world.of(BatchCommitted)[0]
    assert "write" not in committed.milliseconds, "its metric is that of the calls"


@pytest.mark.parametrize("way", ["attribute", "setting"])
def test_an_error_of_process_records_skips_as_in_the_kcl(calls, way):
    shape = {"batch": {"failed_records": "skip"}} if way == "setting" else {}
    world = world_of(calls, skips=way == "attribute", **shape)
    world.run(5)
    calls.acts["process_records"] = boom
    world.put(*numbered(3))
    world.run(5)
    (event,) = world.of(RecordsDeadLettered)
    assert (event.records, event.skipped) == (3, True)
    assert event.error.startswith("ValueError: boom")
    del calls.acts["process_records"]
    world.put(*numbered(3, "s"))
    world.run(5)
    assert calls.data() == [*numbered(3), *numbered(3, "s")]
    assert world.worker.paused() == {}


def test_an_error_of_shard_ended_is_repeated(calls):
    calls.acts["shard_ended"] = boom
    world = world_of(calls)
    world.run(5)
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    world.run(10)
    assert len(calls.inputs("shard_ended")) > 1
    calls.acts["shard_ended"] = checkpoint
    world.run(40)
    assert row_of(world).ended
    assert len(calls.inputs("initialize")) == 3


@pytest.mark.parametrize("way", ["handoff", "stop"])
def test_an_error_of_shutdown_requested_and_lease_lost_keeps_no_lease(calls, way, caplog):
    """The Java KCL drops the lease without a transfer then (protocol §6.5)."""
    calls.acts |= {"shutdown_requested": boom, "lease_lost": boom}
    world = world_of(calls)
    world.run(5)
    if way == "handoff":
        hand_over(world)
    else:
        stop(world)
    assert row_of(world).owner == ("w-9" if way == "handoff" else None)
    assert calls.names()[-2:] == ["shutdown_requested", "lease_lost"]
    assert "shutdown_requested of shardId-000000000000 failed" in caplog.text


def test_what_is_not_a_processor(calls):
    world = world_of(calls)
    world.processor = dict
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    world.run(10)
    errors = [str(getattr(event, "error", "")) for event in world.events]
    assert any("returned a dict. Return a RecordProcessor." in text for text in errors)


def test_a_processor_that_hangs_is_reported_and_its_lease_is_renewed(calls):
    began, release = threading.Event(), threading.Event()

    def hangs(_given):
        began.set()
        assert release.wait(60)

    calls.acts["process_records"] = hangs
    world = world_of(calls, worker={"hung_after_millis": 60_000})
    world.run(5)
    world.put(*numbered(3))
    thread = None
    for _ in range(200):
        world.worker.lease_tick()
        world.worker.fetch_tick()
        world.clock.advance(0.05)
        thread = threading.Thread(target=world.worker.process_tick, daemon=True)
        thread.start()
        while thread.is_alive() and not began.is_set():
            thread.join(0.005)
        if began.is_set():
            break
    for _ in range(700):
        world.worker.lease_tick()
        world.clock.advance(0.1)
    assert len(world.of(WorkerHung)) == 1
    assert row_of(world).owner == "w-1"
    release.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_handoff_ends_the_deliveries_of_a_batch(calls):
    """The next owner gets the rest. One batch has the records of four reads."""
    world = world_of(
        calls, retrieval={"max_records": 5}, batch={"min_batch_interval_millis": 2_000}
    )
    world.run(5)
    handed = []

    def hands_over(_given):
        if not handed:
            handed.append(world.leases.view().initiate_handoff(row_of(world), "w-9"))
            world.worker.leases.renew_all()

    calls.acts = {"process_records": hands_over, "shutdown_requested": checkpoint}
    world.put(*numbered(20))
    world.run_without_leader(20)
    assert handed[0] is not None
    assert len(calls.data()) == 5
    last = [r for g in calls.inputs("process_records") for r in g.records][-1]
    assert row_of(world).checkpoint == Position(last.sequence_number)
