"""What AWS documents of reading from Kinesis, and of time, asked through boto3 of the
embedded AWS.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from tests.support.local_aws import MAX_HASH, ZERO, client, iterate, new_stream, put, read, refused

# -- iterators and reading
# ----------------------------------------------------------------------------


def test_all_five_iterator_types(kinesis: Any, name: str) -> None:
    numbers = put(kinesis, name, b"a", b"b", b"c")
    arrival = kinesis.get_records(ShardIterator=iterate(kinesis, name))["Records"][1][
        "ApproximateArrivalTimestamp"
    ]
    assert read(kinesis, iterate(kinesis, name)) == [b"a", b"b", b"c"]
    assert read(
        kinesis,
        iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[1]),
    ) == [b"b", b"c"]
    assert read(
        kinesis,
        iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[1]),
    ) == [b"c"]
    assert (
        read(
            kinesis,
            iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[2]),
        )
        == []
    )
    assert b"b" in read(
        kinesis, iterate(kinesis, name, kind="AT_TIMESTAMP", Timestamp=arrival.timestamp())
    )
    assert read(kinesis, iterate(kinesis, name, kind="AT_TIMESTAMP", Timestamp=0)) == [
        b"a",
        b"b",
        b"c",
    ]
    latest = iterate(kinesis, name, kind="LATEST")
    assert read(kinesis, latest) == []
    put(kinesis, name, b"d")
    assert read(kinesis, latest) == [b"d"]
    start = kinesis.list_shards(StreamName=name)["Shards"][0]["SequenceNumberRange"][
        "StartingSequenceNumber"
    ]
    assert read(
        kinesis, iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=start)
    ) == [b"a", b"b", b"c", b"d"]


def test_iterator_errors(kinesis: Any, name: str) -> None:
    ask = kinesis.get_shard_iterator
    shard = ZERO
    assert "does not exist" in refused(
        "ResourceNotFoundException",
        ask,
        StreamName=name,
        ShardId="shardId-000000000009",
        ShardIteratorType="LATEST",
    )
    refused(
        "ResourceNotFoundException",
        ask,
        StreamName=name,
        ShardId="nonsense",
        ShardIteratorType="LATEST",
    )
    refused(
        "ResourceNotFoundException",
        ask,
        StreamName="nobody",
        ShardId=shard,
        ShardIteratorType="LATEST",
    )


def test_iterator_arguments_that_do_not_fit(kinesis: Any, name: str) -> None:
    number = put(kinesis, name, b"a")[0]
    other = new_stream(kinesis, 2)
    foreign = kinesis.put_record(
        StreamName=other, Data=b"x", PartitionKey="k", ExplicitHashKey=str(MAX_HASH)
    )["SequenceNumber"]
    ask, shard = kinesis.get_shard_iterator, ZERO
    refused(
        "ValidationException", ask, StreamName=name, ShardId=shard, ShardIteratorType="SOMEWHERE"
    )
    refused("ValidationException", ask, StreamName=name, ShardId=shard)
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_SEQUENCE_NUMBER",
    )
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_TIMESTAMP",
    )
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="LATEST",
        StartingSequenceNumber=number,
    )
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_SEQUENCE_NUMBER",
        StartingSequenceNumber="12",
    )
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_SEQUENCE_NUMBER",
        StartingSequenceNumber="abc",
    )
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_SEQUENCE_NUMBER",
        StartingSequenceNumber=foreign,
    )
    future = datetime.now(UTC).timestamp() + 3600
    refused(
        "InvalidArgumentException",
        ask,
        StreamName=name,
        ShardId=shard,
        ShardIteratorType="AT_TIMESTAMP",
        Timestamp=future,
    )


def test_get_records_errors(kinesis: Any, name: str) -> None:
    token = iterate(kinesis, name)
    for bad in (
        "garbage",
        "AAAA",
        token[:-4],
        token[:-5] + ("A" if token[-5] != "A" else "B") + token[-4:],
    ):
        refused("InvalidArgumentException", kinesis.get_records, ShardIterator=bad)
    refused("ValidationException", kinesis.get_records)
    refused("ValidationException", kinesis.get_records, ShardIterator=token, Limit=10001)
    refused("ValidationException", kinesis.get_records, ShardIterator=token, Limit=0)
    kinesis.delete_stream(StreamName=name)
    refused("ResourceNotFoundException", kinesis.get_records, ShardIterator=token)
    kinesis.create_stream(StreamName=name, ShardCount=1)
    refused("ResourceNotFoundException", kinesis.get_records, ShardIterator=token)


def test_page_caps(kinesis: Any, name: str) -> None:
    for _ in range(3):
        kinesis.put_records(
            StreamName=name, Records=[{"Data": b"x" * 1_000_000, "PartitionKey": "k"}] * 5
        )
    first = kinesis.get_records(ShardIterator=iterate(kinesis, name))
    assert sum(len(r["Data"]) for r in first["Records"]) <= 10 * 1_048_576
    assert len(first["Records"]) == 10
    assert first["MillisBehindLatest"] >= 0
    rest = kinesis.get_records(ShardIterator=first["NextShardIterator"])
    assert len(rest["Records"]) == 5
    assert rest["MillisBehindLatest"] == 0
    small = new_stream(kinesis, 1)
    for _ in range(21):
        kinesis.put_records(StreamName=small, Records=[{"Data": b"", "PartitionKey": "k"}] * 500)
    page = kinesis.get_records(ShardIterator=iterate(kinesis, small))
    assert len(page["Records"]) == 10_000
    assert (
        len(kinesis.get_records(ShardIterator=page["NextShardIterator"], Limit=300)["Records"])
        == 300
    )


def test_iterators_may_be_used_again(kinesis: Any, name: str) -> None:
    put(kinesis, name, b"a", b"b")
    token = iterate(kinesis, name)
    assert read(kinesis, token, Limit=1) == read(kinesis, token, Limit=1) == [b"a"]


def test_stream_arn_stands_for_the_name(kinesis: Any, name: str) -> None:
    arn = kinesis.describe_stream(StreamName=name)["StreamDescription"]["StreamARN"]
    kinesis.put_record(StreamARN=arn, Data=b"a", PartitionKey="k")
    kinesis.put_records(
        StreamARN=arn, StreamName=name, Records=[{"Data": b"b", "PartitionKey": "k"}]
    )
    token = kinesis.get_shard_iterator(
        StreamARN=arn, ShardId=ZERO, ShardIteratorType="TRIM_HORIZON"
    )["ShardIterator"]
    assert read(kinesis, token) == [b"a", b"b"]
    assert read(kinesis, token, StreamARN=arn) == [b"a", b"b"]
    assert len(kinesis.list_shards(StreamARN=arn)["Shards"]) == 1
    assert (
        kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"]["StreamName"]
        == name
    )
    refused(
        "InvalidArgumentException", kinesis.describe_stream, StreamARN=arn, StreamName="another"
    )
    refused("ResourceNotFoundException", kinesis.describe_stream, StreamARN=arn + "x")
    refused("InvalidArgumentException", kinesis.describe_stream, StreamARN="arn:nonsense")


# -- time
# ----------------------------------------------------------------------------


@pytest.fixture
def timed() -> Iterator[tuple[EmbeddedAws, Any, ShiftedClock]]:
    clock = ShiftedClock()
    with EmbeddedAws(clock=clock) as running:
        yield running, client(running), clock


def test_tokens_expire_after_five_minutes(timed: tuple[EmbeddedAws, Any, ShiftedClock]) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 2)
    token = iterate(kinesis, name)
    page = kinesis.list_shards(StreamName=name, MaxResults=1)["NextToken"]
    clock.advance(290)
    fresh = kinesis.get_records(ShardIterator=token)["NextShardIterator"]
    assert len(kinesis.list_shards(NextToken=page)["Shards"]) == 1
    clock.advance(20)
    assert "Iterator expired" in refused(
        "ExpiredIteratorException", kinesis.get_records, ShardIterator=token
    )
    refused("ExpiredNextTokenException", kinesis.list_shards, NextToken=page)
    assert kinesis.get_records(ShardIterator=fresh)["Records"] == []


def test_millis_behind_latest(timed: tuple[EmbeddedAws, Any, ShiftedClock]) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 1)
    put(kinesis, name, b"a")
    clock.advance(2.5)
    put(kinesis, name, b"b")
    page = kinesis.get_records(ShardIterator=iterate(kinesis, name), Limit=1)
    assert 2500 <= page["MillisBehindLatest"] < 4000
    assert kinesis.get_records(ShardIterator=page["NextShardIterator"])["MillisBehindLatest"] == 0


def test_records_and_closed_shards_leave_retention(
    timed: tuple[EmbeddedAws, Any, ShiftedClock],
) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 1)
    first = put(kinesis, name, b"old")[0]
    clock.advance(23 * 3600)
    put(kinesis, name, b"young")
    kinesis.split_shard(StreamName=name, ShardToSplit=ZERO, NewStartingHashKey=str(2**127))
    token = iterate(kinesis, name)
    assert read(kinesis, token) == [b"old", b"young"]
    clock.advance(2 * 3600)
    assert read(kinesis, iterate(kinesis, name)) == [b"young"]
    assert read(
        kinesis, iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=first)
    ) == [b"young"]
    assert len(kinesis.list_shards(StreamName=name)["Shards"]) == 3
    clock.advance(23 * 3600)
    shards = kinesis.list_shards(StreamName=name)["Shards"]
    assert [s["ShardId"][-1] for s in shards] == ["1", "2"]
    assert shards[0]["ParentShardId"] == ZERO
    refused(
        "ResourceNotFoundException",
        kinesis.get_shard_iterator,
        StreamName=name,
        ShardId=ZERO,
        ShardIteratorType="TRIM_HORIZON",
    )
    assert len(kinesis.describe_stream(StreamName=name)["StreamDescription"]["Shards"]) == 2


def test_longer_retention_keeps_records(timed: tuple[EmbeddedAws, Any, ShiftedClock]) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 1)
    put(kinesis, name, b"a")
    kinesis.increase_stream_retention_period(StreamName=name, RetentionPeriodHours=168)
    clock.advance(100 * 3600)
    assert read(kinesis, iterate(kinesis, name)) == [b"a"]
    kinesis.decrease_stream_retention_period(StreamName=name, RetentionPeriodHours=24)
    assert read(kinesis, iterate(kinesis, name)) == []


def test_a_live_reader_survives_trimming(timed: tuple[EmbeddedAws, Any, ShiftedClock]) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 1)
    put(kinesis, name, *[b"%d" % i for i in range(10)])
    clock.advance(24 * 3600 - 100)
    put(kinesis, name, *[b"%d" % i for i in range(10, 20)])
    page = kinesis.get_records(ShardIterator=iterate(kinesis, name), Limit=12)
    clock.advance(200)
    assert read(kinesis, page["NextShardIterator"]) == [b"%d" % i for i in range(12, 20)]


def test_delays() -> None:
    clock = ShiftedClock()
    with EmbeddedAws(
        clock=clock, settings=KinesisSettings(create_delay_seconds=60, reshard_delay_seconds=60)
    ) as running:
        kinesis = client(running)
        kinesis.create_stream(StreamName="slow", ShardCount=1)
        assert (
            kinesis.describe_stream(StreamName="slow")["StreamDescription"]["StreamStatus"]
            == "CREATING"
        )
        assert kinesis.describe_stream(StreamName="slow")["StreamDescription"]["Shards"] == []
        refused(
            "ResourceNotFoundException",
            kinesis.put_record,
            StreamName="slow",
            Data=b"x",
            PartitionKey="k",
        )
        refused(
            "ResourceInUseException",
            kinesis.split_shard,
            StreamName="slow",
            ShardToSplit=ZERO,
            NewStartingHashKey="99",
        )
        clock.advance(61)
        kinesis.split_shard(StreamName="slow", ShardToSplit=ZERO, NewStartingHashKey=str(2**127))
        assert (
            kinesis.describe_stream_summary(StreamName="slow")["StreamDescriptionSummary"][
                "StreamStatus"
            ]
            == "UPDATING"
        )
        assert kinesis.put_record(StreamName="slow", Data=b"x", PartitionKey="k")["ShardId"] == ZERO
        refused(
            "ResourceInUseException",
            kinesis.update_shard_count,
            StreamName="slow",
            TargetShardCount=2,
            ScalingType="UNIFORM_SCALING",
        )
        clock.advance(61)
        assert kinesis.put_record(StreamName="slow", Data=b"x", PartitionKey="k")["ShardId"] != ZERO
        assert (
            kinesis.describe_stream_summary(StreamName="slow")["StreamDescriptionSummary"][
                "StreamStatus"
            ]
            == "ACTIVE"
        )
