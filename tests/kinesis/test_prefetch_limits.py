"""`Prefetcher.ready_in`: when the buffer becomes a batch, and the common times of reads."""

from __future__ import annotations

import itertools

import pytest

from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import ThrottledError
from tests.support.prefetching import MIB, FakeReader, FanOutWorld

INTERVAL = 0.1


def batches(**limits: int) -> BatchSettings:
    return BatchSettings(min_batch_interval_millis=round(INTERVAL * 1000), **limits)


class PushedFake(FakeReader):
    """A reader that counts as `PushedReader`."""

    poll_seconds = 0.02

    def close(self) -> None:
        """Nothing is open."""


def test_a_buffer_that_reaches_a_limit_does_not_wait() -> None:
    world = FanOutWorld(FakeReader("a"), budget=MIB)
    assert world.prefetcher.ready_in(batches(max_batch_records=1)) is None, "it is empty"
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches(max_batch_records=1)) == 0
    assert world.prefetcher.ready_in(batches(max_batch_records=2)) != 0
    world.prefetcher.take(1, MIB)
    assert world.prefetcher.ready_in(batches(max_batch_records=1)) is None
    world.prefetcher.add(FakeReader("large", size=MIB))
    world.prefetcher.remove("a")
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == 0, (
        "the buffer is full, and nothing is fetched before something is taken"
    )


@pytest.mark.parametrize(("behind", "waits"), [(0, INTERVAL), (None, INTERVAL), (1, 5 * INTERVAL)])
def test_records_wait_for_a_read_that_is_due_and_longer_when_they_are_late(
    behind: int | None, waits: float
) -> None:
    world = FanOutWorld(FakeReader("a", behind=behind), FakeReader("b", behind=behind))
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == pytest.approx(waits)
    world.clock.advance(waits - 0.01)
    assert world.prefetcher.ready_in(batches()) == pytest.approx(0.01)
    world.clock.advance(0.02)
    assert world.prefetcher.ready_in(batches()) == 0


def test_records_do_not_wait_when_no_read_is_due_in_the_interval() -> None:
    world = FanOutWorld(FakeReader("a", behind=0), FakeReader("b", behind=0), idle=500)
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == pytest.approx(INTERVAL)
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == 0, "both are read, and due after 0.5 s"


def test_records_wait_for_a_read_that_is_under_way() -> None:
    first, second = FakeReader("a", behind=0), FakeReader("b", behind=0)
    world = FanOutWorld(first, second, idle=500)
    world.prefetcher.step()
    found: list[float | None] = []
    second.hook = lambda: found.append(world.prefetcher.ready_in(batches()))
    world.clock.advance(0.01)
    world.prefetcher.step()
    assert found == [pytest.approx(INTERVAL - 0.01)]


@pytest.mark.parametrize("step", [None, ThrottledError("slow")])
def test_a_read_without_records_ends_the_wait_of_the_others(step: Exception | None) -> None:
    world = FanOutWorld(FakeReader("a", behind=0), FakeReader("b", behind=0, script=[step]))
    stop = world.clock.signal()
    world.prefetcher.step()
    assert world.prefetcher.wait_for_data(stop, 1)
    assert world.prefetcher.ready_in(batches()) != 0
    world.prefetcher.step()
    assert world.prefetcher.wait_for_data(stop, 1)
    assert world.clock.monotonic() == 0, "the processing thread was woken"
    assert world.prefetcher.ready_in(batches()) == 0


def test_pushed_records_become_a_batch_once_per_interval() -> None:
    world = FanOutWorld(PushedFake("a", behind=0))
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == 0, "the first ones do not wait"
    assert world.prefetcher.take(10, MIB)
    world.clock.advance(0.03)
    world.prefetcher.step()
    assert world.prefetcher.ready_in(batches()) == pytest.approx(INTERVAL - 0.03)
    world.clock.advance(INTERVAL)
    assert world.prefetcher.ready_in(batches()) == 0


def test_shards_at_their_end_are_read_at_the_same_times_and_never_sooner_than_allowed() -> None:
    readers = [FakeReader(key, behind=0, script=[None] * 1000) for key in "abcd"]
    world = FanOutWorld(idle=500)
    for reader in readers:
        reader.clock = world.clock
        world.prefetcher.add(reader)
        world.run(0.13)
    world.run(10)
    for reader in readers:
        gaps = [b - a for a, b in itertools.pairwise(reader.reads)]
        assert min(gaps) >= 0.5 - 1e-9, "two reads per second and shard"
        assert max(gaps) <= 0.55 + 0.02
    last = [[at for at in reader.reads if at > 8] for reader in readers]
    for at_once in zip(*last, strict=True):
        assert max(at_once) - min(at_once) <= 0.02
