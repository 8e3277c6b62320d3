"""What AWS documents of putting records, requested through boto3 from the embedded AWS."""

from __future__ import annotations

import hashlib
import itertools
import threading
from datetime import UTC, datetime
from typing import Any

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import (
    MAX_HASH,
    ZERO,
    client,
    new_stream,
    put,
    read_all,
    refused,
)


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
