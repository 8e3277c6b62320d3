"""The prefetcher and the memory budget of its worker: reading waits for room, and goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import Chunk
from kcl_pipeline.config import BatchSettings, ConsumerSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.memory import READ_BYTES, MemoryBudget
from tests.support.examples import examples
from tests.support.prefetching import MIB, FakeReader, FanOutWorld

BATCH = BatchSettings(min_batch_interval_millis=100)


def budget(max_mib: int) -> MemoryBudget:
    """The budget of a worker with this limit."""
    return MemoryBudget.of(
        ConsumerSettings(
            application_name="orders",
            streams=("orders",),
            worker={"record_memory_max_bytes": max_mib * MIB},
        )
    )


def world_of(memory: MemoryBudget, *readers: FakeReader) -> FanOutWorld:
    return FanOutWorld(*readers, budget=1024 * MIB, memory=memory)


def test_records_count_from_their_read_until_their_batch_has_ended() -> None:
    memory, reader = budget(64), FakeReader("a", size=MIB)
    world = world_of(memory, reader)
    during: list[int] = []
    reader.hook = lambda: during.append(memory.counts()["prefetch"])
    world.prefetcher.step()
    assert during == [READ_BYTES]
    page = memory.counts()["prefetch"]
    assert MIB < page < MIB + 1000
    (chunk,) = world.prefetcher.take(10, 10 * MIB)
    assert chunk.bytes <= page
    assert memory.counts() == {"prefetch": 0, "batch": page, "files": 0, "result": 0}
    world.prefetcher.release_taken()
    assert memory.used_bytes == 0


def test_a_page_counts_once_and_until_its_last_part_is_released() -> None:
    memory, reader = budget(64), FakeReader("a")
    world = world_of(memory, reader)
    world.run(0.15)  # one page
    reader.script = [None] * 1000
    page = memory.used_bytes
    slot = world.prefetcher._slots["a"]
    whole = slot.buffer[0].cost
    slot.buffer[0].cost.uses += 1
    world.prefetcher._pages.take(whole, is_split=False)
    assert memory.used_bytes == page
    world.prefetcher.release_taken()
    assert memory.used_bytes == page, "a part waits"
    world.prefetcher.remove("a")
    assert memory.used_bytes == 0


@pytest.mark.parametrize("end", ["failure", "nothing", "lost", "stop"])
def test_a_read_that_brings_nothing_leaves_nothing(end: str) -> None:
    memory, reader = budget(64), FakeReader("a")
    world = world_of(memory, reader)
    if end == "failure":
        reader.script = [UnavailableError("no answer")]
    elif end == "nothing":
        reader.script = [None]
    elif end == "lost":
        reader.hook = lambda: world.prefetcher.remove("a")
    else:
        reader.script = [KeyboardInterrupt()]  # type: ignore[list-item]
    if end == "stop":
        with pytest.raises(KeyboardInterrupt):
            world.prefetcher.step()
    else:
        world.prefetcher.step()
    assert memory.used_bytes == 0


def test_at_most_a_quarter_waits() -> None:
    memory = budget(64)
    world = world_of(memory, FakeReader("a", size=MIB), FakeReader("b", size=MIB))
    world.run(30)
    assert 16 * MIB <= memory.counts()["prefetch"] < 18 * MIB
    assert memory.peak_bytes < 18 * MIB + READ_BYTES


def test_reading_waits_while_a_result_has_the_memory_and_then_goes_on() -> None:
    memory, reader = budget(64), FakeReader("a", size=MIB)
    world = world_of(memory, reader)
    world.prefetcher.step()
    with memory.counting("result", 60 * MIB):
        world.run(10)
        assert len(reader.reads) == 1
        assert world.prefetcher.ready_in(BATCH) == 0, "nothing is read before a batch is taken"
        assert world.prefetcher.take(10, MIB * 2)
        world.run(10)
        assert len(reader.reads) == 1, "the batch is in processing"
    world.run(10)
    assert len(reader.reads) > 10


@pytest.mark.parametrize("used", [64, 1000])
def test_one_read_is_possible_however_little_memory_is_left(used: int) -> None:
    memory, reader = budget(64), FakeReader("a", size=10 * MIB)
    world = world_of(memory, reader)
    memory.change({"result": used * MIB})
    for number in range(1, 4):
        world.run(10)
        assert len(reader.reads) == number
        assert world.prefetcher.ready_in(BATCH) == 0
        (chunk,) = world.prefetcher.take(10, MIB)
        assert chunk.bytes > 10 * MIB, "a large record is a batch of its own"
        world.run(10)
        assert len(reader.reads) == number, "its batch has not ended"
        world.prefetcher.release_taken()


def test_reads_under_way_count_with_the_largest_response() -> None:
    memory = budget(64)
    readers = [FakeReader(key, size=100) for key in "abcdef"]
    world = world_of(memory, *readers)
    seen: list[int] = []

    def during() -> None:
        seen.append(memory.counts()["prefetch"])
        world.prefetcher.step()

    for reader in readers:
        reader.hook = during
    world.prefetcher.step()
    assert seen == [READ_BYTES, 2 * READ_BYTES], "two have half of the memory"


def test_without_a_budget_only_the_limit_of_the_prefetcher_holds() -> None:
    world = FanOutWorld(FakeReader("a", size=10 * MIB), budget=30 * MIB)
    world.run(20)
    assert len(world.prefetcher.take(10, 100 * MIB)) == 3


Amounts = st.lists(st.integers(0, 10 * MIB), min_size=5, max_size=25)


@examples(30)
@given(Amounts, st.sampled_from([64, 100, 512]), st.integers(1, 3))
def test_the_limit_is_kept_and_every_record_is_processed(
    sizes: list[int], max_mib: int, expansion: int
) -> None:
    """A batch has a copy and a result of any size, as far as there is room."""
    memory = budget(max_mib)
    readers = [FakeReader(key) for key in "abc"]
    for number, reader in enumerate(readers):
        reader.read = _reads(reader, sizes[number::3])  # type: ignore[method-assign]
    world = world_of(memory, *readers)
    taken, end = 0, 200.0
    while taken < len(sizes):
        assert world.clock.monotonic() < end, "reading has stopped"
        world.run(0.5)
        world.prefetcher.release_taken()
        share = world.prefetcher.payload_for(memory.share_bytes)
        chunks = world.prefetcher.take(1000, min(64 * MIB, share))
        taken += len(chunks)
        size = sum(chunk.bytes for chunk in chunks)
        with memory.counting("files", size):
            room = memory.reserve_result()
            world.run(3)
            memory.change({"result": -room})
        with memory.counting("files", size), memory.counting("result", min(room, size * expansion)):
            world.run(1)
    assert memory.peak_bytes <= memory.max_bytes
    world.prefetcher.release_taken()
    assert memory.used_bytes == 0


def _reads(reader: FakeReader, sizes: list[int]):
    read, left = FakeReader.read.__get__(reader), list(sizes)

    def next_read() -> Chunk | None:
        if not left:
            reader.script = [None]
        else:
            reader.size = left.pop(0)
        chunk: Chunk | None = read()
        return chunk

    return next_read
