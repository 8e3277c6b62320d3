"""What AWS documents of resharding and of ListShards, asked through boto3 of the embedded AWS."""

from __future__ import annotations

from typing import Any

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.testing.clock import ShiftedClock
from tests.support.local_aws import MAX_HASH, ZERO, iterate, new_stream, put, refused

# -- resharding
# ----------------------------------------------------------------------------


def test_split(kinesis: Any, name: str) -> None:
    old = put(kinesis, name, b"a", b"b")
    middle = 2**127
    kinesis.split_shard(StreamName=name, ShardToSplit=ZERO, NewStartingHashKey=str(middle))
    parent, left, right = kinesis.list_shards(StreamName=name)["Shards"]
    assert left["HashKeyRange"] == {"StartingHashKey": "0", "EndingHashKey": str(middle - 1)}
    assert right["HashKeyRange"] == {"StartingHashKey": str(middle), "EndingHashKey": str(MAX_HASH)}
    assert left["ParentShardId"] == right["ParentShardId"] == parent["ShardId"]
    assert "AdjacentParentShardId" not in left
    ending = int(parent["SequenceNumberRange"]["EndingSequenceNumber"])
    assert int(old[-1]) < ending
    for child in (left, right):
        assert int(child["SequenceNumberRange"]["StartingSequenceNumber"]) > ending
        assert "EndingSequenceNumber" not in child["SequenceNumberRange"]
    for edge, child in (("0", left), (str(middle), right)):
        answer = kinesis.put_record(
            StreamName=name, Data=b"n", PartitionKey="k", ExplicitHashKey=edge
        )
        assert answer["ShardId"] == child["ShardId"]
        assert int(answer["SequenceNumber"]) > ending
    last = kinesis.get_records(ShardIterator=iterate(kinesis, name))
    assert [r["Data"] for r in last["Records"]] == [b"a", b"b"]
    assert "NextShardIterator" not in last
    assert last["MillisBehindLatest"] == 0
    assert last["ChildShards"] == [
        {
            "ShardId": c["ShardId"],
            "ParentShards": [parent["ShardId"]],
            "HashKeyRange": c["HashKeyRange"],
        }
        for c in (left, right)
    ]
    at_end = iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=str(ending))
    assert kinesis.get_records(ShardIterator=at_end)["ChildShards"] == last["ChildShards"]
    latest = kinesis.get_records(ShardIterator=iterate(kinesis, name, kind="LATEST"))
    assert latest["Records"] == []
    assert latest["ChildShards"] == last["ChildShards"]
    assert "ChildShards" not in kinesis.get_records(
        ShardIterator=iterate(kinesis, name, left["ShardId"])
    )


def test_iterator_taken_before_a_split_reaches_the_children(kinesis: Any, name: str) -> None:
    token = kinesis.get_records(ShardIterator=iterate(kinesis, name, kind="LATEST"))[
        "NextShardIterator"
    ]
    put(kinesis, name, b"a")
    kinesis.split_shard(StreamName=name, ShardToSplit=ZERO, NewStartingHashKey=str(2**127))
    page = kinesis.get_records(ShardIterator=token)
    assert [r["Data"] for r in page["Records"]] == [b"a"]
    assert len(page["ChildShards"]) == 2


def test_merge(kinesis: Any) -> None:
    name = new_stream(kinesis, 2)
    zero, one = ZERO, "shardId-000000000001"
    numbers = [
        kinesis.put_record(StreamName=name, Data=b"x", PartitionKey="k", ExplicitHashKey=h)[
            "SequenceNumber"
        ]
        for h in ("0", str(MAX_HASH))
    ]
    kinesis.merge_shards(StreamName=name, ShardToMerge=zero, AdjacentShardToMerge=one)
    child = kinesis.list_shards(StreamName=name)["Shards"][2]
    assert (child["ParentShardId"], child["AdjacentParentShardId"]) == (zero, one)
    assert child["HashKeyRange"] == {"StartingHashKey": "0", "EndingHashKey": str(MAX_HASH)}
    expected = [
        {
            "ShardId": child["ShardId"],
            "ParentShards": [zero, one],
            "HashKeyRange": child["HashKeyRange"],
        }
    ]
    for shard in (zero, one):
        page = kinesis.get_records(ShardIterator=iterate(kinesis, name, shard))
        assert page["ChildShards"] == expected
        assert len(page["Records"]) == 1
    assert int(put(kinesis, name, b"y")[0]) > max(map(int, numbers))
    assert (
        kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"][
            "OpenShardCount"
        ]
        == 1
    )


def test_reshard_errors(kinesis: Any) -> None:
    name = new_stream(kinesis, 3)
    zero, one, two = (f"shardId-{i:012d}" for i in range(3))
    keys = kinesis.list_shards(StreamName=name)["Shards"][1]["HashKeyRange"]
    low, high = int(keys["StartingHashKey"]), int(keys["EndingHashKey"])
    for wrong in (low - 1, low, low + 1, high, high + 1):
        message = refused(
            "InvalidArgumentException",
            kinesis.split_shard,
            StreamName=name,
            ShardToSplit=one,
            NewStartingHashKey=str(wrong),
        )
        assert "NewStartingHashKey" in message
    refused(
        "ResourceNotFoundException",
        kinesis.split_shard,
        StreamName=name,
        ShardToSplit="shardId-000000000009",
        NewStartingHashKey="9",
    )
    assert "not an adjacent pair" in refused(
        "InvalidArgumentException",
        kinesis.merge_shards,
        StreamName=name,
        ShardToMerge=zero,
        AdjacentShardToMerge=two,
    )
    refused(
        "InvalidArgumentException",
        kinesis.merge_shards,
        StreamName=name,
        ShardToMerge=zero,
        AdjacentShardToMerge=zero,
    )
    refused(
        "ResourceNotFoundException",
        kinesis.merge_shards,
        StreamName=name,
        ShardToMerge=zero,
        AdjacentShardToMerge="shardId-000000000009",
    )
    kinesis.split_shard(StreamName=name, ShardToSplit=one, NewStartingHashKey=str(low + 2))
    message = refused(
        "InvalidArgumentException",
        kinesis.split_shard,
        StreamName=name,
        ShardToSplit=one,
        NewStartingHashKey=str(low + 100),
    )
    assert "already been merged or split" in message
    refused(
        "InvalidArgumentException",
        kinesis.merge_shards,
        StreamName=name,
        ShardToMerge=zero,
        AdjacentShardToMerge=one,
    )


def test_update_shard_count(kinesis: Any) -> None:
    name = new_stream(kinesis, 2)
    scale = kinesis.update_shard_count
    answer = scale(StreamName=name, TargetShardCount=4, ScalingType="UNIFORM_SCALING")
    assert (answer["CurrentShardCount"], answer["TargetShardCount"], answer["StreamName"]) == (
        2,
        4,
        name,
    )
    refused(
        "LimitExceededException",
        scale,
        StreamName=name,
        TargetShardCount=9,
        ScalingType="UNIFORM_SCALING",
    )
    refused(
        "LimitExceededException",
        scale,
        StreamName=name,
        TargetShardCount=1,
        ScalingType="UNIFORM_SCALING",
    )
    refused("ValidationException", scale, StreamName=name, TargetShardCount=4, ScalingType="RANDOM")
    refused(
        "ValidationException",
        scale,
        StreamName=name,
        TargetShardCount=0,
        ScalingType="UNIFORM_SCALING",
    )
    scale(StreamName=name, TargetShardCount=3, ScalingType="UNIFORM_SCALING")
    shards = kinesis.list_shards(StreamName=name)["Shards"]
    opened = [s for s in shards if "EndingSequenceNumber" not in s["SequenceNumberRange"]]
    starts = sorted(int(s["HashKeyRange"]["StartingHashKey"]) for s in opened)
    assert starts == [i * (2**128 // 3) for i in range(3)]
    ids = {s["ShardId"] for s in shards}
    assert all(s["ParentShardId"] in ids for s in shards[2:])
    assert len(ids) == len(shards)


def test_sequence_numbers_grow_along_lineage(kinesis: Any, name: str) -> None:
    last = int(put(kinesis, name, b"0")[0])
    for round_ in range(6):
        opened = kinesis.list_shards(StreamName=name, ShardFilter={"Type": "AT_LATEST"})["Shards"]
        if len(opened) == 1:
            kinesis.split_shard(
                StreamName=name, ShardToSplit=opened[0]["ShardId"], NewStartingHashKey=str(2**127)
            )
        else:
            kinesis.merge_shards(
                StreamName=name,
                ShardToMerge=opened[0]["ShardId"],
                AdjacentShardToMerge=opened[1]["ShardId"],
            )
        number = int(put(kinesis, name, b"%d" % round_)[0])
        assert number > last
        last = number


# -- ListShards
# ----------------------------------------------------------------------------


def test_list_shards_pages_by_token_alone(kinesis: Any) -> None:
    name = new_stream(kinesis, 7)
    answer = kinesis.list_shards(StreamName=name, MaxResults=3)
    token = answer["NextToken"]
    ids = [s["ShardId"] for s in answer["Shards"]]
    for extra in (
        {"StreamName": name},
        {"StreamARN": f"arn:aws:kinesis:us-east-1:123456789012:stream/{name}"},
        {"ExclusiveStartShardId": ids[0]},
        {"ShardFilter": {"Type": "AT_LATEST"}},
        {"StreamCreationTimestamp": 0},
    ):
        assert "cannot be provided together" in refused(
            "InvalidArgumentException", kinesis.list_shards, NextToken=token, **extra
        )
    answer = kinesis.list_shards(NextToken=token, MaxResults=3)
    ids += [s["ShardId"] for s in answer["Shards"]]
    answer = kinesis.list_shards(NextToken=answer["NextToken"])
    ids += [s["ShardId"] for s in answer["Shards"]]
    assert "NextToken" not in answer
    assert ids == [f"shardId-{i:012d}" for i in range(7)]
    refused("InvalidArgumentException", kinesis.list_shards, NextToken="garbage")
    refused("InvalidArgumentException", kinesis.list_shards)
    refused("ValidationException", kinesis.list_shards, StreamName=name, MaxResults=10_001)
    assert [
        s["ShardId"][-1]
        for s in kinesis.list_shards(StreamName=name, ExclusiveStartShardId=ids[4])["Shards"]
    ] == ["5", "6"]


def test_shard_filters(kinesis: Any, name: str, aws: EmbeddedAws) -> None:
    assert isinstance(aws.clock, ShiftedClock)
    created = aws.clock.wall()
    aws.clock.advance(10)
    kinesis.split_shard(StreamName=name, ShardToSplit=ZERO, NewStartingHashKey=str(2**127))
    between = aws.clock.wall() + 5
    aws.clock.advance(10)
    kinesis.merge_shards(
        StreamName=name,
        ShardToMerge="shardId-000000000001",
        AdjacentShardToMerge="shardId-000000000002",
    )

    def ids(**shard_filter: Any) -> str:
        return "".join(
            s["ShardId"][-1]
            for s in kinesis.list_shards(StreamName=name, ShardFilter=shard_filter)["Shards"]
        )

    assert ids(Type="FROM_TRIM_HORIZON") == "0123"
    assert ids(Type="AT_LATEST") == "3"
    assert ids(Type="AT_TRIM_HORIZON") == "0"
    assert ids(Type="AT_TIMESTAMP", Timestamp=created + 1) == "0"
    assert ids(Type="AT_TIMESTAMP", Timestamp=between) == "12"
    assert ids(Type="AT_TIMESTAMP", Timestamp=aws.clock.wall()) == "3"
    assert ids(Type="FROM_TIMESTAMP", Timestamp=between) == "123"
    assert ids(Type="FROM_TIMESTAMP", Timestamp=created - 1000) == "0123"
    assert ids(Type="AFTER_SHARD_ID", ShardId="shardId-000000000001") == "23"
    for wrong in (
        {"Type": "AFTER_SHARD_ID"},
        {"Type": "AT_TIMESTAMP"},
        {"Type": "AT_LATEST", "ShardId": "shardId-000000000001"},
    ):
        refused("InvalidArgumentException", kinesis.list_shards, StreamName=name, ShardFilter=wrong)
    refused(
        "ValidationException", kinesis.list_shards, StreamName=name, ShardFilter={"Type": "SOME"}
    )
    page = kinesis.list_shards(
        StreamName=name, ShardFilter={"Type": "AT_TIMESTAMP", "Timestamp": between}, MaxResults=1
    )
    assert [
        s["ShardId"][-1] for s in kinesis.list_shards(NextToken=page["NextToken"])["Shards"]
    ] == ["2"]
