"""Many streams: the work of a cycle grows with the leases, and not with leases times streams."""

from __future__ import annotations

from kcl_pipeline.leader.sync import LeaseMap
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import former_leases
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.kinesis.model import KinesisSettings
from tests.support.leader_world import World


def lease(stream, shard, **changes):
    return Lease(f"{stream}:s-{shard}", TRIM_HORIZON, stream=stream, **changes)


def test_a_lease_map_follows_every_change():
    leases = LeaseMap([lease("1:a:5", 0), lease("1:a:5", 1), lease("1:b:5", 0)])
    a, b = StreamId("a", "1", 5), StreamId("b", "1", 5)
    leases["1:a:5:s-1"] = lease("1:a:5", 1, owner="w")
    leases["1:b:5:s-7"] = lease("1:b:5", 7)
    del leases["1:a:5:s-0"]
    assert leases.of_stream(a) == [lease("1:a:5", 1, owner="w")]
    assert leases.of_stream(b) == [lease("1:b:5", 0), lease("1:b:5", 7)]
    assert leases.of_stream(StreamId("a", "1", 6)) == []
    assert set(leases) == {"1:a:5:s-1", "1:b:5:s-0", "1:b:5:s-7"}


def test_a_lease_map_keeps_former_streams_of_one_name_apart():
    leases = LeaseMap([Lease("s-0", TRIM_HORIZON, recreated_millis=4)])
    assert leases.of_stream(StreamId("a", recreated_millis=5)) == []
    leases["s-0"] = Lease("s-0", TRIM_HORIZON, recreated_millis=5)
    assert leases.of_stream(StreamId("a", recreated_millis=4)) == []
    assert leases.of_stream(StreamId("a", recreated_millis=5)) == [leases["s-0"]]


def test_former_leases_parse_each_stream_once(monkeypatch):
    parsed = []
    parse = StreamId.parse
    monkeypatch.setattr(StreamId, "parse", lambda text: parsed.append(text) or parse(text))
    rows = [lease(f"1:a{stream}:5", shard) for stream in range(20) for shard in range(10)]
    rows.append(lease("1:a3:4", 0))
    found = former_leases(rows, [StreamId(f"a{stream}", "1", 5) for stream in range(20)])
    assert [deletion.lease.lease_key for deletion in found] == ["1:a3:4:s-0"]
    assert len(parsed) == 21


def test_2200_streams_are_recorded_read_and_led():
    names = tuple(f"events-of-tenant-{number:04}" for number in range(2_200))
    world = World(shards=1, streams=names, kinesis=KinesisSettings(shard_limit=len(names)))
    world.join("a")
    first = world.leader().run_once()
    assert (first.error, len(first.created)) == (None, len(names))
    record = world.coordinator.read_application()
    assert [stream.name for stream in record.identity.streams] == list(names)
    world.clock.advance(60)
    again = world.leader("next").run_once()
    assert not again.led
    world.clock.advance(60)
    again = world.leaders["next"].run_once()
    assert (again.led, again.error, again.created, again.deleted) == (True, None, (), ())
    assert len(again.leases) == len(again.coverage) == len(names)
