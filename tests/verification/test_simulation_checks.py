"""The invariants of the simulation: what an at-least-once sink may do, and nothing more."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from kcl_pipeline.batch import DataFile
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    Position,
    StoredPosition,
)
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.sink import LogEntry
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from verification.simulation import simulate
from verification.simulation.checks.leader import LockWatch
from verification.simulation.checks.leases import BrokenInvariantError, Moved
from verification.simulation.checks.rehearsal import back_and_forth
from verification.simulation.checks.sink import Checks
from verification.simulation.environment.sinks import CheckedTable
from verification.simulation.environment.streams import Streams
from verification.simulation.environment.traffic import EVENT_SCHEMA, Published
from verification.simulation.scenario import BEGIN_MILLIS, Scenario

KEY = "shardId-000000000000"


def one_stream(shards):
    streams = Streams(VirtualClock(), is_multi=False)
    streams.create("events", shards)
    return streams


class World:
    """One shard of one key, and a sink whose rows the test lands."""

    def __init__(self, begin, *, exactly_once=False):
        clock = VirtualClock()
        streams = one_stream(1)
        created = streams.all[0].stream.created_millis // 1000
        self.key = f"app/{streams.all[0].stream.arn}/{created}/{KEY}"
        self.leases = InMemoryLeaseTable(clock=clock)
        scenario = Scenario(
            initial_position="LATEST" if begin == LATEST else "TRIM_HORIZON",
            exactly_once=exactly_once,
        )
        self.checks = Checks(self.leases, streams, scenario, clock.monotonic)
        create_lease(self.leases, Lease(KEY, begin))
        self.checks.row_written(KEY, "leader", "sensor")
        for number in range(10):
            event = Published(KEY, Position(str(1000 + number)), 0, poison=False)
            self.checks.published(f"event-{number}", event)
        self.assign("w1")

    def assign(self, worker_id):
        """A leader gives the lease to a worker."""
        self.leases.assign(self.leases.get(KEY), worker_id)
        self.checks.row_written(KEY, "leader", "sensor")

    def release(self, worker_id):
        """The worker gives it back in good order."""
        self.leases.evict(self.leases.get(KEY))
        self.checks.row_written(KEY, "worker", worker_id)

    def checkpoint(self, worker_id, number):
        row = self.leases.get(KEY)
        self.leases.update_checkpoint(row, checkpoint=Position(str(1000 + number)))
        self.checks.row_written(KEY, "worker", worker_id)

    def begin(self):
        """A worker begins to write."""
        return self.checks.begins([KEY])

    def entry(self, version, *numbers, objects):
        """Return an entry with these rows; its file is in `objects`."""
        rows = [(f"event-{n}", "key", n, KEY, str(1000 + n), 0) for n in numbers]
        columns = list(zip(*rows, strict=True))
        path = f"file-{len(objects)}"
        objects[path] = pa.table([pa.array(c) for c in columns], schema=EVENT_SCHEMA)
        stored = StoredPosition(version + 1, Position(str(1000 + numbers[-1])))
        return LogEntry(version, (DataFile(path, len(rows), 1),), {self.key: stored})

    def land(self, *numbers, begun=None):
        """The rows of a batch are in the sink; its writer began at `begun`, or just now."""
        objects = {}
        entry = self.entry(0, *numbers, objects=objects)
        with self.checks.begun_at(begun or self.begin()):
            self.checks.landed(entry, objects)


def test_a_paused_writer_may_repeat_what_the_next_owner_wrote_while_it_was_paused():
    """Seed 9006772. The lease came back to the paused worker, so the row does not tell."""
    world = World(TRIM_HORIZON)
    paused = world.begin()
    world.assign("w2")
    world.land(0, 1)
    world.release("w2")
    world.assign("w1")
    world.land(0, 1, begun=paused)


def test_a_writer_that_was_not_paused_may_not_repeat():
    world = World(TRIM_HORIZON)
    world.assign("w2")
    world.land(0, 1)
    world.release("w2")
    world.assign("w1")
    with pytest.raises(BrokenInvariantError, match=r"S4: event-0 .* nothing excuses it"):
        world.land(0, 1)


def test_a_paused_writer_that_keeps_its_lease_may_not_repeat():
    world = World(TRIM_HORIZON)
    paused = world.begin()
    world.land(0, 1)
    with pytest.raises(BrokenInvariantError, match=r"S4: event-0 .* nothing excuses it"):
        world.land(0, 1, begun=paused)


def test_a_paused_writer_may_not_repeat_what_landed_before_it_began():
    world = World(TRIM_HORIZON)
    world.assign("w2")
    world.land(0)
    paused = world.begin()
    world.assign("w1")
    world.land(1, begun=world.begin())
    world.checks._excused_at["event-0"] = world.checks._excuses[KEY]
    with pytest.raises(BrokenInvariantError, match=r"S4: event-0 .* nothing excuses it"):
        world.land(0, begun=paused)


def test_an_exactly_once_sink_never_repeats():
    world = World(TRIM_HORIZON, exactly_once=True)
    paused = world.begin()
    world.assign("w2")
    world.land(0, 1)
    with pytest.raises(BrokenInvariantError, match=r"S4: event-0 .* is in the table twice$"):
        world.land(0, 1, begun=paused)


def test_rows_that_a_restore_removed_are_read_again_when_an_older_copy_is_put_back():
    world = World(TRIM_HORIZON, exactly_once=True)
    table = CheckedTable(world.checks)
    table.append(LogEntry(0))
    copy = table.copy()
    for version, numbers in ((1, (0, 1)), (2, (2,))):
        table.append(world.entry(version, *numbers, objects=table.objects))
    assert table.restore(1)
    assert table.restore(3)
    assert table.put_back(copy)
    table.append(world.entry(1, 0, 1, 2, objects=table.objects))
    with pytest.raises(BrokenInvariantError, match=r"S4: event-0 .* is in the table twice$"):
        table.append(world.entry(2, 0, objects=table.objects))


@pytest.mark.parametrize("is_sought", [True, False])
def test_a_finished_parent_is_deleted_before_its_child_has_begun_only_beside_a_seek(is_sought):
    """Seed 7435310489: the deletion was decided before, and the seek creates the row again."""
    clock = VirtualClock()
    streams = one_stream(1)
    scenario = Scenario(initial_position="TRIM_HORIZON", exactly_once=True)
    leases = InMemoryLeaseTable(clock=clock)
    checks = Checks(leases, streams, scenario, clock.monotonic)
    child = "shardId-000000000001"
    create_lease(leases, Lease(KEY, SHARD_END, child_shard_ids=frozenset({child})))
    checks.row_written(KEY, "leader", "sensor")
    create_lease(leases, Lease(child, TRIM_HORIZON, parent_shard_ids=frozenset({KEY})))
    checks.row_written(child, "leader", "sensor")
    if is_sought:
        checks.row_written(child, "operator", "")
    leases.erase(KEY)
    if is_sought:
        checks.row_written(KEY, "leader", "sensor")
    else:
        with pytest.raises(BrokenInvariantError, match=r"S8: .* before its child .* had begun"):
            checks.row_written(KEY, "leader", "sensor")


def overtaken(begin, **scenario):
    """The first batch of a paused worker lands behind that of the next owner."""
    world = World(begin, **scenario)
    paused = world.begin()
    world.assign("w2")
    world.land(5)
    world.checkpoint("w2", 5)
    return world, paused


def test_at_latest_the_first_batch_of_a_paused_writer_may_come_behind_the_next_owners():
    world, paused = overtaken(LATEST)
    world.land(2, 3, begun=paused)


def test_so_may_a_batch_whose_records_have_left_retention_since():
    world, paused = overtaken(TRIM_HORIZON)
    world.checks.trimmed(1)
    world.land(2, 3, begun=paused)


@pytest.mark.parametrize(
    ("begin", "scenario"),
    [(TRIM_HORIZON, {}), (LATEST, {"exactly_once": True})],
)
def test_elsewhere_it_may_not(begin, scenario):
    world, paused = overtaken(begin, **scenario)
    with pytest.raises(BrokenInvariantError, match=r"S5: event-2 .* after number 5"):
        world.land(2, 3, begun=paused)


def test_nor_by_a_writer_that_was_not_paused():
    world, paused = overtaken(LATEST)
    with pytest.raises(BrokenInvariantError, match=r"S5: event-2 .* after number 5"):
        world.land(2, begun=replace(paused, landings=1))


def test_nor_behind_the_first_checkpoint():
    world, paused = overtaken(LATEST)
    world.land(9)
    with pytest.raises(BrokenInvariantError, match=r"S5: event-7 .* after number 9"):
        world.land(7, begun=paused)


def test_a_lease_goes_back_and_forth_when_it_moves_again_under_a_steady_load():
    moves = [
        Moved(1.0, "a", "w1", "w2"),
        Moved(2.0, "b", "w1", None),
        Moved(13.0, "a", "w2", "w1"),
        Moved(14.0, "c", "w1", "w2"),
    ]
    assert back_and_forth(moves, 2, ()) == [moves[2]]
    assert back_and_forth(moves, 1, ()) == [moves[2]]
    assert back_and_forth(moves, 0, ()) == []


def test_a_worker_id_that_two_processes_use_has_no_steady_load():
    """Seed 7000325: each process refuses what the other has prepared, and reads it again."""
    moves = [Moved(1.0, "a", "w1", "shared"), Moved(13.0, "a", "shared", "w1")]
    assert back_and_forth(moves, 1, ("shared",)) == []
    assert back_and_forth([*moves, Moved(14.0, "a", "w1", "w2")], 1, ("shared",)) != []
    assert back_and_forth([moves[0], Moved(13.0, "a", "w1", "shared")], 1, ("shared",)) == []
    assert back_and_forth(moves, 1, ("other",)) == [moves[1]]


CHILD = "shardId-000000000009"


class Family:
    """A parent whose lease a paused leader created after that of its child."""

    def __init__(self, begin, *, parent_first=False):
        self.world = world = World(begin)
        world.leases.delete(world.leases.get(KEY))
        world.checks = Checks(
            world.leases,
            one_stream(1),
            Scenario(initial_position=begin.sequence_number),
            lambda: 0.0,
        )
        parent, child = Lease(KEY, begin), Lease(CHILD, begin, parent_shard_ids=frozenset({KEY}))
        for lease in (parent, child) if parent_first else (child, parent):
            create_lease(world.leases, lease)
            world.checks.row_written(lease.lease_key, "leader", "sensor")

    def publish(self, lease_key, millis):
        event = Published(lease_key, Position("1000"), millis, poison=False)
        self.world.checks.published(f"event-of-{lease_key}", event)

    def land_child(self):
        self.world.checks._parents_ended(CHILD)


def test_a_parent_that_comes_late_and_has_nothing_to_read_excuses_its_child():
    """Seed 134900059: a leader slept in its first shard sync; the shard was merged."""
    family = Family(AT_TIMESTAMP)
    family.publish(KEY, BEGIN_MILLIS - 1)
    family.publish(CHILD, BEGIN_MILLIS)
    family.land_child()
    Family(LATEST).land_child()


@pytest.mark.parametrize("begin", [TRIM_HORIZON, AT_TIMESTAMP])
def test_a_parent_that_comes_late_and_has_records_excuses_nothing(begin):
    family = Family(begin)
    family.publish(KEY, BEGIN_MILLIS)
    with pytest.raises(BrokenInvariantError, match=r"S5: .* before its parent"):
        family.land_child()


@pytest.mark.parametrize("begin", [TRIM_HORIZON, AT_TIMESTAMP])
def test_a_parent_that_comes_first_excuses_nothing(begin):
    with pytest.raises(BrokenInvariantError, match=r"S5: .* before its parent"):
        Family(begin, parent_first=True).land_child()


def missing_of_a_shard_between(late_parent):
    """Shards 0 and 1 are merged into 2, which is split; 0 gets a lease, and so do the ends."""
    streams = one_stream(2)
    model = streams.model
    shards = [f"shardId-{number:012d}" for number in range(5)]
    model.call(
        "MergeShards", StreamName="events", ShardToMerge=shards[0], AdjacentShardToMerge=shards[1]
    )
    model.call(
        "SplitShard", StreamName="events", ShardToSplit=shards[2], NewStartingHashKey=str(2**127)
    )
    checks = Checks(
        InMemoryLeaseTable(),
        streams,
        Scenario(initial_position="LATEST"),
        lambda: 0.0,
    )
    ends = shards[3:]
    for key in (*ends, shards[0]) if late_parent else (shards[0], *ends):
        create_lease(checks.table, Lease(key, LATEST))
        checks.row_written(key, "leader", "sensor")
    event = Published(shards[2], Position("1000"), 1, poison=False)
    checks.published("event", event)
    return checks.missing()


def test_a_shard_that_was_passed_over_is_not_read_because_a_parent_comes_late():
    """A leader slept in its first shard sync at LATEST."""
    assert missing_of_a_shard_between(late_parent=True) == set()
    assert missing_of_a_shard_between(late_parent=False) == {"event"}


@pytest.mark.parametrize(
    ("error", "is_missing"), [("ValueError: the transform is broken", False), ("other", True)]
)
def test_only_a_broken_transform_sets_aside_what_it_could_take(error, is_missing):
    world = World(TRIM_HORIZON)
    letter = {"lease_key": KEY, "sequence_number": "1001", "sub_sequence_number": 0}
    world.checks.dead_lettered(
        pa.Table.from_pylist([{**letter, "data": b"event-1|k|0", "error": error}])
    )
    assert ("event-1" in world.checks.missing()) == is_missing


def test_a_dry_run_that_writes_is_found():
    world = World(TRIM_HORIZON)
    with pytest.raises(BrokenInvariantError, match=f"S14: a dry run wrote {KEY}"):
        world.checks.row_written(KEY, "reader", "w")


def test_no_process_draws_a_lock_version_again(monkeypatch):
    """A restarted leader that draws the versions of the one before looks like a silent leader.

    Another candidate then takes its lock.
    """
    versions = []
    look = LockWatch.look

    def noting(self):
        look(self)
        lock = self._seen
        if lock is not None and lock.version not in versions[-1:]:
            versions.append(lock.version)

    monkeypatch.setattr(LockWatch, "look", noting)
    assert simulate(30).violations == ()
    assert len(versions) > 20
    assert len(set(versions)) == len(versions)
