"""The leader asks the table which shards were begun before it creates missing leases."""

from dataclasses import replace

import pytest

from kcl_pipeline.errors import SinkError
from kcl_pipeline.leases.application.identity import ApplicationIdentity
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.position import LATEST, TRIM_HORIZON
from tests.support.leader_world import World

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
        ({PARENT: False}, dict.fromkeys((PARENT, LOW, HIGH), TRIM_HORIZON)),
        ({PARENT: True}, dict.fromkeys((LOW, HIGH), TRIM_HORIZON)),
        ({PARENT: True, LOW: False}, dict.fromkeys((LOW, HIGH), TRIM_HORIZON)),
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
    stored |= {PARENT: True} if known else {}
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


@pytest.mark.parametrize("protocol", ["two_phase", "positions", None])
def test_the_table_of_an_application_with_two_phase_is_not_asked(protocol):
    """A leader may have no permission to read it."""
    setting = {} if protocol is None else {"batch": {"commit_protocol": protocol}}
    asked = []
    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"}, **setting)
    ensure_client_version(world.coordinator, "w", world.clock)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    identity = ApplicationIdentity.of([stream], is_multi_stream=False, sink="delta:/x")
    recorded = replace(identity, positions=False)
    assert world.coordinator.put_application(recorded, replacing=None)

    def ask(_stream, shard_ids):
        asked.extend(shard_ids)
        return {}

    cycle = world.leader(stored=ask)
    assert cycle.run_once().error is None
    assert positions(world) == {PARENT: LATEST}
    assert bool(asked) == (protocol == "positions"), "a worker will change the record"
