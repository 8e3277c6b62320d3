"""A replay of dead letters: each lands once, and exactly these are marked (embedded AWS)."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta

import pytest
from deltalake import DeltaTable
from deltalake.table import TableMerger

from kcl_pipeline import KinesisPipeline
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.control.replay import texts
from kcl_pipeline.delta.dead_letters.replayed import mark_replayed
from kcl_pipeline.errors import NotFoundError, SettingsError
from kcl_pipeline.events import DeadLettersUnreadable
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.worker.summary import StopReason
from tests.support.dead_letters import NOON, Strict, letter, store
from tests.support.local_aws import fresh_name
from tests.support.replay_world import ReplayWorld


@pytest.fixture(scope="module")
def server():
    with EmbeddedAws() as aws:
        aws.warm_up()
        yield aws


@pytest.fixture
def strict():
    return Strict()


@pytest.fixture
def world(server, tmp_path, strict):
    """The pipeline; its stream is deleted, because a replay of dead letters does not read it."""
    found = ReplayWorld(
        server, tmp_path, fresh_name("letters"), transform=strict, batch={"max_batch_records": 5}
    )
    found.kinesis.delete_stream(StreamName=found.name)
    found.dead = f"{found.table}_dead_letters"
    return found


def plan(world, replay_id=None, **where):
    where = where or {"in_place": True}
    return world.plan(replay_id, dead_letters=True, **where)


def letters(world, uri=None):
    """The rows of the dead-letter table: data and whether it is marked."""
    rows = DeltaTable(uri or world.dead).to_pyarrow_table().to_pylist()
    return Counter((row["data"], row["replayed_at"] is not None) for row in rows)


def sequence(numbers, **more):
    return [letter(n, data=b"%d" % n, **more) for n in numbers]


def test_dead_letters_of_a_pipeline_land_in_its_table_and_are_marked(server, tmp_path, strict):
    world = ReplayWorld(server, tmp_path, fresh_name("letters"), transform=strict)
    world.dead = f"{world.table}_dead_letters"
    records = [b"%d" % n for n in range(20)]
    strict.fails = lambda data: data in {b"3", b"7", b"11"}
    world.put(*records)
    world.drain()
    assert world.rows(world.table) == Counter(set(records) - {b"3", b"7", b"11"})
    strict.fails = lambda data: data == b"7"
    names = world.table_names()
    done = world.run(plan(world, "r1"))
    assert (done.is_complete, done.total.records, done.total.dead_letters) == (True, 3, 1)
    assert done.marked == 3
    assert world.rows(world.table) == Counter(set(records) - {b"7"})
    assert letters(world) == Counter([(b"3", True), (b"7", True), (b"11", True), (b"7", False)]), (
        "the record that failed again is a new row"
    )
    assert world.table_names() == names
    assert "3 records replayed, 2 rows written and 1 record failed again" in texts.replayed(done)[0]
    strict.fails = lambda _: False
    again = world.run(plan(world))
    assert (again.total.records, again.marked) == (1, 1)
    assert world.rows(world.table) == Counter(records)
    with pytest.raises(SettingsError, match="the replay 'r1' has ended"):
        plan(world, "r1")


def test_into_a_side_table_marks_nothing_and_all_may_fail_again(world, strict):
    store(world.dead, *sequence(range(30)))
    strict.fails = lambda data: data != b"4"
    done = world.run(plan(world, into=world.side))
    assert (done.is_complete, done.marked, done.total.dead_letters) == (True, None, 29)
    assert world.rows(world.side) == Counter([b"4"])
    assert letters(world) == Counter((b"%d" % n, False) for n in range(30))
    assert letters(world, f"{world.side}_dead_letters").total() == 29
    assert not world.rows(world.table)


def test_all_records_that_can_be_read_without_a_call_to_kinesis(world, monkeypatch):
    """Shards of two streams, an aggregate, large and binary data, and rows that are no records."""
    large = bytes(range(256)) * 4096
    aggregate = b"\xf3\x89\x9a\xc2" + large
    parts = [letter(1, sub, data=b"part-%d" % sub) for sub in range(7)]
    other = sequence(range(40, 52), shard_id="shardId-000000000001", stream="former")
    wrong = [letter("LATEST"), letter(4, data=None)]
    store(world.dead, *parts, letter(2, data=large), letter(3, data=aggregate), *wrong, *other)
    found, events = plan(world), []
    assert "21 dead letters in" in texts.plan(found)[1]
    assert "2 rows cannot be replayed" in texts.plan(found)[-1]
    assert world.replaying().shards(found) == {"orders": 1, "former": 1}
    monkeypatch.delattr(AwsClients, "kinesis")
    done = world.replaying().run(found, world.clock.signal(), events=events.append)
    assert (done.is_complete, done.total.records, done.marked) == (True, 21, 21)
    rows = DeltaTable(world.table).to_pyarrow_table().to_pylist()
    assert Counter(row["data"] for row in rows) == Counter(
        [one["data"] for one in (*parts, *other)] + [large, aggregate]
    )
    subs = {row["data"]: row["sub_sequence_number"] for row in rows}
    assert [subs[b"part-%d" % sub] for sub in range(7)] == list(range(7))
    assert {row["shard_id"] for row in rows} == {"shardId-000000000000", "shardId-000000000001"}
    (event,) = [one for one in events if isinstance(one, DeadLettersUnreadable)]
    assert (event.rows, event.table) == (2, world.dead)
    assert letters(world)[(b"LATEST/0", False)] == 1


def test_only_the_records_that_failed_in_a_time_range(world):
    hour = timedelta(hours=1)
    store(world.dead, *(letter(n, failed_at=NOON + n * hour) for n in range(4)))
    store(world.dead, letter(9, stream="other", failed_at=NOON + hour))
    where = {"in_place": True, "only_stream": "orders"}
    found = world.plan(None, NOON + hour, NOON + 3 * hour, dead_letters=True, **where)
    assert "2 dead letters of the stream orders in" in texts.plan(found)[1]
    assert "which failed from 2026-01-01T13:00:00.000+00:00 before 2026" in texts.plan(found)[1]
    assert texts.plan_as_dict(found)["dead_letters"]["records"] == 2
    every = texts.plan_as_dict(plan(world))
    assert (every["from"], every["to"], every["dead_letters"]["records"]) == (None, None, 5)


def test_no_dead_letters(world):
    done = world.run(plan(world))
    assert (done.is_complete, done.total.records, done.marked) == (True, 0, 0)
    store(world.dead, letter(1, replayed_at=NOON))
    assert plan(world).letters.records == 0


def test_rows_that_another_replay_has_marked_keep_their_mark(world):
    store(world.dead, *sequence(range(3)))
    found = plan(world)
    mark_replayed(world.dead, None, failed_before=NOON + timedelta(hours=1), replayed_at=NOON)
    done = world.run(found)
    assert (done.is_complete, done.total.records, done.marked) == (True, 3, 0)
    times = DeltaTable(world.dead).to_pyarrow_table()["replayed_at"].to_pylist()
    assert times == [NOON] * 3


def test_a_stopped_replay_is_not_complete_and_marks_nothing(world):
    store(world.dead, *sequence(range(3)))
    stop = world.clock.signal()
    stop.set()
    done = world.replaying().run(plan(world, "r1"), stop)
    assert (done.is_complete, done.reason, done.marked) == (False, StopReason.STOPPED, None)
    assert world.plan("r1").is_continued
    assert letters(world)[(b"0", False)] == 1


class KilledError(BaseException):
    """The process ends here."""


def test_a_run_that_was_killed_in_the_middle_is_continued(world, strict):
    """The transform ends the first run after some batches; aggregates are cut by them."""
    store(
        world.dead,
        *(letter(n, sub, data=b"%d-%d" % (n, sub)) for n in range(6) for sub in range(4)),
    )
    seen = []

    def dies(data):
        seen.append(data)
        if len(seen) > 12:
            raise KilledError
        return False

    strict.fails = dies
    with pytest.raises(KilledError):
        world.run(plan(world, "again"))
    middle = world.rows(world.table).total()
    assert 0 < middle < 24
    assert letters(world)[(b"0-0", True)] == 0
    store(world.dead, *sequence([99]))
    strict.fails = lambda _: False
    world.clock.advance(2)
    with pytest.raises(SettingsError, match="--into differs from the replay 'again'"):
        plan(world, "again", into=world.side)
    found = world.plan("again")
    assert (found.is_continued, found.letters.records) == (True, 24)
    done = world.run(found)
    assert (done.is_complete, done.total.records, done.marked) == (True, 24 - middle, 24)
    assert world.rows(world.table) == Counter(b"%d-%d" % (n, s) for n in range(6) for s in range(4))
    assert letters(world)[(b"99", False)] == 1


def test_a_lost_answer_of_the_mark_and_a_kill_after_it(world, monkeypatch):
    store(world.dead, *sequence(range(3)))
    execute, answers = TableMerger.execute, []

    def lands_and_fails(self):
        answers.append(execute(self))
        if len(answers) == 1:
            raise OSError("the answer was lost")
        if len(answers) == 2:
            raise KilledError
        return answers[-1]

    monkeypatch.setattr(TableMerger, "execute", lands_and_fails)
    with pytest.raises(KilledError):
        world.run(plan(world, "r1"))
    store(world.dead, *sequence([7]))
    done = world.run(world.plan("r1"))
    assert (done.is_complete, done.total.records, done.marked) == (True, 0, 3)
    assert [one["num_target_rows_updated"] for one in answers] == [3, 0, 0]
    times = DeltaTable(world.dead).to_pyarrow_table()["replayed_at"].to_pylist()
    assert len({one for one in times if one is not None}) == 1
    assert world.rows(world.table) == Counter([b"0", b"1", b"2"])


def test_a_process_that_begins_after_another_has_ended_the_replay_repeats_nothing(world):
    store(world.dead, *sequence(range(5)))
    found, names = plan(world, "r1"), world.table_names()
    assert world.run(found).is_complete
    again = world.run(found)
    assert (again.is_complete, again.total, again.marked) == (True, None, 0)
    assert world.rows(world.table) == Counter([b"%d" % n for n in range(5)])
    assert world.table_names() == names


def test_a_process_whose_tables_another_one_deletes_at_the_end_is_complete(world, monkeypatch):
    store(world.dead, *sequence(range(5)))
    found, ended = plan(world, "r1"), []
    build = KinesisPipeline.build_worker

    def build_late(*given, **named):
        worker = build(*given, **named)
        if not ended:
            ended.append(None)
            ended[0] = world.run(found)
        return worker

    monkeypatch.setattr(KinesisPipeline, "build_worker", build_late)
    late = world.run(found)
    assert [(one.is_complete, one.error) for one in (*ended, late)] == [(True, None)] * 2
    assert late.total is None
    assert world.rows(world.table) == Counter([b"%d" % n for n in range(5)])


def test_a_process_without_tables_reports_them_while_the_replay_has_not_ended(world, monkeypatch):
    store(world.dead, *sequence(range(5)))

    def missing(*_, **__):
        raise NotFoundError("the table is not there")

    monkeypatch.setattr(KinesisPipeline, "build_worker", missing)
    with pytest.raises(NotFoundError):
        world.run(plan(world, "r1"))


def test_two_processes_share_one_replay(world):
    store(
        world.dead,
        *(row for n in range(3) for row in sequence(range(20), shard_id=f"shardId-{n:012d}")),
    )
    found, results = plan(world, "r1"), []

    def run():
        results.append(world.run(found))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    if not any(done.is_complete for done in results):
        results.append(world.run(world.plan("r1")))
    assert world.rows(world.table) == Counter([b"%d" % n for n in range(20)] * 3)
    assert set(letters(world)) == {(b"%d" % n, True) for n in range(20)}


def test_wrong_options(world):
    with pytest.raises(SettingsError, match="the table is missing; write --into ADDRESS"):
        world.plan(dead_letters=True)
    with pytest.raises(SettingsError, match="is the table of the pipeline or of its dead"):
        plan(world, into=world.dead)
