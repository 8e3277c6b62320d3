"""Cutting batches and finding the records that a transform cannot take."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import Batch, ShardRange, Written
from kcl_pipeline.errors import TransformFailed
from kcl_pipeline.records.kinesis import RECORD_SCHEMA, Chunk
from kcl_pipeline.sequence import TRIM_HORIZON, Position
from kcl_pipeline.worker.batches import MAX_FAILED_RECORDS, cut, dead_letters, lease_key_of, records_of, write_or_sift

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def table(shard: str, numbers: list[int], stream: str = "orders", data: list[bytes] | None = None) -> pa.Table:
    rows = [
        {
            "stream": stream,
            "shard_id": shard,
            "sequence_number": str(n),
            "sub_sequence_number": 0,
            "partition_key": "k",
            "explicit_hash_key": None,
            "data": data[i] if data else b"ok",
            "approximate_arrival_timestamp": NOW,
            "encryption_type": None,
        }
        for i, n in enumerate(numbers)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


def chunk(key: str, after: Position, numbers: list[int], through: int | None = None) -> Chunk:
    last = Position(str(through or numbers[-1])) if (numbers or through) else after
    return Chunk(key, table(key.rsplit(":", 1)[-1], numbers), after, last, 10)


class Writer:
    """Fails on records whose data starts with `bad`; keeps what it wrote last."""

    def __init__(self) -> None:
        self.calls = 0
        self.rows: list[int] = []

    def write(self, batch: Batch) -> Written:
        self.calls += 1
        bad = [d for d in batch.records["data"].to_pylist() if d.startswith(b"bad")]
        if bad:
            raise TransformFailed(f"cannot take {bad[0]!r}")
        self.rows = [int(n) for n in batch.records["sequence_number"].to_pylist()]
        return Written((), pa.schema([]), len(self.rows))


def test_chunks_of_a_lease_join_into_one_range():
    batch = cut(
        "b", [chunk("s1", TRIM_HORIZON, [1, 2]), chunk("s2", Position("7"), [8]), chunk("s1", Position("2"), [3])], {"s1": TRIM_HORIZON, "s2": Position("7")}
    )
    assert batch.ranges == (ShardRange("s1", TRIM_HORIZON, Position("3")), ShardRange("s2", Position("7"), Position("8")))
    assert batch.records["sequence_number"].to_pylist() == ["1", "2", "3", "8"]


def test_a_chunk_that_does_not_follow_on_is_left_out():
    batch = cut(
        "b", [chunk("s1", Position("5"), [6]), chunk("s2", TRIM_HORIZON, [1]), chunk("s2", Position("3"), [4])], {"s1": Position("4"), "s2": TRIM_HORIZON}
    )
    assert batch.ranges == (ShardRange("s2", TRIM_HORIZON, Position("1")),)
    assert batch.records.num_rows == 1


def test_a_chunk_of_an_unknown_lease_is_left_out():
    assert cut("b", [chunk("s1", TRIM_HORIZON, [1])], {}).ranges == ()


def test_a_range_may_move_without_rows_but_one_that_does_not_move_is_no_range():
    batch = cut("b", [chunk("s1", Position("1"), [], through=9), chunk("s2", Position("1"), [])], {"s1": Position("1"), "s2": Position("1")})
    assert batch.ranges == (ShardRange("s1", Position("1"), Position("9")),)


def test_records_of_tells_streams_with_equal_shard_ids_apart():
    both = pa.concat_tables([table("shard-0", [1], "orders"), table("shard-0", [2], "clicks")])
    assert records_of(both, ["1:clicks:5:shard-0"])["sequence_number"].to_pylist() == ["2"]
    assert records_of(both, []).num_rows == 0


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=10))))
def test_exactly_the_failing_records_are_set_aside(case: tuple[int, set[int]]):
    count, bad = case
    data = [b"bad" if i in bad else b"ok" for i in range(count)]
    batch = Batch("b", (ShardRange("s1", TRIM_HORIZON, Position(str(count))),), table("s1", list(range(1, count + 1)), data=data))
    writer = Writer()
    sifted = write_or_sift(writer, batch)
    assert [row for row, _ in sifted.failed] == sorted(bad)
    assert writer.rows == [i + 1 for i in range(count) if i not in bad]
    assert sifted.batch.records.num_rows == count - len(bad)
    letters = dead_letters(batch, sifted.failed)
    assert letters["sequence_number"].to_pylist() == [str(i + 1) for i in sorted(bad)]
    assert set(letters["lease_key"].to_pylist()) <= {"s1"}


def test_a_broken_transform_is_told_from_broken_records():
    class Broken(Writer):
        def write(self, batch: Batch) -> Written:
            raise TransformFailed("no such column")

    batch = Batch("b", (ShardRange("s1", TRIM_HORIZON, Position("3")),), table("s1", [1, 2, 3]))
    with pytest.raises(TransformFailed, match="no such column"):
        write_or_sift(Broken(), batch)


def test_too_many_failing_records_fail_the_batch():
    count = MAX_FAILED_RECORDS + 5
    batch = Batch("b", (ShardRange("s1", TRIM_HORIZON, Position(str(count))),), table("s1", list(range(1, count + 1)), data=[b"bad"] * count))
    with pytest.raises(TransformFailed, match="more than"):
        write_or_sift(Writer(), batch)


def test_a_failure_that_passes_on_its_own_sets_nothing_aside():
    class Once(Writer):
        def write(self, batch: Batch) -> Written:
            if self.calls == 0:
                self.calls = 1
                raise TransformFailed("a passing cloud")
            return super().write(batch)

    batch = Batch("b", (ShardRange("s1", TRIM_HORIZON, Position("3")),), table("s1", [1, 2, 3]))
    sifted = write_or_sift(Once(), batch)
    assert sifted.failed == ()
    assert sifted.written.rows == 3


def test_lease_key_of_a_row():
    ranges = (ShardRange("1:orders:5:shard-0", TRIM_HORIZON, Position("1")), ShardRange("1:clicks:5:shard-0", TRIM_HORIZON, Position("2")))
    batch = Batch("b", ranges, pa.concat_tables([table("shard-0", [1], "orders"), table("shard-0", [2], "clicks")]))
    assert lease_key_of(batch, 1) == "1:clicks:5:shard-0"
