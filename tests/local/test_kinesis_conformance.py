"""What AWS documents of Kinesis streams and of putting records, asked through boto3 of the embedded
AWS.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import (
    MAX_HASH,
    ZERO,
    client,
    fresh_name,
    new_stream,
    put,
    read_all,
    refused,
)


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


@pytest.fixture(scope="module")
def kinesis(aws: EmbeddedAws) -> Any:
    return client(aws)


@pytest.fixture
def name(kinesis: Any) -> str:
    return new_stream(kinesis, 1)


# -- streams
# ----------------------------------------------------------------------------


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
    limits = kinesis.describe_limits()
    kinesis.create_stream(StreamName=name, StreamModeDetails={"StreamMode": "ON_DEMAND"})
    assert len(kinesis.list_shards(StreamName=name)["Shards"]) == 4
    after = kinesis.describe_limits()
    assert after["OnDemandStreamCount"] == limits["OnDemandStreamCount"] + 1
    assert after["OpenShardCount"] == limits["OpenShardCount"]
    assert after["ShardLimit"] > after["OpenShardCount"]
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
    assert kinesis.describe_limits()["OpenShardCount"] == limits["OpenShardCount"] + 4


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
    kinesis.remove_tags_from_stream(StreamName=name, TagKeys=["a", "missing"])
    kinesis.add_tags_to_stream(StreamName=name, Tags={"b": "3"})
    assert kinesis.list_tags_for_stream(StreamName=name)["Tags"][0] == {"Key": "b", "Value": "3"}
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    kinesis.tag_resource(ResourceARN=arn, Tags={"d": "4"})
    kinesis.untag_resource(ResourceARN=arn, TagKeys=["c"])
    assert [t["Key"] for t in kinesis.list_tags_for_resource(ResourceARN=arn)["Tags"]] == ["b", "d"]


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


# -- putting
# ----------------------------------------------------------------------------


def test_put_and_read_back(kinesis: Any, name: str) -> None:
    everything = bytes(range(256))
    before = datetime.now(UTC)
    one = kinesis.put_record(StreamName=name, Data=everything, PartitionKey="schlüssel-✓")
    assert one["ShardId"] == ZERO
    assert (len(one["SequenceNumber"]), str(int(one["SequenceNumber"]))) == (
        56,
        one["SequenceNumber"],
    )
    many = kinesis.put_records(
        StreamName=name, Records=[{"Data": b"%d" % i, "PartitionKey": f"k{i}"} for i in range(500)]
    )
    assert many["FailedRecordCount"] == 0
    numbers = [one["SequenceNumber"], *(r["SequenceNumber"] for r in many["Records"])]
    assert [int(n) for n in numbers] == sorted({int(n) for n in numbers})
    records = read_all(kinesis, name, ZERO)
    assert [r["SequenceNumber"] for r in records] == numbers
    assert (records[0]["Data"], records[0]["PartitionKey"]) == (everything, "schlüssel-✓")
    assert [r["Data"] for r in records[1:]] == [b"%d" % i for i in range(500)]
    assert abs((records[0]["ApproximateArrivalTimestamp"] - before).total_seconds()) < 5
    assert records[0]["ApproximateArrivalTimestamp"].microsecond % 1000 == 0


def test_records_are_routed_by_md5_or_explicit_key(kinesis: Any) -> None:
    name = new_stream(kinesis, 4)
    shards = {
        s["ShardId"]: s["HashKeyRange"] for s in kinesis.list_shards(StreamName=name)["Shards"]
    }
    for i in range(40):
        shard = shards[
            kinesis.put_record(StreamName=name, Data=b"", PartitionKey=f"é{i}")["ShardId"]
        ]
        hashed = int(hashlib.md5(f"é{i}".encode()).hexdigest(), 16)
        assert int(shard["StartingHashKey"]) <= hashed <= int(shard["EndingHashKey"])
    for shard_id, keys in shards.items():
        for edge in keys.values():
            assert (
                kinesis.put_record(
                    StreamName=name, Data=b"", PartitionKey="k", ExplicitHashKey=edge
                )["ShardId"]
                == shard_id
            )


def test_put_limits(kinesis: Any, name: str) -> None:
    mebibyte = 1_048_576
    kinesis.put_record(StreamName=name, Data=b"x" * (mebibyte - 1), PartitionKey="k")
    refused(
        "ValidationException",
        kinesis.put_record,
        StreamName=name,
        Data=b"x" * (mebibyte + 1),
        PartitionKey="k",
    )
    refused(
        "ValidationException",
        kinesis.put_records,
        StreamName=name,
        Records=[{"Data": b"x" * mebibyte, "PartitionKey": "kk"}],
    )
    refused(
        "ValidationException",
        kinesis.put_records,
        StreamName=name,
        Records=[{"Data": b"", "PartitionKey": "k"}] * 501,
    )
    refused("ValidationException", kinesis.put_records, StreamName=name, Records=[])
    refused("ValidationException", kinesis.put_records, StreamName=name)
    refused(
        "InvalidArgumentException",
        kinesis.put_records,
        StreamName=name,
        Records=[{"Data": b"x" * 900_000, "PartitionKey": "k"}] * 6,
    )
    kinesis.put_records(
        StreamName=name, Records=[{"Data": b"x" * 900_000, "PartitionKey": "k"}] * 5
    )
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="")
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x")
    refused("ValidationException", kinesis.put_record, StreamName=name, PartitionKey="k")
    refused(
        "ValidationException",
        kinesis.put_record,
        StreamName=name,
        Data=b"x",
        PartitionKey="k" * 257,
    )
    kinesis.put_record(StreamName=name, Data=b"x", PartitionKey="ü" * 256)
    refused(
        "InvalidArgumentException",
        kinesis.put_record,
        StreamName=name,
        Data=b"x",
        PartitionKey="k",
        ExplicitHashKey=str(2**128),
    )
    refused(
        "ValidationException",
        kinesis.put_record,
        StreamName=name,
        Data=b"x",
        PartitionKey="k",
        ExplicitHashKey="0x10",
    )
    refused(
        "ValidationException",
        kinesis.put_record,
        StreamName=name,
        Data=b"x",
        PartitionKey="k",
        ExplicitHashKey="-1",
    )
    assert len(read_all(kinesis, name, ZERO)) == 7


def test_sequence_number_for_ordering(kinesis: Any, name: str) -> None:
    first = put(kinesis, name, b"a")[0]
    second = kinesis.put_record(
        StreamName=name, Data=b"b", PartitionKey="k", SequenceNumberForOrdering=first
    )["SequenceNumber"]
    assert int(second) > int(first)
    refused(
        "InvalidArgumentException",
        kinesis.put_record,
        StreamName=name,
        Data=b"b",
        PartitionKey="k",
        SequenceNumberForOrdering="7",
    )


def test_eight_writers_lose_nothing(aws: EmbeddedAws, kinesis: Any) -> None:
    name = new_stream(kinesis, 4)
    acknowledged: list[list[tuple[str, bytes]]] = [[] for _ in range(8)]

    def write(worker: int) -> None:
        own = client(aws)
        for i in range(40):
            data = [b"%d/%d/%d" % (worker, i, j) for j in range(25)]
            answer = own.put_records(
                StreamName=name, Records=[{"Data": d, "PartitionKey": d.decode()} for d in data]
            )
            acknowledged[worker] += [
                (r["SequenceNumber"], d) for r, d in zip(answer["Records"], data, strict=True)
            ]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    middle = str(MAX_HASH // 8 + 1)
    kinesis.split_shard(StreamName=name, ShardToSplit=ZERO, NewStartingHashKey=middle)
    kinesis.merge_shards(
        StreamName=name,
        ShardToMerge="shardId-000000000002",
        AdjacentShardToMerge="shardId-000000000003",
    )
    for thread in threads:
        thread.join(30)
    stored = [
        (r["SequenceNumber"], r["Data"])
        for s in kinesis.list_shards(StreamName=name)["Shards"]
        for r in read_all(kinesis, name, s["ShardId"])
    ]
    assert len(stored) == 8000
    assert sorted(stored) == sorted(itertools.chain(*acknowledged))
    assert len({n for n, _ in stored}) == 8000
