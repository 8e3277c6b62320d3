"""What every transactional sink does, run against the Delta table and its version in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import (
    Batch,
    BatchWriter,
    CommitEntry,
    CommitOutcome,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.delta.arrow_writer import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
NONE = TxnVersions()


@dataclass
class World:
    """A table, seen by as many workers as a test asks for."""

    new_sink: Callable[[], TransactionalSink]
    writer: BatchWriter
    ids: Callable[[], list[int]]
    dead_letters: Callable[[], int]

    def write(self, *ids: int) -> Written:
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "text": pa.array([str(one) for one in ids], pa.string()),
            }
        )
        return self.writer.write(Batch("b", (), table))

    def ready(self) -> TransactionalSink:
        sink = self.new_sink()
        sink.ensure_table(SCHEMA)
        return sink


@pytest.fixture(name="world", params=["memory", "delta", "short names"])
def world_fixture(request: pytest.FixtureRequest, tmp_path) -> World:
    if request.param == "memory":
        table = MemoryTable()

        def memory_ids() -> list[int]:
            rows = table.rows()
            return [] if rows is None else sorted(rows["id"].to_pylist())

        return World(
            lambda: InMemorySink(table),
            MemoryBatchWriter(table),
            memory_ids,
            lambda: sum(one.num_rows for one in table.dead_letters),
        )
    uri = str(tmp_path / "table")

    def delta_rows(path: str) -> pa.Table:
        return pa.table(DeltaTable(path).to_pyarrow_table())

    def new_sink() -> TransactionalSink:
        sink = DeltaCommitter(DeltaSink(uri), "app")
        sink.name_positions(short=request.param == "short names")
        return sink

    return World(
        new_sink,
        ArrowBatchWriter(None, uri),
        lambda: sorted(delta_rows(uri)["id"].to_pylist()),
        lambda: delta_rows(f"{uri}_dead_letters").num_rows,
    )


def entry(key: str, number: int, expected: TxnVersions = NONE) -> CommitEntry:
    return CommitEntry(key, number, expected)


def landed(outcome: CommitOutcome) -> bool:
    assert (outcome.version is None) == bool(outcome.refused)
    return outcome.version is not None


def test_without_a_table_nothing_is_known_and_nothing_needs_a_fence(world: World) -> None:
    sink = world.new_sink()
    assert sink.txn_versions(["a", "b"]) == {"a": NONE, "b": NONE}
    assert sink.fence("a", TxnVersions(3, 1)) == TxnVersions(3, 1)
    with pytest.raises(SinkError):
        sink.commit(world.write(1), [entry("a", 1)])


def test_the_table_is_created_once(world: World) -> None:
    first, second = world.new_sink(), world.new_sink()
    for sink in (first, second, first):
        sink.ensure_table(SCHEMA)
    assert landed(first.commit(world.write(1), [entry("a", 1)]))
    second.ensure_table(SCHEMA)
    assert world.ids() == [1]


def test_a_schema_that_does_not_fit_is_refused_with_the_columns(world: World) -> None:
    sink = world.ready()
    with pytest.raises(SinkError, match="text"):
        sink.ensure_table(pa.schema([("id", pa.int64()), ("text", pa.int32())]))
    with pytest.raises(SinkError, match="more"):
        sink.ensure_table(pa.schema([("id", pa.int64()), ("more", pa.string())]))


def test_a_commit_sets_the_data_numbers_of_all_its_leases_and_no_fence(world: World) -> None:
    sink = world.ready()
    assert landed(sink.commit(world.write(1, 2), [entry("a", 7), entry("b", 3)]))
    assert world.new_sink().txn_versions(["a", "b", "c"]) == {
        "a": TxnVersions(7),
        "b": TxnVersions(3),
        "c": NONE,
    }
    assert world.ids() == [1, 2]


def test_versions_grow_by_one_per_commit(world: World) -> None:
    sink = world.ready()
    first = sink.commit(world.write(1), [entry("a", 1)]).version
    second = sink.commit(world.write(2), [entry("a", 2, TxnVersions(1))]).version
    assert first is not None
    assert second == first + 1


def test_a_refusal_names_the_leases_that_are_in_the_way_and_lands_nothing(world: World) -> None:
    sink, rival = world.ready(), world.new_sink()
    assert landed(rival.commit(world.write(1), [entry("b", 4)]))
    outcome = sink.commit(world.write(2, 3), [entry("a", 1), entry("b", 5), entry("c", 1)])
    assert outcome == CommitOutcome(None, ("b",))
    assert sink.txn_versions(["a", "b", "c"]) == {"a": NONE, "b": TxnVersions(4), "c": NONE}
    assert world.ids() == [1]
    assert landed(sink.commit(world.write(2), [entry("a", 1), entry("c", 1)])), (
        "the rest of the batch lands on its own"
    )


def test_the_same_commit_again_is_found_landed_and_lands_once(world: World) -> None:
    sink, written = world.ready(), world.write(1)
    entries = [entry("a", 1), entry("b", 1)]
    version = sink.commit(written, entries).version
    assert landed(sink.commit(world.write(9), [entry("c", 1)]))
    assert sink.commit(written, entries).version == version
    assert world.new_sink().commit(written, entries).version is not None
    assert world.ids() == [1, 9]


def test_a_landed_commit_that_was_overtaken_is_known_to_who_saw_it_and_never_repeated(
    world: World,
) -> None:
    sink, rival, written = world.ready(), world.new_sink(), world.write(1)
    entries = [entry("a", 1), entry("b", 1)]
    version = sink.commit(written, entries).version
    assert landed(rival.commit(world.write(2), [entry("b", 2, TxnVersions(1))]))
    assert sink.commit(written, entries).version == version
    stranger = world.new_sink().commit(written, entries)
    assert stranger in (CommitOutcome(version), CommitOutcome(None, ("a", "b"))), (
        "one that saw nothing of it gives up all its leases, or knows"
    )
    assert landed(
        rival.commit(world.write(3), [entry("a", 2, TxnVersions(1)), entry("b", 3, TxnVersions(2))])
    )
    assert sink.commit(written, entries).version == version
    assert world.ids() == [1, 2, 3]


def test_a_number_that_the_log_had_before_the_expected_one_is_no_proof_of_landing(
    world: World,
) -> None:
    """A lease row that somebody deleted begins its numbers anew."""
    sink = world.ready()
    assert landed(sink.commit(world.write(1), [entry("a", 2)]))
    assert landed(sink.commit(world.write(2), [entry("a", 40, TxnVersions(2))]))
    assert landed(sink.commit(world.write(3), [entry("a", 1, TxnVersions(40))]))
    assert landed(sink.commit(world.write(4), [entry("a", 2, TxnVersions(1))]))
    assert world.ids() == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [3, 11])
def test_numbers_are_compared_for_equality_never_for_order(world: World, number: int) -> None:
    sink = world.ready()
    assert landed(sink.commit(world.write(1), [entry("a", 10)]))
    for expected in (NONE, TxnVersions(9), TxnVersions(11), TxnVersions(10, 1)):
        if expected.data != number:
            assert sink.commit(world.write(2), [entry("a", number, expected)]) == CommitOutcome(
                None, ("a",)
            )
    assert landed(sink.commit(world.write(3), [entry("a", number, TxnVersions(10))]))
    assert sink.txn_versions(["a"]) == {"a": TxnVersions(number)}
    assert world.ids() == [1, 3]


def test_a_batch_without_files_is_a_commit_like_any_other(world: World) -> None:
    sink, stale = world.ready(), world.new_sink()
    empty = world.write()
    assert empty.files == ()
    assert landed(sink.commit(empty, [entry("a", 1)]))
    assert stale.commit(empty, [entry("a", 2)]) == CommitOutcome(None, ("a",))
    assert landed(stale.commit(empty, [entry("a", 2, TxnVersions(1))]))
    assert world.ids() == []


def test_a_fence_raises_the_fence_number_alone(world: World) -> None:
    sink = world.ready()
    assert landed(sink.commit(world.write(1), [entry("a", 5)]))
    assert sink.fence("a", TxnVersions(5)) == TxnVersions(5, 1)
    assert sink.fence("a", TxnVersions(5)) is None, "made on numbers that are not there any more"
    assert sink.fence("a", TxnVersions(5, 1)) == TxnVersions(5, 2)
    assert sink.fence("b", NONE) == TxnVersions(None, 1)
    assert world.new_sink().txn_versions(["a", "b"]) == {
        "a": TxnVersions(5, 2),
        "b": TxnVersions(None, 1),
    }


def test_a_fence_does_not_hide_a_landed_batch(world: World) -> None:
    sink, taker = world.ready(), world.new_sink()
    assert landed(sink.commit(world.write(1), [entry("a", 5)]))
    assert taker.fence("a", NONE) is None
    assert taker.txn_versions(["a"]) == {"a": TxnVersions(5)}


Step = Callable[[dict[str, TransactionalSink], dict[str, list[object]]], None]


def _orders(*runs: Sequence[str]) -> list[tuple[str, ...]]:
    """All interleavings of the runs, each in its own order."""
    names = [name for number, run in enumerate(runs) for name in [str(number)] * len(run)]
    found = []
    for order in sorted(set(itertools.permutations(names))):
        left = [list(run) for run in runs]
        found.append(tuple(left[int(name)].pop(0) for name in order))
    return found


@pytest.mark.parametrize(
    "order",
    _orders(
        ["old commits", "old commits again"], ["taker reads", "taker settles", "taker commits"]
    ),
    ids="-".join,
)
def test_a_takeover_at_any_moment_lands_the_range_once(
    world: World, order: tuple[str, ...]
) -> None:
    """The old owner has prepared n = 5 for record 1 and is slow; the taker settles by reading,
    fencing or finding it landed, then commits the range.
    """
    old, taker = world.ready(), world.new_sink()
    old_batch = world.write(1)
    seen = NONE
    settled = ""
    old_landed = []
    for step in order:
        if step.startswith("old"):
            old_landed.append(landed(old.commit(old_batch, [entry("a", 5)])))
        elif step == "taker reads":
            seen = taker.txn_versions(["a"])["a"]
        elif step == "taker settles":
            while True:
                if seen.data == 5:
                    settled = "landed"
                    break
                fenced = taker.fence("a", seen)
                if fenced is not None:
                    seen, settled = fenced, "fenced"
                    break
                seen = taker.txn_versions(["a"])["a"]
        else:
            ids = (2,) if settled == "landed" else (1, 2)
            assert landed(taker.commit(world.write(*ids), [entry("a", 8, seen)]))
    assert world.ids() == [1, 2], f"{order} {old_landed}"
    assert any(old_landed) == (settled == "landed")
    assert landed(taker.commit(world.write(3), [entry("a", 9, TxnVersions(8, seen.fence))]))
    assert landed(old.commit(old_batch, [entry("a", 5)])) == (settled == "landed"), (
        "the old owner gets the right answer, late"
    )
    assert world.ids() == [1, 2, 3]


def test_other_leases_commits_are_no_obstacle(world: World) -> None:
    workers = [world.ready(), world.new_sink(), world.new_sink()]
    numbers = [NONE] * 3
    for turn in range(1, 5):
        for which, sink in enumerate(workers):
            assert landed(
                sink.commit(
                    world.write(turn * 10 + which), [entry(f"lease-{which}", turn, numbers[which])]
                )
            )
            numbers[which] = TxnVersions(turn)
    assert world.ids() == sorted(turn * 10 + which for turn in range(1, 5) for which in range(3))


def test_a_commit_that_could_not_be_told_apart_is_refused_beforehand(world: World) -> None:
    sink, written = world.ready(), world.write(1)
    with pytest.raises(ValueError, match="at least one"):
        sink.commit(written, [])
    with pytest.raises(ValueError, match=r"each (only )?once"):
        sink.commit(written, [entry("a", 1), entry("a", 2)])
    with pytest.raises(ValueError, match="must be new"):
        sink.commit(written, [entry("a", 1, TxnVersions(1))])
    assert world.ids() == []


@pytest.mark.parametrize("number", [2**63, 10**37, -(2**63) - 1])
def test_a_number_that_no_log_can_hold_is_that_leases_problem(world: World, number: int) -> None:
    sink = world.ready()
    outcome = sink.commit(world.write(1, 2), [entry("a", 1), entry("b", number)])
    assert (outcome.version, outcome.refused) == (None, ("b",))
    assert "number" in outcome.reason
    assert landed(sink.commit(world.write(1), [entry("a", 1)]))
    assert world.ids() == [1]


def test_dead_letters_are_kept(world: World) -> None:
    sink = world.new_sink()
    letters = pa.table({"data": [b"x", b"y"], "error": ["no", "no"], "lease_key": ["a", "a"]})
    sink.write_dead_letters(letters)
    sink.write_dead_letters(letters.slice(0, 1))
    assert world.dead_letters() == 3, "records without a position are all new"


def letters(key: str, *numbers: int) -> pa.Table:
    return pa.table(
        {
            "lease_key": [key] * len(numbers),
            "sequence_number": [str(number) for number in numbers],
            "sub_sequence_number": pa.array([0] * len(numbers), pa.int64()),
            "error": ["no"] * len(numbers),
        }
    )


def test_a_dead_letter_is_kept_once_however_its_batch_is_repeated(world: World) -> None:
    sink, other = world.new_sink(), world.new_sink()
    for numbers in [(3, 7), (3,), (3, 7, 9), (3, 7)]:
        sink.write_dead_letters(letters("a", *numbers))
    other.write_dead_letters(letters("a", 3, 7, 9, 12))
    sink.write_dead_letters(letters("a", 12, 14))
    sink.write_dead_letters(pa.concat_tables([letters("b", 3, 7), letters("a", 14, 15)]))
    assert world.dead_letters() == len([3, 7, 9, 12, 14, 15]) + len([3, 7])
