"""`Prefetcher.fills`: when a wait before the next batch is useless."""

from __future__ import annotations

import random

from kcl_pipeline.config import RetrievalSettings
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.testing.clock import VirtualClock
from tests.kinesis.test_prefetch import MIB, FakeReader


def test_it_says_when_waiting_would_bring_no_more():
    clock = VirtualClock()
    prefetcher = Prefetcher(
        RetrievalSettings(prefetch_max_bytes=MIB), clock, random.Random(1), lambda _event: None
    )
    prefetcher.add(FakeReader("small"))
    assert not prefetcher.fills(1, 1)
    prefetcher.step()
    assert prefetcher.fills(1, MIB)
    assert prefetcher.fills(2, 101)
    assert not prefetcher.fills(2, 102)
    prefetcher.take(1, MIB)
    assert not prefetcher.fills(1, 1)
    prefetcher.add(FakeReader("large", size=MIB))
    clock.advance(1)
    prefetcher.remove("small")
    prefetcher.step()
    assert prefetcher.fills(10**6, 10 * MIB), (
        "the buffer is full, and nothing is fetched before something is taken"
    )
    prefetcher.remove("large")
    assert not prefetcher.fills(1, 1)
