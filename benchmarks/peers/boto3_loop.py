"""Typical boto3 loop: one thread reads shard after shard and visits every record.

Usage: `python -m benchmarks.peers.boto3_loop STREAM`.
"""

from __future__ import annotations

import sys

import boto3


def main(stream: str) -> None:
    client = boto3.client("kinesis")
    shards = [s["ShardId"] for s in client.list_shards(StreamName=stream)["Shards"]]
    iterators = [
        client.get_shard_iterator(StreamName=stream, ShardId=s, ShardIteratorType="TRIM_HORIZON")[
            "ShardIterator"
        ]
        for s in shards
    ]
    taken = size = 0
    while True:
        for i, iterator in enumerate(iterators):
            answer = client.get_records(ShardIterator=iterator, Limit=10_000)
            for record in answer["Records"]:
                taken += 1
                size += len(record["Data"])
            iterators[i] = answer["NextShardIterator"]
            print(taken, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
