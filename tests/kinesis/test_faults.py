"""Reader and prefetcher under random faults read the records of each shard once and in order."""

from __future__ import annotations

import random

import pytest

from kcl_pipeline.batch import Chunk
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.errors import ExpiredIteratorError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import Shard
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from tests.support.kpl_encoder import aggregate_of
from tests.support.shortened import shortened


class Unreliable(InMemoryKinesis):
    """Refuses calls, loses responses after the call was applied, and truncates responses."""

    def __init__(self, model: KinesisModel, rng: random.Random) -> None:
        super().__init__(model)
        self.rng = rng
        self.calm = False

    def get_shard_iterator(self, *args, **kwargs) -> str:
        self._maybe((ThrottledError("slow"), UnavailableError("gone")))
        return super().get_shard_iterator(*args, **kwargs)

    def get_records(self, stream, shard_id, iterator, limit) -> RecordsPage:
        self._maybe((ThrottledError("slow"), UnavailableError("gone"), ExpiredIteratorError("old")))
        page = super().get_records(stream, shard_id, iterator, self.rng.randint(1, 5))
        self._maybe((UnavailableError("the response was lost"), MemoryError("no room for it")))
        return page

    def _maybe(self, errors: tuple[Exception, ...]) -> None:
        if not self.calm and self.rng.random() < 0.15:
            raise self.rng.choice(errors)


class Consumer:
    """Commits what it takes, sometimes loses a lease with its buffer and begins again at what is
    committed, and follows shards to their children.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.model = KinesisModel(self.clock, enforce_limits=seed % 2 == 0)
        self.model.call("CreateStream", StreamName="orders", ShardCount=2)
        self.clock.advance(60)
        self.kinesis = Unreliable(self.model, self.rng)
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        self.settings = RetrievalSettings()
        self.prefetcher = Prefetcher(self.settings, self.clock, self.rng, lambda _: None)
        self.committed: dict[str, Position] = {}
        self.got: list[bytes] = []
        self.ended: set[str] = set()
        self.sent: list[bytes] = []
        self.shards = self._shards()
        for shard_id in self.shards:
            self.begin(shard_id)

    def _shards(self) -> dict[str, Shard]:
        return {s.shard_id: s for s in self.kinesis.list_shards(self.stream)}

    def begin(self, shard_id: str) -> None:
        position = self.committed.setdefault(shard_id, TRIM_HORIZON)
        hash_key_range = self.shards[shard_id].hash_key_range
        self.prefetcher.add(
            ShardReader(
                self.kinesis,
                self.stream,
                shard_id,
                shard_id,
                position,
                hash_key_range,
                self.settings,
                self.clock,
            )
        )

    def put(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            key = str(self.rng.random())
            members = [f"{len(self.sent) + i}".encode() for i in range(self.rng.randint(1, 4))]
            data = (
                members[0] if len(members) == 1 else aggregate_of([(key, None, m) for m in members])
            )
            self.model.call("PutRecord", StreamName="orders", PartitionKey=key, Data=data)
            self.sent.extend(members)

    def split(self) -> None:
        shard = self.rng.choice([s for s in self._shards().values() if s.is_open])
        middle = (shard.hash_key_range.start + shard.hash_key_range.end) // 2
        self.model.call(
            "SplitShard",
            StreamName="orders",
            ShardToSplit=shard.shard_id,
            NewStartingHashKey=str(middle),
        )

    def take(self) -> None:
        for chunk in self.prefetcher.take(self.rng.randint(1, 20), self.rng.randint(1, 2000)):
            self.commit(chunk)

    def commit(self, chunk: Chunk) -> None:
        assert chunk.after == self.committed[chunk.lease_key]
        assert chunk.through >= chunk.after
        assert chunk.lease_key not in self.ended
        self.got.extend(chunk.records.column("data").to_pylist())
        self.committed[chunk.lease_key] = chunk.through
        if chunk.shard_end is None:
            return
        self.ended.add(chunk.lease_key)
        self.shards = self._shards()
        for child in chunk.shard_end:
            self.begin(child.shard_id)

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.1:
            self.put()
        elif dice < 0.13:
            self.begin(self.rng.choice([s for s in self.committed if s not in self.ended]))
        elif dice < 0.133:
            self.split()
        elif dice < 0.5:
            self.take()
        elif dice < 0.505:
            self.clock.advance(400)
        else:
            self.clock.advance(self.prefetcher.step())

    def finish(self) -> None:
        self.kinesis.calm = True
        for _ in range(20_000):
            if len(self.got) >= len(self.sent) and self.prefetcher._bytes == 0:
                return
            self.clock.advance(self.prefetcher.step())
            self.take()


@pytest.mark.parametrize("seed", shortened(range(12), lambda seed: seed < 4))
def test_every_record_once_and_in_the_order_of_its_shard(seed: int) -> None:
    consumer = Consumer(seed)
    for _ in range(1500):
        consumer.step()
    consumer.put()
    consumer.finish()
    assert len(consumer.sent) > 150
    assert sorted(consumer.got, key=int) == consumer.sent
    assert consumer.ended or len(consumer.committed) == 2
