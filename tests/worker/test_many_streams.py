"""An application of many streams with 4 shards each, in memory and in virtual time."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.events import LeadershipLost
from kcl_pipeline.leases.row import CHECKPOINT, OWNER
from tests.support.streams_world import StreamsWorld

SHARDS = 4
EACH = 5


def owners(world: StreamsWorld) -> Counter[str]:
    """Count the unfinished leases by owner."""
    return Counter(
        row.get(OWNER, {}).get("S", "nobody")
        for row in world.leases.rows().values()
        if row[CHECKPOINT]["S"] != "SHARD_END"
    )


def put(world: StreamsWorld, streams: tuple[str, ...], prefix: str) -> None:
    for stream in streams:
        world.put(stream, EACH, f"{prefix}-{stream}")


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])
def test_every_record_of_many_streams_lands_once(count):
    streams = tuple(f"s{number:03}" for number in range(count))
    world = StreamsWorld(*streams, shards=SHARDS)
    names = ("w1", "w2", "w3", "w4")
    for name in names:
        world.start(name, *streams)
    put(world, streams, "first")
    assert world.run_until(world.has_all, 120) <= 60
    assert owners(world) == dict.fromkeys(names, len(streams) * SHARDS // len(names))

    # A worker crashes, shards are split, streams come back, and others are gone for a while.
    del world.workers["w1"]
    for number, stream in enumerate(streams):
        if number % 10 == 0:
            world.model.split(stream, "shardId-000000000000")
        if number % 10 == 1:
            world.delete(stream)
    for number, stream in enumerate(streams):
        if number % 10 == 1:
            world.clock.advance(0.01)
            world.create(stream, 2)
    put(world, streams, "second")
    seconds = world.run_until(world.has_all, 240)
    assert seconds <= 120
    assert "w1" not in owners(world)
    assert "nobody" not in owners(world)
    assert not [lost for lost in world.of(LeadershipLost) if lost.owner_name != "w1"]
