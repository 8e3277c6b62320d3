"""Leases of finished shards do not count when leases are shared out by number."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World

BALANCED = {"lease_assignment_strategy": "balanced"}


def fleet_with_finished_leases(finished: int) -> World:
    """Worker a with four idle open leases and some finished ones."""
    world = World(shards=4, assignment=BALANCED)
    world.leader()
    world.join("a")
    world.run_until(lambda: len(world.held()["a"]) == 4)
    for number in range(finished):
        create_lease(world.leases, Lease(f"shardId-00000000010{number}", SHARD_END, owner="a"))
    world.workers["a"].discover()
    for key, lease in world.workers["a"].held.items():
        renewed = world.leases.renew(lease, 0.0)
        assert renewed is not None
        world.workers["a"].held[key] = renewed
    world.run(60)
    assert len(world.held(ended=True)["a"]) == 4 + finished
    return world


@pytest.mark.parametrize("finished", [0, 3, 4])
def test_a_worker_that_joins_gets_half_of_the_open_leases(finished: int) -> None:
    world = fleet_with_finished_leases(finished)
    world.join("b")
    world.run(240)
    assert {name: len(keys) for name, keys in world.held().items()} == {"a": 2, "b": 2}
    assert len(world.held(ended=True)["a"]) == 2 + finished, "finished leases stay"


def test_finished_leases_of_a_stopped_owner_get_an_owner_and_do_not_unbalance_the_fleet() -> None:
    """A Java worker deletes only finished leases that it holds, so they need an owner."""
    world = fleet_with_finished_leases(3)
    world.join("b", "c")
    world.run(240)
    world.kill("a")
    world.run(240)
    assert set(world.owners().values()) == {"b", "c"}
    unfinished = Counter(le.owner for le in world.table().values() if not le.ended)
    assert unfinished == {"b": 2, "c": 2}
