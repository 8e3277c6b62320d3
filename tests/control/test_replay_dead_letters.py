"""A replay of dead letters: each lands once, and exactly these are marked, also after a crash."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import timedelta
from itertools import product
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.table import TableMerger

from kcl_pipeline import DeltaSink, ForeachArrowSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.control import replay
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.control.operations import ReplayRequest
from kcl_pipeline.delta.dead_letters import mark_replayed
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import DeadLettersUnreadable
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.sinks.sink import TableSink
from tests.support.dead_letters import NOON, Strict, letter, store
from tests.support.local_aws import fresh_name
from tests.support.replay_world import ReplayWorld
from tests.support.shortened import shortened


class LettersWorld:
    """A pipeline whose tables are in a folder. No service of AWS is there."""

    def __init__(self, folder, strict, sink=None):
        self.clock = SystemClock()
        self.table, self.side = str(folder / "table"), str(folder / "side")
        self.dead = f"{self.table}_dead_letters"
        transforms = {} if sink is not None else {"transform_arrow": strict}
        self.pipeline = KinesisPipeline(
            name="orders",
            streams=["orders"],
            sink=sink or DeltaSink(self.table),
            settings_overrides={"batch": {"max_batch_records": 5}},
            **transforms,
        )

    def replaying(self, **options):
        control = SimpleNamespace(clock=self.clock)
        context = OperationContext(lambda: control, AwsClients, self.pipeline, **options)
        return replay.LettersReplay(context, random.Random(1))

    def plan(self, replay_id=None, begin=None, end=None, **where):
        times = [None if one is None else one.isoformat() for one in (begin, end)]
        where = where or {"in_place": True}
        request = ReplayRequest(
            replay_id=replay_id,
            from_time=times[0],
            to_time=times[1],
            dead_letters=True,
            **where,
        )
        return self.replaying().plan(request)

    def run(self, plan, **options):
        return self.replaying(**options).run(plan)

    def rows(self, uri=None):
        """How often each record is in a table."""
        uri = uri or self.table
        if not DeltaTable.is_deltatable(uri):
            return Counter()
        return Counter(DeltaTable(uri).to_pyarrow_table().column("data").to_pylist())


@pytest.fixture
def strict():
    return Strict()


@pytest.fixture
def world(tmp_path, strict):
    return LettersWorld(tmp_path, strict)


def letters(uri):
    """The rows of a dead-letter table: data and whether it is marked."""
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    return Counter((row["data"], row["replayed_at"] is not None) for row in rows)


def sequence(numbers, **more):
    return [letter(n, data=b"%d" % n, **more) for n in numbers]


def datas(numbers):
    return Counter(b"%d" % n for n in numbers)


def test_dead_letters_of_a_worker_land_in_its_table_and_are_marked(tmp_path, strict):
    with EmbeddedAws() as aws:
        aws.warm_up()
        written = ReplayWorld(aws, tmp_path, fresh_name("letters"), transform=strict)
        records = [b"%d" % n for n in range(20)]
        strict.fails = lambda data: data in {b"3", b"7", b"11"}
        written.put(*records)
        written.drain()
    world = LettersWorld(tmp_path, strict)
    assert world.rows() == Counter(set(records) - {b"3", b"7", b"11"})
    strict.fails = lambda data: data == b"7"
    done = world.run(world.plan("r1"))
    assert (done.is_complete, done.records, done.rows, done.failed) == (True, 3, 2, 1)
    assert done.marked >= 3, "a worker that repeats a batch appends its dead letters again"
    assert world.rows() == Counter(set(records) - {b"7"})
    waiting = (b"7", False)
    assert set(letters(world.dead)) == {(b"3", True), (b"7", True), (b"11", True), waiting}, (
        "the record that failed again is a new row"
    )
    assert (
        "3 records replayed, 2 rows written and 1 record failed again" in replay.sentences(done)[0]
    )
    strict.fails = lambda _: False
    again = world.run(world.plan())
    assert (again.records, again.marked) == (1, 1)
    assert world.rows() == Counter(records)


def test_into_a_side_table_marks_nothing_and_all_may_fail_again(world, strict):
    store(world.dead, *sequence(range(30)))
    strict.fails = lambda data: data != b"4"
    done = world.run(world.plan(into=world.side))
    assert (done.is_complete, done.marked, done.failed) == (True, None, 29)
    assert world.rows(world.side) == Counter([b"4"])
    assert letters(world.dead) == Counter((b"%d" % n, False) for n in range(30))
    assert letters(f"{world.side}_dead_letters").total() == 29
    assert not world.rows()


@pytest.mark.parametrize("is_in_place", [True, False])
def test_chunks_whose_records_all_fail_before_the_output_exists_count_as_landed(
    world, strict, is_in_place
):
    store(world.dead, *sequence(range(30)))
    strict.fails = lambda data: data != b"14"
    where = {"in_place": True} if is_in_place else {"into": world.side}
    done = world.run(world.plan("r1", **where))
    assert (done.is_complete, done.error, done.records, done.failed) == (True, None, 30, 29)
    table = world.table if is_in_place else world.side
    assert world.rows(table) == Counter([b"14"])
    assert letters(f"{table}_dead_letters").total() == 29 + 30 * is_in_place
    assert world.plan("r1", **where).landed == len(done.plan.chunks) == 6
    assert world.run(world.plan("r1", **where)).records == 0


def test_a_replay_adds_the_columns_that_the_table_lacks(tmp_path):
    world = LettersWorld(tmp_path, None, DeltaSink(str(tmp_path / "table"), schema_evolution=True))
    DeltaTable.create(world.table, pa.schema([("data", pa.binary())]))
    store(world.dead, *sequence(range(3)))
    assert world.run(world.plan()).is_complete
    found = DeltaTable(world.table).to_pyarrow_table()
    assert sorted(found["sequence_number"].to_pylist()) == [
        letter(n)["sequence_number"] for n in range(3)
    ]


def test_all_records_that_can_be_read(world):
    """Shards of two streams, an aggregate, large and binary data, and rows that are no records."""
    large = bytes(range(256)) * 4096
    aggregate = b"\xf3\x89\x9a\xc2" + large
    parts = [letter(1, sub, data=b"part-%d" % sub) for sub in range(7)]
    other = sequence(range(40, 52), shard_id="shardId-000000000001", stream="former")
    wrong = [letter("LATEST"), letter(4, data=None)]
    store(world.dead, *parts, letter(2, data=large), letter(3, data=aggregate), *wrong, *other)
    plan, events = world.plan(), []
    assert "21 dead letters in" in replay.plan_sentences(plan)[1]
    assert "2 rows cannot be replayed" in replay.plan_sentences(plan)[-1]
    assert dict(plan.letters.streams) == {"orders": 1, "former": 1}
    done = world.run(plan, events=events.append)
    assert (done.is_complete, done.records, done.marked) == (True, 21, 21)
    rows = DeltaTable(world.table).to_pyarrow_table().to_pylist()
    assert Counter(row["data"] for row in rows) == Counter(
        [one["data"] for one in (*parts, *other)] + [large, aggregate]
    )
    subs = {row["data"]: row["sub_sequence_number"] for row in rows}
    assert [subs[b"part-%d" % sub] for sub in range(7)] == list(range(7))
    assert {row["shard_id"] for row in rows} == {"shardId-000000000000", "shardId-000000000001"}
    (event,) = [one for one in events if isinstance(one, DeadLettersUnreadable)]
    assert (event.rows, event.table) == (2, world.dead)
    assert letters(world.dead)[(b"LATEST/0", False)] == 1


def test_a_record_that_has_several_dead_letters_lands_once_and_all_of_them_are_marked(world):
    repeated = [letter(1, failed_at=NOON + timedelta(seconds=n)) for n in range(3)]
    another = letter(1, data=b"another", approximate_arrival_timestamp=NOON + timedelta(days=1))
    store(world.dead, *repeated, another)
    done = world.run(world.plan())
    assert (done.is_complete, done.records, done.marked) == (True, 2, 4)
    assert world.rows() == Counter([b"1/0", b"another"])


def test_only_the_records_that_failed_in_a_time_range(world):
    hour = timedelta(hours=1)
    store(world.dead, *(letter(n, failed_at=NOON + n * hour) for n in range(4)))
    store(world.dead, letter(9, stream="other", failed_at=NOON + hour))
    where = {"in_place": True, "only_stream": "orders"}
    plan = world.plan(None, NOON + hour, NOON + 3 * hour, **where)
    assert "2 dead letters of the stream orders in" in replay.plan_sentences(plan)[1]
    assert (
        "which failed from 2026-01-01T13:00:00.000+00:00 before 2026"
        in replay.plan_sentences(plan)[1]
    )
    assert replay.plan_as_dict(plan)["dead_letters"]["records"] == 2
    every = replay.plan_as_dict(world.plan())
    assert (every["from"], every["to"], every["dead_letters"]["records"]) == (None, None, 5)


def test_no_dead_letters(world):
    done = world.run(world.plan())
    assert (done.is_complete, done.records, done.marked) == (True, 0, 0)
    store(world.dead, letter(1, replayed_at=NOON))
    assert world.plan().letters.records == 0


def test_rows_that_another_replay_has_marked_keep_their_mark(world):
    store(world.dead, *sequence(range(3)))
    plan = world.plan()
    mark_replayed(world.dead, None, failed_before=NOON + timedelta(hours=1), replayed_at=NOON)
    done = world.run(plan)
    assert (done.is_complete, done.records, done.marked) == (True, 3, 0)
    times = DeltaTable(world.dead).to_pyarrow_table()["replayed_at"].to_pylist()
    assert times == [NOON] * 3


def test_a_stopped_replay_is_not_complete_and_is_continued(world, strict):
    store(world.dead, *sequence(range(12)))
    stop = world.clock.signal()

    def stops(_):
        stop.set()
        return False

    strict.fails = stops
    done = world.run(world.plan("r1"), stop=stop)
    assert (done.is_complete, done.error, done.records, done.marked) == (
        *(False, "it was stopped"),
        *(5, 5),
    )
    assert "continue it with the same options and the id r1" in replay.sentences(done)[-1]
    strict.fails = lambda _: False
    store(world.dead, *sequence([99]))
    plan = world.plan("r1")
    assert plan.is_continued
    assert "1 of 3 chunks have landed before" in replay.plan_sentences(plan)
    done = world.run(plan)
    assert (done.is_complete, done.records, done.marked) == (True, 7, 7)
    assert world.rows() == datas(range(12)), "a row that is newer than the replay waits"
    assert letters(world.dead)[(b"99", False)] == 1


class KilledError(BaseException):
    """The process ends here."""


STEPS = {
    "before the failures are stored": (TableSink, "write_dead_letters", "before"),
    "after the failures are stored": (TableSink, "write_dead_letters", "after"),
    "before the commit to the output": (TableSink, "commit", "before"),
    "after the commit to the output": (TableSink, "commit", "after"),
    "before the dead letters are marked": (replay, "mark_records", "before"),
    "after the dead letters are marked": (replay, "mark_records", "after"),
}


# Each step, and each chunk before and after a step; `make test-long` has all
SHORT = {*zip(STEPS, (1, 1, 2, 2, 3, 3), strict=True), ("after the commit to the output", 1)}


@pytest.mark.parametrize(
    ("step", "chunk"), shortened(product(STEPS, (1, 2, 3)), SHORT.__contains__)
)
def test_a_crash_at_each_step_repeats_neither_rows_nor_marks(
    world, strict, monkeypatch, step, chunk
):
    """Three chunks of up to five records, each with a record that fails again."""
    numbers, failing = range(13), {b"1", b"7", b"12"}
    store(world.dead, *sequence(numbers))
    strict.fails = lambda data: data in failing
    owner, name, when = STEPS[step]
    original, calls = getattr(owner, name), []

    def crashes(*given, **named):
        calls.append(name)
        if len(calls) == chunk and when == "before":
            raise KilledError
        answer = original(*given, **named)
        if len(calls) == chunk:
            raise KilledError
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, crashes)
        with pytest.raises(KilledError):
            world.run(world.plan("r1"))
    store(world.dead, *sequence([99]))
    plan = world.plan("r1")
    has_begun = chunk > 1 or name == "mark_records" or step == "after the commit to the output"
    replayed = datas(numbers if has_begun else [*numbers, 99])
    assert plan.is_continued == has_begun, "else it begins once more, with the newest version"
    assert world.run(plan).is_complete
    assert world.rows() == replayed - Counter(failing), "each record lands once"
    found = letters(world.dead)
    assert {data for data, is_marked in found if is_marked} == set(replayed)
    waiting = {data for data, is_marked in found if not is_marked}
    assert waiting == failing | ({b"99"} if has_begun else set())
    again = world.run(world.plan("r1"))
    assert (again.is_complete, again.records) == (True, 0), "a replay that has ended adds nothing"
    assert world.rows() == replayed - Counter(failing)
    assert letters(world.dead) == found


def test_a_transform_that_is_wrong_ends_the_replay_with_its_error(world, strict):
    store(world.dead, *sequence(range(3)))
    world.pipeline = KinesisPipeline(
        name="orders",
        streams=["orders"],
        sink=DeltaSink(world.table),
        transform_arrow=lambda records: records.append_column("_error", records["shard_id"]).drop(
            ["sequence_number"]
        ),
    )
    done = world.run(world.plan("r1"))
    assert not done.is_complete
    assert "sequence_number" in done.error
    assert not world.rows()
    assert letters(world.dead) == Counter((b"%d" % n, False) for n in range(3))


def test_other_options_do_not_continue_a_replay(world, strict, monkeypatch):
    store(world.dead, *sequence(range(9)))

    def dies(*_):
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(replay, "mark_records", dies)
        with pytest.raises(KilledError):
            world.run(world.plan("r1"))
    with pytest.raises(SettingsError, match="the options differ from those of the replay 'r1'"):
        world.plan("r1", begin=NOON)
    assert world.run(world.plan("r1")).is_complete


def test_a_lost_answer_of_the_mark(world, monkeypatch):
    store(world.dead, *sequence(range(3)))
    execute, answers = TableMerger.execute, []

    def lands_and_fails(self):
        answers.append(execute(self))
        if len(answers) == 1:
            raise OSError("the answer was lost")
        return answers[-1]

    monkeypatch.setattr(TableMerger, "execute", lands_and_fails)
    done = world.run(world.plan("r1"))
    assert (done.is_complete, done.records, done.marked) == (True, 3, 3)
    assert [one["num_target_rows_updated"] for one in answers] == [3, 0]


def test_two_processes_share_one_replay(world):
    store(
        world.dead,
        *(row for n in range(3) for row in sequence(range(20), shard_id=f"shardId-{n:012d}")),
    )
    plan, results = world.plan("r1"), []

    def run():
        results.append(world.run(plan))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert [done.is_complete for done in results] == [True, True]
    assert world.rows() == Counter([b"%d" % n for n in range(20)] * 3)
    assert set(letters(world.dead)) == {(b"%d" % n, True) for n in range(20)}


def test_a_function_as_the_sink_gets_each_record_and_the_letters_are_marked(tmp_path, strict):
    given = []

    def function(rows, identity):
        given.extend(rows["data"].to_pylist())

    dead = str(tmp_path / "dead")
    world = LettersWorld(tmp_path, strict, ForeachArrowSink(function, dead_letter_uri=dead))
    store(dead, *sequence(range(7)))
    done = world.run(world.plan("r1"))
    assert (done.is_complete, done.records, done.marked) == (True, 7, 7)
    assert Counter(given) == datas(range(7))


def test_wrong_options(world):
    with pytest.raises(SettingsError, match="the table is missing; write --into ADDRESS"):
        world.replaying().plan(ReplayRequest(dead_letters=True))
    with pytest.raises(SettingsError, match="is the table of the pipeline or of its dead"):
        world.plan(into=world.dead)
    world.pipeline = SimpleNamespace(sink=SimpleNamespace(dead_letter_uri=None))
    with pytest.raises(SettingsError, match="no dead-letter table; set its dead_letter_uri"):
        world.replaying()
