"""A shard that cannot go on says so: which step it waits in, after which time, how often."""

from dataclasses import replace

import pytest

from kcl_pipeline.errors import SinkError, ThrottledError, UnavailableError
from kcl_pipeline.events import HandoffCompleted, LeaseMoved, ShardEnded, ShardStalled, StallStep
from kcl_pipeline.kinesis.prefetch import ReadState
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from kcl_pipeline.worker import commit
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered

ZERO, ONE, CHILD = (f"shardId-{number:012d}" for number in range(3))
AFTER = 20.0


def make(*, buffered, shards=1, **more):
    return World(
        shards=shards, buffered=buffered, worker={"shard_stalled_after_millis": 20_000}, **more
    )


BOTH = pytest.mark.parametrize("world", [True, False], ids=["buffered", "executors"], indirect=True)
"""Also where executors read. `make test-long` has all tests with both."""


@pytest.fixture(
    name="world",
    params=[True, pytest.param(False, marks=pytest.mark.long)],
    ids=["buffered", "executors"],
)
def world_fixture(request):
    world = make(buffered=request.param)
    world.run(5)
    return world


def steps(world):
    return [(event.lease_key, event.step) for event in world.of(ShardStalled)]


def stalled(world: World) -> dict[str, str]:
    return {one.lease_key: one.step for one in world.worker.status().stalled}


def status(world):
    """What the row of the worker says, which `doctor` and the checks read."""
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    return row.status


def fail_the_sink(world, times=10**9):
    sink, left = world.worker._dependencies.sink, [times]
    before = sink.commit

    def failing(*batch):
        if left[0] > 0:
            left[0] -= 1
            raise SinkError("the store is away")
        return before(*batch)

    sink.commit = failing


@BOTH
def test_an_idle_shard_is_never_stalled(world):
    world.run(200)
    assert world.of(ShardStalled) == []
    assert stalled(world) == {}


def test_a_shard_with_a_record_now_and_then_is_never_stalled(world):
    for number in range(12):
        world.put(f"r{number}".encode())
        world.run(15)
    assert world.of(ShardStalled) == []


@BOTH
def test_a_shard_that_cannot_be_read_is_reported_at_a_bounded_rate_until_it_can(world):
    read = world.kinesis.get_records

    def failing(*_request):
        raise UnavailableError("the network is away")

    world.kinesis.get_records = failing
    world.run(AFTER - 2)
    assert world.of(ShardStalled) == []
    world.run(3 * AFTER)
    told = world.of(ShardStalled)
    assert 2 <= len(told) <= 4
    assert {(event.worker_id, event.lease_key, event.step) for event in told} == {
        ("w-1", ZERO, StallStep.READING)
    }
    assert told[0].error == "UnavailableError: the network is away"
    assert AFTER <= told[0].seconds < AFTER + 3
    assert [event.seconds for event in told] == sorted(event.seconds for event in told)
    assert stalled(world) == {ZERO: StallStep.READING}
    assert [(one.lease_key, one.step) for one in world.worker.status().stalled] == [
        (ZERO, "reading")
    ]
    row = status(world)
    assert (row.stalled_leases, [one.lease_key for one in row.stalled]) == (1, [ZERO])
    assert (row.stalled[0].step, row.stalled[0].error) == (
        "reading",
        "UnavailableError: the network is away",
    )
    assert row.stalled[0].seconds >= AFTER
    world.kinesis.get_records = read
    world.run(60)
    assert stalled(world) == {}
    assert status(world).stalled_leases == 0
    told = world.of(ShardStalled)
    world.run(2 * AFTER)
    assert world.of(ShardStalled) == told
    # The next one is reported after its limit, and does not have to last longer than the first.
    world.kinesis.get_records = failing
    world.run(AFTER + 3)
    assert len(world.of(ShardStalled)) == len(told) + 1


def test_after_a_pause_of_the_process_a_stall_is_repeated_after_its_time_only():
    """SIGSTOP: the process goes on shortly before three times the limit."""
    world = make(buffered=True, lease={"failover_time_millis": 5 * int(AFTER) * 1000})
    world.run(5)

    def failing(*_request):
        raise UnavailableError("the network is away")

    def look_for(seconds):
        for _ in range(seconds):
            world.run(1)
            world.worker.watchdog.look(None)

    world.kinesis.get_records = failing
    look_for(1)
    world.clock.advance(3 * AFTER - 4)
    look_for(15)
    (told,) = world.of(ShardStalled)
    assert 2 * AFTER < told.seconds < 3 * AFTER
    look_for(10)
    assert len(world.of(ShardStalled)) == 2


def test_a_batch_that_cannot_be_committed_is_reported_and_reading_is_no_movement(monkeypatch):
    """Each failure has the shard read again, with success: that must not look like movement."""
    world = make(buffered=True)
    world.run(5)
    fail_the_sink(world)
    monkeypatch.setattr(commit, "COMMIT", replace(commit.COMMIT, limit_seconds=0.0))
    world.put(*numbered(3))
    for _ in range(12):
        world.run(AFTER / 4)
        world.worker._runner._sink_failures = 0
    told = world.of(ShardStalled)
    assert told
    assert {event.step for event in told} <= {
        StallStep.STARTING,
        StallStep.READING,
        StallStep.QUEUED,
        StallStep.PROCESSING,
    }
    assert "the store is away" in told[-1].error


@pytest.mark.parametrize("buffered", [True, False])
def test_a_transform_that_hangs_is_reported_by_the_thread_that_renews(buffered):
    world = None

    def hangs(records):
        for _ in range(100 if records.num_rows == 3 else 0):
            world.clock.advance(0.3)
            world.worker.lease_tick()
            world.worker.fetch_tick()
        return records

    world = make(buffered=buffered, transform=hangs)
    world.run(5)
    world.put(b"first")
    world.run(5)
    world.put(*numbered(3))
    world.run(3)
    assert world.data() == [b"first", *numbered(3)]
    (told,) = world.of(ShardStalled)
    expected = StallStep.PROCESSING if buffered else StallStep.READING
    assert (told.lease_key, told.step) == (ZERO, expected), "a job reads and transforms in one"
    assert stalled(world) == {ZERO: expected}
    world.run(5)
    assert stalled(world) == {}


def test_records_that_nobody_takes_are_queued_although_their_shard_is_polled():
    world = make(buffered=True)
    world.run(5)
    world.put(*numbered(3))
    read, reads = world.kinesis.get_records, []
    world.kinesis.get_records = lambda *request: reads.append(request) or read(*request)
    for _ in range(200):
        world.clock.advance(0.2)
        world.worker.lease_tick()
        world.worker.fetch_tick()
    assert steps(world)[0] == (ZERO, StallStep.QUEUED)
    assert len(reads) > 30, "reading goes on"


def test_a_shard_that_is_read_again_after_a_failure_moves_at_its_tip_alone():
    """Pages without records are success, and lead again and again to the batch that fails."""
    world = make(buffered=True)
    world.run(5)
    consumer = world.worker.lifecycle.consumers[ZERO]
    consumer.restarted = True
    state = ReadState(read_at=0.0, has_waiting=False, caught_up=False, error=None)

    def behind(_key):
        return replace(state, read_at=world.clock.monotonic())

    at_tip, world.worker.source.state_of = world.worker.source.state_of, behind
    world.run(AFTER + 5)
    assert steps(world) == [(ZERO, StallStep.READING)]
    world.worker.source.state_of = at_tip
    world.run(5)
    assert stalled(world) == {}


def test_a_lease_that_is_gained_while_the_processing_thread_hangs_is_queued():
    world = make(buffered=True, shards=2)
    world.run(5)
    (lost,) = [held for held in world.worker.leases.held() if held.lease_key == ONE]
    world.worker.leases.drop(lost, "for the test")
    for _ in range(200):
        world.clock.advance(0.2)
        world.worker.lease_tick()
    assert (ONE, StallStep.QUEUED) in steps(world)


def test_beginning_with_a_lease_is_no_movement():
    """Seed 6035570942: a worker that was held up began with a lease late, and could not read."""
    world = make(buffered=True, shards=2)
    world.run(5)
    (lost,) = [held for held in world.worker.leases.held() if held.lease_key == ONE]
    world.worker.leases.drop(lost, "for the test")
    while ONE not in {held.lease_key for held in world.worker.leases.held()}:
        world.clock.advance(0.2)
        world.worker.lease_tick()
    for _ in range(round(0.8 * AFTER / 0.2)):
        world.clock.advance(0.2)
        world.worker.lease_tick()

    def failing(*_request):
        raise UnavailableError("the network is away")

    world.kinesis.get_records = failing
    assert ONE not in {key for key, _ in steps(world)}
    world.run(AFTER / 2)
    assert (ONE, StallStep.READING) in steps(world)


def test_an_overdue_handoff_of_a_row_that_is_being_written_delays_no_report():
    """Seed 9130000566: the thread that renews waited for a lease whose call hung."""
    world = World(
        shards=2,
        buffered=True,
        lease={"failover_time_millis": 10_000, "graceful_lease_handoff_timeout_millis": 1000},
        worker={"shard_stalled_after_millis": 5_000},
    )
    world.run(5)
    leases, rows = world.worker.leases, world.leases.view()
    rows.initiate_handoff(rows.get(ZERO), "w-2")
    leases.renew_all()
    counter = rows.get(ONE).counter

    def hangs(operation, _key):
        if operation == "TransactWriteItems":
            world.leases.hook(None, None)
            for _ in range(30):
                world.clock.advance(0.2)
                world.worker.lease_tick()

    world.leases.hook(hangs, None)
    held = leases.get(ZERO)
    leases.create_successors(held, [Lease(CHILD, TRIM_HORIZON, parent_shard_ids=frozenset({ZERO}))])
    assert (ONE, StallStep.READING) in steps(world)
    assert rows.get(ONE).counter > counter, "the other lease is renewed meanwhile"
    assert leases.get(ZERO) is held, "the handoff waits for the end of the call"
    world.clock.advance(3.4)
    world.worker.lease_tick()
    assert world.of(HandoffCompleted)[0].forced


def split(world):
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=ZERO, NewStartingHashKey=str(2**127)
    )
    world.clock.advance(0.5)


@BOTH
def test_an_end_that_cannot_be_recorded_is_reported(world):
    def failing(*_request):
        raise ThrottledError("slow down")

    world.leases.create_successors = failing
    split(world)
    world.run(60 + 2 * AFTER)
    assert world.of(ShardEnded) == []
    assert (ZERO, StallStep.ENDING) in steps(world)
    assert any(
        "ThrottledError: slow down" in (event.error or "") for event in world.of(ShardStalled)
    )


def child_of_foreign_parents(world):
    """A child whose parent another worker holds."""
    create_lease(
        world.leases, Lease("shardId-000000000007", Position("5"), counter=4, owner="java")
    )
    create_lease(
        world.leases,
        Lease(
            CHILD, TRIM_HORIZON, owner="w-1", parent_shard_ids=frozenset({"shardId-000000000007"})
        ),
    )


def parent_moves(world, number):
    parent = world.leases.get("shardId-000000000007")
    world.leases.update_checkpoint(parent, checkpoint=Position(str(number)))


def test_a_child_whose_parent_stands_still_waits_for_it(world):
    child_of_foreign_parents(world)
    world.worker.lead_tick = lambda: 1.0
    world.run(2 * AFTER)
    assert (CHILD, StallStep.WAITING_FOR_PARENT) in steps(world)
    assert world.worker.lifecycle.consumers[CHILD].state is ConsumerState.BLOCKED


def test_a_child_whose_parent_moves_is_not_stalled(world):
    child_of_foreign_parents(world)
    world.worker.lead_tick = lambda: 1.0
    for number in range(6, 20):
        parent_moves(world, number)
        world.run(AFTER / 2)
    assert steps(world) == []


def test_a_lease_of_a_stream_that_is_not_read_is_reported(world):
    other = f"123456789012:other:1700000000:{ZERO}"
    # as in an application of several streams, which takes leases of this form
    world.worker.leases._multi_stream = None
    create_lease(
        world.leases,
        Lease(other, TRIM_HORIZON, owner="w-1", stream="123456789012:other:1700000000"),
    )
    world.worker.lead_tick = lambda: 1.0
    world.run(2 * AFTER)
    assert (other, StallStep.UNKNOWN_STREAM) in steps(world)


def test_a_lease_that_was_lost_and_gained_again_has_its_time_anew(world):
    read = world.kinesis.get_records

    def failing(*_request):
        raise UnavailableError("the network is away")

    world.kinesis.get_records = failing
    for _ in range(6):
        world.run(AFTER / 2)
        (held,) = world.worker.leases.held()
        world.worker.leases.drop(held, "for the test")
        world.run(2)
    assert world.of(ShardStalled) == []
    world.kinesis.get_records = read


def test_a_finished_shard_is_not_stalled(world):
    split(world)
    world.run(60)
    assert ZERO in [event.lease_key for event in world.of(ShardEnded)]
    assert world.of(LeaseMoved)
    world.run(3 * AFTER)
    assert ZERO not in [key for key, _ in steps(world)]
    assert steps(world) == []


def test_the_default_is_two_minutes():
    settings = World().settings
    assert settings.worker.shard_stalled_after_millis == 120_000
