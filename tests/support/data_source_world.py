"""A Kinesis query without Spark: the planner, an offset log, and tasks that read what they are
given, all on virtual time.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa

from kcl_pipeline.spark.data_source.offsets import Offset, offset_from_json, offset_to_json
from kcl_pipeline.spark.data_source.options import parse_options
from kcl_pipeline.spark.data_source.plan import Limit, Piece, StreamPlanner
from kcl_pipeline.spark.data_source.read import read_range
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel

ZERO = "shardId-000000000000"


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [f"{i}".encode() for i in range(start, start + count)]


DAY = 24 * 3600
Row = tuple[str, str, int, bytes]
"""Shard, sequence number, sub-sequence number, data."""


class World:
    """Kinesis with one stream, `orders`."""

    def __init__(self, shards: int = 1) -> None:
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock)
        self.kinesis = InMemoryKinesis(self.model)
        self.model.call("CreateStream", StreamName="orders", ShardCount=shards)
        self.clock.advance(60)

    def put(self, *values: bytes, key: str | None = None, stream: str = "orders") -> list[str]:
        return [
            self.model.call(
                "PutRecord", StreamName=stream, PartitionKey=key or f"key-{v[:8]!r}", Data=v
            )["SequenceNumber"]
            for v in values
        ]

    def open_shards(self) -> list[Any]:
        return [
            s
            for s in self.kinesis.list_shards(
                self.kinesis.resolve_stream("orders", multi_stream=False)
            )
            if s.is_open
        ]

    def split(self, shard_id: str) -> None:
        shard = next(s for s in self.open_shards() if s.shard_id == shard_id)
        middle = (shard.hash_key_range.start + shard.hash_key_range.end) // 2 + 1
        self.model.call(
            "SplitShard", StreamName="orders", ShardToSplit=shard_id, NewStartingHashKey=str(middle)
        )

    def merge(self, first: str, second: str) -> None:
        self.model.call(
            "MergeShards", StreamName="orders", ShardToMerge=first, AdjacentShardToMerge=second
        )


class Query:
    """What Spark does with a stream reader: plan, log the end, run the tasks.

    `log` is all that outlives a restart.
    """

    def __init__(self, world: World, log: list[str] | None = None, **options: str) -> None:
        self.world = world
        self.options = {"streamName": "orders", "idleTimeBetweenReadsInMillis": "200"} | options
        self.parsed = parse_options(self.options)
        self.planner = StreamPlanner(
            world.kinesis, self.parsed, world.clock, random.Random(1), threads=0
        )
        self.log = [] if log is None else log
        self.held_rows = 0

    def offset(self, batch: int) -> Offset:
        return (
            self.planner.initial() if batch < 0 else offset_from_json(json.loads(self.log[batch]))
        )

    @property
    def last(self) -> dict[str, Any]:
        """The logged offset of `orders`."""
        return json.loads(self.log[-1])["orders"]

    def restarted(self, **options: str) -> Query:
        """A fresh process on the same checkpoint."""
        return Query(self.world, self.log, **(self.options | options))

    def batch(self, limit: Limit | None = None) -> list[Row] | None:
        """Plan and run one batch; None when there is none."""
        self.world.clock.advance(0.01)
        end = self.planner.plan(self.offset(len(self.log) - 1), limit or Limit())
        if end is None:
            return None
        self.log.append(json.dumps(offset_to_json(end)))
        return self.run(len(self.log) - 1)

    def run(self, batch: int) -> list[Row]:
        """The rows of a batch that is logged."""
        return [
            row
            for piece in self.planner.pieces(self.offset(batch - 1), self.offset(batch))
            for row in self.rows(piece)
        ]

    def rows(self, piece: Piece) -> list[Row]:
        tables = list(piece.records)
        self.held_rows += sum(t.num_rows for t in tables)
        if piece.rest is not None:
            tables += read_range(
                self.world.kinesis,
                piece.rest,
                self.planner.rules,
                self.world.clock,
                random.Random(2),
            )
        return [row for table in tables for row in rows_of(table)]

    def drain(self, limit: Limit | None = None, most: int = 60) -> list[list[Row]]:
        """Batches until there is none."""
        batches = []
        for _ in range(most):
            rows = self.batch(limit)
            if rows is None:
                return batches
            batches.append(rows)
        raise AssertionError(f"after {most} batches there are still more")


def rows_of(table: pa.Table) -> list[Row]:
    names = ("shard_id", "sequence_number", "sub_sequence_number", "data")
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def data(batches: list[list[Row]]) -> list[bytes]:
    return [row[3] for rows in batches for row in rows]
