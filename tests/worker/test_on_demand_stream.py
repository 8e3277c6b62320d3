"""A stream in on-demand mode, whose shards are split and merged by the service under load."""

from __future__ import annotations

import pytest

from kcl_pipeline.events import RecordsLost, ShardStalled
from kcl_pipeline.leases.row import CHECKPOINT, OWNER
from tests.support.streams_world import StreamsWorld

STREAM = "orders"
SHARDS = 4
LAG_SECONDS = 15


class OnDemandWorld(StreamsWorld):
    """The service changes the shards. A call of SplitShard or MergeShards would be refused."""

    def create(self, stream, shards=SHARDS):
        self.model.call(
            "CreateStream", StreamName=stream, StreamModeDetails={"StreamMode": "ON_DEMAND"}
        )

    def open_shards(self):
        shards = self.model.stream(STREAM).open_shards
        return sorted(shards, key=lambda shard: shard.hash_key_range.start)

    def split(self, index):
        shard = self.open_shards()[index]
        keys = shard.hash_key_range
        middle = (keys.start + keys.end) // 2 + 1
        self.model.stream(STREAM).split(shard, middle, self.now_millis())

    def merge(self, index):
        first, second = self.open_shards()[index : index + 2]
        self.model.stream(STREAM).merge(first, second, self.now_millis())

    def now_millis(self):
        return int(self.clock.wall() * 1000)

    def unfinished(self):
        return [row for row in self.leases.rows().values() if row[CHECKPOINT]["S"] != "SHARD_END"]


@pytest.mark.parametrize("minutes", [4, pytest.param(16, marks=pytest.mark.long)])
def test_shards_change_every_minute_under_load(minutes):
    world = OnDemandWorld(STREAM)
    assert len(world.open_shards()) == SHARDS
    for name in ("w1", "w2", "w3"):
        world.start(name, STREAM)
    for minute in range(minutes):
        for second in range(60 - LAG_SECONDS):
            world.put(STREAM, 8, f"{minute}-{second}")
            world.run(1)
            if second == 20:
                index = minute % len(world.open_shards())
                world.split(index) if minute % 4 < 3 else world.merge(max(index - 1, 0))
        # Every record is in the table long before the next change.
        assert world.run_until(world.has_all, LAG_SECONDS) < LAG_SECONDS

    assert len(world.open_shards()) == SHARDS + minutes // 2
    assert world.of(ShardStalled) == []
    assert world.of(RecordsLost) == []
    owned = [row[OWNER]["S"] for row in world.unfinished()]
    assert len(owned) == len(world.open_shards())
    assert set(owned) == {"w1", "w2", "w3"}
