"""The Kinesis client in memory that serves dead letters, read by a `ShardReader`."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from deltalake import DeltaTable

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.control.replay.dead_letters import STREAM, DeadLetterKinesis
from kcl_pipeline.delta.dead_letters.records import DeadLetterRecords, Selection
from kcl_pipeline.errors import ExpiredIteratorError, NotFoundError, UnavailableError
from kcl_pipeline.kinesis.client import IteratorType
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.kinesis.retention import Gap
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, StreamId
from tests.support.dead_letters import letter, store

SHARD = f"{STREAM}-0000"
ORDERS = StreamId(STREAM)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "dead")


def served(uri: str, page_records: int = 3) -> DeadLetterKinesis:
    version = DeltaTable(uri).version()
    records = DeadLetterRecords(uri, None, version, Selection(), page_records=page_records)
    return DeadLetterKinesis(records)


def read(kinesis: DeadLetterKinesis, after: Position) -> list[tuple[Position, bytes]]:
    """The end of each chunk and the data of its records, until the tip."""
    gaps: list[Gap] = []
    reader = ShardReader(
        kinesis,
        ORDERS,
        SHARD,
        SHARD,
        after,
        None,
        RetrievalSettings(skip_kpl_deaggregation=True),
        SystemClock(),
        on_gap=gaps.append,
    )
    found = []
    while reader.millis_behind_latest != 0:
        if chunk := reader.read():
            last = chunk.records.slice(chunk.records.num_rows - 1)
            number, sub = (
                last[name][0].as_py() for name in ("sequence_number", "sub_sequence_number")
            )
            assert chunk.through == Position(number, sub) == reader.position
            found += [(chunk.through, one) for one in chunk.records["data"].to_pylist()]
    assert not gaps
    return found


def test_reading_continues_after_any_position_also_inside_an_aggregate(uri: str) -> None:
    rows = [letter(n, sub) for n in range(3) for sub in range(1 + 2 * n)]
    store(uri, *reversed(rows))
    kinesis = served(uri)
    every = [row["data"] for row in rows]
    assert [one for _, one in read(kinesis, TRIM_HORIZON)] == every
    for n, row in enumerate(rows):
        after = Position(row["sequence_number"], row["sub_sequence_number"])
        assert [one for _, one in read(kinesis, after)] == every[n + 1 :]


def test_iterators_at_and_after_a_number_and_at_the_end(uri: str) -> None:
    store(uri, *(letter(str(n)) for n in (5, 9, 10, 11, 100)))
    kinesis = served(uri, page_records=2)

    cases: tuple[tuple[IteratorType, str | None, list[bytes]], ...] = (
        ("AT_SEQUENCE_NUMBER", "9", [b"9/0"]),
        ("AFTER_SEQUENCE_NUMBER", "9", [b"10/0", b"11/0"]),
        ("AT_SEQUENCE_NUMBER", "6", [b"9/0"]),
        ("AFTER_SEQUENCE_NUMBER", "10", [b"11/0"]),
        ("AFTER_SEQUENCE_NUMBER", "100", []),
        ("TRIM_HORIZON", None, [b"5/0", b"9/0"]),
        ("LATEST", None, []),
    )
    for kind, number, expected in cases:
        iterator = kinesis.get_shard_iterator(ORDERS, SHARD, kind, sequence_number=number)
        page = kinesis.get_records(ORDERS, SHARD, iterator, 10)
        assert page.records["data"].to_pylist() == expected
        assert page.next_iterator is not None
    assert page.millis_behind_latest == 0
    assert kinesis.latest_iterator(ORDERS, SHARD).iterator == iterator


def test_the_shards_cover_the_hash_keys(uri: str) -> None:
    store(uri, *(letter(1, shard_id=f"shardId-{n:012d}") for n in range(3)))
    kinesis = served(uri)
    shards = kinesis.list_shards(kinesis.resolve_stream("any", multi_stream=False))
    ranges = [one.hash_key_range for one in shards]
    assert len(ranges) == 3
    assert (ranges[0].start, ranges[-1].end) == (0, MAX_HASH_KEY)
    assert all(b.start == a.end + 1 for a, b in pairwise(ranges))


def test_without_records_there_is_one_empty_shard(uri: str) -> None:
    store(uri)
    kinesis = served(uri)
    assert [one.shard_id for one in kinesis.list_shards(ORDERS)] == [SHARD]
    assert read(kinesis, TRIM_HORIZON) == []


def test_errors_are_those_of_kinesis(uri: str) -> None:
    store(uri, letter(1))
    kinesis = served(uri)
    with pytest.raises(NotFoundError, match="there is no shard x"):
        kinesis.get_shard_iterator(ORDERS, "x", "LATEST")
    with pytest.raises(ExpiredIteratorError):
        kinesis.get_records(ORDERS, SHARD, "AAAA", 1)
    shutil.rmtree(uri)
    with pytest.raises(UnavailableError, match="reading the dead-letter table"):
        kinesis.get_records(ORDERS, SHARD, "0", 1)
