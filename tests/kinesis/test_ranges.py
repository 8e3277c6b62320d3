"""Reading ranges of many shards without state: limits, fairness, and reading rows again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kcl_pipeline import errors
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.kinesis.ranges import FetchedShard, RangeReader, ShardFetch, rows_through
from kcl_pipeline.kinesis.reader import Resume
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from tests.support.kpl_encoder import aggregate_of

ALL = HashKeyRange(0, MAX_HASH_KEY)
MIB = 1 << 20


class Flaky(InMemoryKinesis):
    """Counts calls, and fails those in its script."""

    def __init__(self, model: KinesisModel) -> None:
        super().__init__(model)
        self.failures: dict[int, errors.AwsError] = {}
        self.reads: list[str] = []
        self.iterators: list[str] = []

    def get_records(self, stream, shard_id, iterator, limit):
        self.reads.append(shard_id)
        failure = self.failures.pop(len(self.reads), None)
        if failure is not None:
            raise failure
        return super().get_records(stream, shard_id, iterator, limit)

    def get_shard_iterator(
        self, stream, shard_id, iterator_type, *, sequence_number=None, timestamp=None
    ):
        self.iterators.append(iterator_type)
        return super().get_shard_iterator(
            stream, shard_id, iterator_type, sequence_number=sequence_number, timestamp=timestamp
        )


class World:
    def __init__(self, shards: int = 2) -> None:
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock)
        self.model.call("CreateStream", StreamName="orders", ShardCount=shards)
        self.clock.advance(60)
        self.kinesis = Flaky(self.model)
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        self.shards = [shard.shard_id for shard in self.kinesis.list_shards(self.stream)]
        self.reader = self.reading()

    def reading(self, **settings) -> RangeReader:
        return RangeReader(self.kinesis, RetrievalSettings(**settings), None, self.clock)

    def put(self, shard: int, *values: bytes) -> None:
        start = str(self.kinesis.list_shards(self.stream)[shard].hash_key_range.start)
        for value in values:
            self.model.call(
                "PutRecord",
                StreamName="orders",
                PartitionKey="k",
                ExplicitHashKey=start,
                Data=value,
            )
        self.clock.advance(0.01)

    def fetch(
        self,
        shard: int,
        after: Position = TRIM_HORIZON,
        *,
        records: int = 1000,
        size: int = MIB,
        resume: Resume | None = None,
    ) -> ShardFetch:
        return ShardFetch(
            self.shards[shard],
            self.stream,
            self.shards[shard],
            after,
            ALL,
            records,
            size,
            resume or Resume(),
        )


def numbered(count: int) -> list[bytes]:
    return [f"{number}".encode() for number in range(count)]


def data(table) -> list[bytes]:
    return table.column("data").to_pylist()


def test_every_shard_is_read_to_its_tip_and_says_where_it_stopped():
    world = World()
    world.put(0, *numbered(7))
    (first, rows), (second, none) = world.reader.fetch([world.fetch(0), world.fetch(1)], 5.0)
    assert (data(rows), first.records, first.bytes, first.at_tip, first.error) == (
        numbered(7),
        7,
        14,
        True,
        None,
    )
    assert first.through == Position(rows.column("sequence_number")[6].as_py())
    assert (none.num_rows, second.through, second.records, second.at_tip) == (
        0,
        TRIM_HORIZON,
        0,
        True,
    )
    assert len(first.arrival_micros) == 7


def test_a_fetch_goes_on_where_the_one_before_stopped_without_another_iterator():
    world = World()
    world.put(0, *numbered(5))
    ((first, _),) = world.reader.fetch([world.fetch(0)], 5.0)
    world.put(0, b"5", b"6")
    ((second, rows),) = world.reader.fetch(
        [world.fetch(0, first.through, resume=first.resume)], 5.0
    )
    assert (data(rows), second.after) == ([b"5", b"6"], first.through)
    assert world.kinesis.iterators == ["TRIM_HORIZON"]


def test_an_expired_iterator_is_replaced_after_the_last_record():
    world = World()
    world.put(0, *numbered(5))
    ((first, _),) = world.reader.fetch([world.fetch(0)], 5.0)
    world.put(0, b"5")
    world.clock.advance(301)
    ((_, rows),) = world.reader.fetch([world.fetch(0, first.through, resume=first.resume)], 5.0)
    assert data(rows) == [b"5"]
    assert world.kinesis.iterators == ["TRIM_HORIZON", "AFTER_SEQUENCE_NUMBER"]


def test_limits_stop_a_shard_between_responses():
    world = World()
    world.put(0, *numbered(10))
    ((by_records, rows),) = world.reading(max_records=3).fetch([world.fetch(0, records=4)], 5.0)
    assert (data(rows), by_records.at_tip) == (numbered(6), False)
    ((by_bytes, _),) = world.reading(max_records=3).fetch([world.fetch(0, size=1)], 5.0)
    assert by_bytes.records == 3
    ((_, few),) = world.reader.fetch([world.fetch(0, records=2)], 5.0)
    assert few.num_rows == 2


def test_time_is_up_for_all_but_each_was_asked_once():
    world = World(3)
    for shard in range(3):
        world.put(shard, *numbered(4))
    read = world.reading(max_records=1).fetch([world.fetch(shard) for shard in range(3)], 0.0)
    assert [shard.records for shard, _ in read] == [1, 1, 1]


def test_one_shard_is_asked_five_times_a_second_at_most():
    world = World()
    world.put(0, *numbered(11))
    began = world.clock.monotonic()
    ((fetched, _),) = world.reading(max_records=1).fetch([world.fetch(0)], 60.0)
    assert fetched.records == 11
    assert world.clock.monotonic() - began == pytest.approx(0.2 * (len(world.kinesis.reads) - 1))


def test_an_error_is_the_shards_own_and_keeps_what_came_before():
    world = World()
    world.put(0, *numbered(2))
    world.put(1, *numbered(2))
    world.kinesis.failures = {3: errors.ThrottledError("slow down")}
    (first, rows), (second, others) = world.reading(max_records=1).fetch(
        [world.fetch(0), world.fetch(1)], 5.0
    )
    assert (data(rows), first.error, first.throttled) == ([b"0"], "ThrottledError: slow down", True)
    assert (data(others), second.error) == (numbered(2), None)
    ((_, rest),) = world.reader.fetch([world.fetch(0, first.through, resume=first.resume)], 5.0)
    assert data(rest) == [b"1"]


def test_a_shards_end_is_returned_with_its_children():
    world = World()
    world.put(0, b"last")
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit=world.shards[0],
        NewStartingHashKey=str(2**126),
    )
    world.clock.advance(60)
    ((fetched, rows),) = world.reader.fetch([world.fetch(0)], 5.0)
    assert data(rows) == [b"last"]
    assert fetched.shard_end is not None
    assert len(fetched.shard_end) == 2


def test_latest_stands_still_however_often_it_is_fetched():
    world = World()
    world.put(0, b"before")
    fetch = world.reader.opened(world.fetch(0, LATEST))
    world.put(0, b"after")
    for _ in range(2):
        ((_, rows),) = world.reader.fetch([fetch], 5.0)
        assert data(rows) == [b"after"]
    assert world.kinesis.iterators == ["LATEST"]


def test_the_same_rows_come_again_although_more_have_arrived():
    world = World()
    world.put(0, aggregate_of([("k", "0", f"a{i}".encode()) for i in range(5)]), b"plain")
    fetch = world.fetch(0)
    ((fetched, rows),) = world.reader.fetch([fetch], 5.0)
    world.put(0, b"later", b"still later")
    assert world.reader.read_exactly(fetch, fetched.through, fetched.records).equals(rows)
    middle = Position(rows.column("sequence_number")[2].as_py(), 2)
    assert data(world.reader.read_exactly(fetch, middle, 3)) == [b"a0", b"a1", b"a2"]


def test_reading_again_waits_for_what_passes_and_refuses_what_is_different():
    world = World()
    world.put(0, *numbered(3))
    fetch = world.fetch(0)
    ((fetched, rows),) = world.reader.fetch([fetch], 5.0)
    world.kinesis.failures = {
        len(world.kinesis.reads) + 1: errors.ThrottledError("slow down"),
        len(world.kinesis.reads) + 2: errors.UnavailableError("away"),
    }
    assert world.reader.read_exactly(fetch, fetched.through, 3).equals(rows)
    with pytest.raises(errors.UnavailableError, match="has 3 records, not the 4"):
        world.reader.read_exactly(fetch, fetched.through, 4)


@pytest.mark.parametrize("answers", ["throttled", "empty"])
def test_reading_again_ends_soon_after_a_stop(answers):
    world = World()
    world.put(0, b"1")
    stop, began, calls = world.clock.signal(), world.clock.monotonic(), []
    answer = world.kinesis.get_records

    def slow(*args, **names):
        calls.append(args)
        if len(calls) == 3:
            stop.set()
        if answers == "throttled":
            raise errors.ThrottledError("slow down")
        return replace(answer(*args, **names), millis_behind_latest=1)

    world.kinesis.get_records = slow
    with pytest.raises(errors.CommitStoppedError, match="the worker stops"):
        world.reader.read_exactly(world.fetch(0), Position("9" * 56), 2, stop)
    assert len(calls) == 3
    assert world.clock.monotonic() - began < 5.0


def test_reading_again_gives_up_when_nothing_more_comes():
    world = World()
    world.put(0, b"1")
    far = Position("9" * 56)
    began = world.clock.monotonic()
    with pytest.raises(errors.UnavailableError, match="has 1 records, not the 2"):
        world.reader.read_exactly(world.fetch(0), far, 2)
    assert 2.0 <= world.clock.monotonic() - began < 3.0, "the service says that there is no more"


def test_reading_again_waits_for_a_service_that_does_not_say_that_there_is_no_more():
    world = World()
    world.put(0, b"1")
    far = Position("9" * 56)
    began = world.clock.monotonic()
    answer = world.kinesis.get_records
    world.kinesis.get_records = lambda *args, **names: replace(
        answer(*args, **names), millis_behind_latest=1
    )
    with pytest.raises(errors.UnavailableError, match="has 1 records, not the 2"):
        world.reader.read_exactly(world.fetch(0), far, 2)
    assert 120.0 <= world.clock.monotonic() - began < 121.0


def test_rows_are_cut_at_any_position():
    world = World()
    world.put(0, *numbered(50))
    ((_, rows),) = world.reader.fetch([world.fetch(0)], 5.0)
    numbers = rows.column("sequence_number").to_pylist()
    for cut in random.Random(1).sample(range(50), 10):
        assert data(rows_through(rows, Position(numbers[cut]))) == numbered(cut + 1)
    assert rows_through(rows, TRIM_HORIZON).num_rows == 0


def test_what_was_fetched_can_be_sent_to_another_process():
    import pickle  # noqa: PLC0415 (only here)

    shard = FetchedShard("k", TRIM_HORIZON, Position("5", 2), 3, resume=Resume("it", "5"))
    assert pickle.loads(pickle.dumps(shard)) == shard
