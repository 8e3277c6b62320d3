"""`BufferedSource` and the memory budget: the size of a batch, and when its memory is free."""

from __future__ import annotations

import random
from types import SimpleNamespace

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.position import Position
from kcl_pipeline.worker.sources import BufferedSource
from tests.support.prefetching import MIB, FakeReader, FanOutWorld

LIMIT = 64 * MIB


class Source:
    """A source over readers, with a budget of 64 MiB."""

    def __init__(self, *readers: FakeReader) -> None:
        settings = ConsumerSettings(
            application_name="orders",
            streams=("orders",),
            worker={"record_memory_max_bytes": LIMIT},
            batch={"max_batch_bytes": 1024 * MIB, "min_batch_interval_millis": 0},
        )
        self.memory = MemoryBudget.of(settings)
        self.world = FanOutWorld(*readers, budget=1024 * MIB, memory=self.memory)
        self.committed = {reader.lease_key: Position("99") for reader in readers}
        parts = SimpleNamespace(
            settings=settings,
            clock=self.world.clock,
            rng=random.Random(7),
            events=self.world.events.append,
            memory=self.memory,
        )
        self.source = BufferedSource(parts, retrieval=None, held=list)
        self.source._prefetcher = self.world.prefetcher

    def next_keys(self) -> list[str]:
        found = self.source.next("b", self.committed)
        return [] if found is None else [part.lease_key for part in found.read]


def two_large_pages() -> Source:
    """Two reads at the same time return 20 MiB, which is more than a quarter of the budget."""
    first, second = FakeReader("a", size=10 * MIB), FakeReader("b", size=10 * MIB)
    found = Source(first, second)
    first.hook = lambda: (setattr(first, "hook", lambda: None), found.world.prefetcher.step())
    found.world.prefetcher.step()
    assert found.memory.used_bytes > 20 * MIB
    for reader in (first, second):
        reader.ended = True
    return found


def test_a_batch_has_at_most_a_quarter_of_the_budget() -> None:
    found = two_large_pages()
    assert len(found.next_keys()) == 1, "both together have 20 MiB"
    assert 10 * MIB < found.memory.counts()["batch"] < 11 * MIB


def test_a_batch_is_released_when_the_next_one_is_asked_for() -> None:
    found = two_large_pages()
    first = found.next_keys()
    assert found.memory.used_bytes > 20 * MIB, "a batch in processing counts"
    second = found.next_keys()
    assert {*first, *second} == {"a", "b"}
    assert 10 * MIB < found.memory.used_bytes < 11 * MIB
    assert found.next_keys() == []
    assert found.memory.used_bytes == 0


def test_many_small_records_count_with_what_their_columns_hold() -> None:
    """The limit of a batch is one of memory, not one of payload."""
    reader = FakeReader("a", size=0)
    found = Source(reader)
    found.world.run(1)
    cost = found.memory.used_bytes
    payload = found.world.prefetcher._bytes
    fitting = found.world.prefetcher.payload_for(cost // 2)
    assert fitting == payload // 2
    assert cost > 10 * payload
