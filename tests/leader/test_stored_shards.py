"""The leader asks the table which shards were begun before it creates missing leases."""

import pytest

from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position, StoredPosition
from tests.leader.test_application import create_again
from tests.support.leader_world import World, settled

READ = StoredPosition(1, Position("5"))
ENDED = StoredPosition(2, Position("5"), ended=True)
PARENT, LOW, HIGH = (f"shardId-{number:012}" for number in range(3))


def split_at_latest(stored):
    """A split stream at LATEST without leases, and the leader's first cycle."""
    asked = []

    def ask(stream, shard_ids):
        asked.append((stream.name, sorted(shard_ids)))
        if isinstance(stored, Exception):
            raise stored
        return stored

    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"})
    world.model.split("orders", PARENT)
    cycle = world.leader(stored=ask)
    return world, cycle, asked


def positions(world):
    return {key: lease.checkpoint for key, lease in world.table().items()}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, {LOW: LATEST, HIGH: LATEST}),
        ({PARENT: READ}, dict.fromkeys((PARENT, LOW, HIGH), TRIM_HORIZON)),
        ({PARENT: ENDED}, dict.fromkeys((LOW, HIGH), TRIM_HORIZON)),
        ({PARENT: ENDED, LOW: READ}, dict.fromkeys((LOW, HIGH), TRIM_HORIZON)),
    ],
)
def test_a_stream_without_leases_continues_where_the_table_is(stored, expected):
    world, cycle, asked = split_at_latest(stored)
    report = cycle.run_once()
    assert report.error is None
    assert positions(world) == expected
    assert asked == [("orders", [PARENT, LOW, HIGH])]


def test_a_table_that_cannot_be_read_creates_no_lease():
    world, cycle, _ = split_at_latest(SinkError("the table cannot be read"))
    assert "cannot be read" in cycle.run_once().error
    assert positions(world) == {}


@pytest.mark.parametrize("known", [True, False])
def test_a_missing_lease_after_a_known_parent_starts_at_its_beginning(known):
    stored = {}
    world, cycle, _ = split_at_latest(stored)
    cycle.run_once()
    stored |= {PARENT: ENDED} if known else {}
    world.leases.erase(HIGH)
    for _ in range(5):
        world.clock.advance(200)
        cycle.run_once()
    assert positions(world) == {LOW: LATEST, HIGH: TRIM_HORIZON if known else LATEST}


def test_at_trim_horizon_the_table_is_not_asked():
    world = World(shards=1)
    cycle = world.leader(stored=lambda *_: pytest.fail("the table was asked"))
    assert cycle.run_once().error is None
    assert positions(world) == {PARENT: TRIM_HORIZON}


def test_every_parent_of_a_row_has_a_row_or_has_ended():
    """A stream at LATEST is created again and resharded, and all rows are deleted by hand.

    The new stream begins at TRIM_HORIZON, so that shard 1 gets a row; its children get theirs when
    it has ended. The merge of one of them with a shard that the table knows must not begin before.
    """
    world = settled(World(shards=3, shard_sync={"initial_position_in_stream": "LATEST"}), "a")
    create_again(world, 3)
    world.run(30)
    shards = [f"shardId-{number:012}" for number in range(10)]
    for key in shards[:3]:
        world.model.split("orders", key)
        world.clock.advance(1)
    world.model.merge("orders", shards[4], shards[5])
    world.clock.advance(1)
    stored = {shards[0]: ENDED, shards[2]: READ, shards[4]: READ}
    for key in world.table():
        world.leases.erase(key)
    world.leaders.clear()
    world.clock.advance(60)
    cycle = world.leader(
        "next", stored=lambda _stream, ids: {k: stored[k] for k in ids if k in stored}
    )
    cycle.run_once()
    world.clock.advance(60)
    cycle.run_once()
    rows = world.table()
    assert {shards[1], shards[5], shards[9]} <= rows.keys()
    known = rows.keys() | {key for key, position in stored.items() if position.ended}
    assert all(row.parent_shard_ids <= known for row in rows.values())
    assert rows[shards[5]].checkpoint == TRIM_HORIZON
