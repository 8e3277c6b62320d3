"""Options, offsets, batch ranges and the reading of a range, without Spark."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.errors import RecordsLostError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.ranges import rows_through
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, Shard, StreamId
from kcl_pipeline.spark.data_source.batch import plan_ranges
from kcl_pipeline.spark.data_source.lineage import children_in
from kcl_pipeline.spark.data_source.offsets import ShardOffset
from kcl_pipeline.spark.data_source.options import parse_options
from kcl_pipeline.spark.data_source.plan import Limit, Piece, read_rules
from kcl_pipeline.spark.data_source.read import ReadRange, read_range
from kcl_pipeline.spark.data_source.tasks import KinesisPartition, partitions_of, read_partition
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from tests.support.data_source_world import DAY, ZERO, Query, World, data, numbered, rows_of
from tests.support.kpl_encoder import aggregate_of

ALL = HashKeyRange(0, MAX_HASH_KEY)
COLUMNS = {
    "stream": "a",
    "shard_id": ZERO,
    "sequence_number": "1",
    "sub_sequence_number": 0,
    "partition_key": "k",
    "data": b"d",
} | {"approximate_arrival_timestamp": datetime.fromtimestamp(0, UTC)}


def read_all(world: World, **options: str) -> list[bytes]:
    """What `spark.read` gives."""
    parsed = parse_options({"streamName": "orders"} | options)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    rows = []
    for wanted in plan_ranges(world.kinesis, stream, parsed):
        for table in read_range(
            world.kinesis, wanted, read_rules(parsed), world.clock, random.Random(1)
        ):
            rows += [row[3] for row in rows_of(table)]
    return rows


# -- options
# ----------------------------------------------------------------------------


# -- spark.read
# ----------------------------------------------------------------------------


def test_reads_all_shards_also_closed_ones_to_the_tip() -> None:
    world = World(2)
    world.put(*numbered(20))
    world.split(ZERO)
    world.put(*numbered(20, 20), aggregate_of([("a", None, b"100"), ("a", None, b"101")]))
    assert sorted(read_all(world, maxRecordsPerFetch="3"), key=int) == [
        *numbered(40),
        b"100",
        b"101",
    ]


class Busy(InMemoryKinesis):
    """Every look at the stream brings ten records more than it can take away."""

    def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
        for i in range(limit + 10):
            self.model.call(
                "PutRecord", StreamName=stream.name, PartitionKey="k", Data=f"new-{i}".encode()
            )
        return super().get_records(stream, shard_id, iterator, limit)


def test_a_busy_stream_does_not_keep_a_batch_read_for_ever() -> None:
    world = World(1)
    for i in range(40):
        world.put(f"{i}".encode())
        world.clock.advance(0.05)
    world.kinesis = Busy(world.model)
    rows = read_all(world, maxRecordsPerFetch="5")
    assert set(numbered(40)) <= set(rows)
    assert len(rows) < 100


def test_reads_between_two_times() -> None:
    world = World(1)
    moments = []
    for i in range(5):
        moments.append(datetime.fromtimestamp(world.clock.wall(), UTC).isoformat())
        world.put(f"{i}".encode())
        world.clock.advance(10)
    between = {
        "startingPosition": f"AT_TIMESTAMP {moments[1]}",
        "endingPosition": f"AT_TIMESTAMP {moments[4]}",
    }
    assert read_all(world, **between) == [b"1", b"2", b"3"]
    assert read_all(world, **between, maxRecordsPerFetch="1") == [b"1", b"2", b"3"]


class Arriving(InMemoryKinesis):
    """Records have these arrival times (seconds after `start`), which do not increase."""

    def __init__(self, world: World, *seconds: float) -> None:
        super().__init__(world.model)
        self.start = datetime.fromtimestamp(round(world.clock.wall()), UTC)
        self.seconds = [self.start + timedelta(seconds=one) for one in seconds]

    def get_shard_iterator(self, stream, shard_id, iterator_type, **more) -> str:
        return super().get_shard_iterator(stream, shard_id, "TRIM_HORIZON")

    def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
        page = super().get_records(stream, shard_id, iterator, limit)
        numbers = [int(data) for data in page.records.column("data").to_pylist()]
        column = page.records.schema.get_field_index("approximate_arrival_timestamp")
        times = pa.array([self.seconds[n] for n in numbers], RECORD_SCHEMA.field(column).type)
        records = page.records.set_column(column, RECORD_SCHEMA.field(column), times)
        return replace(page, records=records)


@pytest.mark.parametrize("per_page", ["1", "2", "1000"])
def test_a_record_belongs_to_a_time_range_by_its_own_time(per_page: str) -> None:
    world = World(1)
    world.put(*numbered(7))
    world.kinesis = Arriving(world, 0, 12, 8, 30, 9, 70, 71)
    world.clock.advance(120)
    begin, end = (world.kinesis.start + timedelta(seconds=s) for s in (5, 10))
    until = {"endingPosition": f"AT_TIMESTAMP {end.isoformat()}", "maxRecordsPerFetch": per_page}
    assert read_all(world, **until) == [b"0", b"2", b"4"]
    range_of = until | {"startingPosition": f"AT_TIMESTAMP {begin.isoformat()}"}
    assert read_all(world, **range_of) == [b"2", b"4"]


def test_a_record_without_a_key_and_aggregates_of_a_stream_that_spreads_them() -> None:
    world = World(2)
    stream = world.model.stream("orders")
    stream.mode = "ON_DEMAND"
    world.model.call(
        "UpdateStreamRecordDistributionStrategy",
        StreamARN=stream.arn,
        RecordDistributionStrategy="AUTO",
    )
    everywhere = aggregate_of([("k", str(n * 2**125), b"%d" % n) for n in range(8)])
    for _ in range(2):
        world.model.call("PutRecord", StreamName="orders", Data=b"keyless")
        world.put(everywhere, everywhere, key="a")
    expected = sorted([*numbered(8) * 4, b"keyless", b"keyless"])
    assert sorted(read_all(world)) == expected
    assert sorted(data(Query(world).drain())) == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_offsets_of_a_stream_s_batch_read_that_batch(seed: int) -> None:
    rng = random.Random(seed)
    world = World(2)
    query = Query(world, maxRecordsPerFetch="4")
    batches = []
    for turn in range(40):
        world.put(*numbered(rng.randint(0, 5), turn * 10))
        if turn % 12 == 5:
            world.split(rng.choice(world.open_shards()).shard_id)
        rows = query.batch(Limit(max_records=rng.randint(1, 8)))
        batches += [] if rows is None else [rows]
    for number in range(1, len(batches)):
        between = {"startingPosition": query.log[number - 1], "endingPosition": query.log[number]}
        assert sorted(read_all(world, **between)) == sorted(data([batches[number]]))
    assert sorted(read_all(world, endingPosition=query.log[-1])) == sorted(data(batches))


# -- one range
# ----------------------------------------------------------------------------


class Failing(InMemoryKinesis):
    """Fails so many times before each answer."""

    def __init__(self, world: World, *failures: Exception) -> None:
        super().__init__(world.model)
        self._failures = failures
        self._left = list(failures)

    def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
        if self._left:
            raise self._left.pop()
        self._left = list(self._failures)
        return super().get_records(stream, shard_id, iterator, limit)


def whole(world: World, through: str | None = None, **options: str) -> list[bytes]:
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    wanted = ReadRange(
        stream, ZERO, ALL, ShardOffset(TRIM_HORIZON), None if through is None else Position(through)
    )
    rules = read_rules(parse_options({"streamName": "orders", "maxRecordsPerFetch": "2"} | options))
    return [
        row[3]
        for table in read_range(world.kinesis, wanted, rules, world.clock, random.Random(1))
        for row in rows_of(table)
    ]


def test_throttling_and_failures_are_waited_out_within_bounds() -> None:
    world = World(1)
    world.put(*numbered(7))
    world.kinesis = Failing(
        world, ThrottledError("slow down"), UnavailableError("502"), ThrottledError("slow down")
    )
    assert whole(world) == numbered(7)
    world.kinesis = Failing(world, *[ThrottledError("slow down")] * 1000)
    began = world.clock.monotonic()
    with pytest.raises(ThrottledError):
        whole(world, retryTimeoutInMillis="30000")
    assert 10 <= world.clock.monotonic() - began <= 40


def test_an_expired_iterator_is_made_anew() -> None:
    world = World(1)
    world.put(*numbered(6))

    class Slow(InMemoryKinesis):
        def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
            page = super().get_records(stream, shard_id, iterator, limit)
            world.clock.advance(301)
            return page

    world.kinesis = Slow(world.model)
    assert whole(world) == numbered(6)


def test_a_range_ends_exactly_inside_an_aggregate() -> None:
    world = World(1)
    (number,) = world.put(aggregate_of([("a", None, v) for v in numbered(4)]), key="a")
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    rules = read_rules(parse_options({"streamName": "orders"}))
    wanted = ReadRange(stream, ZERO, ALL, ShardOffset(Position(number, 0)), Position(number, 2))
    (table,) = read_range(world.kinesis, wanted, rules, world.clock, random.Random(1))
    assert [row[3] for row in rows_of(table)] == [b"1", b"2"]
    for last in range(4):
        assert rows_through(table, Position(number, last)).num_rows == min(last, 2)


def test_a_range_whose_end_is_gone() -> None:
    world = World(1)
    number = world.put(b"a")[0]
    world.clock.advance(2 * DAY)
    with pytest.raises(
        RecordsLostError,
        match=f"{ZERO} of orders after TRIM_HORIZON through {number} cannot be read again",
    ):
        whole(world, number)
    assert whole(world, number, failOnDataLoss="false") == []


# -- what tasks are given
# ----------------------------------------------------------------------------


def test_a_task_gives_spark_no_empty_batch() -> None:
    """Spark takes an empty batch for the end of the rows."""
    rows = RECORD_SCHEMA.empty_table()
    table = pa.Table.from_pylist(
        [dict.fromkeys(RECORD_SCHEMA.names, None) | COLUMNS], schema=RECORD_SCHEMA
    )
    (partition,) = partitions_of([Piece((rows, table, rows, table), 10, None)])
    batches = list(read_partition(partition, parse_options({"streamName": "a"}), RECORD_SCHEMA))
    assert sum(batch.num_rows for batch in batches) == 2
    assert all(batch.num_rows for batch in batches)
    assert (
        list(
            read_partition(InputPartition(None), parse_options({"streamName": "a"}), RECORD_SCHEMA)
        )
        == []
    )


def test_small_pieces_go_together() -> None:
    table = RECORD_SCHEMA.empty_table()
    wanted = ReadRange(StreamId("a"), ZERO, ALL, ShardOffset(TRIM_HORIZON))
    pieces = [Piece((table,), size, None) for size in (1000, 2000, 3 * 2**20, 2**20, 1)] + [
        Piece((table,), 5, wanted),
        Piece((), 0, wanted),
    ]
    tasks = partitions_of(pieces)
    assert sorted(len(task.shares) for task in tasks if isinstance(task, KinesisPartition)) == [
        1,
        1,
        2,
        3,
    ]
    assert (
        sum(
            part.rest is wanted
            for task in tasks
            if isinstance(task, KinesisPartition)
            for part in task.shares
        )
        == 2
    )


def test_a_listing_from_the_middle_of_a_reshard_names_no_children() -> None:
    middle = 2**127
    parent = Shard(ZERO, ALL, "1", "2")
    left = Shard("shardId-000000000001", HashKeyRange(0, middle - 1), "3", None, ZERO)
    right = Shard("shardId-000000000002", HashKeyRange(middle, MAX_HASH_KEY), "3", None, ZERO)
    assert children_in([parent, left], ZERO) == ()
    assert [child.shard_id for child in children_in([parent, left, right], ZERO)] == [
        left.shard_id,
        right.shard_id,
    ]
