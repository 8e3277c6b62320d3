"""Menu 4 of the simulation: streams that come, go and return, two accounts, reads that hang."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from kcl_pipeline.batch import DataFile
from kcl_pipeline.leader import sync
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.stream import HOUR_MILLIS
from kcl_pipeline.testing.sink import LogEntry
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from verification.simulation import simulate
from verification.simulation.checks.leases import BrokenInvariantError
from verification.simulation.checks.sink import Checks
from verification.simulation.environment.calls import TABLE_READS, Fault
from verification.simulation.environment.streams import OTHER_ACCOUNT, OWN_ACCOUNT, Streams, arn_of
from verification.simulation.environment.traffic import EVENT_SCHEMA, Published
from verification.simulation.incidents.choices import INCIDENTS
from verification.simulation.incidents.storm import Storm, StormOptions
from verification.simulation.incidents.streams import HANGING, NEW_STREAM
from verification.simulation.run import unsettled
from verification.simulation.scenario import NEED_SEVERAL, Scenario, scenario_of
from verification.simulation.world import World

SHARD = "shardId-000000000000"
NAMESAKE = arn_of(OTHER_ACCOUNT, "events")


def streams_of(*refs):
    clock = VirtualClock()
    streams = Streams(clock, is_multi=len(refs) > 1)
    for ref in refs:
        streams.create(ref, 1)
    return streams, clock


def test_streams_of_one_name_differ_by_account_and_by_creation():
    streams, clock = streams_of("events", NAMESAKE)
    own = streams.current["events"]
    streams.delete("events")
    assert not streams.exists(own)
    assert not streams.is_replaced(own)
    clock.advance(2)
    again = streams.create("events", 2)
    assert streams.is_replaced(own)
    names = [one.lease_name(SHARD) for one in streams.all]
    assert len(set(names)) == 3
    assert [streams.of_name(name) for name in names] == streams.all
    assert [one.label for one in streams.all] == ["events", f"{OTHER_ACCOUNT}.events", "events.2"]
    assert again.has_column("events")
    assert again.has_column(arn_of(OWN_ACCOUNT, "events"))
    assert not streams.current[NAMESAKE].has_column("events")


def test_a_single_stream_that_returns_has_the_lease_keys_of_the_former_one():
    streams, clock = streams_of("events")
    streams.delete("events")
    clock.advance(2)
    again = streams.create("events", 1)
    first = streams.all[0]
    assert first.lease_key(SHARD) == again.lease_key(SHARD) == SHARD
    assert first.lease_name(SHARD) != again.lease_name(SHARD)
    row = Lease(SHARD, TRIM_HORIZON, recreated_millis=again.recreated_millis)
    assert streams.of(row) is again
    assert row.unique_key == again.lease_name(SHARD)
    assert streams.of(row.with_(recreated_millis=1)) is None


class Committed:
    """One event of a single stream, and a commit of it."""

    def __init__(self):
        self.streams, self.clock = streams_of("events")
        self.table = InMemoryLeaseTable(clock=self.clock)
        self.checks = Checks(self.table, self.streams, Scenario(), self.clock.monotonic)
        self.checks.published("event", Published(SHARD, Position("7"), 0, poison=False))

    def land(self, *, under=SHARD, number="7"):
        stream = self.streams.all[0].stream
        key = f"app/{stream.arn}/{stream.created_millis // 1000}/{under}"
        rows = pa.table([["event"], ["k"], [0], [SHARD], [number], [0]], schema=EVENT_SCHEMA)
        entry = LogEntry(0, (DataFile("file", 1, 1),), {key: StoredPosition(1, Position(number))})
        self.checks.landed(entry, {"file": rows})

    def write(self, lease):
        create_lease(self.table, lease)
        self.checks.row_written(lease.lease_key, "leader", "sensor")

    def replace(self):
        gone = self.streams.delete("events")
        self.checks.deleted(gone)
        self.clock.advance(2)
        return self.streams.create("events", 1)


def test_a_row_has_the_position_of_its_event_and_the_lease_that_committed_it():
    Committed().land()
    with pytest.raises(BrokenInvariantError, match="S15: event of"):
        Committed().land(number="8")
    with pytest.raises(BrokenInvariantError, match="S15: event of"):
        Committed().land(under="shardId-000000000005")


def test_only_records_of_a_deleted_stream_may_be_missing():
    world = Committed()
    assert world.checks.missing() == {"event"}
    again = world.replace()
    assert world.checks.missing() == set()
    name = again.lease_name(SHARD)
    world.checks.published("later", Published(name, Position("7"), 0, poison=False))
    assert world.checks.missing() == {"later"}


def test_a_lease_is_of_a_stream_that_existed_and_replaces_no_other():
    world = Committed()
    with pytest.raises(BrokenInvariantError, match=r"S15: .* is of a stream that never existed"):
        world.write(Lease(SHARD, TRIM_HORIZON, recreated_millis=5))
    world = Committed()
    world.write(Lease(SHARD, TRIM_HORIZON))
    again = world.replace()
    world.table.erase(SHARD)
    with pytest.raises(BrokenInvariantError, match=r"S15: .* was written over"):
        world.write(Lease(SHARD, TRIM_HORIZON, recreated_millis=again.recreated_millis))


def test_an_unfinished_lease_may_be_deleted_only_with_its_stream():
    world = Committed()
    world.write(Lease(SHARD, TRIM_HORIZON))
    world.table.erase(SHARD)
    with pytest.raises(BrokenInvariantError, match="S8"):
        world.checks.row_written(SHARD, "leader", "sensor")
    world.replace()
    world.checks.row_written(SHARD, "leader", "sensor")


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_an_unfinished_lease_of_a_shard_that_left_its_stream_is_deleted_after_its_report(
    is_trimmed,
):
    """Seed 4216960159: a seek created the row, and the shard was trimmed before it was read."""
    world = Committed()
    stream = world.streams.all[0].stream
    world.write(Lease(SHARD, TRIM_HORIZON))
    world.table.erase(SHARD)
    if is_trimmed:
        model = world.streams.model_of("events")
        middle = str(2**127)
        model.call("SplitShard", StreamName="events", ShardToSplit=SHARD, NewStartingHashKey=middle)
        world.clock.advance(60)
        world.streams.settled(world.streams.all[0])
        stream.settle(model.world.now_millis() + (stream.retention_hours + 1) * HOUR_MILLIS)
        assert stream.shard(SHARD) is None
        with pytest.raises(BrokenInvariantError, match="S8"):
            world.checks.row_written(SHARD, "worker", "w1")
    world.checks.not_listed(SHARD)
    if is_trimmed:
        world.checks.row_written(SHARD, "worker", "w1")
    else:
        with pytest.raises(BrokenInvariantError, match="S8"):
            world.checks.row_written(SHARD, "worker", "w1")


def storm_of(name):
    """A storm of a seed that is steered to an incident, with the streams events and orders."""
    first = INCIDENTS.index(name if name in NEED_SEVERAL else "stream_comes")
    seeds = range(first, 100 * len(INCIDENTS), len(INCIDENTS))
    seed = next(seed for seed in seeds if scenario_of(seed).streams == ("events", "orders"))
    world = World(seed, scenario_of(seed))
    storm = Storm(world, StormOptions())
    storm.begin()
    world.scheduler.run(seconds=3.0)
    return world, storm


@pytest.mark.parametrize(
    ("name", "comes"),
    [
        ("stream_comes", {NEW_STREAM}),
        ("namesake_comes", {NAMESAKE, arn_of(OTHER_ACCOUNT, "orders")}),
    ],
)
def test_a_stream_comes_with_a_worker_that_names_it_beside_others_that_do_not(name, comes):
    world, storm = storm_of(name)
    before = world.configured
    storm.strike(name)
    (new,) = set(world.configured) - set(before)
    assert new in comes
    assert {m.configured for m in world.machines.values()} == {before, world.configured}
    world.scheduler.close()


def test_a_stream_that_is_gone_for_good_has_to_be_reported():
    world, storm = storm_of("stream_goes")
    storm.strike("stream_goes")
    assert len(world.streams.current) == 1
    assert not world.returning
    (gone,) = set(world.configured) - set(world.streams.current)
    silent = f"L8: nothing says that {world.streams.arn_of(gone)} is missing"
    world.scheduler.run(lambda: unsettled(world) == [silent], seconds=1.0)
    world.unavailable.clear()
    world.scheduler.run(seconds=20.0)
    assert world.streams.arn_of(gone) in world.unavailable
    world.scheduler.close()


def test_a_stream_returns_at_the_latest_when_the_storm_ends():
    world, storm = storm_of("stream_returns")
    storm.strike("stream_returns")
    assert len(world.returning) == 1
    storm.calm()
    assert set(world.streams.current) == set(world.configured)
    assert len(world.streams.all) == 3
    world.scheduler.close()


def test_a_leader_that_keeps_the_leases_of_former_streams_is_found(monkeypatch):
    monkeypatch.setattr(sync, "former_leases", lambda *_: ())
    monkeypatch.setattr(Storm, "_plan", lambda _storm: [(5.0, "stream_returns")])
    seed = next(seed for seed in range(100) if len(scenario_of(seed).streams) > 1)
    found = simulate(seed, StormOptions(call_fault_chance=0.0, steer=False)).violations
    assert [text.partition("[")[0] for text in found] == ["30 s after the storm: L8: the leases "]


def test_half_of_all_reads_are_throttled_and_renewals_scans_and_pages_hang():
    world, storm = storm_of("throttled_reads")
    before = Counter(world.weather.counts)
    storm.strike("throttled_reads")
    for _ in range(6):
        storm.strike("hung_calls")
        world.scheduler.run(seconds=2.5)
    counts = world.weather.counts - before
    throttled = {site for site, fault in counts if fault is Fault.THROTTLED}
    assert {"leases.Scan", "leases.Query", "coordinator.GetItem"} <= throttled <= TABLE_READS
    hung = {site for site, fault in counts if fault is Fault.HUNG}
    assert hung
    assert hung <= {site for kind in HANGING for site in kind}
    storm.calm()
    assert not world.weather.throttled_sites
    assert not world.weather.hanging
    world.scheduler.close()
