"""A batch that is written again after another worker took one of its leases."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kcl_pipeline.errors import TableMismatchError
from kcl_pipeline.events import BatchCommitted, BatchRefused, ShardPaused, ShardResumed
from kcl_pipeline.sinks.sink import shard_key
from tests.support.worker_world import World, numbered


class FailsWhenWrittenAgain:
    """While it writes a batch of two shards, another worker commits to the first shard.

    The next call fails on its first record: a look-up service is down for a moment. With the way
    `lands` it does not.
    """

    def __init__(self, way: str):
        self.way = way
        self.world: World | None = None
        self.failing = False

    def __call__(self, records: pa.Table) -> pa.Table:
        errors: list[str | None] = [None] * records.num_rows
        if self.failing:
            self.failing = False
            if self.way == "raises":
                raise ValueError("look-up timed out")
            errors[0] = "look-up timed out"
        elif self.world is not None and len(set(records["shard_id"].to_pylist())) == 2:
            other, self.world = self.world, None
            sink = other.make_sink()
            [key] = [
                shard_key(one.stream, one.lease_key)
                for one in other.worker.lifecycle.consumers.values()
                if one.lease_key.endswith("0")
            ]
            now = sink.positions([key])
            becomes = {key: now.shards[key].moved(now.shards[key].position)}
            assert sink.commit(now.table_id, (), now.shards, becomes).version
            self.failing = self.way != "lands"
        return records.append_column("_error", pa.array(errors, pa.string()))


def written_again(way: str, *, buffered: bool) -> World:
    """A worker that wrote a batch again, because another worker's commit came before its own."""
    transform = FailsWhenWrittenAgain(way)
    world = World(transform=transform, buffered=buffered, batch={"min_batch_interval_millis": 1000})
    world.put(*numbered(10))
    world.run(10)
    transform.world = world
    world.put(*numbered(20, "s"))
    world.run(60)
    assert world.of(BatchRefused), "the other worker's commit was not met"
    return world


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("way", ["rejects", "raises"])
def test_what_fails_only_then_is_judged_like_any_other_record(way: str, buffered: bool):
    world = written_again(way, buffered=buffered)
    letters = [one for table in world.table.dead_letters for one in table["data"].to_pylist()]
    assert sorted(world.data() + letters) == sorted(world.sent)


def test_records_of_a_lease_that_was_left_out_count_when_they_land():
    world = written_again("lands", buffered=True)
    assert sorted(world.data()) == sorted(world.sent)
    assert sum(event.records for event in world.of(BatchCommitted)) == len(world.sent)


class KeepsItsSink(World):
    def make_sink(self):
        self.sink = super().make_sink()
        return self.sink


def test_a_table_that_does_not_fit_pauses_the_shards_until_it_does():
    world = KeepsItsSink(buffered=True)
    world.put(*numbered(10))
    world.run(5)
    commit = world.sink.commit

    def refuse(*_):
        raise TableMismatchError("v is double in the output and bigint in the table")

    world.sink.commit = refuse
    world.put(*numbered(20, "s"))
    world.run(90)
    assert len(world.data()) == 10
    assert {one.reason for one in world.of(ShardPaused)} == {
        "v is double in the output and bigint in the table"
    }
    assert len(world.worker.paused()) == 2
    world.sink.commit = commit
    world.run(70)
    assert world.data() == sorted(world.sent)
    assert len(world.of(ShardResumed)) == 2
