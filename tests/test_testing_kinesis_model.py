"""The Kinesis model without HTTP: limits, costs, lineage as a property, clocks, and the Arrow client."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcl_pipeline import errors
from kcl_pipeline.records.kinesis import RECORD_SCHEMA, KinesisClient
from kcl_pipeline.shards import MAX_HASH_KEY, StreamId
from kcl_pipeline.testing import kinesis_sequence as sequence
from kcl_pipeline.testing.clock import ShiftedClock, VirtualClock
from kcl_pipeline.testing.kinesis_client import InMemoryKinesis
from kcl_pipeline.testing.kinesis_errors import KinesisError
from kcl_pipeline.testing.kinesis_limits import TokenBucket
from kcl_pipeline.testing.kinesis_model import OPERATIONS, KinesisModel
from kcl_pipeline.testing.kinesis_state import KinesisSettings

ZERO = "shardId-000000000000"


def model_with(shards: int = 1, **settings_: object) -> tuple[KinesisModel, VirtualClock]:
    clock = VirtualClock()
    model = KinesisModel(clock, KinesisSettings(**settings_))  # type: ignore[arg-type]
    model.create_stream("s", shards)
    return model, clock


def token_for(model: KinesisModel, shard: str = ZERO, kind: str = "TRIM_HORIZON") -> str:
    return str(model.call("GetShardIterator", StreamName="s", ShardId=shard, ShardIteratorType=kind)["ShardIterator"])


# -- sequence numbers --------------------------------------------------------------------------------------------------


def test_sequence_numbers_have_the_layout_of_the_service() -> None:
    # Numbers that the service gave, as its public documentation shows them: from 2015 and 2018, of shards 0 and 6.
    assert sequence.parse("49546986683135544286507457936321625675700192471156785154") == sequence.SequenceParts(1_421_279_230, 469, 0)
    assert sequence.parse("49590338271490256608559692538361571095921575989136588898") == sequence.SequenceParts(1_542_776_258, 1_734_642_199, 6)
    made = sequence.number(sequence.base_of(1_700_000_000, 18), 7, 1_700_000_123)
    assert sequence.parse(made) == sequence.SequenceParts(1_700_000_000, 7, 18)
    assert len(made) == 56
    for text in ("", "1", "x" * 56, "9" * 56, str(int(made) + 1)):
        assert sequence.parse(text) is None


@given(st.integers(0, 2**34), st.integers(0, 2**20), st.integers(1, 2**40), st.integers(0, 2**34))
def test_sequence_numbers_grow_within_a_shard_and_over_generations(created: int, shard: int, index: int, arrival: int) -> None:
    start = int(sequence.starting(created, shard))
    one = int(sequence.number(sequence.base_of(created, shard), index, arrival))
    two = int(sequence.number(sequence.base_of(created, shard), index + 1, 0))
    end = int(sequence.ending(created, shard, arrival))
    child = int(sequence.starting(created + 1, 0))
    assert start < one < two < end < child


# -- limits ------------------------------------------------------------------------------------------------------------


def test_token_bucket_refills_to_one_second() -> None:
    bucket = TokenBucket(5)
    assert [bucket.has(1, 0.0) and (bucket.take(1) or True) for _ in range(6)] == [True] * 5 + [False]
    assert bucket.has(1, 0.2)
    assert not bucket.has(2, 0.2)
    assert bucket.available(100.0) == 5


def test_five_reads_a_second() -> None:
    model, clock = model_with(enforce_limits=True)
    token = token_for(model)
    for _ in range(5):
        model.call("GetRecords", ShardIterator=token)
    with pytest.raises(KinesisError) as caught:
        model.call("GetRecords", ShardIterator=token)
    assert caught.value.code == "ProvisionedThroughputExceededException"
    assert caught.value.message == f"Rate exceeded for shard {ZERO} in stream s under account 123456789012."
    clock.advance(0.2)
    model.call("GetRecords", ShardIterator=token)
    with pytest.raises(KinesisError):
        model.call("GetRecords", ShardIterator=token)


def test_a_large_read_is_paid_for_afterwards() -> None:
    model, clock = model_with(enforce_limits=True)
    for _ in range(11):
        model.put("s", [("k", b"x" * 1_000_000)])
        clock.advance(1)
    token = token_for(model)
    page = model.call("GetRecords", ShardIterator=token)
    assert len(page["Records"]) == 10
    for _ in range(3):
        clock.advance(1)
        with pytest.raises(KinesisError, match="ProvisionedThroughputExceeded"):
            model.call("GetRecords", ShardIterator=page["NextShardIterator"])
    clock.advance(1.2)
    assert len(model.call("GetRecords", ShardIterator=page["NextShardIterator"])["Records"]) == 1


def test_thousand_records_a_second_and_partial_failure() -> None:
    model, clock = model_with(2, enforce_limits=True)
    left, right = str(0), str(MAX_HASH_KEY)
    for _ in range(2):
        assert all(p.error is None for p in model.put_records("s", [("k", b"", left)] * 500))
    answer = model.call("PutRecords", StreamName="s", Records=[{"Data": b"", "PartitionKey": "k", "ExplicitHashKey": h} for h in (left, right, left)])
    assert answer["FailedRecordCount"] == 2
    assert [r.get("ErrorCode") for r in answer["Records"]] == ["ProvisionedThroughputExceededException", None, "ProvisionedThroughputExceededException"]
    assert "ShardId" not in answer["Records"][0]
    assert "Rate exceeded for shard shardId-000000000000" in answer["Records"][0]["ErrorMessage"]
    with pytest.raises(KinesisError, match="ProvisionedThroughputExceeded"):
        model.call("PutRecord", StreamName="s", Data=b"", PartitionKey="k", ExplicitHashKey=left)
    clock.advance(1)
    assert model.call("PutRecord", StreamName="s", Data=b"", PartitionKey="k", ExplicitHashKey=left)["ShardId"] == ZERO


def test_one_mebibyte_a_second_in() -> None:
    model, clock = model_with(enforce_limits=True)
    puts = model.put_records("s", [("k", b"x" * 500_000, None)] * 4)
    assert [p.error is None for p in puts] == [True, True, False, False]
    clock.advance(1)
    assert model.put_records("s", [("k", b"x" * 1_048_575, None)])[0].error is None


def test_without_limits_nothing_is_refused() -> None:
    model, _ = model_with()
    model.put("s", [("k", b"")] * 5000)
    token = token_for(model)
    for _ in range(50):
        assert len(model.call("GetRecords", ShardIterator=token)["Records"]) == 5000


def test_ten_rescalings_a_day() -> None:
    model, clock = model_with(enforce_limits=True)
    for i in range(10):
        model.call("UpdateShardCount", StreamName="s", TargetShardCount=1 + (i + 1) % 2, ScalingType="UNIFORM_SCALING")
    with pytest.raises(KinesisError, match="LimitExceeded"):
        model.call("UpdateShardCount", StreamName="s", TargetShardCount=2, ScalingType="UNIFORM_SCALING")
    clock.advance(24 * 3600 + 1)
    model.call("UpdateShardCount", StreamName="s", TargetShardCount=2, ScalingType="UNIFORM_SCALING")


# -- behaviour ---------------------------------------------------------------------------------------------------------


def test_trimming_keeps_places_and_sizes_right() -> None:
    model, clock = model_with()
    model.put("s", [("k", b"x" * 100)] * 3000)
    clock.advance(23 * 3600)
    model.put("s", [("k", b"%d" % i) for i in range(4000)])
    token = token_for(model)
    clock.advance(2 * 3600)
    shard = model.stream("s").require_shard(ZERO)
    first = model.call("GetShardIterator", StreamName="s", ShardId=ZERO, ShardIteratorType="TRIM_HORIZON")["ShardIterator"]
    page = model.call("GetRecords", ShardIterator=first)
    assert [r["Data"] for r in page["Records"]] == [b"%d" % i for i in range(4000)]
    assert (shard.head, shard.end) == (3000, 7000)
    number = model.put("s", [("k", b"new")])[0].sequence_number
    after = model.call("GetShardIterator", StreamName="s", ShardId=ZERO, ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber=number)
    assert [r["Data"] for r in model.call("GetRecords", ShardIterator=after["ShardIterator"])["Records"]] == [b"new"]
    with pytest.raises(KinesisError, match="ExpiredIterator"):
        model.call("GetRecords", ShardIterator=token)


def test_page_is_cut_by_bytes_also_after_trimming() -> None:
    model, clock = model_with()
    model.put("s", [("k", b"x" * 10)] * 2000)
    clock.advance(25 * 3600)
    for _ in range(3):
        model.put_records("s", [("k", b"x" * 1_000_000, None)] * 5)
    token = token_for(model)
    model.stream("s").trim(model.stream("s").require_shard(ZERO), model.world.now_millis())
    assert len(model.call("GetRecords", ShardIterator=token)["Records"]) == 10


def test_clock_going_back_keeps_order() -> None:
    clock = ShiftedClock(VirtualClock(), offset_seconds=1000.0)
    model = KinesisModel(clock)
    model.create_stream("s")
    first = model.put("s", [("k", b"a")])[0]
    model.world.clock = VirtualClock(1_700_000_000.0)
    second = model.put("s", [("k", b"b")])[0]
    model.split("s", ZERO)
    third = model.put("s", [("k", b"c")])[0]
    assert int(first.sequence_number) < int(second.sequence_number) < int(third.sequence_number)


def test_eight_writers_while_resharding() -> None:
    model = KinesisModel()
    model.create_stream("s", 2)
    acknowledged: list[list[tuple[str, bytes]]] = [[] for _ in range(8)]

    def write(worker: int) -> None:
        for i in range(100):
            data = [(f"{worker}-{i}-{j}", b"%d-%d-%d" % (worker, i, j)) for j in range(10)]
            acknowledged[worker] += [(p.sequence_number, d) for p, (_, d) in zip(model.put("s", data), data, strict=True)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for target in (4, 3, 6, 3, 2, 4):
        model.call("UpdateShardCount", StreamName="s", TargetShardCount=target, ScalingType="UNIFORM_SCALING")
    for thread in threads:
        thread.join(30)
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    stored: list[tuple[str, bytes]] = []
    for shard in client.list_shards(stream):
        page = client.get_records(stream, shard.shard_id, client.get_shard_iterator(stream, shard.shard_id, "TRIM_HORIZON"), 10_000)
        stored += zip(page.records["sequence_number"].to_pylist(), page.records["data"].to_pylist(), strict=True)
    assert len(stored) == 8000
    assert sorted(stored) == sorted(pair for worker in acknowledged for pair in worker)


def test_unknown_operation_and_missing_parameters() -> None:
    model, _ = model_with()
    with pytest.raises(KinesisError, match="UnknownOperation"):
        model.call("CreateQueue")
    for operation in ("PutRecords", "GetRecords", "SplitShard", "UpdateShardCount", "RegisterStreamConsumer"):
        with pytest.raises(KinesisError, match="must not be null"):
            model.call(operation, StreamName="s")
    assert len(OPERATIONS) >= 30


# -- the property ------------------------------------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 30), st.integers(0, 10_000)),
        st.tuples(st.just("split"), st.integers(0, 50), st.integers(2, 1000)),
        st.tuples(st.just("merge"), st.integers(0, 50), st.integers(0, 1)),
        st.tuples(st.just("scale"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.just(0)),
    ),
    max_size=25,
)


def follow_lineage(model: KinesisModel, limit: int) -> list[tuple[str, str, bytes]]:
    """Read like a consumer that starts at the horizon: a child only after all its parents are at their end."""
    roots = model.call("ListShards", StreamName="s", ShardFilter={"Type": "AT_TRIM_HORIZON"})["Shards"]
    ready = [s["ShardId"] for s in roots]
    seen, finished = set(ready), set()
    records: list[tuple[str, str, bytes]] = []
    while ready:
        shard = ready.pop(0)
        token: str | None = token_for(model, shard)
        while token is not None:
            page = model.call("GetRecords", ShardIterator=token, Limit=limit)
            records += [(r["PartitionKey"], r["SequenceNumber"], r["Data"]) for r in page["Records"]]
            token = page.get("NextShardIterator")
            if token is not None and not page["Records"]:
                assert page["MillisBehindLatest"] == 0
                break
            for child in page.get("ChildShards", ()):
                if set(child["ParentShards"]) <= finished | {shard} and child["ShardId"] not in seen:
                    seen.add(child["ShardId"])
                    ready.append(child["ShardId"])
        finished.add(shard)
    return records


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 4), st.integers(1, 40))
def test_every_record_once_and_in_order_per_key_along_lineage(actions: list[tuple[str, int, int]], shards: int, limit: int) -> None:
    model, clock = model_with(shards)
    written: dict[str, list[tuple[str, bytes]]] = {}
    count = 0
    for action, one, two in actions:
        opened = model.stream("s").open_shards
        if action == "put":
            data = [(f"key-{(i * two) % 7}", b"%d" % (count + i)) for i in range(one)]
            count += one
            for (key, value), put in zip(data, model.put("s", data), strict=True):
                written.setdefault(key, []).append((put.sequence_number, value))
        elif action == "split" and len(opened) < 12:
            shard = opened[one % len(opened)]
            keys = shard.hash_key_range
            if keys.end - keys.start > 10:
                model.split("s", shard.shard_id, keys.start + 2 + (keys.end - keys.start - 4) * two // 1000)
        elif action == "merge" and len(opened) > 1:
            at = one % (len(opened) - 1)
            pair = [opened[at].shard_id, opened[at + 1].shard_id]
            model.merge("s", pair[two], pair[1 - two])
        elif action == "scale" and len(opened) <= one * 2 and one <= len(opened) * 2:
            model.call("UpdateShardCount", StreamName="s", TargetShardCount=one, ScalingType="UNIFORM_SCALING")
        elif action == "wait":
            clock.advance(one)
        ranges = [(s.hash_key_range.start, s.hash_key_range.end) for s in model.stream("s").open_shards]
        assert [r[0] for r in ranges] == [0, *(r[1] + 1 for r in ranges[:-1])]
        assert ranges[-1][1] == MAX_HASH_KEY
    found: dict[str, list[tuple[str, bytes]]] = {}
    for key, number, value in follow_lineage(model, limit):
        found.setdefault(key, []).append((number, value))
    assert found == written
    assert all([int(n) for n, _ in pairs] == sorted(int(n) for n, _ in pairs) for pairs in found.values())


# -- the Arrow client --------------------------------------------------------------------------------------------------


def test_client_pages_are_arrow() -> None:
    model, _ = model_with(2)
    client: KinesisClient = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    assert stream == StreamId("s", arn="arn:aws:kinesis:us-east-1:123456789012:stream/s")
    multi = client.resolve_stream(stream.arn or "", multi_stream=True)
    assert multi.serialized == "123456789012:s:1700000000"
    puts = model.put("s", [(f"k{i}", b"%d" % i) for i in range(100)])
    total = 0
    for shard in client.list_shards(stream):
        page = client.get_records(stream, shard.shard_id, client.get_shard_iterator(stream, shard.shard_id, "TRIM_HORIZON"), 10_000)
        assert page.records.schema.equals(RECORD_SCHEMA)
        page.records.validate(full=True)
        expected = [p.sequence_number for p in puts if p.shard_id == shard.shard_id]
        assert page.records["sequence_number"].to_pylist() == expected
        assert page.bytes == sum(map(len, page.records["data"].to_pylist())) + sum(map(len, page.records["partition_key"].to_pylist()))
        assert (page.millis_behind_latest, page.child_shards) == (0, ())
        total += page.records.num_rows
        first = page.records.slice(0, 1).to_pylist()[0]
        assert (first["stream"], first["shard_id"], first["sub_sequence_number"], first["explicit_hash_key"]) == ("s", shard.shard_id, 0, None)
        assert first["approximate_arrival_timestamp"] == datetime.fromtimestamp(1_700_000_000, UTC)
    assert total == 100


def test_client_shard_end_children_and_filters() -> None:
    model, clock = model_with()
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    start = datetime.fromtimestamp(clock.wall(), UTC)
    clock.advance(5)
    model.split("s", ZERO)
    page = client.get_records(stream, ZERO, client.get_shard_iterator(stream, ZERO, "LATEST"), 10)
    assert page.next_iterator is None
    assert isinstance(page.records, pa.Table)
    assert [c.parents for c in page.child_shards] == [(ZERO,), (ZERO,)]
    shards = client.list_shards(stream)
    assert [s.is_open for s in shards] == [False, True, True]
    assert shards[1].parents == (ZERO,)
    assert [s.shard_id for s in client.list_shards(stream, "AT_TIMESTAMP", start + timedelta(seconds=1))] == [ZERO]
    assert [s.shard_id for s in client.list_shards(stream, "AT_TRIM_HORIZON")] == [ZERO]
    assert [s.is_open for s in client.list_shards(stream, "AT_LATEST")] == [True, True]


def test_client_joins_pages_of_shards() -> None:
    model = KinesisModel(VirtualClock(), KinesisSettings(shard_limit=3000))
    model.create_stream("s", 2500)
    client = InMemoryKinesis(model)
    assert len({s.shard_id for s in client.list_shards(client.resolve_stream("s", multi_stream=False))}) == 2500


def test_client_raises_the_errors_of_the_package() -> None:
    model, clock = model_with(enforce_limits=True)
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    token = client.get_shard_iterator(stream, ZERO, "TRIM_HORIZON")
    for _ in range(5):
        client.get_records(stream, ZERO, token, 1)
    with pytest.raises(errors.Throttled):
        client.get_records(stream, ZERO, token, 1)
    clock.advance(301)
    with pytest.raises(errors.ExpiredIterator) as expired:
        client.get_records(stream, ZERO, token, 1)
    assert (expired.value.code, expired.value.operation) == ("ExpiredIteratorException", "GetRecords")
    with pytest.raises(errors.ExpiredIterator):
        client.get_records(stream, ZERO, "nonsense", 1)
    with pytest.raises(errors.NotFound):
        client.resolve_stream("nobody", multi_stream=False)
    with pytest.raises(errors.NotFound):
        client.get_shard_iterator(stream, "shardId-000000000007", "LATEST")
    with pytest.raises(errors.InvalidRequest):
        client.get_shard_iterator(stream, ZERO, "AT_SEQUENCE_NUMBER", sequence_number="1")


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_shifted_clock() -> None:
    base = VirtualClock(100.0)
    clock = ShiftedClock(base, 5.0)
    assert (clock.wall(), clock.monotonic()) == (105.0, 5.0)
    clock.advance(10)
    clock.sleep(1)
    assert (clock.wall(), clock.monotonic(), base.monotonic(), clock.offset_seconds) == (116.0, 16.0, 1.0, 15.0)
    with pytest.raises(ValueError, match="advanced by -1"):
        clock.advance(-1)


def test_virtual_clock() -> None:
    clock = VirtualClock(50.0)
    signal = clock.signal()
    assert signal.wait(2.5) is False
    assert clock.wall() == 52.5
    with pytest.raises(RuntimeError, match="never end"):
        signal.wait()
    signal.set()
    assert signal.wait(100) is True
    assert signal.is_set()
    assert clock.monotonic() == 2.5
    lock = clock.lock()
    with lock, clock.lock(), pytest.raises(RuntimeError, match="taken twice"), lock:
        pass
    with lock:
        pass
    with pytest.raises(ValueError, match="sleep -1"):
        clock.sleep(-1)
