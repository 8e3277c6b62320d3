"""What AWS documents of Kinesis streams, requested through boto3 from the embedded AWS."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

from tests.support.local_aws import (
    MAX_HASH,
    ZERO,
    fresh_name,
    new_stream,
    refused,
)


def test_create_describe_list_delete(kinesis: Any) -> None:
    before = datetime.now(UTC)
    name = new_stream(kinesis, 3)
    description = kinesis.describe_stream(StreamName=name)["StreamDescription"]
    assert description["StreamStatus"] == "ACTIVE"
    assert description["StreamARN"] == f"arn:aws:kinesis:us-east-1:123456789012:stream/{name}"
    assert description["RetentionPeriodHours"] == 24
    assert description["StreamModeDetails"] == {"StreamMode": "PROVISIONED"}
    assert description["HasMoreShards"] is False
    assert abs((description["StreamCreationTimestamp"] - before).total_seconds()) < 5
    ranges = [
        (int(s["HashKeyRange"]["StartingHashKey"]), int(s["HashKeyRange"]["EndingHashKey"]))
        for s in description["Shards"]
    ]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == MAX_HASH
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(ranges))
    summary = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
    assert (summary["OpenShardCount"], summary["ConsumerCount"], summary["StreamStatus"]) == (
        3,
        0,
        "ACTIVE",
    )
    assert name in kinesis.list_streams(Limit=10000)["StreamNames"]
    kinesis.get_waiter("stream_exists").wait(
        StreamName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 1}
    )
    kinesis.delete_stream(StreamName=name)
    kinesis.get_waiter("stream_not_exists").wait(
        StreamName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 1}
    )
    refused("ResourceNotFoundException", kinesis.describe_stream, StreamName=name)


def test_stream_errors(kinesis: Any, name: str) -> None:
    assert "already exists" in refused(
        "ResourceInUseException", kinesis.create_stream, StreamName=name, ShardCount=1
    )
    refused("ValidationException", kinesis.create_stream, StreamName="no spaces", ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="x" * 129, ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="zero", ShardCount=0)
    refused("ValidationException", kinesis.create_stream, ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="nocount")
    refused("LimitExceededException", kinesis.create_stream, StreamName="huge", ShardCount=100_000)
    for operation in (
        "describe_stream",
        "describe_stream_summary",
        "list_shards",
        "delete_stream",
        "list_tags_for_stream",
    ):
        assert "not found" in refused(
            "ResourceNotFoundException", getattr(kinesis, operation), StreamName="nobody"
        )
    refused(
        "ResourceNotFoundException",
        kinesis.put_record,
        StreamName="nobody",
        Data=b"x",
        PartitionKey="k",
    )
    refused("InvalidArgumentException", kinesis.describe_stream)


def test_list_streams_pages(kinesis: Any) -> None:
    for _ in range(3):
        new_stream(kinesis, 1)
    names: list[str] = []
    answer = kinesis.list_streams(Limit=2)
    while True:
        names += answer["StreamNames"]
        assert [s["StreamName"] for s in answer["StreamSummaries"]] == answer["StreamNames"]
        if not answer["HasMoreStreams"]:
            break
        answer = kinesis.list_streams(Limit=2, NextToken=answer["NextToken"])
    assert names == sorted(set(names))
    assert kinesis.list_streams(Limit=10000)["StreamNames"] == names
    assert (
        kinesis.list_streams(Limit=10000, ExclusiveStartStreamName=names[0])["StreamNames"]
        == names[1:]
    )


def test_describe_stream_pages(kinesis: Any) -> None:
    name = new_stream(kinesis, 5)
    first = kinesis.describe_stream(StreamName=name, Limit=2)["StreamDescription"]
    assert [s["ShardId"][-1] for s in first["Shards"]] == ["0", "1"]
    assert first["HasMoreShards"] is True
    rest = kinesis.describe_stream(
        StreamName=name, ExclusiveStartShardId=first["Shards"][-1]["ShardId"]
    )["StreamDescription"]
    assert [s["ShardId"][-1] for s in rest["Shards"]] == ["2", "3", "4"]
    assert rest["HasMoreShards"] is False


def test_on_demand_and_mode(kinesis: Any) -> None:
    name = fresh_name()
    kinesis.create_stream(StreamName=name, StreamModeDetails={"StreamMode": "ON_DEMAND"})
    assert len(kinesis.list_shards(StreamName=name)["Shards"]) == 4
    refused(
        "ValidationException",
        kinesis.split_shard,
        StreamName=name,
        ShardToSplit=ZERO,
        NewStartingHashKey="100",
    )
    refused(
        "ValidationException",
        kinesis.update_shard_count,
        StreamName=name,
        TargetShardCount=2,
        ScalingType="UNIFORM_SCALING",
    )
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    kinesis.update_stream_mode(StreamARN=arn, StreamModeDetails={"StreamMode": "PROVISIONED"})
    assert kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"][
        "StreamModeDetails"
    ] == {"StreamMode": "PROVISIONED"}


def test_tags(kinesis: Any, name: str) -> None:
    kinesis.add_tags_to_stream(StreamName=name, Tags={"b": "2", "a": "1", "c": ""})
    assert kinesis.list_tags_for_stream(StreamName=name)["Tags"] == [
        {"Key": "a", "Value": "1"},
        {"Key": "b", "Value": "2"},
        {"Key": "c", "Value": ""},
    ]
    page = kinesis.list_tags_for_stream(StreamName=name, Limit=1)
    assert page["HasMoreTags"] is True
    assert [
        t["Key"]
        for t in kinesis.list_tags_for_stream(StreamName=name, ExclusiveStartTagKey="a")["Tags"]
    ] == ["b", "c"]
    kinesis.add_tags_to_stream(StreamName=name, Tags={"b": "3"})
    assert kinesis.list_tags_for_stream(StreamName=name)["Tags"][1] == {"Key": "b", "Value": "3"}


def test_retention_rules(kinesis: Any, name: str) -> None:
    kinesis.increase_stream_retention_period(StreamName=name, RetentionPeriodHours=48)
    assert (
        kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"][
            "RetentionPeriodHours"
        ]
        == 48
    )
    refused(
        "InvalidArgumentException",
        kinesis.increase_stream_retention_period,
        StreamName=name,
        RetentionPeriodHours=36,
    )
    refused(
        "InvalidArgumentException",
        kinesis.increase_stream_retention_period,
        StreamName=name,
        RetentionPeriodHours=8761,
    )
    refused(
        "InvalidArgumentException",
        kinesis.decrease_stream_retention_period,
        StreamName=name,
        RetentionPeriodHours=72,
    )
    refused(
        "InvalidArgumentException",
        kinesis.decrease_stream_retention_period,
        StreamName=name,
        RetentionPeriodHours=23,
    )
    kinesis.decrease_stream_retention_period(StreamName=name, RetentionPeriodHours=24)
    assert (
        kinesis.describe_stream(StreamName=name)["StreamDescription"]["RetentionPeriodHours"] == 24
    )


def test_consumers(kinesis: Any, name: str) -> None:
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    for consumer in ("c1", "c2", "c3"):
        made = kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=consumer)["Consumer"]
        assert made["ConsumerStatus"] == "CREATING"
        assert made["ConsumerARN"].startswith(f"{arn}/consumer/{consumer}:")
    refused(
        "ResourceInUseException", kinesis.register_stream_consumer, StreamARN=arn, ConsumerName="c1"
    )
    described = kinesis.describe_stream_consumer(StreamARN=arn, ConsumerName="c2")[
        "ConsumerDescription"
    ]
    assert (described["ConsumerStatus"], described["StreamARN"]) == ("ACTIVE", arn)
    assert (
        kinesis.describe_stream_consumer(ConsumerARN=described["ConsumerARN"])[
            "ConsumerDescription"
        ]
        == described
    )
    page = kinesis.list_stream_consumers(StreamARN=arn, MaxResults=2)
    assert [c["ConsumerName"] for c in page["Consumers"]] == ["c1", "c2"]
    rest = kinesis.list_stream_consumers(StreamARN=arn, NextToken=page["NextToken"])
    assert [c["ConsumerName"] for c in rest["Consumers"]] == ["c3"]
    assert "NextToken" not in rest
    refused("ResourceInUseException", kinesis.delete_stream, StreamName=name)
    kinesis.deregister_stream_consumer(StreamARN=arn, ConsumerName="c2")
    refused(
        "ResourceNotFoundException",
        kinesis.describe_stream_consumer,
        StreamARN=arn,
        ConsumerName="c2",
    )
    assert [
        c["ConsumerName"] for c in kinesis.list_stream_consumers(StreamARN=arn)["Consumers"]
    ] == ["c1", "c3"]
    for i in range(18):
        kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=f"more-{i}")
    refused(
        "LimitExceededException",
        kinesis.register_stream_consumer,
        StreamARN=arn,
        ConsumerName="too-many",
    )
    kinesis.delete_stream(StreamName=name, EnforceConsumerDeletion=True)
