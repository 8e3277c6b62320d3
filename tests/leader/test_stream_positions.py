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
