"""A stream, its reader and a client that records calls, for tests of shard readers."""

from __future__ import annotations

from datetime import datetime

from kcl_pipeline.batch import Chunk
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.position import Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel

ALL = HashKeyRange(0, MAX_HASH_KEY)


SHARD = "shardId-000000000000"


class World:
    def __init__(self, shards: int = 1) -> None:
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock)
        self.model.call("CreateStream", StreamName="orders", ShardCount=shards)
        self.clock.advance(60)
        self.kinesis = Recording(self.model)
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)

    def create_again(self) -> None:
        self.model.call("DeleteStream", StreamName="orders")
        self.clock.advance(60)
        self.model.call("CreateStream", StreamName="orders", ShardCount=1)
        self.clock.advance(60)

    def split(self) -> None:
        self.model.call(
            "SplitShard", StreamName="orders", ShardToSplit=SHARD, NewStartingHashKey=str(2**127)
        )
        self.clock.advance(60)

    def put(self, *values: bytes, key: str | None = None) -> list[str]:
        return [
            self.model.call(
                "PutRecord", StreamName="orders", PartitionKey=key or f"key-{v[:8]!r}", Data=v
            )["SequenceNumber"]
            for v in values
        ]

    def reader(
        self,
        position: Position,
        *,
        max_records: int = 10_000,
        hash_key_range: HashKeyRange | None = ALL,
        shard: str = SHARD,
        **more,
    ) -> ShardReader:
        chosen = RetrievalSettings(
            max_records=max_records, skip_kpl_deaggregation=more.pop("skip", False)
        )
        return ShardReader(
            self.kinesis,
            self.stream,
            shard,
            shard,
            position,
            hash_key_range,
            chosen,
            self.clock,
            **more,
        )


class Recording(InMemoryKinesis):
    """Records which iterators were requested."""

    def __init__(self, model: KinesisModel) -> None:
        super().__init__(model)
        self.asked: list[tuple[str, str | None, datetime | None]] = []
        self.described = 0
        self.describe_error: Exception | None = None
        self.iterator_error: Exception | None = None

    def resolve_stream(self, name_or_arn, *, multi_stream):
        self.described += 1
        if self.describe_error is not None:
            raise self.describe_error
        return super().resolve_stream(name_or_arn, multi_stream=multi_stream)

    def get_shard_iterator(
        self, stream, shard_id, iterator_type, *, sequence_number=None, timestamp=None
    ) -> str:
        self.asked.append((iterator_type, sequence_number, timestamp))
        if self.iterator_error is not None:
            raise self.iterator_error
        return super().get_shard_iterator(
            stream, shard_id, iterator_type, sequence_number=sequence_number, timestamp=timestamp
        )


def drain(reader: ShardReader, reads: int = 30) -> list[Chunk]:
    return [chunk for chunk in (reader.read() for _ in range(reads)) if chunk is not None]


def values(chunks: list[Chunk]) -> list[bytes]:
    return [v for chunk in chunks for v in chunk.records.column("data").to_pylist()]
