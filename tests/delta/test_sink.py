"""The Delta log itself: stale handles, lost answers, cleaned logs, schemas, maintenance, many
processes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.log import DeltaLog
from kcl_pipeline.delta.sink import DeltaSink, DeltaTableLog, transaction_names
from kcl_pipeline.errors import SettingsError, SinkError, TableMismatchError
from kcl_pipeline.sinks.sink import CommitOutcome
from tests.support.delta_tables import (
    NONE,
    Committer,
    NoWait,
    at,
    committer,
    entry,
    ids,
    log_lines,
    seq,
    upkeep_ended,
    written,
)
from tests.support.sink_writers import SHARED, run_creators, run_writers

SCHEMA = pa.schema([("id", pa.int64())])
DEADLINE_SECONDS = 30.0


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.mark.parametrize("rival", [{"app/a": 2}, {"app/b": 2}, {}])
@pytest.mark.parametrize("with_file", [True, False])
def test_a_stale_handle_appends_nothing_whatever_happened_since(
    uri: str, rival: dict[str, int], with_file: bool
) -> None:
    committer(uri).ensure(SCHEMA)
    stale, other = DeltaLog(uri), DeltaLog(uri)
    assert stale.refresh()
    assert other.refresh()
    other.append((), rival)
    with pytest.raises(SinkError):
        stale.append(written(uri, 1).files if with_file else (), {"app/a": 1})
    assert stale.refresh()
    assert stale.version == 1
    assert [line["txn"]["appId"] for line in log_lines(uri) if "txn" in line] == list(rival)
    assert ids(uri) == []


def test_a_state_that_was_read_before_another_has_no_successor(uri: str) -> None:
    """Entries are compared with the state that the caller gives."""
    rival = committer(uri)
    rival.ensure(SCHEMA)
    log = DeltaTableLog(DeltaSink(uri), NoWait(), random.Random(1), "app")
    head = log.read()
    assert head is not None
    assert rival.move("a", 1)
    assert log.peek() is not None
    with pytest.raises(SinkError, match="not at version 0 any more"):
        log.add(head, (), {"app/a": at(1, 9)})
    assert rival.stored("a") == seq(1)


def interrupted(
    sink: Committer, rival: Callable[[], object], *, lands: bool | None = None
) -> Committer:
    """The first time the sink is about to append, `rival` acts; `lands`: then the append happens
    (or not) and its answer is lost.
    """
    append, done = sink.delta_log.append, []

    def paused(*arguments: object) -> None:
        if done:
            return append(*arguments)  # type: ignore[arg-type]
        done.append(True)
        rival()
        if lands is not False:
            append(*arguments)  # type: ignore[arg-type]
        if lands is not None:
            raise SinkError("the answer was lost")
        return None

    sink.delta_log.append = paused  # type: ignore[method-assign]
    return sink


def test_a_pause_between_comparing_and_writing_is_seen(uri: str) -> None:
    rival = committer(uri)
    rival.ensure(SCHEMA)
    outcomes = {}
    for name, act in {
        "other lease": lambda: rival.land(written(uri, 10), [entry("b", 1)]),
        "moved": lambda: rival.move("a1", 1),
        "same lease": lambda: rival.land(written(uri, 20), [entry("a2", 9)]),
        "other application": lambda: Committer(DeltaSink(uri), "other").land(
            written(uri, 30), [entry("a3", 1)]
        ),
    }.items():
        lease = f"a{len(outcomes)}"
        outcomes[name] = interrupted(committer(uri), act).land(
            written(uri, len(outcomes)),
            [entry(lease, 5), entry(f"{lease}-too", 5)],
        )
    assert outcomes["other lease"].version == 2
    assert outcomes["moved"] == CommitOutcome(None, ("a1",))
    assert outcomes["same lease"] == CommitOutcome(None, ("a2",))
    assert outcomes["other application"].version is not None
    assert ids(uri) == [0, 3, 10, 20, 30]


def test_a_commit_whose_answer_was_lost(uri: str) -> None:
    rival = committer(uri)
    rival.ensure(SCHEMA)
    entries = [entry("a", 1)]
    batch = written(uri, 1)
    outcome = interrupted(committer(uri), lambda: None, lands=True).land(batch, entries)
    assert outcome.version == 1, "its numbers prove that it landed"
    entries = [entry("a", 2, seq(1))]
    unsure = interrupted(committer(uri), lambda: None, lands=False)
    with pytest.raises(SinkError, match="the answer was lost"):
        unsure.land(written(uri, 2), entries)
    assert unsure.stored("a") == seq(1)
    moved_on = interrupted(committer(uri), lambda: rival.move("z", 1), lands=False)
    assert moved_on.land(written(uri, 3), entries).version == 3, (
        "the place was taken: nothing can be under way, so it is tried again"
    )
    assert ids(uri) == [1, 3]


@pytest.mark.parametrize("combined", [True, False])
def test_contention_alone_is_retried_a_bounded_number_of_times(
    uri: str, combined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcl_pipeline.sinks.sink.MAX_ATTEMPTS", 20)
    rival, sink = committer(uri), committer(uri, combined_commits=combined)
    rival.ensure(SCHEMA)
    append, turns = sink.delta_log.append, iter(range(10_000))

    def always_late(*arguments: object) -> None:
        rival.move(f"z{next(turns)}", 1)
        append(*arguments)  # type: ignore[arg-type]

    sink.delta_log.append = always_late  # type: ignore[method-assign]
    with pytest.raises(SinkError, match="lost to other writers"):
        sink.land(written(uri, 1), [entry("a", 1)])
    assert ids(uri) == []
    assert next(turns) == 20
    assert 5 <= sink._clock.waits <= 200


def test_numbers_survive_a_checkpoint_and_a_cleaned_log(uri: str) -> None:
    sink, slow, slower = (
        committer(uri, table_properties={"delta.checkpointInterval": "5"}) for _ in range(3)
    )
    sink.ensure(SCHEMA)
    for turn in range(1, 4):
        assert sink.land(written(uri, turn), [entry("a", turn, seq(turn - 1))]).version == turn
    assert sink.move("a", 3, seq(3))
    assert slow.stored("a") == at(3, 4)
    assert slower.positions([]).shards == {}
    for turn in range(4, 12):
        sink.land(written(uri, turn), [entry("a", turn, at(turn - 1, turn))])
        assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    log = Path(uri) / "_delta_log"
    assert {file.name[:20].lstrip("0") for file in log.glob("*.checkpoint.parquet")} == {"5", "10"}
    for version in range(9):
        (log / f"{version:020d}.json").unlink()
    for reader in (sink, slow, slower, committer(uri)):
        assert (reader.stored("a"), reader.stored("b")) == (at(11, 12), NONE)
    assert slow.land(written(uri, 12), [entry("a", 12, at(11, 12))]).version is not None
    assert ids(uri) == list(range(1, 13))


def test_a_checkpoint_that_fails_does_not_spoil_the_commit(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = committer(uri, table_properties={"delta.checkpointInterval": "1"})
    sink.ensure(SCHEMA)
    monkeypatch.setattr(
        DeltaTable, "create_checkpoint", lambda _self: (_ for _ in ()).throw(OSError("disk full"))
    )
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    assert "disk full" in caplog.text


def test_other_columns_are_named_or_added(uri: str) -> None:
    strict, open_minded = committer(uri), committer(uri, schema_evolution=True)
    strict.ensure(SCHEMA)
    more = written(uri, 1, note=pa.array(["n"]))
    with pytest.raises(
        SinkError, match=r"note \(string\) is not in the table.*schema_evolution=True"
    ):
        strict.land(more, [entry("a", 1)])
    with pytest.raises(SinkError, match=r"id is string in the output and bigint in the table"):
        open_minded.ensure(pa.schema([("id", pa.string()), ("note", pa.string())]))
    assert open_minded.land(more, [entry("a", 1)]).version is not None
    assert strict.land(written(uri, 2), [entry("b", 1)]).version is not None, (
        "a batch without the new column fits"
    )
    assert (
        strict.land(written(uri, 3, note=pa.array(["m"])), [entry("b", 2, seq(1))]).version
        is not None
    )
    rows = DeltaTable(uri).to_pyarrow_table().sort_by("id").to_pylist()
    assert rows == [{"id": 1, "note": "n"}, {"id": 2, "note": None}, {"id": 3, "note": "m"}]


def test_a_column_that_is_all_null_is_refused_where_the_table_lacks_it(uri: str) -> None:
    """It was left out without a word, and the next batch failed on it."""
    schema = pa.schema([*SCHEMA, pa.field("note", pa.null())])
    sentence = "every value of note is null and without a type; cast it to its type"
    for evolution in (False, True):
        with pytest.raises(TableMismatchError, match=sentence):
            committer(uri, schema_evolution=evolution).ensure(schema)
    assert not Path(uri).exists()
    sink = committer(uri)
    sink.ensure(pa.schema([*SCHEMA, pa.field("other", pa.string())]))
    with pytest.raises(TableMismatchError, match=sentence):
        sink.land(written(uri, 1, note=pa.nulls(1)), [entry("a", 1)])


def test_a_column_that_is_all_null_is_null_where_the_table_has_it(uri: str) -> None:
    schema = pa.schema([*SCHEMA, pa.field("note", pa.null())])
    sink = committer(uri)
    sink.ensure(pa.schema([*SCHEMA, pa.field("note", pa.string())]))
    sink.ensure(schema)
    batch = written(uri, 1, note=pa.nulls(1))
    assert sink.land(batch, [entry("a", 1)]).version is not None
    assert DeltaTable(uri).to_pyarrow_table().to_pylist() == [{"id": 1, "note": None}]


def test_two_workers_add_the_same_column_at_once(uri: str) -> None:
    first, second = committer(uri, schema_evolution=True), committer(uri, schema_evolution=True)
    first.ensure(SCHEMA)
    wider = pa.schema([*SCHEMA, ("note", pa.string())])
    add = second.delta_log.add_columns

    def late(fields: list[pa.Field]) -> None:
        first.ensure(wider)
        add(fields)

    second.delta_log.add_columns = late  # type: ignore[method-assign]
    second.ensure(wider)
    assert [field.name for field in DeltaTable(uri).schema().fields] == ["id", "note"]


def test_partitions(uri: str) -> None:
    values = ["a b", "c:d/%é", "", None, "e=f", "a b"]
    writer = ArrowBatchWriter(None, uri, ("kind",))
    batch = writer.write(
        Batch(
            "b/1",
            (),
            pa.table({"id": pa.array(range(6)), "kind": pa.array(values).dictionary_encode()}),
        )
    )
    assert sorted(
        (file.rows, file.partition_values["kind"])
        for file in batch.files
        if file.partition_values["kind"]
    ) == [
        (1, "c:d/%é"),
        (1, "e=f"),
        (2, "a b"),
    ]
    sink = committer(uri, partition_by=("kind",))
    sink.ensure(batch.output_schema)
    sink.land(batch, [entry("a", 1)])
    rows = DeltaTable(uri).to_pyarrow_table().sort_by("id").to_pylist()
    assert [row["kind"] for row in rows] == ["a b", "c:d/%é", None, None, "e=f", "a b"]
    with pytest.raises(SinkError, match=r"partitioned by \['kind'\]"):
        committer(uri).ensure(batch.output_schema)
    with pytest.raises(SinkError, match="partition_by names day"):
        committer(uri, partition_by=("day",)).ensure(batch.output_schema)


def test_a_table_that_asks_more_of_its_writers_is_refused(uri: str) -> None:
    committer(uri).ensure(SCHEMA)
    DeltaTable(uri).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(SinkError, match=r"check constraints \(positive\)"):
        committer(uri).ensure(SCHEMA)


def test_a_column_that_may_not_be_null_takes_batches_that_hold_no_null(uri: str) -> None:
    DeltaTable.create(uri, pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    sink = committer(uri)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    holes = ArrowBatchWriter(None, uri).write(
        Batch("b", (), pa.table({"id": pa.array([None, 2], pa.int64())}))
    )
    with pytest.raises(SinkError, match="id is not nullable"):
        sink.land(holes, [entry("a", 2, seq(1))])


def test_a_forked_child_is_told_so(uri: str) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    child = os.fork()
    if child == 0:  # only raw exits in here: this process has pytest's state
        try:
            sink.stored("a")
        except SinkError as error:
            os._exit(7 if "spawn" in str(error) else 8)
        except BaseException:  # noqa: BLE001
            # whatever it is, the child must not return into pytest
            os._exit(9)
        os._exit(10)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(SettingsError, match="uri=' ' is empty"):
        DeltaSink(" ")
    with pytest.raises(SettingsError, match=r"partition_by=\['day'\]"):
        DeltaSink("t", partition_by="day")
    with pytest.raises(SettingsError, match="is the table itself"):
        DeltaSink("/t/x", dead_letter_uri="/t/x/")
    assert DeltaSink("/t/x/").dead_letters == "/t/x_dead_letters"
    assert DeltaSink("s3://b/x").dead_letters == "s3://b/x_dead_letters"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("workers", "commits"), [(3, 8), pytest.param(8, 20, marks=pytest.mark.long)]
)
def test_processes_lose_and_repeat_nothing(uri: str, workers: int, commits: int) -> None:
    results = run_writers(uri, workers=workers, commits=commits)
    lines = log_lines(uri)
    added = [line["add"]["path"] for line in lines if "add" in line]
    assert len(added) == len(set(added)) == sum(len(result["written"]) for result in results)
    assert ids(uri) == sorted(ident for result in results for ident in result["written"])
    assert sum("metaData" in line for line in lines) == 1, "the table was created once"
    contested = [
        line["txn"]["version"]
        for line in lines
        if line.get("txn", {}).get("appId") == transaction_names(f"app/{SHARED}")[0]
    ]
    assert len(contested) == sum(result["won"] for result in results) > 0
    final = committer(uri).positions([f"{n}-x" for n in range(1, workers + 1)]).shards
    assert set(final.values()) == {seq(commits)}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [3, pytest.param(6, marks=pytest.mark.long)])
def test_many_workers_create_a_table_once(tmp_path: Path, workers: int) -> None:
    assert run_creators(str(tmp_path), workers=workers, rounds=8) == [0] * workers
    for turn in range(8):
        assert sum("metaData" in line for line in log_lines(str(tmp_path / str(turn)))) == 1
        assert DeltaTable(str(tmp_path / str(turn))).version() == 0
