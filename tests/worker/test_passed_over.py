"""The lease of a shard in front of those at which a stream was begun."""

from __future__ import annotations

import pytest

from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.worker.consumer import ConsumerState
from tests.support.worker_world import World, numbered
from tests.worker.test_parents import CHILD, NEVER_AUDITED, P0, P1, plant

GRANDCHILDREN = tuple(f"shardId-{number:012}" for number in (3, 4))


def merged_and_split(**rows):
    """P0 and P1 were merged into CHILD, which was split. P0 is held, P1 and CHILD have no row."""
    world = World(shards=2, shard_sync={**NEVER_AUDITED, "initial_position_in_stream": "LATEST"})
    world.put(*numbered(20))
    world.model.merge("orders", P0, P1)
    world.model.split("orders", CHILD)
    for shard_id, checkpoint in rows.items():
        plant(world, GRANDCHILDREN[int(shard_id[-1])], checkpoint, owner="w-2")
    plant(world, P0, LATEST, owner="w-1")
    world.worker.leases.discover()
    return world


def ended(world):
    for _ in range(40):
        world.worker.lease_tick()
        world.worker.process_tick()
        world.clock.advance(0.05)
    return world.leases.get(P0).checkpoint == SHARD_END


@pytest.mark.parametrize("begun", [LATEST, Position("1000")])
def test_it_ends_when_the_shards_behind_have_begun(begun):
    world = merged_and_split(row0=begun, row1=SHARD_END)
    assert ended(world)
    assert world.leases.get(CHILD) is None
    assert world.leases.get(P1) is None


@pytest.mark.parametrize(
    "rows", [{"row0": LATEST}, {"row0": LATEST, "row1": TRIM_HORIZON}, {}], ids=str
)
def test_it_waits_while_a_shard_behind_has_not_begun(rows):
    world = merged_and_split(**rows)
    assert not ended(world)
    assert world.worker.lifecycle.consumers[P0].state is ConsumerState.ENDING
