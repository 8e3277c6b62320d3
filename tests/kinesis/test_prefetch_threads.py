"""Threads that fetch, take and wait at the same time."""

from __future__ import annotations

import random
import threading

import pytest

from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.events import Event, ReadFinished
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from tests.support.prefetching import MIB, FakeReader, FanOutWorld


def test_waiting_ends_with_new_data_with_the_stop_signal_or_in_time() -> None:
    world = FanOutWorld(FakeReader("a"))
    stop = world.clock.signal()
    assert not world.prefetcher.wait_for_data(stop, 0.5)
    assert world.clock.monotonic() == pytest.approx(0.5)
    world.prefetcher.step()
    assert world.prefetcher.wait_for_data(stop, 5)
    assert not world.prefetcher.wait_for_data(stop, 1)
    assert world.clock.monotonic() == pytest.approx(1.5)
    stop.set()
    assert not world.prefetcher.wait_for_data(stop, 100)
    assert world.clock.monotonic() == pytest.approx(1.5)


def test_a_waiting_thread_is_woken_by_a_fetch() -> None:
    clock = SystemClock()
    prefetcher = Prefetcher(RetrievalSettings(), clock, random.Random(1), lambda _: None)
    prefetcher.add(FakeReader("a"))
    woken: list[bool] = []
    waiter = threading.Thread(
        target=lambda: woken.append(prefetcher.wait_for_data(threading.Event(), 30))
    )
    waiter.start()
    prefetcher.step()
    waiter.join(10)
    assert woken == [True]


class Guarded(ShardReader):
    """Fails when two threads are inside at once."""

    inside = False

    def read(self) -> Chunk | None:
        assert not self.inside
        self.inside = True
        try:
            return super().read()
        finally:
            self.inside = False


def take_all(
    prefetcher: Prefetcher, clock: SystemClock, *, threads: int, records: int
) -> list[Chunk]:
    stop = threading.Event()
    got: list[Chunk] = []

    def fetch() -> None:
        while not stop.is_set():
            stop.wait(prefetcher.step())

    fetchers = [threading.Thread(target=fetch) for _ in range(threads)]
    for thread in fetchers:
        thread.start()
    try:
        deadline = clock.monotonic() + 30
        while sum(c.records.num_rows for c in got) < records and clock.monotonic() < deadline:
            prefetcher.wait_for_data(stop, 0.2)
            while some := prefetcher.take(33, MIB):
                got.extend(some)
    finally:
        stop.set()
        for thread in fetchers:
            thread.join(10)
    return got


def test_threads_never_step_one_reader_at_once_and_lose_nothing() -> None:
    """Eight threads fetch from the model and one takes. Every record is taken once, in order per
    shard.
    """
    clock = SystemClock()
    model = KinesisModel(clock)
    model.call("CreateStream", StreamName="orders", ShardCount=6)
    kinesis = InMemoryKinesis(model)
    stream = kinesis.resolve_stream("orders", multi_stream=False)
    for batch in range(20):
        records = [
            {"PartitionKey": f"{batch}-{i}", "Data": f"{batch}-{i}".encode()} for i in range(100)
        ]
        model.call("PutRecords", StreamName="orders", Records=records)
    chosen = RetrievalSettings(max_records=50, idle_time_between_reads_in_millis=200)
    events: list[Event] = []
    prefetcher = Prefetcher(chosen, clock, random.Random(1), events.append)
    for shard in kinesis.list_shards(stream):
        prefetcher.add(
            Guarded(
                kinesis,
                stream,
                shard.shard_id,
                shard.shard_id,
                TRIM_HORIZON,
                shard.hash_key_range,
                chosen,
                clock,
            )
        )
    got = take_all(prefetcher, clock, threads=8, records=2000)
    data = [v for c in got for v in c.records.column("data").to_pylist()]
    assert len(data) == len(set(data)) == 2000
    last: dict[str, Position] = {}
    for chunk in got:
        assert chunk.after == last.get(chunk.lease_key, TRIM_HORIZON)
        last[chunk.lease_key] = chunk.through
    assert {(type(event), event.succeeded) for event in events} == {(ReadFinished, True)}
    assert prefetcher._bytes == 0
