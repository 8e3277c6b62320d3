"""Reading one shard: positions, resume, expired iterators, shard ends and invalid responses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from kcl_pipeline import errors
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import records_table
from kcl_pipeline.kinesis.reader import KPL_PARTITION_KEY, ShardReader
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import ChildShard, HashKeyRange, StreamId
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.kpl_encoder import aggregate_of
from tests.support.reader_world import ALL, SHARD, World, drain, values

CHILDREN = (ChildShard("shardId-000000000001", ("shardId-000000000000",), ALL),)


def test_chunks_join_without_a_gap() -> None:
    world = World()
    numbers = world.put(*[f"{i}".encode() for i in range(25)])
    chunks = drain(world.reader(TRIM_HORIZON, max_records=7))
    assert values(chunks) == [f"{i}".encode() for i in range(25)]
    assert chunks[0].after == TRIM_HORIZON
    assert all(a.through == b.after for a, b in itertools.pairwise(chunks))
    assert [c.through for c in chunks] == [Position(numbers[i]) for i in (6, 13, 20, 24)]
    assert [c.millis_behind_latest for c in chunks][-1] == 0
    assert [t for t, _, _ in world.kinesis.asked] == ["TRIM_HORIZON"]


def test_bytes_count_data_and_partition_keys() -> None:
    world = World()
    world.put(b"abc", b"defgh")
    (chunk,) = drain(world.reader(TRIM_HORIZON), 1)
    assert chunk.bytes == 8 + sum(len(k) for k in chunk.records.column("partition_key").to_pylist())


@pytest.mark.parametrize("stop", [0, 3, 9])
def test_resumes_after_a_plain_record(stop: int) -> None:
    world = World()
    numbers = world.put(*[f"{i}".encode() for i in range(10)])
    reader = world.reader(Position(numbers[stop]))
    chunks = drain(reader)
    assert values(chunks) == [f"{i}".encode() for i in range(stop + 1, 10)]
    assert world.kinesis.asked[0] == ("AT_SEQUENCE_NUMBER", numbers[stop], None)
    assert reader.position == Position(numbers[-1])
    assert all(c.after == Position(numbers[stop]) for c in chunks[:1])


@pytest.mark.parametrize(
    ("sub", "rest"), [(0, [b"b", b"c", b"last"]), (1, [b"c", b"last"]), (2, [b"last"])]
)
def test_resumes_inside_an_aggregate(sub: int, rest: list[bytes]) -> None:
    world = World()
    _, number, last = world.put(
        b"first", aggregate_of([("k", None, b"a"), ("k", None, b"b"), ("k", None, b"c")]), b"last"
    )
    chunks = drain(world.reader(Position(number, sub)))
    assert values(chunks) == rest
    assert (chunks[0].after, chunks[-1].through) == (Position(number, sub), Position(last))


def test_an_aggregate_at_the_end_is_through_at_its_last_index() -> None:
    world = World()
    (number,) = world.put(aggregate_of([("k", None, b"a"), ("k", None, b"b")]))
    (chunk,) = drain(world.reader(TRIM_HORIZON))
    assert chunk.through == Position(number, 1)
    world.put(b"next")
    assert values(drain(world.reader(chunk.through))) == [b"next"]


def test_one_page_per_record_around_the_checkpoint() -> None:
    world = World()
    numbers = world.put(b"0", aggregate_of([("k", None, b"a"), ("k", None, b"b")]), b"2")
    chunks = drain(world.reader(Position(numbers[1], 1), max_records=1))
    assert values(chunks) == [b"2"]
    assert chunks[0].after == Position(numbers[1], 1)


def test_a_foreign_aggregate_at_the_end_moves_the_position() -> None:
    world = World()
    foreign = aggregate_of([("k", "99", b"a"), ("k", "98", b"b")])
    one, two = world.put(b"mine", foreign, key=KPL_PARTITION_KEY)
    (chunk,) = drain(world.reader(TRIM_HORIZON, hash_key_range=HashKeyRange(0, 50)))
    assert (values([chunk]), chunk.through) == ([b"mine"], Position(two, 1))
    (only,) = drain(world.reader(Position(one), hash_key_range=HashKeyRange(0, 50)))
    assert (only.records.num_rows, only.bytes, only.after, only.through) == (
        0,
        0,
        Position(one),
        Position(two, 1),
    )


def test_aggregates_can_be_left_as_they_are() -> None:
    world = World()
    data = aggregate_of([("k", None, b"a"), ("k", None, b"b")])
    world.put(data)
    assert values(drain(world.reader(TRIM_HORIZON, skip=True))) == [data]


def test_a_position_inside_a_record_that_is_left_whole_never_goes_back() -> None:
    world = World()
    (number,) = world.put(aggregate_of([("k", None, b"a"), ("k", None, b"b")]))
    reader = world.reader(Position(number, 1), skip=True)
    assert reader.read() is None
    assert reader.position == Position(number, 1)
    world.put(b"next")
    (chunk,) = drain(reader, 1)
    assert (chunk.after, values([chunk])) == (Position(number, 1), [b"next"])


def test_an_expired_iterator_is_rebuilt_after_the_last_record_read() -> None:
    world = World()
    numbers = world.put(b"0", b"1")
    reader = world.reader(TRIM_HORIZON)
    assert values(drain(reader, 2)) == [b"0", b"1"]
    world.clock.advance(301)
    world.put(b"2")
    assert values(drain(reader, 2)) == [b"2"]
    assert world.kinesis.asked[1:] == [("AFTER_SEQUENCE_NUMBER", numbers[1], None)]


def test_an_expired_latest_iterator_loses_nothing() -> None:
    world = World()
    world.put(b"before")
    world.clock.advance(5)
    reader = world.reader(LATEST)
    assert reader.read() is None
    made = datetime.fromtimestamp(world.clock.wall(), UTC)
    world.clock.advance(100)
    world.put(b"between")
    world.clock.advance(201)
    chunks = drain(reader, 2)
    assert values(chunks) == [b"between"]
    assert chunks[0].after == LATEST
    assert world.kinesis.asked == [("LATEST", None, None), ("AT_TIMESTAMP", None, made)]


def test_a_service_that_does_not_tell_the_time_is_asked_for_latest_again() -> None:
    """As in the Java KCL, records in between are skipped, which LATEST allows. It is reported
    once.
    """
    world = World()
    latest = world.kinesis.latest_iterator
    world.kinesis.latest_iterator = lambda *place: replace(latest(*place), since=None)
    reader = world.reader(LATEST)
    assert reader.read() is None
    world.clock.advance(301)
    with pytest.raises(
        errors.UnavailableError, match="records that arrived in between are skipped"
    ):
        reader.read()
    assert reader.read() is None
    world.put(b"after")
    assert values(drain(reader, 2)) == [b"after"]
    assert [kind for kind, _, _ in world.kinesis.asked] == ["LATEST", "LATEST"]


def test_an_expired_resume_iterator_starts_at_the_checkpoint_again() -> None:
    world = World()
    numbers = world.put(b"0", b"1")
    reader = world.reader(Position(numbers[1]))
    assert reader.read() is None
    world.clock.advance(301)
    world.put(b"2")
    assert values(drain(reader, 2)) == [b"2"]
    assert world.kinesis.asked[1] == ("AFTER_SEQUENCE_NUMBER", numbers[1], None)


def test_at_timestamp_takes_the_configured_time_and_needs_one() -> None:
    world = World()
    world.put(b"early")
    world.clock.advance(10)
    since = datetime.fromtimestamp(world.clock.wall(), UTC)
    world.put(b"late")
    assert values(drain(world.reader(AT_TIMESTAMP, initial_timestamp=since))) == [b"late"]
    with pytest.raises(errors.SettingsError, match="initial_timestamp"):
        world.reader(AT_TIMESTAMP)
    with pytest.raises(ValueError, match="SHARD_END"):
        world.reader(SHARD_END)


def test_a_checkpoint_that_left_retention_goes_on_at_the_horizon() -> None:
    world = World()
    (old,) = world.put(b"old")
    world.clock.advance(20 * 3600)
    world.put(b"new")
    world.clock.advance(5 * 3600)
    chunks = drain(world.reader(Position(old)))
    assert values(chunks) == [b"new"]
    assert chunks[0].after == Position(old)


class Scripted:
    """A `KinesisClient` that gives prepared pages; an exception in the script is raised once."""

    def __init__(self, *script: RecordsPage | Exception) -> None:
        self.script = list(script)
        self.iterators: list[str] = []
        self.made = 0

    def get_shard_iterator(
        self, stream, shard_id, iterator_type, *, sequence_number=None, timestamp=None
    ) -> str:
        self.made += 1
        return f"made-{self.made}-{iterator_type}"

    def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
        self.iterators.append(iterator)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def page_of(
    *numbers: str,
    next_iterator: str | None = "next",
    children: tuple[ChildShard, ...] = (),
    data: bytes = b"x",
) -> RecordsPage:
    rows = len(numbers)
    table = records_table(
        "orders",
        SHARD,
        sequence_numbers=list(numbers),
        partition_keys=["k"] * rows,
        data=[data] * rows,
        arrival_micros=np.zeros(rows, np.int64),
        encryption_types=[None] * rows,
    )
    return RecordsPage(table, next_iterator, 0, children, rows * (len(data) + 1))


def scripted(
    *script: RecordsPage | Exception, position: Position = TRIM_HORIZON
) -> tuple[ShardReader, Scripted]:
    kinesis = Scripted(*script)
    return ShardReader(
        kinesis,
        StreamId("orders"),
        SHARD,
        SHARD,
        position,
        ALL,
        RetrievalSettings(),
        VirtualClock(),
    ), kinesis  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nonsense",
    [
        page_of("1", next_iterator=None),
        page_of("1", children=CHILDREN),
        page_of("1", next_iterator=None, children=(replace(CHILDREN[0], parents=()),)),
        errors.ThrottledError("slow down"),
        errors.UnavailableError("gone for a moment"),
    ],
)
def test_what_can_be_retried_is_asked_again_with_the_same_iterator(nonsense) -> None:
    reader, kinesis = scripted(page_of("1"), nonsense, page_of("2"))
    first = reader.read()
    with pytest.raises((errors.UnavailableError, errors.ThrottledError)):
        reader.read()
    second = reader.read()
    assert kinesis.iterators == ["made-1-TRIM_HORIZON", "next", "next"]
    assert first is not None
    assert second is not None
    assert (second.after, second.through) == (first.through, Position("2"))


def test_a_page_that_cannot_be_taken_apart_is_asked_for_again(monkeypatch) -> None:
    reader, kinesis = scripted(page_of("1"), page_of("2"), page_of("2"))
    reader.read()
    with monkeypatch.context() as broken:
        broken.setattr(
            "kcl_pipeline.kinesis.reader.deaggregate", lambda *_: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            reader.read()
    again = reader.read()
    assert again is not None
    assert (again.after, again.through, kinesis.iterators[1:]) == (
        Position("1"),
        Position("2"),
        ["next", "next"],
    )


def test_an_iterator_that_expires_twice_in_a_row_is_reported() -> None:
    reader, kinesis = scripted(
        errors.ExpiredIteratorError("old"), errors.ExpiredIteratorError("old"), page_of("5")
    )
    with pytest.raises(errors.ExpiredIteratorError):
        reader.read()
    assert reader.read() is not None
    assert kinesis.made == 2


def test_numbers_compare_as_numbers() -> None:
    reader, _ = scripted(page_of("9", "10", "11"), position=Position("009"))
    chunk = reader.read()
    assert chunk is not None
    assert chunk.records.column("sequence_number").to_pylist() == ["10", "11"]


def test_empty_pages_behind_the_tip_keep_going() -> None:
    reader, kinesis = scripted(
        page_of(next_iterator="a"), page_of(next_iterator="b"), page_of("3", next_iterator="c")
    )
    assert [reader.read() is None for _ in range(3)] == [True, True, False]
    assert kinesis.iterators == ["made-1-TRIM_HORIZON", "a", "b"]
