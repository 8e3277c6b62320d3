"""Each stream begins at its own position, also when another worker reads it."""

from datetime import UTC, datetime

from kcl_pipeline.config import StreamSettings
from tests.support.streams_world import StreamsWorld


def test_streams_begin_at_their_own_positions():
    world = StreamsWorld("a", "b", "c", shards=1)
    for stream in "abc":
        world.model.put(stream, [("k", f"{stream}-old".encode())])
    world.clock.advance(10)
    begin = datetime.fromtimestamp(world.clock.wall() - 5, UTC)
    of_streams = {
        "b": StreamSettings(initial_position_in_stream="LATEST"),
        "c": StreamSettings(initial_position_in_stream="AT_TIMESTAMP", initial_timestamp=begin),
    }
    world.start("w", "a", "b", "c", stream_settings=of_streams)
    world.run_until(lambda: world.data() == [b"a-old"], limit=60)
    world.run(10)
    for stream in "abc":
        world.model.put(stream, [("k", f"{stream}-new".encode())])
    world.run(10)
    assert world.data() == [b"a-new", b"a-old", b"b-new", b"c-new"]


def of_third_stream(world: StreamsWorld, **position: object) -> dict[str, StreamSettings]:
    """Records that are too old, then the settings of a worker that adds the stream c."""
    world.start("old", "a", "b")
    world.run(30)
    world.model.put("c", [("k", b"c-old")])
    world.clock.advance(10)
    return {"c": StreamSettings.model_validate(position)}


def test_a_worker_that_does_not_name_a_stream_begins_it_at_the_time_in_the_lease_row():
    """Both leader and reader have the old list. The worker that knew the time has gone."""
    world = StreamsWorld("a", "b", "c", shards=1)
    begin = datetime.fromtimestamp(world.clock.wall() + 35, UTC)
    own = of_third_stream(world, initial_position_in_stream="AT_TIMESTAMP", initial_timestamp=begin)
    world.start("new", "a", "b", "c", stream_settings=own)
    del world.workers["new"]
    world.model.put("c", [("k", b"c-new")])
    world.run_until(lambda: b"c-new" in world.data(), limit=60)
    world.run(10)
    assert world.data() == [b"c-new"]
    (row,) = (item for key, item in world.leases.rows().items() if ":c:" in key)
    assert row["kclpInitialTimestamp"] == {"N": str(int(begin.timestamp() * 1000))}


def test_a_leader_that_does_not_name_a_stream_begins_it_at_the_recorded_position():
    world = StreamsWorld("a", "b", "c", shards=1)
    own = of_third_stream(world, initial_position_in_stream="LATEST")
    world.start("new", "a", "b", "c", stream_settings=own)
    del world.workers["new"]
    world.run(30)
    world.model.put("c", [("k", b"c-new")])
    world.run_until(lambda: b"c-new" in world.data(), limit=60)
    world.run(10)
    assert world.data() == [b"c-new"]
