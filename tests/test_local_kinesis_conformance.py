"""What AWS documents of Kinesis, asked through boto3 of the embedded AWS."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.kinesis_state import KinesisSettings

MAX_HASH = 2**128 - 1
_names = itertools.count()


def client(aws: EmbeddedAws, service: str = "kinesis") -> Any:
    config = Config(retries={"total_max_attempts": 1}, parameter_validation=False, connect_timeout=5, read_timeout=20)
    return boto3.client(service, endpoint_url=aws.endpoint_url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s", config=config)


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


@pytest.fixture(scope="module")
def kinesis(aws: EmbeddedAws) -> Any:
    return client(aws)


@pytest.fixture
def name(kinesis: Any) -> str:
    fresh = f"stream-{next(_names)}"
    kinesis.create_stream(StreamName=fresh, ShardCount=1)
    return fresh


def new_stream(kinesis: Any, shards: int) -> str:
    fresh = f"stream-{next(_names)}"
    kinesis.create_stream(StreamName=fresh, ShardCount=shards)
    return fresh


def refused(code: str, call: Callable[..., Any], *args: Any, **params: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(*args, **params)
    assert caught.value.response["Error"]["Code"] == code, caught.value
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    return str(caught.value.response["Error"]["Message"])


def iterate(kinesis: Any, name: str, shard: str = "shardId-000000000000", kind: str = "TRIM_HORIZON", **more: Any) -> str:
    return str(kinesis.get_shard_iterator(StreamName=name, ShardId=shard, ShardIteratorType=kind, **more)["ShardIterator"])


def read(kinesis: Any, token: str, **more: Any) -> list[bytes]:
    return [r["Data"] for r in kinesis.get_records(ShardIterator=token, **more)["Records"]]


def read_all(kinesis: Any, name: str, shard: str) -> list[dict[str, Any]]:
    token: str | None = iterate(kinesis, name, shard)
    records: list[dict[str, Any]] = []
    for _ in range(1000):
        answer = kinesis.get_records(ShardIterator=token)
        records += answer["Records"]
        token = answer.get("NextShardIterator")
        if token is None or (not answer["Records"] and answer["MillisBehindLatest"] == 0):
            return records
    raise AssertionError("the shard does not end")


def put(kinesis: Any, name: str, *data: bytes, key: str = "k") -> list[str]:
    return [kinesis.put_record(StreamName=name, Data=d, PartitionKey=key)["SequenceNumber"] for d in data]


# -- streams -----------------------------------------------------------------------------------------------------------


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
    ranges = [(int(s["HashKeyRange"]["StartingHashKey"]), int(s["HashKeyRange"]["EndingHashKey"])) for s in description["Shards"]]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == MAX_HASH
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(ranges))
    summary = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
    assert (summary["OpenShardCount"], summary["ConsumerCount"], summary["StreamStatus"]) == (3, 0, "ACTIVE")
    assert name in kinesis.list_streams(Limit=10000)["StreamNames"]
    kinesis.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 1})
    kinesis.delete_stream(StreamName=name)
    kinesis.get_waiter("stream_not_exists").wait(StreamName=name, WaiterConfig={"Delay": 0, "MaxAttempts": 1})
    refused("ResourceNotFoundException", kinesis.describe_stream, StreamName=name)


def test_stream_errors(kinesis: Any, name: str) -> None:
    assert "already exists" in refused("ResourceInUseException", kinesis.create_stream, StreamName=name, ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="no spaces", ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="x" * 129, ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="zero", ShardCount=0)
    refused("ValidationException", kinesis.create_stream, ShardCount=1)
    refused("ValidationException", kinesis.create_stream, StreamName="nocount")
    refused("LimitExceededException", kinesis.create_stream, StreamName="huge", ShardCount=100_000)
    for operation in ("describe_stream", "describe_stream_summary", "list_shards", "delete_stream", "list_tags_for_stream"):
        assert "not found" in refused("ResourceNotFoundException", getattr(kinesis, operation), StreamName="nobody")
    refused("ResourceNotFoundException", kinesis.put_record, StreamName="nobody", Data=b"x", PartitionKey="k")
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
    assert kinesis.list_streams(Limit=10000, ExclusiveStartStreamName=names[0])["StreamNames"] == names[1:]


def test_describe_stream_pages(kinesis: Any) -> None:
    name = new_stream(kinesis, 5)
    first = kinesis.describe_stream(StreamName=name, Limit=2)["StreamDescription"]
    assert [s["ShardId"][-1] for s in first["Shards"]] == ["0", "1"]
    assert first["HasMoreShards"] is True
    rest = kinesis.describe_stream(StreamName=name, ExclusiveStartShardId=first["Shards"][-1]["ShardId"])["StreamDescription"]
    assert [s["ShardId"][-1] for s in rest["Shards"]] == ["2", "3", "4"]
    assert rest["HasMoreShards"] is False


def test_on_demand_and_mode(kinesis: Any) -> None:
    name = f"stream-{next(_names)}"
    limits = kinesis.describe_limits()
    kinesis.create_stream(StreamName=name, StreamModeDetails={"StreamMode": "ON_DEMAND"})
    assert len(kinesis.list_shards(StreamName=name)["Shards"]) == 4
    after = kinesis.describe_limits()
    assert after["OnDemandStreamCount"] == limits["OnDemandStreamCount"] + 1
    assert after["OpenShardCount"] == limits["OpenShardCount"]
    assert after["ShardLimit"] > after["OpenShardCount"]
    refused("ValidationException", kinesis.split_shard, StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey="100")
    refused("ValidationException", kinesis.update_shard_count, StreamName=name, TargetShardCount=2, ScalingType="UNIFORM_SCALING")
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    kinesis.update_stream_mode(StreamARN=arn, StreamModeDetails={"StreamMode": "PROVISIONED"})
    assert kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"]["StreamModeDetails"] == {"StreamMode": "PROVISIONED"}
    assert kinesis.describe_limits()["OpenShardCount"] == limits["OpenShardCount"] + 4


def test_tags(kinesis: Any, name: str) -> None:
    kinesis.add_tags_to_stream(StreamName=name, Tags={"b": "2", "a": "1", "c": ""})
    assert kinesis.list_tags_for_stream(StreamName=name)["Tags"] == [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "2"}, {"Key": "c", "Value": ""}]
    page = kinesis.list_tags_for_stream(StreamName=name, Limit=1)
    assert page["HasMoreTags"] is True
    assert [t["Key"] for t in kinesis.list_tags_for_stream(StreamName=name, ExclusiveStartTagKey="a")["Tags"]] == ["b", "c"]
    kinesis.remove_tags_from_stream(StreamName=name, TagKeys=["a", "missing"])
    kinesis.add_tags_to_stream(StreamName=name, Tags={"b": "3"})
    assert kinesis.list_tags_for_stream(StreamName=name)["Tags"][0] == {"Key": "b", "Value": "3"}
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    kinesis.tag_resource(ResourceARN=arn, Tags={"d": "4"})
    kinesis.untag_resource(ResourceARN=arn, TagKeys=["c"])
    assert [t["Key"] for t in kinesis.list_tags_for_resource(ResourceARN=arn)["Tags"]] == ["b", "d"]


def test_retention_rules(kinesis: Any, name: str) -> None:
    kinesis.increase_stream_retention_period(StreamName=name, RetentionPeriodHours=48)
    assert kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["RetentionPeriodHours"] == 48
    refused("InvalidArgumentException", kinesis.increase_stream_retention_period, StreamName=name, RetentionPeriodHours=36)
    refused("InvalidArgumentException", kinesis.increase_stream_retention_period, StreamName=name, RetentionPeriodHours=8761)
    refused("InvalidArgumentException", kinesis.decrease_stream_retention_period, StreamName=name, RetentionPeriodHours=72)
    refused("InvalidArgumentException", kinesis.decrease_stream_retention_period, StreamName=name, RetentionPeriodHours=23)
    kinesis.decrease_stream_retention_period(StreamName=name, RetentionPeriodHours=24)
    assert kinesis.describe_stream(StreamName=name)["StreamDescription"]["RetentionPeriodHours"] == 24


def test_consumers(kinesis: Any, name: str) -> None:
    arn = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    for consumer in ("c1", "c2", "c3"):
        made = kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=consumer)["Consumer"]
        assert made["ConsumerStatus"] == "CREATING"
        assert made["ConsumerARN"].startswith(f"{arn}/consumer/{consumer}:")
    refused("ResourceInUseException", kinesis.register_stream_consumer, StreamARN=arn, ConsumerName="c1")
    described = kinesis.describe_stream_consumer(StreamARN=arn, ConsumerName="c2")["ConsumerDescription"]
    assert (described["ConsumerStatus"], described["StreamARN"]) == ("ACTIVE", arn)
    assert kinesis.describe_stream_consumer(ConsumerARN=described["ConsumerARN"])["ConsumerDescription"] == described
    page = kinesis.list_stream_consumers(StreamARN=arn, MaxResults=2)
    assert [c["ConsumerName"] for c in page["Consumers"]] == ["c1", "c2"]
    rest = kinesis.list_stream_consumers(StreamARN=arn, NextToken=page["NextToken"])
    assert [c["ConsumerName"] for c in rest["Consumers"]] == ["c3"]
    assert "NextToken" not in rest
    refused("ResourceInUseException", kinesis.delete_stream, StreamName=name)
    kinesis.deregister_stream_consumer(StreamARN=arn, ConsumerName="c2")
    refused("ResourceNotFoundException", kinesis.describe_stream_consumer, StreamARN=arn, ConsumerName="c2")
    assert [c["ConsumerName"] for c in kinesis.list_stream_consumers(StreamARN=arn)["Consumers"]] == ["c1", "c3"]
    for i in range(18):
        kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=f"more-{i}")
    refused("LimitExceededException", kinesis.register_stream_consumer, StreamARN=arn, ConsumerName="too-many")
    kinesis.delete_stream(StreamName=name, EnforceConsumerDeletion=True)


# -- putting -----------------------------------------------------------------------------------------------------------


def test_put_and_read_back(kinesis: Any, name: str) -> None:
    everything = bytes(range(256))
    before = datetime.now(UTC)
    one = kinesis.put_record(StreamName=name, Data=everything, PartitionKey="schlüssel-✓")
    assert one["ShardId"] == "shardId-000000000000"
    assert (len(one["SequenceNumber"]), str(int(one["SequenceNumber"]))) == (56, one["SequenceNumber"])
    many = kinesis.put_records(StreamName=name, Records=[{"Data": b"%d" % i, "PartitionKey": f"k{i}"} for i in range(500)])
    assert many["FailedRecordCount"] == 0
    numbers = [one["SequenceNumber"], *(r["SequenceNumber"] for r in many["Records"])]
    assert [int(n) for n in numbers] == sorted({int(n) for n in numbers})
    records = read_all(kinesis, name, "shardId-000000000000")
    assert [r["SequenceNumber"] for r in records] == numbers
    assert (records[0]["Data"], records[0]["PartitionKey"]) == (everything, "schlüssel-✓")
    assert [r["Data"] for r in records[1:]] == [b"%d" % i for i in range(500)]
    assert abs((records[0]["ApproximateArrivalTimestamp"] - before).total_seconds()) < 5
    assert records[0]["ApproximateArrivalTimestamp"].microsecond % 1000 == 0


def test_records_are_routed_by_md5_or_explicit_key(kinesis: Any) -> None:
    name = new_stream(kinesis, 4)
    shards = {s["ShardId"]: s["HashKeyRange"] for s in kinesis.list_shards(StreamName=name)["Shards"]}
    for i in range(40):
        shard = shards[kinesis.put_record(StreamName=name, Data=b"", PartitionKey=f"é{i}")["ShardId"]]
        hashed = int(hashlib.md5(f"é{i}".encode()).hexdigest(), 16)
        assert int(shard["StartingHashKey"]) <= hashed <= int(shard["EndingHashKey"])
    for shard_id, keys in shards.items():
        for edge in keys.values():
            assert kinesis.put_record(StreamName=name, Data=b"", PartitionKey="k", ExplicitHashKey=edge)["ShardId"] == shard_id


def test_put_limits(kinesis: Any, name: str) -> None:
    mebibyte = 1_048_576
    kinesis.put_record(StreamName=name, Data=b"x" * (mebibyte - 1), PartitionKey="k")
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x" * (mebibyte + 1), PartitionKey="k")
    refused("ValidationException", kinesis.put_records, StreamName=name, Records=[{"Data": b"x" * mebibyte, "PartitionKey": "kk"}])
    refused("ValidationException", kinesis.put_records, StreamName=name, Records=[{"Data": b"", "PartitionKey": "k"}] * 501)
    refused("ValidationException", kinesis.put_records, StreamName=name, Records=[])
    refused("ValidationException", kinesis.put_records, StreamName=name)
    refused("InvalidArgumentException", kinesis.put_records, StreamName=name, Records=[{"Data": b"x" * 900_000, "PartitionKey": "k"}] * 6)
    kinesis.put_records(StreamName=name, Records=[{"Data": b"x" * 900_000, "PartitionKey": "k"}] * 5)
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="")
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x")
    refused("ValidationException", kinesis.put_record, StreamName=name, PartitionKey="k")
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="k" * 257)
    kinesis.put_record(StreamName=name, Data=b"x", PartitionKey="ü" * 256)
    refused("InvalidArgumentException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="k", ExplicitHashKey=str(2**128))
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="k", ExplicitHashKey="0x10")
    refused("ValidationException", kinesis.put_record, StreamName=name, Data=b"x", PartitionKey="k", ExplicitHashKey="-1")
    assert len(read_all(kinesis, name, "shardId-000000000000")) == 7


def test_sequence_number_for_ordering(kinesis: Any, name: str) -> None:
    first = put(kinesis, name, b"a")[0]
    second = kinesis.put_record(StreamName=name, Data=b"b", PartitionKey="k", SequenceNumberForOrdering=first)["SequenceNumber"]
    assert int(second) > int(first)
    refused("InvalidArgumentException", kinesis.put_record, StreamName=name, Data=b"b", PartitionKey="k", SequenceNumberForOrdering="7")


def test_eight_writers_lose_nothing(aws: EmbeddedAws, kinesis: Any) -> None:
    name = new_stream(kinesis, 4)
    acknowledged: list[list[tuple[str, bytes]]] = [[] for _ in range(8)]

    def write(worker: int) -> None:
        own = client(aws)
        for i in range(40):
            data = [b"%d/%d/%d" % (worker, i, j) for j in range(25)]
            answer = own.put_records(StreamName=name, Records=[{"Data": d, "PartitionKey": d.decode()} for d in data])
            acknowledged[worker] += [(r["SequenceNumber"], d) for r, d in zip(answer["Records"], data, strict=True)]

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    middle = str(MAX_HASH // 8 + 1)
    kinesis.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=middle)
    kinesis.merge_shards(StreamName=name, ShardToMerge="shardId-000000000002", AdjacentShardToMerge="shardId-000000000003")
    for thread in threads:
        thread.join(30)
    stored = [(r["SequenceNumber"], r["Data"]) for s in kinesis.list_shards(StreamName=name)["Shards"] for r in read_all(kinesis, name, s["ShardId"])]
    assert len(stored) == 8000
    assert sorted(stored) == sorted(itertools.chain(*acknowledged))
    assert len({n for n, _ in stored}) == 8000


# -- iterators and reading ---------------------------------------------------------------------------------------------


def test_all_five_iterator_types(kinesis: Any, name: str) -> None:
    numbers = put(kinesis, name, b"a", b"b", b"c")
    arrival = kinesis.get_records(ShardIterator=iterate(kinesis, name))["Records"][1]["ApproximateArrivalTimestamp"]
    assert read(kinesis, iterate(kinesis, name)) == [b"a", b"b", b"c"]
    assert read(kinesis, iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[1])) == [b"b", b"c"]
    assert read(kinesis, iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[1])) == [b"c"]
    assert read(kinesis, iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=numbers[2])) == []
    assert b"b" in read(kinesis, iterate(kinesis, name, kind="AT_TIMESTAMP", Timestamp=arrival.timestamp()))
    assert read(kinesis, iterate(kinesis, name, kind="AT_TIMESTAMP", Timestamp=0)) == [b"a", b"b", b"c"]
    latest = iterate(kinesis, name, kind="LATEST")
    assert read(kinesis, latest) == []
    put(kinesis, name, b"d")
    assert read(kinesis, latest) == [b"d"]
    start = kinesis.list_shards(StreamName=name)["Shards"][0]["SequenceNumberRange"]["StartingSequenceNumber"]
    assert read(kinesis, iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=start)) == [b"a", b"b", b"c", b"d"]


def test_iterator_errors(kinesis: Any, name: str) -> None:
    number = put(kinesis, name, b"a")[0]
    other = new_stream(kinesis, 2)
    foreign = kinesis.put_record(StreamName=other, Data=b"x", PartitionKey="k", ExplicitHashKey=str(MAX_HASH))["SequenceNumber"]
    ask = kinesis.get_shard_iterator
    shard = "shardId-000000000000"
    assert "does not exist" in refused("ResourceNotFoundException", ask, StreamName=name, ShardId="shardId-000000000009", ShardIteratorType="LATEST")
    refused("ResourceNotFoundException", ask, StreamName=name, ShardId="nonsense", ShardIteratorType="LATEST")
    refused("ResourceNotFoundException", ask, StreamName="nobody", ShardId=shard, ShardIteratorType="LATEST")
    refused("ValidationException", ask, StreamName=name, ShardId=shard, ShardIteratorType="SOMEWHERE")
    refused("ValidationException", ask, StreamName=name, ShardId=shard)
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_SEQUENCE_NUMBER")
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_TIMESTAMP")
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="LATEST", StartingSequenceNumber=number)
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="12")
    refused("ValidationException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="abc")
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber=foreign)
    future = datetime.now(UTC).timestamp() + 3600
    refused("InvalidArgumentException", ask, StreamName=name, ShardId=shard, ShardIteratorType="AT_TIMESTAMP", Timestamp=future)


def test_get_records_errors(kinesis: Any, name: str) -> None:
    token = iterate(kinesis, name)
    for bad in ("garbage", "AAAA", token[:-4], token[:-5] + ("A" if token[-5] != "A" else "B") + token[-4:]):
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
        kinesis.put_records(StreamName=name, Records=[{"Data": b"x" * 1_000_000, "PartitionKey": "k"}] * 5)
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
    assert len(kinesis.get_records(ShardIterator=page["NextShardIterator"], Limit=300)["Records"]) == 300


def test_iterators_may_be_used_again(kinesis: Any, name: str) -> None:
    put(kinesis, name, b"a", b"b")
    token = iterate(kinesis, name)
    assert read(kinesis, token, Limit=1) == read(kinesis, token, Limit=1) == [b"a"]


def test_stream_arn_stands_for_the_name(kinesis: Any, name: str) -> None:
    arn = kinesis.describe_stream(StreamName=name)["StreamDescription"]["StreamARN"]
    kinesis.put_record(StreamARN=arn, Data=b"a", PartitionKey="k")
    kinesis.put_records(StreamARN=arn, StreamName=name, Records=[{"Data": b"b", "PartitionKey": "k"}])
    token = kinesis.get_shard_iterator(StreamARN=arn, ShardId="shardId-000000000000", ShardIteratorType="TRIM_HORIZON")["ShardIterator"]
    assert read(kinesis, token) == [b"a", b"b"]
    assert read(kinesis, token, StreamARN=arn) == [b"a", b"b"]
    assert len(kinesis.list_shards(StreamARN=arn)["Shards"]) == 1
    assert kinesis.describe_stream_summary(StreamARN=arn)["StreamDescriptionSummary"]["StreamName"] == name
    refused("InvalidArgumentException", kinesis.describe_stream, StreamARN=arn, StreamName="another")
    refused("ResourceNotFoundException", kinesis.describe_stream, StreamARN=arn + "x")
    refused("ValidationException", kinesis.describe_stream, StreamARN="arn:nonsense")


# -- resharding --------------------------------------------------------------------------------------------------------


def test_split(kinesis: Any, name: str) -> None:
    old = put(kinesis, name, b"a", b"b")
    middle = 2**127
    kinesis.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(middle))
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
        answer = kinesis.put_record(StreamName=name, Data=b"n", PartitionKey="k", ExplicitHashKey=edge)
        assert answer["ShardId"] == child["ShardId"]
        assert int(answer["SequenceNumber"]) > ending
    last = kinesis.get_records(ShardIterator=iterate(kinesis, name))
    assert [r["Data"] for r in last["Records"]] == [b"a", b"b"]
    assert "NextShardIterator" not in last
    assert last["MillisBehindLatest"] == 0
    assert last["ChildShards"] == [{"ShardId": c["ShardId"], "ParentShards": [parent["ShardId"]], "HashKeyRange": c["HashKeyRange"]} for c in (left, right)]
    at_end = iterate(kinesis, name, kind="AT_SEQUENCE_NUMBER", StartingSequenceNumber=str(ending))
    assert kinesis.get_records(ShardIterator=at_end)["ChildShards"] == last["ChildShards"]
    latest = kinesis.get_records(ShardIterator=iterate(kinesis, name, kind="LATEST"))
    assert latest["Records"] == []
    assert latest["ChildShards"] == last["ChildShards"]
    assert "ChildShards" not in kinesis.get_records(ShardIterator=iterate(kinesis, name, left["ShardId"]))


def test_iterator_taken_before_a_split_reaches_the_children(kinesis: Any, name: str) -> None:
    token = kinesis.get_records(ShardIterator=iterate(kinesis, name, kind="LATEST"))["NextShardIterator"]
    put(kinesis, name, b"a")
    kinesis.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
    page = kinesis.get_records(ShardIterator=token)
    assert [r["Data"] for r in page["Records"]] == [b"a"]
    assert len(page["ChildShards"]) == 2


def test_merge(kinesis: Any) -> None:
    name = new_stream(kinesis, 2)
    zero, one = "shardId-000000000000", "shardId-000000000001"
    numbers = [kinesis.put_record(StreamName=name, Data=b"x", PartitionKey="k", ExplicitHashKey=h)["SequenceNumber"] for h in ("0", str(MAX_HASH))]
    kinesis.merge_shards(StreamName=name, ShardToMerge=zero, AdjacentShardToMerge=one)
    child = kinesis.list_shards(StreamName=name)["Shards"][2]
    assert (child["ParentShardId"], child["AdjacentParentShardId"]) == (zero, one)
    assert child["HashKeyRange"] == {"StartingHashKey": "0", "EndingHashKey": str(MAX_HASH)}
    expected = [{"ShardId": child["ShardId"], "ParentShards": [zero, one], "HashKeyRange": child["HashKeyRange"]}]
    for shard in (zero, one):
        page = kinesis.get_records(ShardIterator=iterate(kinesis, name, shard))
        assert page["ChildShards"] == expected
        assert len(page["Records"]) == 1
    assert int(put(kinesis, name, b"y")[0]) > max(map(int, numbers))
    assert kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]["OpenShardCount"] == 1


def test_reshard_errors(kinesis: Any) -> None:
    name = new_stream(kinesis, 3)
    zero, one, two = (f"shardId-{i:012d}" for i in range(3))
    keys = kinesis.list_shards(StreamName=name)["Shards"][1]["HashKeyRange"]
    low, high = int(keys["StartingHashKey"]), int(keys["EndingHashKey"])
    for wrong in (low - 1, low, low + 1, high, high + 1):
        message = refused("InvalidArgumentException", kinesis.split_shard, StreamName=name, ShardToSplit=one, NewStartingHashKey=str(wrong))
        assert "NewStartingHashKey" in message
    refused("ValidationException", kinesis.split_shard, StreamName=name, ShardToSplit=one, NewStartingHashKey="01")
    refused("ResourceNotFoundException", kinesis.split_shard, StreamName=name, ShardToSplit="shardId-000000000009", NewStartingHashKey="9")
    assert "not an adjacent pair" in refused("InvalidArgumentException", kinesis.merge_shards, StreamName=name, ShardToMerge=zero, AdjacentShardToMerge=two)
    refused("InvalidArgumentException", kinesis.merge_shards, StreamName=name, ShardToMerge=zero, AdjacentShardToMerge=zero)
    refused("ResourceNotFoundException", kinesis.merge_shards, StreamName=name, ShardToMerge=zero, AdjacentShardToMerge="shardId-000000000009")
    kinesis.split_shard(StreamName=name, ShardToSplit=one, NewStartingHashKey=str(low + 2))
    message = refused("InvalidArgumentException", kinesis.split_shard, StreamName=name, ShardToSplit=one, NewStartingHashKey=str(low + 100))
    assert "already been merged or split" in message
    refused("InvalidArgumentException", kinesis.merge_shards, StreamName=name, ShardToMerge=zero, AdjacentShardToMerge=one)


def test_update_shard_count(kinesis: Any) -> None:
    name = new_stream(kinesis, 2)
    scale = kinesis.update_shard_count
    answer = scale(StreamName=name, TargetShardCount=4, ScalingType="UNIFORM_SCALING")
    assert (answer["CurrentShardCount"], answer["TargetShardCount"], answer["StreamName"]) == (2, 4, name)
    refused("LimitExceededException", scale, StreamName=name, TargetShardCount=9, ScalingType="UNIFORM_SCALING")
    refused("LimitExceededException", scale, StreamName=name, TargetShardCount=1, ScalingType="UNIFORM_SCALING")
    refused("ValidationException", scale, StreamName=name, TargetShardCount=4, ScalingType="RANDOM")
    refused("ValidationException", scale, StreamName=name, TargetShardCount=0, ScalingType="UNIFORM_SCALING")
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
            kinesis.split_shard(StreamName=name, ShardToSplit=opened[0]["ShardId"], NewStartingHashKey=str(2**127))
        else:
            kinesis.merge_shards(StreamName=name, ShardToMerge=opened[0]["ShardId"], AdjacentShardToMerge=opened[1]["ShardId"])
        number = int(put(kinesis, name, b"%d" % round_)[0])
        assert number > last
        last = number


# -- ListShards --------------------------------------------------------------------------------------------------------


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
        assert "cannot be provided together" in refused("InvalidArgumentException", kinesis.list_shards, NextToken=token, **extra)
    answer = kinesis.list_shards(NextToken=token, MaxResults=3)
    ids += [s["ShardId"] for s in answer["Shards"]]
    answer = kinesis.list_shards(NextToken=answer["NextToken"])
    ids += [s["ShardId"] for s in answer["Shards"]]
    assert "NextToken" not in answer
    assert ids == [f"shardId-{i:012d}" for i in range(7)]
    refused("InvalidArgumentException", kinesis.list_shards, NextToken="garbage")
    refused("InvalidArgumentException", kinesis.list_shards)
    refused("ValidationException", kinesis.list_shards, StreamName=name, MaxResults=10_001)
    assert [s["ShardId"][-1] for s in kinesis.list_shards(StreamName=name, ExclusiveStartShardId=ids[4])["Shards"]] == ["5", "6"]


def test_shard_filters(kinesis: Any, name: str, aws: EmbeddedAws) -> None:
    assert isinstance(aws.clock, ShiftedClock)
    created = aws.clock.wall()
    aws.clock.advance(10)
    kinesis.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
    between = aws.clock.wall() + 5
    aws.clock.advance(10)
    kinesis.merge_shards(StreamName=name, ShardToMerge="shardId-000000000001", AdjacentShardToMerge="shardId-000000000002")

    def ids(**shard_filter: Any) -> str:
        return "".join(s["ShardId"][-1] for s in kinesis.list_shards(StreamName=name, ShardFilter=shard_filter)["Shards"])

    assert ids(Type="FROM_TRIM_HORIZON") == "0123"
    assert ids(Type="AT_LATEST") == "3"
    assert ids(Type="AT_TRIM_HORIZON") == "0"
    assert ids(Type="AT_TIMESTAMP", Timestamp=created + 1) == "0"
    assert ids(Type="AT_TIMESTAMP", Timestamp=between) == "12"
    assert ids(Type="AT_TIMESTAMP", Timestamp=aws.clock.wall()) == "3"
    assert ids(Type="FROM_TIMESTAMP", Timestamp=between) == "123"
    assert ids(Type="FROM_TIMESTAMP", Timestamp=created - 1000) == "0123"
    assert ids(Type="AFTER_SHARD_ID", ShardId="shardId-000000000001") == "23"
    for wrong in ({"Type": "AFTER_SHARD_ID"}, {"Type": "AT_TIMESTAMP"}, {"Type": "AT_LATEST", "ShardId": "shardId-000000000001"}):
        refused("InvalidArgumentException", kinesis.list_shards, StreamName=name, ShardFilter=wrong)
    refused("ValidationException", kinesis.list_shards, StreamName=name, ShardFilter={"Type": "SOME"})
    page = kinesis.list_shards(StreamName=name, ShardFilter={"Type": "AT_TIMESTAMP", "Timestamp": between}, MaxResults=1)
    assert [s["ShardId"][-1] for s in kinesis.list_shards(NextToken=page["NextToken"])["Shards"]] == ["2"]


# -- time --------------------------------------------------------------------------------------------------------------


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
    assert "Iterator expired" in refused("ExpiredIteratorException", kinesis.get_records, ShardIterator=token)
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


def test_records_and_closed_shards_leave_retention(timed: tuple[EmbeddedAws, Any, ShiftedClock]) -> None:
    _, kinesis, clock = timed
    name = new_stream(kinesis, 1)
    first = put(kinesis, name, b"old")[0]
    clock.advance(23 * 3600)
    put(kinesis, name, b"young")
    kinesis.split_shard(StreamName=name, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
    token = iterate(kinesis, name)
    assert read(kinesis, token) == [b"old", b"young"]
    clock.advance(2 * 3600)
    assert read(kinesis, iterate(kinesis, name)) == [b"young"]
    assert read(kinesis, iterate(kinesis, name, kind="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=first)) == [b"young"]
    assert len(kinesis.list_shards(StreamName=name)["Shards"]) == 3
    clock.advance(23 * 3600)
    shards = kinesis.list_shards(StreamName=name)["Shards"]
    assert [s["ShardId"][-1] for s in shards] == ["1", "2"]
    assert shards[0]["ParentShardId"] == "shardId-000000000000"
    refused("ResourceNotFoundException", kinesis.get_shard_iterator, StreamName=name, ShardId="shardId-000000000000", ShardIteratorType="TRIM_HORIZON")
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
    with EmbeddedAws(clock=clock, settings=KinesisSettings(create_delay_seconds=60, reshard_delay_seconds=60)) as running:
        kinesis = client(running)
        kinesis.create_stream(StreamName="slow", ShardCount=1)
        assert kinesis.describe_stream(StreamName="slow")["StreamDescription"]["StreamStatus"] == "CREATING"
        assert kinesis.describe_stream(StreamName="slow")["StreamDescription"]["Shards"] == []
        refused("ResourceNotFoundException", kinesis.put_record, StreamName="slow", Data=b"x", PartitionKey="k")
        refused("ResourceInUseException", kinesis.split_shard, StreamName="slow", ShardToSplit="shardId-000000000000", NewStartingHashKey="99")
        clock.advance(61)
        kinesis.split_shard(StreamName="slow", ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127))
        assert kinesis.describe_stream_summary(StreamName="slow")["StreamDescriptionSummary"]["StreamStatus"] == "UPDATING"
        assert kinesis.put_record(StreamName="slow", Data=b"x", PartitionKey="k")["ShardId"] == "shardId-000000000000"
        refused("ResourceInUseException", kinesis.update_shard_count, StreamName="slow", TargetShardCount=2, ScalingType="UNIFORM_SCALING")
        clock.advance(61)
        assert kinesis.put_record(StreamName="slow", Data=b"x", PartitionKey="k")["ShardId"] != "shardId-000000000000"
        assert kinesis.describe_stream_summary(StreamName="slow")["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"
