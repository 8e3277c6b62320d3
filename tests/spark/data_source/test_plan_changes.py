"""Streams that come, go, reshard and lose records under a running query."""

from __future__ import annotations

import json

import pytest

from kcl_pipeline.errors import RecordsLostError
from kcl_pipeline.spark.data_source.plan import Limit
from tests.support.data_source_world import DAY, ZERO, Query, World, data, numbered


def test_streams_come_and_go_at_a_restart() -> None:
    world = World(1)
    world.model.call("CreateStream", StreamName="returns", ShardCount=1)
    world.put(b"a")
    query = Query(world)
    query.drain()
    world.put(b"r", stream="returns")
    world.put(b"b")
    both = query.restarted(streamName="orders, returns")
    assert sorted(data(both.drain())) == [b"b", b"r"]
    assert set(json.loads(query.log[-1])) == {"orders", "returns"}
    world.put(b"r2", stream="returns")
    one = both.restarted(streamName="returns")
    assert data(one.drain()) == [b"r2"]
    assert set(json.loads(query.log[-1])) == {"returns"}


def test_children_begin_in_the_batch_after_their_parents_end() -> None:
    world = World(2)
    world.put(*numbered(20))
    query = Query(world)
    one, two = sorted(s.shard_id for s in world.open_shards())
    world.merge(one, two)
    world.put(*numbered(20, 20))
    batches = query.drain(Limit(max_records=15))
    child = "shardId-000000000002"
    parents_done = max(i for i, rows in enumerate(batches) for row in rows if row[0] != child)
    assert (
        min(i for i, rows in enumerate(batches) for row in rows if row[0] == child)
        == parents_done + 1
    )
    logged = [json.loads(text)["orders"] for text in query.log]
    assert child not in logged[parents_done - 1]
    assert {shard: entry.get("ended") for shard, entry in logged[parents_done].items()} == {
        one: True,
        two: True,
        child: None,
    }
    assert set(logged[-1]) == {child}


def test_a_restart_between_the_ends_of_two_parents() -> None:
    world = World(2)
    one, two = sorted(s.shard_id for s in world.open_shards())
    world.put(*numbered(6), key="a")
    world.put(*numbered(6, 6), key="b")
    world.merge(one, two)
    world.put(b"99")
    query = Query(world, maxRecordsPerShardPerTrigger="2")
    seen = data([query.batch(Limit(max_records=2)) or []])
    for _ in range(30):
        query = query.restarted()
        seen += data([query.batch(Limit(max_records=2)) or []])
    assert sorted(seen, key=int) == [*numbered(12), b"99"]
    assert seen[-1] == b"99"


def test_to_the_tip_follows_a_reshard() -> None:
    world = World(1)
    world.put(*numbered(5))
    world.split(ZERO)
    world.put(*numbered(5, 5))
    query = Query(world)
    query.planner.read_to_the_tip()
    assert sorted(data(query.drain()), key=int) == numbered(10)


def test_records_that_left_retention_stop_the_query_or_not() -> None:
    world = World(1)
    number = world.put(b"read")[0]
    query = Query(world)
    query.drain()
    world.put(b"lost")
    world.clock.advance(2 * DAY)
    last = world.put(b"left")[0]
    with pytest.raises(
        RecordsLostError,
        match=f"{ZERO} of orders after {number} .* its oldest record is {last}; write option "
        "failOnDataLoss=false",
    ):
        query.restarted().batch()
    assert data(query.restarted(failOnDataLoss="false").drain()) == [b"left"]


def test_a_shard_that_was_idle_has_lost_nothing() -> None:
    """Its last record has left retention, but an idle query has logged that nothing came
    after it.
    """
    world = World(1)
    world.put(b"read")
    query = Query(world)
    query.drain()
    for _ in range(30):
        world.clock.advance(3600)
        assert query.batch() in (None, [])
    world.put(b"new")
    assert data(query.restarted().drain()) == [b"new"]


def test_an_idle_query_logs_once_an_hour() -> None:
    world = World(1)
    world.put(b"read")
    query = Query(world)
    query.drain()
    before = len(query.log)
    for _ in range(6 * 12):
        world.clock.advance(300)
        query.batch()
    assert len(query.log) - before in (5, 6)


def test_a_batch_that_cannot_be_read_again() -> None:
    world = World(1)
    world.put(b"a")
    world.clock.advance(DAY / 2)
    (_, last) = world.put(b"b", b"c")
    query = Query(world)
    rows = query.batch()
    assert data([rows or []]) == [b"a", b"b", b"c"]
    world.clock.advance(DAY / 2 + 60)
    with pytest.raises(
        RecordsLostError, match=f"{ZERO} of orders after TRIM_HORIZON through {last}"
    ):
        query.restarted().run(0)
    assert data([query.restarted(failOnDataLoss="false").run(0)]) == [b"b", b"c"]
    world.clock.advance(DAY)
    with pytest.raises(
        RecordsLostError, match=f"after TRIM_HORIZON through {last}.*nothing is left"
    ):
        query.restarted().run(0)
    assert query.restarted(failOnDataLoss="false").run(0) == []


def test_a_shard_that_is_gone() -> None:
    world = World(1)
    world.put(b"a")
    query = Query(world)
    query.drain()
    world.split(ZERO)
    world.clock.advance(3 * DAY)
    world.put(b"b", key="x")
    assert ZERO not in {
        s.shard_id
        for s in world.kinesis.list_shards(
            world.kinesis.resolve_stream("orders", multi_stream=False)
        )
    }
    with pytest.raises(
        RecordsLostError, match=f"shards of orders do not exist any more: {ZERO} after"
    ):
        query.restarted().batch()
    assert data(query.restarted(failOnDataLoss="false").drain()) == [b"b"]
    assert ZERO not in query.last


def test_a_stream_that_was_made_anew() -> None:
    world = World(1)
    world.put(b"a")
    query = Query(world)
    query.drain()
    world.model.call("DeleteStream", StreamName="orders")
    world.clock.advance(60)
    world.model.call("CreateStream", StreamName="orders", ShardCount=1)
    world.clock.advance(60)
    world.put(b"b")
    with pytest.raises(RecordsLostError, match=ZERO):
        query.restarted().batch()
