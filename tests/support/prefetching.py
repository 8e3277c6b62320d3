"""Readers and chunks made up for tests of the prefetcher."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from kcl_pipeline.batch import Chunk, payload_bytes
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.events import Event
from kcl_pipeline.kinesis.decode import records_table
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.position import Position
from kcl_pipeline.testing.clock import VirtualClock

MIB = 1024 * 1024


def table(first: int, sizes: list[int]) -> pa.Table:
    rows = len(sizes)
    return records_table(
        "orders",
        "shard",
        sequence_numbers=[str(first + i) for i in range(rows)],
        partition_keys=["k"] * rows,
        data=[b"x" * size for size in sizes],
        arrival_micros=np.zeros(rows, np.int64),
        encryption_types=[None] * rows,
    )


def chunk_of(
    key: str, first: int, sizes: list[int], *, behind: int | None = 0, shard_end=None
) -> Chunk:
    records = table(first, sizes)
    after = Position(str(first - 1))
    return Chunk(
        key,
        records,
        after,
        Position(str(first + len(sizes) - 1)),
        payload_bytes(records),
        behind,
        shard_end,
    )


class FakeReader:
    """Gives chunks of `size` bytes, `behind` the tip; `script` holds exceptions (or None: nothing
    new) for the next reads.
    """

    def __init__(
        self,
        key: str,
        *,
        size: int = 100,
        behind: int | None = 1000,
        script: list[Exception | None] | None = None,
    ) -> None:
        self.lease_key = key
        self.millis_behind_latest: int | None = None
        self.ended = False
        self.last_bytes = 0
        self.read_up_to_millis: int | None = None
        self.size = size
        self.behind = behind
        self.script = script or []
        self.reads: list[float] = []
        self.next = 100
        self.clock: VirtualClock | None = None
        self.hook: Callable[[], None] = lambda: None

    def read(self) -> Chunk | None:
        if self.clock is not None:
            self.reads.append(self.clock.monotonic())
        self.hook()
        if self.script:
            step = self.script.pop(0)
            if step is not None:
                raise step
            self.millis_behind_latest, self.last_bytes = self.behind, 0
            return None
        self.millis_behind_latest = self.behind
        chunk = chunk_of(self.lease_key, self.next, [self.size], behind=self.behind)
        self.next += 1
        self.last_bytes = chunk.bytes
        return chunk


class FanOutWorld:
    def __init__(
        self,
        *readers: FakeReader,
        budget: int = 64 * MIB,
        idle: int = 1000,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.events: list[Event] = []
        chosen = RetrievalSettings(
            prefetch_max_bytes=budget, idle_time_between_reads_in_millis=idle
        )
        self.prefetcher = Prefetcher(
            chosen, self.clock, random.Random(7), self.events.append, memory
        )
        for reader in readers:
            reader.clock = self.clock
            self.prefetcher.add(reader)

    def run(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(self.prefetcher.step())
