"""Batches whose transform fails: which records are set aside, and which shards pause."""

from __future__ import annotations

import datetime as dt
import gc
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import (
    RECORD_SCHEMA,
    REJECTED_SCHEMA,
    Batch,
    Chunk,
    PartFailure,
)
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import BrokenTransformError, ResultMismatchError, TransformFailedError
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.sink import MemoryBatchWriter, MemoryTable
from kcl_pipeline.worker.batch_runner import WriteSteps
from kcl_pipeline.worker.failures import (
    DEAD_LETTER_SCHEMA,
    FAILED_SCHEMA,
    JUDGED_RECORDS,
    FailureLimits,
    dead_letters,
    rejected_records,
)
from kcl_pipeline.worker.isolation import SAMPLES, IsolationStoppedError

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
GOOD, BAD = b"ok", b"bad"


def records(shard: str, data: list[bytes], stream: str = "orders") -> pa.Table:
    rows = len(data)
    return pa.table(
        [
            [stream] * rows,
            [shard] * rows,
            [str(row + 1) for row in range(rows)],
            pa.array([0] * rows, pa.int64()),
            ["k"] * rows,
            pa.nulls(rows, pa.string()),
            pa.array(data, pa.binary()),
            pa.array([NOW] * rows, pa.timestamp("us", tz="UTC")),
            pa.nulls(rows, pa.string()),
        ],
        schema=RECORD_SCHEMA,
    )


def batch_of(**shards: list[bytes]) -> Batch:
    ranges = tuple(
        Chunk(key, records(key, data), TRIM_HORIZON, Position(str(len(data) + 1)), 0)
        for key, data in shards.items()
    )
    return Batch("b", ranges, pa.concat_tables([part.records for part in ranges]))


def strict(table: pa.Table) -> pa.Table:
    """Fails on every batch that has a bad record."""
    bad = pc.index(table["data"], pa.scalar(BAD, pa.binary())).as_py()
    if bad >= 0:
        raise ValueError(f"cannot take {BAD!r}")
    return table


class Bench:
    """A splitter on tables in memory; counts the transform's calls and the records it was given."""

    def __init__(self, transform=strict, **settings):
        self.calls: list[int] = []
        self.paused: dict[str, str] = {}
        self.table = MemoryTable()
        self.stopped = False

        def counted(table: pa.Table) -> pa.Table:
            self.calls.append(table.num_rows)
            return transform(table)

        self.writer = MemoryBatchWriter(self.table, counted)
        self.limits = FailureLimits(BatchSettings(**settings))
        self.splitter = WriteSteps(
            self.writer, self.limits, lambda batch: batch, random.Random(1), lambda: self.stopped
        )

    def split(self, batch: Batch) -> list[Batch]:
        keys: list[str] = []

        def pause(reasons: Mapping[str, str]) -> None:
            keys.extend(reasons)
            self.paused.update(reasons)

        parts = list(self.splitter.run(batch, pause))
        keys += [key for part in parts for key in part.lease_keys]
        assert all(part.ranges for part in parts), "nothing to commit is no part"
        assert sorted(keys) == sorted(r.lease_key for r in batch.ranges), "each lease once"
        assert all(calls > 0 for calls in self.calls), "never called without records"
        return parts

    def rows(self, part: Batch) -> list[str]:
        tables = [self.table.objects[file.path] for file in part.files]
        return [number for table in tables for number in table["sequence_number"].to_pylist()]


def numbers(part: Batch, key: str) -> list[str]:
    return part.failed[key]["sequence_number"].to_pylist() if key in part.failed else []


@given(
    st.integers(1, 90).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=10))
    )
)
def test_exactly_the_failing_records_are_set_aside(case: tuple[int, set[int]]):
    count, bad = case
    bench = Bench(max_dead_letter_share=1)
    [part] = bench.split(batch_of(s1=[BAD if i in bad else GOOD for i in range(count)]))
    assert numbers(part, "s1") == [str(row + 1) for row in sorted(bad)]
    assert bench.rows(part) == [str(row + 1) for row in range(count) if row not in bad]
    assert (part.records.num_rows, bench.paused) == (count - len(bad), {})


def test_thirty_of_fifty_thousand_take_few_calls_and_no_files_but_the_batch():
    """A call that fails ends a Python process of Spark, so it costs as much as several others."""
    bad = set(random.Random(7).sample(range(50_000), 30))
    failing = []

    def noting(table: pa.Table) -> pa.Table:
        try:
            return strict(table)
        except ValueError:
            failing.append(table.num_rows)
            raise

    bench = Bench(noting)
    [part] = bench.split(batch_of(s1=[BAD if i in bad else GOOD for i in range(50_000)]))
    assert numbers(part, "s1") == [str(row + 1) for row in sorted(bad)]
    assert len(bench.calls) < 1_200
    assert len(failing) < 120
    assert len(bench.table.objects) == 1


class Suspecting:
    """A writer that names suspects; counts the parts that it evaluates.

    Args:
        bench: Has the writer that evaluates them.
        suspects: Returns the suspects of a failing part.
    """

    def __init__(self, bench: Bench, suspects: Callable[[pa.Table], range]):
        self._probe, self._suspects = bench.writer.probe, suspects
        self.evaluated = self.failing = 0
        bench.writer.probe = self.probe  # type: ignore[method-assign]

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        failures = self._probe(slices)
        self.evaluated += len(slices)
        self.failing += sum(failure is not None for failure in failures)
        return [
            failure and replace(failure, suspects=self._suspects(part))
            for failure, part in zip(failures, slices, strict=True)
        ]


@given(
    st.integers(1, 300).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=10))
    ),
    st.data(),
)
def test_wrong_suspects_change_no_result(case: tuple[int, set[int]], data: st.DataObject):
    count, bad = case
    bench = Bench(max_dead_letter_share=1)
    near = st.builds(range, st.integers(0, 310), st.integers(0, 310))
    Suspecting(bench, lambda _: data.draw(near))
    [part] = bench.split(batch_of(s1=[BAD if i in bad else GOOD for i in range(count)]))
    assert numbers(part, "s1") == [str(row + 1) for row in sorted(bad)]
    assert bench.rows(part) == [str(row + 1) for row in range(count) if row not in bad]
    assert bench.paused == {}


def first_bad(part: pa.Table) -> int:
    return int(pc.index(part["data"], pa.scalar(BAD, pa.binary())).as_py())


def batch_after(part: pa.Table, returned: int) -> range:
    """The 64th of a long part, or the record of a short one, that follows the returned rows."""
    size = max(part.num_rows // 64, 1) if part.num_rows > 64 else 1
    begin = returned // size * size
    return range(begin, begin + size) if begin or size == 1 else range(0)


@pytest.mark.parametrize(
    ("suspects", "most", "most_failing"),
    [
        (lambda part: batch_after(part, first_bad(part)), 320, 110),
        (lambda part: batch_after(part, first_bad(part) // 3), 1_200, 150),  # it filters
        (lambda part: batch_after(part, 3 * first_bad(part)), 1_200, 150),  # it multiplies
        (lambda part: batch_after(part, part.num_rows - 1), 1_200, 150),  # it fails at the end
    ],
)
def test_suspects_that_fail_save_parts_and_others_cost_a_round(
    suspects: Callable[[pa.Table], range], most: int, most_failing: int
):
    bad = set(random.Random(7).sample(range(50_000), 30))
    bench = Bench()
    counts = Suspecting(bench, suspects)
    [part] = bench.split(batch_of(s1=[BAD if i in bad else GOOD for i in range(50_000)]))
    assert numbers(part, "s1") == [str(row + 1) for row in sorted(bad)]
    assert counts.evaluated < most
    assert counts.failing < most_failing


REFUSED = b"no table holds it"


class TwoKinds:
    """A writer that finds failures of the kind of its last write only, as the one of Spark does.

    The transform raises on bad records. Values are refused after it has returned.
    """

    refusal: type[TransformFailedError] = TransformFailedError

    def __init__(self, bench: Bench):
        self._write, self._has_raised = bench.writer.write, False
        self.writes = 0
        bench.writer.write = self.write  # type: ignore[method-assign]
        bench.writer.probe = self.probe  # type: ignore[method-assign]

    def write(self, batch: Batch) -> Batch:
        self.writes += 1
        self._has_raised = BAD in batch.records["data"].to_pylist()
        if not self._has_raised and REFUSED in batch.records["data"].to_pylist():
            raise self.refusal("refused", detail="refused")
        return self._write(batch)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        kinds = [(BAD, "raised")] if self._has_raised else [(BAD, "raised"), (REFUSED, "refused")]
        return [
            next((PartFailure(e) for kind, e in kinds if kind in part["data"].to_pylist()), None)
            for part in slices
        ]


@given(
    st.lists(
        st.lists(st.sampled_from([GOOD, GOOD, GOOD, BAD, REFUSED]), min_size=1, max_size=40),
        min_size=1,
        max_size=3,
    )
)
def test_failures_of_two_kinds_are_found_one_after_the_other(shards: list[list[bytes]]):
    bench = Bench(max_dead_letter_share=1)
    TwoKinds(bench)
    given_batch = batch_of(**{f"s{number}": data for number, data in enumerate(shards)})
    parts = bench.split(given_batch)
    assert bench.paused == {}
    errors = {BAD: "raised", REFUSED: "refused"}
    for part in parts:
        assert sorted(bench.rows(part)) == sorted(part.records["sequence_number"].to_pylist())
        for chunk in part.ranges:
            data = shards[int(chunk.lease_key[1:])]
            failed = part.failed.get(chunk.lease_key, FAILED_SCHEMA.empty_table())
            texts = failed["error"].to_pylist()
            assert dict(zip(failed["sequence_number"].to_pylist(), texts, strict=True)) == {
                str(row + 1): errors[value] for row, value in enumerate(data) if value != GOOD
            }
            assert chunk.records["data"].to_pylist() == [GOOD] * data.count(GOOD)


@pytest.mark.parametrize(("limit", "paused"), [(11, False), (10, True), (5, True)])
def test_failures_of_both_kinds_count_together(limit: int, paused: bool):
    data = [GOOD] * 300 + [BAD] * 5 + [REFUSED] * 6
    random.Random(3).shuffle(data)
    bench = Bench(max_dead_letters_per_batch=limit)
    TwoKinds(bench)
    failed = [numbers(part, "s1") for part in bench.split(batch_of(s1=data))]
    assert [len(each) for each in failed] == ([] if paused else [11])
    assert bench.paused.keys() == ({"s1"} if paused else set())
    if paused:
        assert "of 311 records fail" in bench.paused["s1"]
        assert f"max_dead_letters_per_batch={limit} allow {limit}" in bench.paused["s1"]


def test_values_of_no_table_in_most_records_pause_the_shard_after_a_sample():
    bench = Bench()
    counts = TwoKinds(bench)
    assert bench.split(batch_of(s1=[BAD] * 3 + [REFUSED] * 20_000)) == []
    assert "16 of 16 records chosen at random from 20000 fail" in bench.paused["s1"]
    assert counts.writes == 2


def test_a_shard_with_values_of_no_table_alone_is_committed_before_the_search():
    bench = Bench()
    TwoKinds(bench)
    first, second = bench.split(batch_of(s1=[BAD] + [GOOD] * 30, s2=[REFUSED] + [GOOD] * 20))
    assert (first.lease_keys, numbers(first, "s2")) == (("s2",), ["1"])
    assert (second.lease_keys, numbers(second, "s1")) == (("s1",), ["1"])


@pytest.mark.parametrize(("misfits", "paused"), [(1, False), (20, True)])
def test_columns_that_fit_no_table_pause_the_rest_of_a_search_if_all_records_have_them(
    misfits: int, paused: bool
):
    bench = Bench(max_dead_letter_share=1)
    TwoKinds(bench).refusal = ResultMismatchError
    data = [BAD] + [REFUSED] * misfits + [GOOD] * (20 - misfits)
    failed = [numbers(part, "s1") for part in bench.split(batch_of(s1=data))]
    assert failed == ([] if paused else [["1", "2"]])
    assert bench.paused == ({"s1": "refused"} if paused else {})


def test_columns_of_one_long_shard_that_fit_no_table_do_not_pause_a_short_one():
    """A sample of the batch has no record of the short shard."""
    bench = Bench()
    TwoKinds(bench).refusal = ResultMismatchError
    [part] = bench.split(batch_of(s1=[REFUSED] * 1_000, s2=[GOOD] * 3))
    assert (part.lease_keys, bench.rows(part)) == (("s2",), ["1", "2", "3"])
    assert bench.paused.keys() == {"s1"}
    assert bench.paused["s1"].startswith("refused")


def test_columns_that_fit_no_table_are_the_reason_although_each_record_has_columns_that_fit():
    bench = Bench()
    write = bench.writer.write

    def untyped(batch: Batch) -> Batch:
        if batch.records.num_rows > 1:
            raise ResultMismatchError("the element of tags has no type")
        return write(batch)

    bench.writer.write = untyped  # type: ignore[method-assign]
    assert bench.split(batch_of(s1=[GOOD] * 5)) == []
    assert bench.paused == {"s1": "the element of tags has no type"}


def test_more_than_a_hundred_failing_records_of_many_are_no_broken_transform():
    bench = Bench(failed_records="skip")
    data = [BAD if i % 50 == 3 else GOOD for i in range(10_000)]
    [part] = bench.split(batch_of(s1=data))
    assert len(numbers(part, "s1")) == 200
    assert bench.paused == {}


def test_a_broken_transform_pauses_its_shard_after_a_few_calls():
    bench = Bench()
    assert bench.split(batch_of(s1=[BAD] * 20_000)) == []
    assert "16 of 16 records chosen at random from 20000 fail" in bench.paused["s1"]
    assert "max_dead_letter_share=0.5" in bench.paused["s1"]
    assert "ValueError: cannot take" in bench.paused["s1"]
    assert len(bench.calls) < 30


@pytest.mark.parametrize(
    ("settings", "paused"),
    [
        ({}, True),
        ({"max_dead_letter_share": 0.51}, False),
        ({"max_dead_letter_share": 0.51, "max_dead_letters_per_batch": 100}, True),
        ({"max_dead_letter_share": 0.51, "max_dead_letters_per_batch": 101}, False),
        ({"max_dead_letters_per_batch": 0, "failed_records": "skip"}, True),
        (
            {
                "max_dead_letter_share": 1,
                "max_dead_letters_per_batch": 0,
                "failed_records": "skip",
            },
            False,
        ),
        ({"failed_records": "fail", "max_dead_letter_share": 1}, True),
    ],
)
def test_a_shard_pauses_above_each_limit(settings: dict[str, object], paused: bool):
    data = [BAD] * 101 + [GOOD] * 99
    random.Random(3).shuffle(data)
    bench = Bench(**settings)
    failed = [numbers(part, "s1") for part in bench.split(batch_of(s1=data))]
    assert bool(bench.paused) is paused
    assert [len(each) for each in failed] == ([] if paused else [101])


def test_healthy_shards_of_the_batch_go_on_first():
    bench = Bench()
    healthy, failing = bench.split(
        batch_of(s1=[GOOD] * 50, s2=[BAD] * 400, s3=[GOOD, BAD] + [GOOD] * 20, s4=[])
    )
    assert healthy.lease_keys == ("s1", "s4")
    assert (healthy.failed, healthy.output_rows) == ({}, 50)
    assert failing.lease_keys == ("s3",)
    assert failing.output_rows == 21
    assert numbers(failing, "s3") == ["2"]
    assert bench.paused.keys() == {"s2"}


def test_with_the_policy_fail_the_record_is_named():
    bench = Bench(failed_records="fail")
    assert bench.split(batch_of(s1=[GOOD] * 70 + [BAD] * 2)) == []
    assert "failed_records is 'fail'" in bench.paused["s1"]
    assert "shard_id=s1, sequence_number=71, sub_sequence_number=0" in bench.paused["s1"]


def test_a_failure_that_passes_on_its_own_sets_nothing_aside():
    failures = iter([True])

    def once(table: pa.Table) -> pa.Table:
        if next(failures, False):
            raise OSError("a passing error")
        return table

    bench = Bench(once)
    [part] = bench.split(batch_of(s1=[GOOD] * 3))
    assert (part.failed, bench.paused, part.output_rows) == ({}, {}, 3)


def test_a_transform_that_fails_on_records_together_alone_pauses_the_shard():
    def not_two(table: pa.Table) -> pa.Table:
        if table.num_rows > 1:
            raise ValueError("two of a kind")
        return table

    bench = Bench(not_two)
    assert bench.split(batch_of(s1=[GOOD] * 5)) == []
    assert "one by one, but not together" in bench.paused["s1"]


def test_shards_with_failing_records_that_fail_together_only_are_committed_one_by_one():
    def one_shard(table: pa.Table) -> pa.Table:
        if table.num_rows > 1 and len(table["shard_id"].unique()) > 1:
            raise ValueError("two shards")
        return strict(table)

    parts = Bench(one_shard).split(batch_of(s1=[GOOD] * 5 + [BAD], s2=[BAD] + [GOOD] * 4))
    assert [part.output_rows for part in parts] == [5, 4]
    assert [numbers(part, key) for part, key in zip(parts, ("s1", "s2"), strict=True)] == [
        ["6"],
        ["1"],
    ]


def test_shards_that_fail_together_only_are_committed_one_by_one():
    def one_shard(table: pa.Table) -> pa.Table:
        if len(table["shard_id"].unique()) > 1:
            raise ValueError("two shards")
        return table

    parts = Bench(one_shard).split(batch_of(s1=[GOOD] * 5, s2=[GOOD] * 4))
    assert [part.output_rows for part in parts] == [5, 4]


def test_a_transform_that_returns_no_table_is_tried_on_a_sample_alone():
    bench = Bench(lambda table: table.num_rows)
    data = {f"s{number}": [GOOD] * 20 for number in range(64)}
    assert bench.split(batch_of(**data)) == []
    assert bench.paused.keys() == data.keys()
    assert "returned int" in bench.paused["s1"]
    assert bench.calls == [64 * 20, *[1] * SAMPLES]


def test_a_batch_without_records_is_not_transformed():
    bench = Bench()
    [part] = bench.split(batch_of(s1=[]))
    assert (part.files, part.rejected) == ((), None)
    assert part.lease_keys == ("s1",)
    assert bench.calls == []


def test_when_all_records_fail_the_rest_is_not_transformed():
    bench = Bench(max_dead_letter_share=1)
    [part] = bench.split(batch_of(s1=[BAD] * 9))
    assert (part.files, part.rejected) == ((), None)
    assert len(numbers(part, "s1")) == 9


def test_a_search_does_not_keep_what_the_transform_had_made_of_the_whole_batch():
    made: list[weakref.ref[pa.Table]] = []

    def late(table: pa.Table) -> pa.Table:
        gc.collect()
        assert all(earlier() is None for earlier in made)
        result = pa.concat_tables([table, table])
        made.append(weakref.ref(result))
        return strict(result).slice(0, table.num_rows)

    bench = Bench(late)
    [part] = bench.split(batch_of(s1=[GOOD] * 20 + [BAD]))
    assert numbers(part, "s1") == ["21"]
    assert len(made) > 2


def test_a_search_ends_when_the_worker_is_stopped():
    bench = Bench()
    bench.stopped = True
    with pytest.raises(IsolationStoppedError):
        bench.split(batch_of(s1=[GOOD, BAD, GOOD]))


class TestLimits:
    def test_few_records_are_judged_together_with_the_ones_before(self):
        limits = FailureLimits(BatchSettings())
        for count in range(10):
            assert limits.of("s1", 1) == 10 - count
            limits.note("s1", 1, 1)
        assert limits.of("s1", 1) == 0
        assert limits.of("s2", 1) == 10
        limits.keep(["s2"])
        assert limits.of("s1", 1) == 10

    def test_good_records_make_room_again(self):
        limits = FailureLimits(BatchSettings())
        for _ in range(10):
            limits.note("s1", 1, 1)
        for _ in range(JUDGED_RECORDS):
            limits.note("s1", 1, 0)
        assert limits.of("s1", 1) == 10
        limits.note("s1", 10, 10)
        assert limits.of("s1", JUDGED_RECORDS) == 10

    def test_a_sink_without_a_place_for_dead_letters_takes_none(self):
        limits = FailureLimits(BatchSettings(), takes_dead_letters=False)
        assert limits.of("s1", 1_000) == 0
        assert "dead_letter_uri" in limits.reason("s1", 1_000)
        skipping = FailureLimits(BatchSettings(failed_records="skip"), takes_dead_letters=False)
        assert skipping.of("s1", 1_000) == 500


def marked(table: pa.Table) -> pa.Table:
    """Hands bad records back, and leaves their position out of the table."""
    is_bad = [value == BAD for value in table["data"].to_pylist()]
    return pa.table(
        {
            "value": table["data"],
            "_error": pa.array(["not good" if bad else None for bad in is_bad], pa.string()),
            "_shard_id": table["shard_id"],
            "_sequence_number": table["sequence_number"],
            "_sub_sequence_number": table["sub_sequence_number"],
        }
    )


class TestRejected:
    def test_rows_with_an_error_become_dead_letters_without_a_failure(self):
        bench = Bench(marked)
        [part] = bench.split(batch_of(s1=[GOOD, BAD, GOOD], s2=[GOOD, GOOD, GOOD, BAD]))
        assert len(bench.calls) == 1
        assert part.output_rows == 5
        assert part.output_schema.names == ["value"]
        assert (numbers(part, "s1"), numbers(part, "s2")) == (["2"], ["4"])
        assert part.failed["s1"]["error"].to_pylist() == ["not good"]
        assert part.failed["s1"]["data"].to_pylist() == [BAD]

    def test_a_shard_without_records_is_committed_beside_them(self):
        """PyArrow ended the process, at each attempt."""
        [part] = Bench(marked).split(batch_of(s1=[], s2=[GOOD, BAD]))
        assert part.lease_keys == ("s1", "s2")
        assert part.failed.keys() == {"s2"}

    def test_too_many_pause_their_shard_and_no_other(self):
        bench = Bench(marked)
        [part] = bench.split(batch_of(s1=[GOOD] * 30, s2=[BAD] * 21 + [GOOD] * 9))
        assert part.lease_keys == ("s1",)
        assert part.output_rows == 30
        assert "21 of 30 records fail" in bench.paused["s2"]
        assert "shard_id=s2, sequence_number=1, sub_sequence_number=0" in bench.paused["s2"]

    def test_what_fails_without_a_shard_over_its_limit_is_isolated(self):
        def alone(table: pa.Table) -> pa.Table:
            if b"worse" in table["data"].to_pylist() and "s2" not in table["shard_id"].to_pylist():
                raise ValueError("worse")
            return marked(table)

        bench = Bench(alone)
        data = [GOOD] * 20
        passing, part = bench.split(batch_of(s1=[b"worse", *data], s2=[BAD] * 40, s3=data))
        assert bench.paused.keys() == {"s2"}
        assert (passing.lease_keys, passing.output_rows) == (("s3",), 20)
        assert (part.lease_keys, part.output_rows) == (("s1",), 20)
        assert numbers(part, "s1") == ["1"]

    def test_failed_and_rejected_records_count_together(self):
        def both(table: pa.Table) -> pa.Table:
            if b"worse" in table["data"].to_pylist():
                raise ValueError("worse")
            return marked(table)

        data = [b"worse"] * 5 + [BAD] * 5 + [GOOD] * 15
        [part] = Bench(both).split(batch_of(s1=data))
        assert part.failed["s1"].num_rows == 10
        bench = Bench(both, max_dead_letters_per_batch=9)
        assert bench.split(batch_of(s1=data)) == []
        assert bench.paused.keys() == {"s1"}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.drop_columns(["_sequence_number"]), "without sequence_number"),
            (
                lambda t: t.set_column(1, "_error", pa.array([1] * t.num_rows)),
                "_error as int64; return it as string",
            ),
            (
                lambda t: t.set_column(3, "_sequence_number", pa.array(["9"] * t.num_rows)),
                "which is not in the batch",
            ),
        ],
    )
    def test_rows_that_no_record_belongs_to_pause_the_shard(self, change, message: str):
        bench = Bench(lambda t: change(marked(t)))
        assert bench.split(batch_of(s1=[GOOD, BAD])) == []
        assert message in bench.paused["s1"]

    @pytest.mark.parametrize("shards", [2, 3, 8])
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda t: t.set_column(3, "_sequence_number", pa.array(["99"] * t.num_rows)),
                "which is not in the batch",
            ),
            (lambda t: None, "the transform returned NoneType"),
        ],
    )
    def test_a_result_that_is_broken_for_records_of_a_shard_pauses_no_other_shard(
        self, change, message: str, shards: int
    ):
        def broken_for_bad(table: pa.Table) -> pa.Table | None:
            result = marked(table)
            return change(result) if BAD in table["data"].to_pylist() else result

        data = {f"s{number}": [GOOD] * 30 for number in range(shards)}
        bench = Bench(broken_for_bad)
        parts = bench.split(batch_of(**data | {"s1": [GOOD] * 29 + [BAD]}))
        assert bench.paused.keys() == {"s1"}
        assert message in bench.paused["s1"]
        assert sum(part.output_rows for part in parts) == 30 * (shards - 1)

    def test_equal_positions_of_two_streams_need_the_stream(self):
        orders = records("shard-0", [GOOD], "orders")
        clicks = records("shard-0", [BAD], "clicks")
        batch = Batch(
            "b",
            (
                Chunk("1:orders:5:shard-0", orders, TRIM_HORIZON, Position("2"), 0),
                Chunk("1:clicks:5:shard-0", clicks, TRIM_HORIZON, Position("2"), 0),
            ),
            pa.concat_tables([orders, clicks]),
        )
        row = {"shard_id": "shard-0", "sequence_number": "1", "sub_sequence_number": 0}
        row |= {"error": "no", "stream": "clicks"}
        found = rejected_records(batch, pa.Table.from_pylist([row], REJECTED_SCHEMA))
        assert found.keys() == {"1:clicks:5:shard-0"}
        with pytest.raises(BrokenTransformError, match="return the column stream"):
            rejected_records(batch, pa.Table.from_pylist([row | {"stream": None}], REJECTED_SCHEMA))

    def test_a_record_that_is_handed_back_twice_is_one_dead_letter(self):
        row = {"shard_id": "s1", "sequence_number": "2", "sub_sequence_number": 0, "stream": None}
        rejected = pa.Table.from_pylist(
            [row | {"error": "first"}, row | {"error": "second"}], REJECTED_SCHEMA
        )
        found = rejected_records(batch_of(s1=[GOOD, BAD]), rejected)
        assert found["s1"]["error"].to_pylist() == ["first"]


def test_a_dead_letter_has_the_record_its_lease_its_error_and_times():
    [part] = Bench().split(batch_of(s1=[GOOD, BAD, GOOD]))
    letters = dead_letters(part.failed, "batch-7", 1_800_000_000.0)
    assert letters.schema == DEAD_LETTER_SCHEMA
    [row] = letters.to_pylist()
    assert row["data"] == BAD
    assert (row["lease_key"], row["batch_id"], row["replayed_at"]) == ("s1", "batch-7", None)
    assert row["failed_at"] == dt.datetime.fromtimestamp(1_800_000_000, dt.UTC)
    assert row["error"].startswith("ValueError: cannot take b'bad' (")
    assert "test_splitting.py:" in row["error"]
    assert "in strict" in row["error"]
