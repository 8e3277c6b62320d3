"""A replay of a time range: each record of the range lands exactly once more (embedded AWS)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest

from kcl_pipeline import DeltaSink, ForeachArrowSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.control import replay
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.control.operations import ReplayRequest
from kcl_pipeline.control.replay import RangeReplay
from kcl_pipeline.errors import NotFoundError, SettingsError
from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import fresh_name
from tests.support.replay_world import FAST, ReplayWorld, only_data

HOUR = 3600.0
BEFORE, INSIDE, AFTER = (
    [b"%s-%d" % (group, n) for n in range(20)] for group in (b"before", b"inside", b"after")
)
MILLI = timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def server():
    with EmbeddedAws() as aws:
        aws.warm_up()
        yield aws


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch):
    monkeypatch.setattr(replay, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def world(server, tmp_path):
    return ReplayWorld(server, tmp_path, fresh_name("replay"))


def put_three_groups(world):
    """Put three groups of records an hour apart. Returns the time range of the second."""
    world.put(*BEFORE)
    world.clock.advance(HOUR)
    world.put(*INSIDE)
    world.clock.advance(HOUR)
    world.put(*AFTER)
    arrivals = world.arrivals(INSIDE)
    return min(arrivals), max(arrivals)


def lease_rows(world):
    return {one.lease_key: one for one in world.tables.lease.list_leases().leases}


def test_a_range_lands_once_in_a_side_table_and_the_main_application_is_untouched(world):
    first, last = put_three_groups(world)
    world.drain()
    rows, names = lease_rows(world), world.table_names()
    done = world.run(world.plan("r1", first, last + MILLI, into=world.side))
    assert (done.is_complete, done.error, done.records) == (True, None, 20)
    assert world.rows(world.side) == Counter(INSIDE)
    assert world.rows(world.table) == Counter([*BEFORE, *INSIDE, *AFTER])
    assert lease_rows(world) == rows
    assert world.table_names() == names, "the tables of the replay are deleted"


def test_the_begin_is_inclusive_and_the_end_exclusive(world):
    world.put(b"one")
    world.clock.advance(1)
    world.put(b"two")
    world.clock.advance(1)
    world.put(b"three")
    one, two, three = world.arrivals([b"one", b"two", b"three"])
    for begin, end, expected in (
        (one, three, [b"one", b"two"]),
        (one + MILLI, three + MILLI, [b"two", b"three"]),
        (two, two + MILLI, [b"two"]),
    ):
        side = f"{world.side}-{len(expected)}-{expected[0].decode()}"
        assert world.run(world.plan(None, begin, end, into=side)).is_complete
        assert world.rows(side) == Counter(expected)


def test_in_place_repeats_the_rows_while_a_worker_of_the_pipeline_goes_on(world):
    first, last = put_three_groups(world)
    stop = world.clock.signal()
    worker = world.pipeline.build_worker(
        "w-1", clients=world.clients(world.pipeline.settings), clock=world.clock
    )
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        done = world.run(world.plan(None, first, last + MILLI, in_place=True))
    finally:
        stop.set()
        thread.join(60)
    assert done.is_complete
    world.put(b"late")
    world.drain()
    assert world.rows(world.table) == Counter([*BEFORE, *INSIDE, *INSIDE, *AFTER, b"late"])


def test_without_an_end_the_range_ends_when_the_replay_was_planned(world):
    world.put(*BEFORE)
    world.clock.advance(HOUR)
    plan = world.plan(None, world.now() - timedelta(hours=2), into=world.side)
    world.clock.advance(1)
    world.put(*AFTER)
    assert world.run(plan).is_complete
    assert world.rows(world.side) == Counter(BEFORE)


def test_shards_that_were_merged_and_split_after_the_range(world):
    """One parent of the merge has records after the range, the other has none."""
    keys = ("0", str(2**127))
    world.put(*INSIDE[:10], hash_key=keys[0])
    world.put(*INSIDE[10:], hash_key=keys[1])
    arrivals = world.arrivals(INSIDE)
    first, last = min(arrivals), max(arrivals)
    world.clock.advance(HOUR)
    world.put(*AFTER, hash_key=keys[0])
    one, two = (s["ShardId"] for s in world.kinesis.list_shards(StreamName=world.name)["Shards"])
    world.kinesis.merge_shards(StreamName=world.name, ShardToMerge=one, AdjacentShardToMerge=two)
    world.put(b"child")
    child = world.kinesis.list_shards(StreamName=world.name)["Shards"][-1]["ShardId"]
    world.kinesis.split_shard(StreamName=world.name, ShardToSplit=child, NewStartingHashKey=keys[1])
    world.clock.advance(HOUR)
    grandchildren = [b"grandchild-%d" % n for n in range(10)]
    world.put(*grandchildren)
    assert world.run(world.plan("r1", first, last + MILLI, into=world.side)).is_complete
    assert world.rows(world.side) == Counter(INSIDE)
    done = world.run(world.plan("r2", last + MILLI, into=f"{world.side}-2"))
    assert done.is_complete
    assert world.rows(f"{world.side}-2") == Counter([*AFTER, b"child", *grandchildren])


KILLED = """
import sys
from tests.control.test_replay import killed_run
killed_run(*sys.argv[1:])
"""


CALLS = itertools.count(1)


def dying(records):
    """Kill this process at the third batch."""
    if next(CALLS) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return only_data(records)


def killed_run(endpoint, table, side, name, begin, end):
    """Begin a replay in this process, which is killed in the middle."""
    options = SessionOptions(
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )
    pipeline = KinesisPipeline(
        name=name,
        streams=[name],
        transform_arrow=dying,
        sink=DeltaSink(table),
        settings_overrides={**FAST, "batch": {"max_batch_records": 5}},
    )
    clock = SystemClock()
    replay.SETTLE_SECONDS = 0.0
    settings = pipeline.settings
    tables = open_tables(settings, AwsClients(settings, options), clock)
    app = ApplicationControl(
        settings, tables.lease, tables.workers, tables.coordinator, clock, "ann"
    )
    context = OperationContext(lambda: app, lambda found: AwsClients(found, options), pipeline)
    replaying = RangeReplay(context)
    where = {"in_place": True} if side == "-" else {"into": side}
    replaying.run(
        replaying.plan(ReplayRequest(replay_id="again", from_time=begin, to_time=end, **where))
    )


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_replay_is_continued_with_its_id_and_nothing_lands_twice(tmp_path, in_place):
    """Kinesis has the real time here, because the killed process has no other."""
    with EmbeddedAws() as aws:
        world = ReplayWorld(aws, tmp_path, fresh_name("killed"), batch={"max_batch_records": 5})
        records = [b"r-%d" % n for n in range(60)]
        world.put(*records)
        world.drain()
        times = min(world.arrivals(records)) - timedelta(seconds=1), world.now()
        target = world.table if in_place else world.side
        began = world.rows(target)
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                KILLED,
                aws.endpoint_url,
                world.table,
                "-" if in_place else world.side,
                world.name,
                *(one.isoformat() for one in times),
            ],
            check=False,
            timeout=120,
        )
        assert ended.returncode == -signal.SIGKILL
        middle = world.rows(target)
        assert 0 < (middle - began).total() < 60
        with pytest.raises(SettingsError, match="differs from the replay 'again'"):
            world.plan("again", times[0] + MILLI, times[1])
        world.put(b"new")
        plan = world.plan("again")
        assert plan.is_continued
        done = world.run(plan)
        assert done.is_complete
        assert done.records == 60 - (middle - began).total()
        assert world.rows(target) == began + Counter(records)
        where = {"in_place": True} if in_place else {"into": target}
        with pytest.raises(SettingsError, match="the replay 'again' has ended"):
            world.plan("again", *times, **where)


@pytest.mark.parametrize(("step", "call"), [("position_sink", 2), ("delete_tables", 1)])
def test_a_run_that_was_killed_before_the_deletion_only_deletes(world, monkeypatch, step, call):
    """Once the record says that the replay is complete, also before the sink says so."""
    first, last = put_three_groups(world)
    plan = world.plan("r1", first, last + MILLI, into=world.side)
    original, left = getattr(replay, step), [call]

    def killed(*given):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(replay, step, killed)
        with pytest.raises(KeyboardInterrupt):
            world.run(plan)
    assert len(world.table_names()) == 3
    done = world.run(world.plan("r1"))
    assert (done.is_complete, done.records) == (True, 0)
    assert world.rows(world.side) == Counter(INSIDE)
    assert not world.table_names()


def test_a_function_gets_a_range_once_if_a_run_is_killed_between_two_deletions(world, monkeypatch):
    """A function stores no end of the replay. The row that does is deleted last."""
    first, last = put_three_groups(world)
    given = []
    sink = ForeachArrowSink(lambda rows, _identity: given.extend(rows["data"].to_pylist()))
    world.pipeline = replace(world.pipeline, sink=sink)
    delete_tables = replay.delete_tables

    def killed(clients, names):
        delete_tables(clients, names[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(replay, "delete_tables", killed)
        with pytest.raises(KeyboardInterrupt):
            world.run(world.plan("r1", first, last + MILLI, in_place=True))
    assert len(world.table_names()) == 2
    assert world.run(world.plan("r1")).is_complete
    assert Counter(given) == Counter(INSIDE)
    assert not world.table_names()


def test_a_process_that_begins_after_another_has_ended_the_replay_repeats_nothing(world):
    first, last = put_three_groups(world)
    plan = world.plan("r1", first, last + MILLI, into=world.side)
    names = world.table_names()
    assert world.run(plan).is_complete
    again = world.run(plan)
    assert (again.is_complete, again.records) == (True, 0)
    assert world.rows(world.side) == Counter(INSIDE)
    assert world.table_names() == names


def test_a_process_whose_tables_another_one_deletes_at_the_end_is_complete(world, monkeypatch):
    first, last = put_three_groups(world)
    plan, ended = world.plan("r1", first, last + MILLI, into=world.side), []
    build = KinesisPipeline.build_worker

    def build_late(*given, **named):
        worker = build(*given, **named)
        if not ended:
            ended.append(None)
            ended[0] = world.run(plan)
        return worker

    monkeypatch.setattr(KinesisPipeline, "build_worker", build_late)
    late = world.run(plan)
    assert [(done.is_complete, done.error) for done in (*ended, late)] == [(True, None)] * 2
    assert late.records == 0
    assert world.rows(world.side) == Counter(INSIDE)


def test_a_process_without_tables_reports_them_while_the_replay_has_not_ended(world, monkeypatch):
    first, last = put_three_groups(world)

    def missing(*_, **__):
        raise NotFoundError("the table is not there")

    monkeypatch.setattr(KinesisPipeline, "build_worker", missing)
    with pytest.raises(NotFoundError):
        world.run(world.plan("r1", first, last + MILLI, into=world.side))


def test_a_stopped_replay_is_not_complete(world):
    first, last = put_three_groups(world)
    plan = world.plan("r1", first, last + MILLI, into=world.side)
    stop = world.clock.signal()
    stop.set()
    done = world.replaying(stop).run(plan)
    assert (done.is_complete, done.error) == (False, "it was stopped")
    assert world.run(world.plan("r1")).is_complete
    assert world.rows(world.side) == Counter(INSIDE)


def test_a_side_table_is_another_table(world):
    begin = world.now() - timedelta(hours=1)
    for address in (world.table, f"{world.table}_dead_letters"):
        with pytest.raises(SettingsError, match="is the table of the pipeline or of its dead"):
            world.plan(None, begin, into=address)
    with pytest.raises(SettingsError, match="reads no stream other"):
        world.plan(None, begin, into=world.side, only_stream="other")


def test_a_dry_run_writes_nothing(world):
    first, last = put_three_groups(world)
    plan = world.plan(None, first, last + MILLI, into=world.side)
    assert world.replaying().with_shards(plan).shards == {world.name: 2}
    assert not world.table_names()
    assert not world.rows(world.side)
