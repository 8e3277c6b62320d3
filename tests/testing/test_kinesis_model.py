"""The Kinesis model without HTTP: sequence numbers, limits, trimming and writers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.shards import MAX_HASH_KEY
from kcl_pipeline.testing.clock import ShiftedClock, VirtualClock
from kcl_pipeline.testing.kinesis import sequence
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.limits import TokenBucket
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from tests.support.local_aws import eager_switching

ZERO = "shardId-000000000000"


def model_with(shards: int = 1, **settings_: object) -> tuple[KinesisModel, VirtualClock]:
    clock = VirtualClock()
    model = KinesisModel(clock, KinesisSettings(**settings_))  # type: ignore[arg-type]
    model.create_stream("s", shards)
    return model, clock


def token_for(model: KinesisModel, shard: str = ZERO, kind: str = "TRIM_HORIZON") -> str:
    return str(
        model.call("GetShardIterator", StreamName="s", ShardId=shard, ShardIteratorType=kind)[
            "ShardIterator"
        ]
    )


def test_two_streams_of_a_name_have_no_second_of_creation_in_common() -> None:
    """Keys of leases and positions have whole seconds."""
    model, clock = model_with()

    def created_seconds() -> int:
        answer = model.call("DescribeStreamSummary", StreamName="s")
        return int(answer["StreamDescriptionSummary"]["StreamCreationTimestamp"]) // 1000

    seconds = [created_seconds()]
    for _ in range(3):
        model.call("DeleteStream", StreamName="s")
        clock.advance(0.1)
        model.create_stream("s", 1)
        seconds.append(created_seconds())
    assert sorted(set(seconds)) == seconds


# -- sequence numbers
# ----------------------------------------------------------------------------


def test_sequence_numbers_have_the_layout_of_the_service() -> None:
    # Numbers that the service gave, as its public documentation shows them: from 2015 and 2018, of
    # shards 0 and 6.
    assert sequence.parse(
        "49546986683135544286507457936321625675700192471156785154"
    ) == sequence.SequenceParts(1_421_279_230, 469, 0)
    assert sequence.parse(
        "49590338271490256608559692538361571095921575989136588898"
    ) == sequence.SequenceParts(1_542_776_258, 1_734_642_199, 6)
    made = sequence.number(sequence.base_of(1_700_000_000, 18), 7, 1_700_000_123)
    assert sequence.parse(made) == sequence.SequenceParts(1_700_000_000, 7, 18)
    assert len(made) == 56
    for text in ("", "1", "x" * 56, "9" * 56, str(int(made) + 1)):
        assert sequence.parse(text) is None


@given(st.integers(0, 2**34), st.integers(0, 2**20), st.integers(1, 2**40), st.integers(0, 2**34))
def test_sequence_numbers_grow_within_a_shard_and_over_generations(
    created: int, shard: int, index: int, arrival: int
) -> None:
    start = int(sequence.starting(created, shard))
    one = int(sequence.number(sequence.base_of(created, shard), index, arrival))
    two = int(sequence.number(sequence.base_of(created, shard), index + 1, 0))
    end = int(sequence.ending(created, shard, arrival))
    child = int(sequence.starting(created + 1, 0))
    assert start < one < two < end < child


# -- limits
# ----------------------------------------------------------------------------


def test_token_bucket_refills_to_one_second() -> None:
    bucket = TokenBucket(5)
    assert [bucket.has(1, 0.0) and (bucket.take(1) or True) for _ in range(6)] == [True] * 5 + [
        False
    ]
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
    assert (
        caught.value.message
        == f"Rate exceeded for shard {ZERO} in stream s under account 123456789012."
    )
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
    answer = model.call(
        "PutRecords",
        StreamName="s",
        Records=[
            {"Data": b"", "PartitionKey": "k", "ExplicitHashKey": h} for h in (left, right, left)
        ],
    )
    assert answer["FailedRecordCount"] == 2
    assert [r.get("ErrorCode") for r in answer["Records"]] == [
        "ProvisionedThroughputExceededException",
        None,
        "ProvisionedThroughputExceededException",
    ]
    assert "ShardId" not in answer["Records"][0]
    assert "Rate exceeded for shard shardId-000000000000" in answer["Records"][0]["ErrorMessage"]
    with pytest.raises(KinesisError, match="ProvisionedThroughputExceeded"):
        model.call("PutRecord", StreamName="s", Data=b"", PartitionKey="k", ExplicitHashKey=left)
    clock.advance(1)
    assert (
        model.call("PutRecord", StreamName="s", Data=b"", PartitionKey="k", ExplicitHashKey=left)[
            "ShardId"
        ]
        == ZERO
    )


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
        model.call(
            "UpdateShardCount",
            StreamName="s",
            TargetShardCount=1 + (i + 1) % 2,
            ScalingType="UNIFORM_SCALING",
        )
    with pytest.raises(KinesisError, match="LimitExceeded"):
        model.call(
            "UpdateShardCount", StreamName="s", TargetShardCount=2, ScalingType="UNIFORM_SCALING"
        )
    clock.advance(24 * 3600 + 1)
    model.call(
        "UpdateShardCount", StreamName="s", TargetShardCount=2, ScalingType="UNIFORM_SCALING"
    )


# -- behaviour
# ----------------------------------------------------------------------------


def test_trimming_keeps_places_and_sizes_right() -> None:
    model, clock = model_with()
    model.put("s", [("k", b"x" * 100)] * 3000)
    clock.advance(23 * 3600)
    model.put("s", [("k", b"%d" % i) for i in range(4000)])
    token = token_for(model)
    clock.advance(2 * 3600)
    shard = model.stream("s").require_shard(ZERO)
    first = model.call(
        "GetShardIterator", StreamName="s", ShardId=ZERO, ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    page = model.call("GetRecords", ShardIterator=first)
    assert [r["Data"] for r in page["Records"]] == [b"%d" % i for i in range(4000)]
    assert (shard.head, shard.end) == (3000, 7000)
    number = model.put("s", [("k", b"new")])[0].sequence_number
    after = model.call(
        "GetShardIterator",
        StreamName="s",
        ShardId=ZERO,
        ShardIteratorType="AT_SEQUENCE_NUMBER",
        StartingSequenceNumber=number,
    )
    assert [
        r["Data"] for r in model.call("GetRecords", ShardIterator=after["ShardIterator"])["Records"]
    ] == [b"new"]
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
            acknowledged[worker] += [
                (p.sequence_number, d) for p, (_, d) in zip(model.put("s", data), data, strict=True)
            ]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    with eager_switching():
        for thread in threads:
            thread.start()
        for target in (4, 3, 6, 3, 2, 4):
            model.call(
                "UpdateShardCount",
                StreamName="s",
                TargetShardCount=target,
                ScalingType="UNIFORM_SCALING",
            )
        for thread in threads:
            thread.join(30)
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    stored: list[tuple[str, bytes]] = []
    for shard in client.list_shards(stream):
        page = client.get_records(
            stream,
            shard.shard_id,
            client.get_shard_iterator(stream, shard.shard_id, "TRIM_HORIZON"),
            10_000,
        )
        stored += zip(
            page.records["sequence_number"].to_pylist(),
            page.records["data"].to_pylist(),
            strict=True,
        )
    assert len(stored) == len({number for number, _ in stored}) == 8000
    assert sorted(stored) == sorted(pair for worker in acknowledged for pair in worker)


def calls_during(action: Callable[[], object]) -> int:
    counted = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted


def test_costs_do_not_grow_with_the_stream() -> None:
    model, clock = model_with(2)
    entries = [(f"k{i}", b"x", None) for i in range(500)]
    model.put_records("s", entries)
    shard = model.stream("s").open_shards[0].shard_id

    def use() -> None:
        model.put_records("s", entries)
        token = model.call(
            "GetShardIterator", StreamName="s", ShardId=shard, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        model.call("GetRecords", ShardIterator=token, Limit=100)
        at = {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": model.world.now_millis()}
        model.call("GetShardIterator", StreamName="s", ShardId=shard, **at)

    small = calls_during(use)
    for _ in range(60):
        model.put_records("s", entries)
    clock.advance(1)
    assert calls_during(use) == small


def test_unknown_operation_and_missing_parameters() -> None:
    model, _ = model_with()
    with pytest.raises(KinesisError, match="UnknownOperation"):
        model.call("CreateQueue")
    for operation in (
        "PutRecords",
        "GetRecords",
        "SplitShard",
        "UpdateShardCount",
        "RegisterStreamConsumer",
    ):
        with pytest.raises(KinesisError, match="must not be null"):
            model.call(operation, StreamName="s")
