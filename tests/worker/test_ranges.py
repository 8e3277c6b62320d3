"""A worker whose executors fetch, without Spark: one thread, a virtual clock, and a table that
shows every row.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import SettingsError, SinkError, ThrottledError, UnavailableError
from kcl_pipeline.events import (
    AggregatesRejected,
    AwsTrouble,
    BatchCommitted,
    ShardEnded,
    ShardStalled,
    StallStep,
)
from kcl_pipeline.kinesis.ranges import FetchedShard, RangesWritten
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import AUTO, USER_PARTITION_KEY, StreamId
from kcl_pipeline.worker.ranges import RangeSource
from kcl_pipeline.worker.summary import StopReason
from tests.support.kpl_encoder import aggregate_of
from tests.support.worker_world import World, numbered


def refuse_bad(table: pa.Table) -> pa.Table:
    for value in table.column("data").to_pylist():
        if value == b"bad":
            raise ValueError("this is bad")
    return table


def test_everything_is_in_the_table_once_and_nothing_is_read_ahead():
    world = World()
    world.put(*numbered(100))
    world.run()
    world.put(*numbered(50, "s"))
    world.run()
    assert world.data() == sorted(world.sent)
    assert world.worker.source.fetch_threads == 0
    batches = world.of(BatchCommitted)
    assert sum(batch.records for batch in batches) == 150
    assert all("job" in batch.milliseconds for batch in batches)
    assert (
        world.worker.summary(StopReason.STOPPED).total.bytes
        == sum(batch.bytes for batch in batches)
        > 0
    )


def test_bytes_are_those_of_each_lease_and_not_a_share_of_the_batch():
    world = World()
    world.run()
    counted: dict[str, int] = {}
    world.worker.leases.record_bytes = lambda key, size: counted.__setitem__(
        key, counted.get(key, 0) + size
    )
    low, high = sorted(
        world.kinesis.list_shards(StreamId("orders")), key=lambda shard: shard.hash_key_range.start
    )
    for shard, size in ((low, 5000), (high, 10)):
        start = str(shard.hash_key_range.start)
        world.model.call(
            "PutRecord",
            StreamName="orders",
            PartitionKey="k",
            ExplicitHashKey=start,
            Data=b"x" * size,
        )
    world.run()
    assert counted == {low.shard_id: 5000, high.shard_id: 10}, "without partition keys, as KCL"
    assert len({batch.lease_keys for batch in world.of(BatchCommitted)}) == 1, "one batch of both"


def test_an_idle_shard_is_asked_at_most_twice_a_second_and_one_behind_at_once():
    world = World(shards=1, retrieval={"max_records": 5}, batch={"max_batch_records": 5})
    world.put(*numbered(1))
    world.run()
    before = len(world.jobs.asked)
    world.run(20.0)
    assert 30 <= len(world.jobs.asked) - before <= 40
    world.put(*numbered(30, "s"))
    before, began = len(world.jobs.asked), world.clock.monotonic()
    while len(world.data()) < 31:
        world.run(0.05)
    assert world.clock.monotonic() - began < 1.0 + 6 * 0.35, (
        "one wait at the tip, then five calls a second"
    )
    assert len(world.jobs.asked) - before >= 6


def test_a_batch_takes_the_shards_that_waited_longest_and_no_more_than_fit():
    world = World(shards=6, batch={"max_batch_bytes": 2 * 1024 * 1024})
    world.run()
    world.jobs.asked.clear()
    world.run(30.0)
    assert max(len(fetches) for fetches in world.jobs.asked) <= 6
    fresh = World(shards=6, batch={"max_batch_bytes": 2 * 1024 * 1024})
    fresh.run(6.0)
    first, second, third = fresh.jobs.asked[:3]
    assert [len(fetches) for fetches in (first, second, third)] == [2, 2, 2], (
        "nothing is known of these shards: a megabyte each"
    )
    assert len({fetch.lease_key for fetches in (first, second, third) for fetch in fetches}) == 6
    assert all(fetch.max_bytes == 1024 * 1024 for fetch in first)


def test_a_shard_that_ends_hands_over_to_its_children():
    world = World(shards=1)
    world.put(*numbered(20))
    world.run()
    shard = world.kinesis.list_shards(StreamId("orders"))[0]
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit=shard.shard_id,
        NewStartingHashKey=str(2**127),
    )
    world.clock.advance(60)
    world.put(*numbered(20, "s"))
    world.run(30.0)
    assert world.data() == sorted(world.sent)
    assert len(world.of(ShardEnded)) == 1


def test_a_record_the_transform_cannot_take_is_set_aside_and_the_rest_is_read_again():
    world = World(transform=refuse_bad)
    world.put(*numbered(10), b"bad", *numbered(10, "s"))
    world.run()
    assert world.data() == sorted(value for value in world.sent if value != b"bad")
    assert [
        row for letters in world.table.dead_letters for row in letters.column("data").to_pylist()
    ] == [b"bad"]


def test_rows_of_a_shard_that_is_not_in_the_batch_are_never_committed():
    world = World()
    world.put(*numbered(40))
    source = world.worker.source
    world.worker.lifecycle.sync_with_leases()
    while not world.jobs.asked:
        world.worker.lease_tick()
        world.worker.lead_tick()
        world.worker.lifecycle.sync_with_leases()
        world.worker.lifecycle.advance(world.clock.signal())
        committed = {
            key: consumer.committed for key, consumer in world.worker.lifecycle.consumers.items()
        }
        committed = {
            key: position if index else None
            for index, (key, position) in enumerate(sorted(committed.items()))
        }
        batch = source.next("b", committed) if len(committed) == 2 else None
        world.clock.advance(0.05)
    assert batch.lease_keys == tuple(sorted(committed)[1:])
    assert batch.files is None
    loaded = source.load(batch)
    assert set(loaded.records.column("shard_id").to_pylist()) == set(sorted(committed)[1:])


def test_a_job_that_fails_is_done_again_from_the_same_places():
    world = World()
    world.put(*numbered(30))
    failures = iter([True, True, False])

    def fail():
        if next(failures, False):
            raise SinkError("the executors are away")

    world.jobs.before = fail
    world.run(20.0)
    assert world.data() == sorted(world.sent)
    assert len([event for event in world.of(AwsTrouble) if "away" in event.error]) == 2
    first, second, third = world.jobs.asked[:3]
    assert {(f.lease_key, f.after) for f in first} <= {
        (f.lease_key, f.after) for f in (*second, *third)
    }


def test_a_job_whose_transform_fails_before_anything_was_read_is_not_taken_for_an_empty_one():
    world = World()
    world.jobs.after = lambda _done: RangesWritten((), failure="no such column")
    with pytest.raises(SinkError, match="no such column"):
        world.run(400.0)


def test_a_commit_without_an_answer_reads_its_shards_again():
    world = World()
    world.put(*numbered(30))
    sink = world.worker._dependencies.sink
    commit, failing = sink.commit, iter([True] * 60)

    def flaky(*given):
        if next(failing, False):
            raise SinkError("no answer")
        return commit(*given)

    sink.commit = flaky
    world.run(200.0)
    assert world.data() == sorted(world.sent)


def test_trouble_of_one_shard_is_told_and_holds_up_nobody():
    world = World()
    world.run()
    bad = world.jobs.asked[-1][0].lease_key

    def unread(shard):
        """As a task tells it that could not read the shard."""
        return (
            FetchedShard(
                bad, shard.after, shard.after, error="Throttled: slow down", throttled=True
            )
            if shard.lease_key == bad
            else shard
        )

    world.jobs.after = lambda done: RangesWritten(tuple(map(unread, done.shards)))
    world.put(*numbered(40))
    world.run(130.0)
    assert any(isinstance(event, AwsTrouble) and bad in event.operation for event in world.events)
    (stalled,) = world.of(ShardStalled)
    assert (stalled.lease_key, stalled.step, stalled.error) == (
        bad,
        StallStep.READING,
        "Throttled: slow down",
    )
    others = {row["shard_id"] for row in world.table.rows().to_pylist()}
    assert bad not in others
    assert others
    assert world.worker.source.lag()[bad] >= 60_000
    world.jobs.after = lambda done: done
    world.run(20.0)
    assert world.data() == sorted(world.sent)


def distribute(world: World, strategy: str) -> None:
    stream = world.model.stream("orders")
    stream.mode = "ON_DEMAND"
    world.model.call(
        "UpdateStreamRecordDistributionStrategy",
        StreamARN=stream.arn,
        RecordDistributionStrategy=strategy,
    )


@pytest.mark.parametrize("buffered", [False, True])
def test_aggregates_of_a_stream_that_spreads_records_are_kept(buffered: bool) -> None:
    aggregate = aggregate_of([("k", str(n * 2**125), b"%d" % n) for n in range(8)])
    members = [b"%d" % n for n in range(8)]
    world = World(buffered=buffered)
    world.run()
    world.put(aggregate, key="a")
    world.run()
    assert (world.data(), len(world.of(AggregatesRejected))) == ([], 1), "KCL's rule"
    distribute(world, AUTO)
    world.put(aggregate, aggregate, key="a")
    for _ in range(2):
        world.model.call("PutRecord", StreamName="orders", Data=b"keyless")
    world.run(20.0)
    assert world.data() == sorted([*members * 2, b"keyless", b"keyless"])
    assert len(world.of(AggregatesRejected)) == 1
    distribute(world, USER_PARTITION_KEY)
    world.clock.advance(600.0)
    world.put(aggregate, key="a")
    world.run(20.0)
    assert len(world.data()) == 18
    assert len({event.sequence_number for event in world.of(AggregatesRejected)}) == 2


def test_latest_is_settled_by_this_process_and_tried_again_when_it_cannot_be():
    world = World(shards=1, shard_sync={"initial_position_in_stream": "LATEST"})
    world.kinesis.service_time = lambda _stream: None  # as in a row of a Java leader
    world.put(b"before")
    refusals = iter([ThrottledError("slow down"), UnavailableError("away")])
    real = world.kinesis.get_shard_iterator

    def flaky(*where, **more):
        refusal = next(refusals, None)
        if refusal is not None:
            raise refusal
        return real(*where, **more)

    world.kinesis.get_shard_iterator = flaky
    while not world.jobs.asked:
        world.run(0.05)
    (fetch,) = world.jobs.asked[0]
    assert fetch.resume.iterator is not None
    world.put(b"after")
    world.run()
    assert world.data() == [b"after"]


def test_lag_and_drain_know_where_the_shards_are():
    world = World(shards=1)
    key = world.kinesis.list_shards(StreamId("orders"))[0].shard_id
    assert world.worker.source.state_of(key) is None
    world.put(*numbered(5))
    world.run()
    assert world.worker.source.state_of(key).caught_up is True
    assert world.worker.source.lag() == {key: 0}
    world.worker.source.end(key)
    assert world.worker.source.state_of(key) is None


def test_waiting_ends_when_a_shard_is_due():
    world = World(shards=1)
    world.run()
    stop = world.clock.signal()
    began = world.clock.monotonic()
    world.worker.source.wait(stop, 5.0)
    assert world.clock.monotonic() - began <= 1.0


def test_ranges_of_another_batch_cannot_be_loaded_by_mistake():
    world = World(shards=1)
    with pytest.raises(KeyError):
        world.worker.source.load(
            Batch(
                "b",
                (Chunk("nobody", NO_RECORDS, TRIM_HORIZON, TRIM_HORIZON, 0),),
                pa.table({}),
                loaded=False,
            )
        )


def test_the_worker_ends_its_jobs():
    world = World(shards=1)
    stop = world.clock.signal()
    stop.set()
    world.make_worker("w-2").run(stop)
    assert world.jobs.closed


def test_settings_say_who_fetches():
    def pipeline(**retrieval):
        return KinesisPipeline(
            name="orders",
            streams=["orders"],
            sink=DeltaSink("table"),
            settings_overrides={"retrieval": retrieval},
        )

    masters = {
        "local[*]": False,
        "local": False,
        "local-cluster[2,1,1024]": True,
        "spark://host:7077": True,
        "yarn": True,
        "k8s://https://host": True,
    }
    assert {master: pipeline().output().executors_fetch(master) for master in masters} == masters
    assert pipeline(fetch_on="driver").output().executors_fetch("yarn") is False
    assert pipeline(fetch_on="executors").output().executors_fetch("local[2]") is True
    with pytest.raises(SettingsError, match="fetch_on='driver'"):
        pipeline(retrieval_mode="fan_out").output().executors_fetch("yarn")


def test_a_supply_is_not_begun_before_its_position_is_known():
    world = World(shards=1)
    world.run()
    consumer = next(iter(world.worker.lifecycle.consumers.values()))
    consumer.committed = None
    assert isinstance(world.worker.source, RangeSource)
    with pytest.raises(ValueError, match="no position"):
        world.worker.source.begin(consumer)


def test_a_shard_that_is_behind_gets_what_the_others_at_their_tip_do_not_need():
    """Seed 9950007795: the lag of one shard of six grew, because it got a sixth of each batch."""
    world = World(shards=4, batch={"max_batch_records": 20})
    world.run()
    shard = world.kinesis.list_shards(StreamId("orders"))[0]
    for number in range(200):
        world.model.call(
            "PutRecord",
            StreamName="orders",
            PartitionKey="k",
            ExplicitHashKey=str(shard.hash_key_range.start),
            Data=f"{number}".encode(),
        )
    world.jobs.asked.clear()
    while len(world.data()) < 200:
        world.run(0.5)
    jobs = [{f.lease_key: f.max_records for f in fetches} for fetches in world.jobs.asked]
    others = [len(job) - 1 for job in jobs if shard.shard_id in job][1:]
    assert max(others) == 3, "one job has all shards"
    assert [job[shard.shard_id] for job in jobs if shard.shard_id in job][1:] == [
        17 if other else 20 for other in others
    ]
