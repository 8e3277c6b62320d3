"""Planning a query's batches without Spark: exact ranges, restarts, reshards, limits, lost
records.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from kcl_pipeline.errors import NotFoundError, SettingsError, ThrottledError
from kcl_pipeline.spark.data_source.plan import Limit
from tests.support.data_source_world import ZERO, Query, World, data, numbered
from tests.support.kpl_encoder import aggregate_of


def test_each_record_once_over_batches_and_restarts() -> None:
    world = World(3)
    world.put(*numbered(50))
    query = Query(world)
    first = query.drain()
    world.put(*numbered(30, 50))
    second = query.restarted().drain()
    assert sorted(data(first), key=int) == numbered(50)
    assert sorted(data(second), key=int) == numbered(30, 50)
    assert query.restarted().batch() is None


@pytest.mark.parametrize("seed", range(25))
def test_random_lives_give_each_record_once_in_order_and_every_batch_again(seed: int) -> None:
    """Puts, aggregates, splits, merges, limits and restarts; a batch read again by a fresh process
    has the same rows.
    """
    rng = random.Random(seed)
    world = World(rng.randint(1, 3))
    per_shard = (
        {"maxRecordsPerShardPerTrigger": str(rng.randint(1, 9))} if rng.random() < 0.4 else {}
    )
    query = Query(
        world,
        maxRecordsPerFetch=str(rng.choice([2, 5, 100])),
        startingPosition=rng.choice(["TRIM_HORIZON", "LATEST"]),
        **per_shard,
    )
    query.planner.initial()
    world.clock.advance(1)
    expected: dict[str, list[bytes]] = {}
    batches: list[list[bytes]] = []
    serial = 0
    for _ in range(60):
        action = rng.random()
        key = f"k{rng.randint(0, 12)}"
        if action < 0.4:
            values = [f"{key}:{serial + i}".encode() for i in range(rng.randint(1, 4))]
            serial += len(values)
            expected.setdefault(key, []).extend(values)
            world.put(
                *(
                    [aggregate_of([(key, None, v) for v in values])]
                    if rng.random() < 0.3
                    else values
                ),
                key=key,
            )
        elif action < 0.47:
            shards = world.open_shards()
            if len(shards) < 6:
                world.split(rng.choice(shards).shard_id)
        elif action < 0.54:
            shards = sorted(world.open_shards(), key=lambda s: s.hash_key_range.start)
            if len(shards) > 1:
                at = rng.randrange(len(shards) - 1)
                world.merge(shards[at].shard_id, shards[at + 1].shard_id)
        elif action < 0.65 and query.log:
            query = query.restarted()
        else:
            rows = query.batch(Limit(max_records=rng.choice([1, 7, 1000])))
            batches += [] if rows is None else [rows]
    batches += query.drain(most=300)
    assert sorted(data(batches)) == sorted(v for values in expected.values() for v in values)
    for key, values in expected.items():
        assert [v for v in data(batches) if v.startswith(f"{key}:".encode())] == values
    fresh = query.restarted()
    for number, rows in enumerate(batches):
        assert sorted(fresh.run(number)) == sorted(rows)
    assert fresh.held_rows == 0
    assert set(query.last) <= {s.shard_id for s in world.open_shards()}


def test_what_was_read_ahead_is_handed_over() -> None:
    world = World(2)
    world.put(*numbered(40))
    query = Query(world)
    rows = query.drain()
    assert query.held_rows == len(data(rows)) == 40


def test_limits() -> None:
    world = World(2)
    world.put(*numbered(40))
    sizes = [len(rows) for rows in Query(world).drain(Limit(max_records=15))]
    assert (max(sizes), sum(sizes)) == (15, 40)
    shards = [
        [row[0] for row in rows] for rows in Query(world, maxRecordsPerShardPerTrigger="3").drain()
    ]
    assert max(rows.count(shard) for rows in shards for shard in rows) == 3
    assert sum(map(len, shards)) == 40
    bytes_of = {value: len(value) + len(f"key-{value!r}") for value in numbered(40)}
    batches = Query(world, maxBytesPerTrigger="100").drain()
    assert sorted(data(batches), key=int) == numbered(40)
    assert max(sum(bytes_of[v] for v in data([rows])) for rows in batches) <= 100


def test_a_batch_without_limit_hands_over_what_the_budget_allows() -> None:
    world = World(2)
    world.put(*[bytes([i]) * 300_000 for i in range(10)])
    query = Query(world, prefetchMaxBytes="1m", maxRecordsPerFetch="1", maxBytesPerTrigger="1m")
    rows = query.batch(Limit(everything=True))
    assert rows is not None
    assert sorted(v[0] for v in data([rows])) == list(range(10))
    assert 0 < query.held_rows < 10
    assert sorted(query.restarted().run(0)) == sorted(rows)
    assert query.batch(Limit(everything=True)) is None


# -- where a query begins
# ----------------------------------------------------------------------------


def test_latest_is_pinned_when_the_query_begins() -> None:
    world = World(2)
    world.put(b"old")
    world.clock.advance(1)
    query = Query(world, startingPosition="LATEST")
    query.planner.initial()
    world.clock.advance(1)
    world.put(b"new", key="a")
    assert data(query.drain()) == [b"new"]
    world.put(*numbered(8))
    assert sorted(data(query.restarted().drain()), key=int) == numbered(8)


def test_the_first_batch_from_latest_is_the_same_after_a_restart() -> None:
    world = World(1)
    world.put(b"old")
    world.clock.advance(1)
    query = Query(world, startingPosition="LATEST")
    query.planner.initial()
    world.clock.advance(1)
    world.put(b"a", b"b")
    rows = query.batch()
    assert rows is not None
    world.clock.advance(10)
    world.put(b"c")
    assert query.restarted().run(0) == rows


def test_begins_at_a_time() -> None:
    world = World(1)
    world.put(b"old")
    world.clock.advance(10)
    moment = datetime.fromtimestamp(world.clock.wall(), UTC).isoformat()
    world.put(b"new")
    query = Query(world, startingPosition=f"AT_TIMESTAMP {moment}")
    assert data(query.drain()) == [b"new"]
    assert data([query.restarted().run(0)]) == [b"new"]


def test_begins_at_the_offsets_of_another_query() -> None:
    world = World(2)
    world.put(*numbered(10))
    query = Query(world)
    query.drain()
    world.put(*numbered(5, 10))
    assert sorted(data(Query(world, startingPosition=query.log[-1]).drain()), key=int) == numbered(
        5, 10
    )
    with pytest.raises(
        SettingsError,
        match="startingPosition names shardId-7, which stream orders does not have; write some of ",
    ):
        Query(world, startingPosition='{"orders": {"shardId-7": "TRIM_HORIZON"}}').batch()
    for offsets in ('{"others": {"shardId-7": "TRIM_HORIZON"}}', '{"orders": {}}'):
        with pytest.raises(SettingsError, match="startingPosition has no offsets of stream orders"):
            Query(world, startingPosition=offsets).batch()


def test_a_stream_that_does_not_exist() -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        Query(World(), streamName="nowhere").batch()


# -- reshards
# ----------------------------------------------------------------------------


# -- to the tip
# ----------------------------------------------------------------------------


def test_to_the_tip_ends_on_a_live_stream() -> None:
    """Every look at the stream brings a record more; the query still ends, with all that was there
    when it began.
    """
    world = World(2)
    world.put(*numbered(30))
    query = Query(world, maxRecordsPerFetch="4")
    query.planner.read_to_the_tip()
    batches = []
    serial = 1000
    for _ in range(100):
        world.put(*numbered(1, serial))
        serial += 1
        rows = query.batch(Limit(max_records=5))
        if rows is None:
            break
        batches.append(rows)
    else:
        raise AssertionError("does not end")
    seen = data(batches)
    assert set(numbered(30)) <= set(seen)
    assert len(seen) < 30 + 2 * 4


class Refusing:
    """A Kinesis whose GetRecords is throttled for one shard."""

    def __init__(self, inner: object, shard_id: str) -> None:
        self._inner = inner
        self._shard_id = shard_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get_records(self, stream, shard_id, iterator, limit):
        if shard_id == self._shard_id:
            raise ThrottledError("too fast")
        return self._inner.get_records(stream, shard_id, iterator, limit)


def test_a_throttled_shard_holds_up_no_other_but_is_not_forgotten_at_the_tip() -> None:
    world = World(2)
    world.put(*numbered(20))
    world.kinesis = Refusing(world.kinesis, ZERO)  # type: ignore[assignment]
    batches = Query(world).drain()
    assert {row[0] for row in batches[0]} == {"shardId-000000000001"}
    ending = Query(world, retryTimeoutInMillis="5000")
    ending.planner.read_to_the_tip()
    assert ending.batch() is not None
    with pytest.raises(ThrottledError):
        ending.batch()


# -- lost records
# ----------------------------------------------------------------------------


def test_a_limited_batch_takes_from_all_shards() -> None:
    """Else the first batches would be one shard's, and a watermark would drop the records of the
    others as late.
    """
    world = World(4)
    world.put(*numbered(400))
    shards = len(world.open_shards())
    for rows in Query(world).drain(Limit(max_records=40))[:5]:
        counts = [sum(row[0] == shard for row in rows) for shard in {row[0] for row in rows}]
        assert (len(counts), max(counts)) == (shards, 40 // shards)
