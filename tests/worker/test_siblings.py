"""A child waits for a parent without a row, and its sibling has begun.

The leader counts the parent as ended, and so does the worker of the child. If they decided
differently, the child would wait for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product

import pytest

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.seek import Seeking, seek_target
from kcl_pipeline.events import RecordsLost
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered

PARENT, LOWER, UPPER = (f"shardId-{number:012}" for number in range(3))
MIDDLE = 2**127


def split(world: World) -> None:
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(MIDDLE)
    )
    world.clock.advance(60)


def keys(*, is_upper: bool) -> Iterator[str]:
    """Partition keys of one of the two children."""
    for number in range(10**6):
        digest = hashlib.md5(f"k{number}".encode(), usedforsecurity=False).digest()
        if (int.from_bytes(digest) >= MIDDLE) == is_upper:
            yield f"k{number}"


def put(world: World, prefix: str, names: Iterator[str]) -> list[bytes]:
    values = numbered(10, prefix)
    for value in values:
        world.put(value, key=next(names))
    return values


def replace_worker(world: World) -> None:
    world.clock.advance(30)
    world.worker = world.make_worker("w-2")
    world.worker.start_up()


@pytest.mark.parametrize(
    ("is_function", "position"),
    shortened(
        product([True, False], ["TRIM_HORIZON", "LATEST"]),
        {(True, "TRIM_HORIZON"), (False, "LATEST")}.__contains__,
    ),
)
def test_a_child_that_is_sought_to_its_beginning_is_read(is_function, position):
    """Nothing was deleted by hand: the row of the finished parent was removed as usual."""
    cleanup = {"completed_lease_cleanup_interval_millis": 5000}
    world = World(
        shards=1,
        is_function=is_function,
        shard_sync=cleanup | {"initial_position_in_stream": position},
    )
    world.run(10)
    world.put(*numbered(20))
    world.run(10)
    split(world)
    put(world, "lower", keys(is_upper=False))
    again = put(world, "upper", keys(is_upper=True))
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert sorted(world.leases.rows()) == [LOWER, UPPER]
    world.worker.lifecycle.release_all()
    app = ApplicationControl(
        world.settings, world.leases, world.rows, world.coordinator, world.clock, "operator"
    )
    target = seek_target("TRIM_HORIZON", None, None, world.clock.wall())
    sink = None if is_function else world.make_sink()
    seeking = Seeking(app, world.kinesis, target, shards=[UPPER], sink=sink)
    written = seeking.write("token", pause=True, wait_seconds=60).written
    assert [one.lease_key for one in written] == [UPPER]
    replace_worker(world)
    world.run(120)
    assert world.data() == sorted([*world.sent, *again])
    assert not world.of(RecordsLost)


def test_a_child_that_was_idle_is_read_after_the_row_of_its_finished_parent_was_deleted():
    world = World(shards=1, is_function=True)
    world.put(*numbered(20))
    split(world)
    put(world, "lower", keys(is_upper=False))
    world.run(60)
    assert world.leases.get(PARENT).ended
    assert world.leases.get(UPPER).checkpoint == TRIM_HORIZON
    world.leases.erase(PARENT)
    replace_worker(world)
    world.run(30)
    put(world, "upper", keys(is_upper=True))
    world.run(60)
    assert world.data() == sorted(world.sent)


@pytest.mark.parametrize("begun", [Position("7"), SHARD_END], ids=["reading", "ended"])
def test_a_child_whose_sibling_a_java_worker_has_begun_is_read(begun):
    """The table does not know what a Java worker has begun."""
    world = World(shards=1)
    world.put(*numbered(20))
    split(world)
    later = put(world, "later", keys(is_upper=True))
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    shards = {shard.shard_id: shard for shard in world.kinesis.list_shards(stream)}
    for shard_id, checkpoint in ((LOWER, begun), (UPPER, TRIM_HORIZON)):
        shard = shards[shard_id]
        lease = Lease(
            shard_id,
            checkpoint,
            parent_shard_ids=frozenset(shard.parents),
            hash_key_range=shard.hash_key_range,
        )
        assert create_lease(world.leases, lease)
    world.run(120)
    assert set(later) <= set(world.data())
