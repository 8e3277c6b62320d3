"""What every sink that stores positions does, run against the Delta table and a table in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, BatchWriter
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome, Positions, Sink
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from tests.support.delta_tables import NOTHING, Entry, commit_entries, entry_of

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
KEY = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000000"
OTHER = "arn:aws:kinesis:eu-west-1:1:stream/s/17/shardId-000000000001"
NONE = NOTHING_STORED


def at(text: str, sub: int = 0) -> Position:
    return Position(text, sub)


@dataclass
class World:
    """A table, seen by as many workers as a test asks for."""

    new_sink: Callable[[], Sink]
    writer: BatchWriter
    ids: Callable[[], list[int]]
    dead_letters: Callable[[], int]

    def write(self, *ids: int) -> Batch:
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "text": pa.array([str(one) for one in ids], pa.string()),
            }
        )
        return self.writer.write(Batch("b", (), table))

    def ready(self) -> Sink:
        sink = self.new_sink()
        sink.ensure(SCHEMA)
        return sink

    def commit(self, sink: Sink, batch: Batch, *entries: Entry) -> CommitOutcome:
        return commit_entries(sink, self.new_sink().positions([]).table_id, batch, entries)

    def stored(self, key: str = KEY) -> StoredPosition:
        return self.new_sink().positions([key]).shards[key]


@pytest.fixture(name="world", params=["memory", "delta"])
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

    return World(
        lambda: DeltaCommitter(DeltaSink(uri), "app"),
        ArrowBatchWriter(None, uri),
        lambda: sorted(delta_rows(uri)["id"].to_pylist()),
        lambda: delta_rows(f"{uri}_dead_letters").num_rows,
    )


def landed(outcome: CommitOutcome) -> bool:
    assert (outcome.version is None) == bool(outcome.refused)
    return outcome.version is not None


def test_without_a_table_nothing_is_known_and_nothing_is_committed(world: World) -> None:
    sink = world.new_sink()
    assert sink.positions([KEY, OTHER]) == Positions(None, {KEY: NONE, OTHER: NONE})
    with pytest.raises(SinkError, match="does not exist"):
        commit_entries(sink, "id", world.write(1), [entry_of(KEY, NONE, at("5"))])
    with pytest.raises(ValueError, match="needs the id of the table"):
        commit_entries(sink, None, world.write(1), [entry_of(KEY, NONE, at("5"))])


def test_the_table_is_created_once(world: World) -> None:
    first, second = world.new_sink(), world.new_sink()
    for sink in (first, second, first):
        sink.ensure(SCHEMA)
    assert landed(world.commit(first, world.write(1), entry_of(KEY, NONE, at("1"))))
    second.ensure(SCHEMA)
    assert world.ids() == [1]


def test_a_schema_that_does_not_fit_is_refused_with_the_columns(world: World) -> None:
    sink = world.ready()
    with pytest.raises(SinkError, match="text"):
        sink.ensure(pa.schema([("id", pa.int64()), ("text", pa.int32())]))
    with pytest.raises(SinkError, match="more"):
        sink.ensure(pa.schema([("id", pa.int64()), ("more", pa.string())]))


def test_a_commit_stores_the_position_of_every_shard_with_its_rows(world: World) -> None:
    sink = world.ready()
    entries = [entry_of(KEY, NONE, at("5", 3)), entry_of(OTHER, NONE, at("9" * 55))]
    first = world.commit(sink, world.write(1, 2), *entries)
    assert world.new_sink().positions([KEY, OTHER]).shards == {
        KEY: StoredPosition(1, at("5", 3)),
        OTHER: StoredPosition(1, at("9" * 55)),
    }
    second = world.commit(sink, world.write(3), entry_of(KEY, world.stored(), at("7")))
    assert world.stored() == StoredPosition(2, at("7"))
    assert first.version is not None
    assert second.version == first.version + 1
    assert world.ids() == [1, 2, 3]


def test_of_two_writers_that_expect_the_same_the_second_is_refused(world: World) -> None:
    first, second = world.ready(), world.new_sink()
    assert landed(world.commit(first, world.write(1), entry_of(KEY, NONE, at("5"))))
    refused = world.commit(second, world.write(1, 2), entry_of(KEY, NONE, at("6")))
    assert refused.refused == (KEY,)
    mixed = [entry_of(OTHER, NONE, at("1")), entry_of(KEY, NONE, at("8"))]
    assert world.commit(second, world.write(3), *mixed).refused == (KEY,)
    assert world.stored(OTHER) == NONE, "all shards or none"
    assert landed(world.commit(second, world.write(3), mixed[0])), "the rest lands on its own"
    assert world.ids() == [1, 3]


@pytest.mark.parametrize(
    "expected",
    [
        NONE,
        StoredPosition(2, at("5")),
        StoredPosition(1, at("5", 1)),
        StoredPosition(1, None),
        StoredPosition(1, at("5"), ended=True),
    ],
)
def test_every_part_of_what_was_read_is_compared(world: World, expected: StoredPosition) -> None:
    sink = world.ready()
    assert landed(world.commit(sink, world.write(1), entry_of(KEY, NONE, at("5"))))
    outcome = world.commit(sink, world.write(2), entry_of(KEY, expected, at("9")))
    assert outcome == CommitOutcome(None, (KEY,))
    assert world.ids() == [1]


def test_the_same_commit_again_is_found_landed_and_lands_once(world: World) -> None:
    sink, other, batch = world.ready(), world.new_sink(), world.write(1)
    entries = [entry_of(KEY, NONE, at("5")), entry_of(OTHER, NONE, at("5"))]
    assert landed(world.commit(sink, batch, *entries))
    assert landed(world.commit(sink, world.write(9), entry_of("c/0/c", NONE, at("1"))))
    assert landed(world.commit(sink, batch, *entries))
    assert landed(world.commit(other, batch, *entries))
    assert world.ids() == [1, 9]


def test_a_landed_commit_that_was_overtaken_is_never_repeated(world: World) -> None:
    sink, rival, batch = world.ready(), world.new_sink(), world.write(1)
    entries = [entry_of(KEY, NONE, at("5")), entry_of(OTHER, NONE, at("5"))]
    assert landed(world.commit(sink, batch, *entries))
    assert landed(
        world.commit(rival, world.write(2), entry_of(OTHER, world.stored(OTHER), at("6")))
    )
    for one in (sink, world.new_sink()):
        assert world.commit(one, batch, *entries) == CommitOutcome(None, (KEY, OTHER))
    assert world.ids() == [1, 2]


def test_a_batch_without_files_is_a_commit_like_any_other(world: World) -> None:
    sink, stale = world.ready(), world.new_sink()
    empty = world.write()
    assert empty.files == ()
    assert landed(world.commit(sink, empty, entry_of(KEY, NONE, at("5"))))
    assert world.commit(stale, empty, entry_of(KEY, NONE, at("6"))).refused == (KEY,)
    assert landed(world.commit(stale, NOTHING, entry_of(KEY, world.stored(), at("6"))))
    assert world.stored().position == at("6")
    assert world.ids() == []


def test_an_entry_without_files_refuses_the_paused_writer_behind_it(world: World) -> None:
    paused, taker = world.ready(), world.new_sink()
    assert landed(world.commit(taker, NOTHING, entry_of(KEY, NONE, at("8"))))
    assert not landed(world.commit(paused, world.write(1), entry_of(KEY, NONE, at("5"))))
    moved = world.stored()
    assert landed(world.commit(taker, NOTHING, entry_of(KEY, moved, at("8"), ended=True)))
    assert world.stored() == StoredPosition(2, at("8"), ended=True)
    assert not landed(world.commit(paused, world.write(1), entry_of(KEY, moved, at("9"))))
    assert world.ids() == []


def test_a_shard_without_records_can_end(world: World) -> None:
    sink = world.ready()
    assert landed(world.commit(sink, NOTHING, entry_of(KEY, NONE, None, ended=True)))
    assert world.stored() == StoredPosition(1, None, ended=True)


def test_a_seek_removes_a_position_and_its_number_grows(world: World) -> None:
    sink = world.ready()
    assert landed(world.commit(sink, world.write(1), entry_of(KEY, NONE, at("5"), ended=True)))
    before = world.stored()
    assert landed(world.commit(sink, NOTHING, entry_of(KEY, before, None)))
    assert world.stored() == StoredPosition(2, None)
    assert not landed(world.commit(sink, world.write(2), entry_of(KEY, before, at("6"))))


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("oott"))), ids="".join)
def test_a_takeover_at_any_moment_lands_each_record_once(
    world: World, order: tuple[str, ...]
) -> None:
    """The old owner commits record 1, twice; the taker reads, then commits what is not there."""
    old, taker = world.ready(), world.new_sink()
    batch, entry = world.write(1), entry_of(KEY, NONE, at("1"))
    seen: StoredPosition | None = None
    for step in order:
        if step == "o":
            world.commit(old, batch, entry)
        elif seen is None:
            seen = world.stored()
        else:
            rows = (2,) if seen.position == at("1") else (1, 2)
            if not landed(world.commit(taker, world.write(*rows), entry_of(KEY, seen, at("2")))):
                again = world.write(2)
                assert landed(world.commit(taker, again, entry_of(KEY, world.stored(), at("2"))))
    assert world.ids() == [1, 2]


def test_other_shards_commits_are_no_obstacle(world: World) -> None:
    workers = [world.ready(), world.new_sink(), world.new_sink()]
    for turn in range(1, 5):
        for which, sink in enumerate(workers):
            key = f"s/0/shard-{which}"
            entry = entry_of(key, world.stored(key), at(str(turn)))
            assert landed(world.commit(sink, world.write(turn * 10 + which), entry))
    assert world.ids() == sorted(turn * 10 + which for turn in range(1, 5) for which in range(3))


def test_a_commit_that_could_not_be_told_apart_is_refused_beforehand(world: World) -> None:
    sink, written = world.ready(), world.write(1)
    with pytest.raises(ValueError, match="needs shards"):
        world.commit(sink, written)
    with pytest.raises(ValueError, match="the next number"):
        world.commit(sink, written, Entry(KEY, NONE, StoredPosition(2, at("1"))))
    assert world.ids() == []


def test_dead_letters_are_appended(world: World) -> None:
    sink, other = world.new_sink(), world.new_sink()
    letters = pa.table({"data": [b"x", b"y"], "error": ["no", "no"], "lease_key": ["a", "a"]})
    sink.write_dead_letters(letters)
    other.write_dead_letters(letters)
    sink.write_dead_letters(letters.slice(0, 1))
    assert world.dead_letters() == 5, "readers take one row of each record"
