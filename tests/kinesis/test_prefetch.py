"""Prefetching: byte limit, fairness, pacing, back-off, leases lost during a read, and threads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import Chunk, payload_bytes
from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.kinesis.prefetch import ReadState, split
from tests.support.examples import examples
from tests.support.prefetching import MIB, FakeReader, FanOutWorld, chunk_of


def keys(chunks: list[Chunk]) -> list[str]:
    return [c.lease_key for c in chunks]


def test_a_lagging_shard_is_read_five_times_a_second_and_an_idle_one_once() -> None:
    lagging, idle = FakeReader("a", behind=5000), FakeReader("b", behind=0, script=[None] * 100)
    world = FanOutWorld(lagging, idle)
    world.run(10)
    assert 45 <= len(lagging.reads) <= 51
    assert 9 <= len(idle.reads) <= 11
    assert min(b - a for a, b in itertools.pairwise(lagging.reads)) >= 0.2 - 1e-9


def test_empty_pages_behind_the_tip_are_passed_quickly() -> None:
    reader = FakeReader("a", behind=5000, script=[None] * 20)
    world = FanOutWorld(reader)
    world.run(4.1)
    assert len(reader.reads) >= 20
    assert not world.prefetcher.caught_up("a")


def test_no_fetch_begins_while_the_budget_is_used_up() -> None:
    world = FanOutWorld(FakeReader("a", size=400_000), FakeReader("b", size=400_000), budget=MIB)
    world.run(20)
    assert MIB <= world.prefetcher._bytes <= MIB + 2 * 400_002
    assert len(world.prefetcher.take(1, 10 * MIB)) == 1
    before = world.prefetcher._bytes
    world.run(5)
    assert world.prefetcher._bytes > before
    while world.prefetcher.take(1000, 100 * MIB):
        pass
    assert (world.prefetcher._bytes, world.prefetcher._cost) == (0, 0)


def test_many_tiny_records_count_with_what_their_columns_hold() -> None:
    world = FanOutWorld(FakeReader("a", size=0), budget=MIB)
    world.run(2)
    assert world.prefetcher._cost > 10 * world.prefetcher._bytes


def test_takes_what_waited_longest_and_keeps_each_lease_in_order() -> None:
    world = FanOutWorld(FakeReader("a"), FakeReader("b"), FakeReader("c"))
    world.run(1.0)
    taken = world.prefetcher.take(9, MIB)
    assert sorted(keys(taken)[:3]) == ["a", "b", "c"]
    assert sorted(keys(taken)) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    for key in "abc":
        own = [c for c in taken if c.lease_key == key]
        assert all(x.through == y.after for x, y in itertools.pairwise(own))


def test_a_chunk_over_the_limit_is_cut_in_two_that_join() -> None:
    world = FanOutWorld()
    reader = FakeReader("a")
    reader.read = lambda: chunk_of("a", 100, [10] * 8, shard_end=())  # type: ignore[method-assign]
    world.prefetcher.add(reader)
    world.prefetcher.step()
    reader.ended = True
    parts = [world.prefetcher.take(3, MIB) for _ in range(4)]
    assert [[c.records.num_rows for c in part] for part in parts] == [[3], [3], [2], []]
    flat = [c for part in parts for c in part]
    assert [str(c.through) for c in flat] == ["102", "105", "107"]
    assert all(x.through == y.after for x, y in itertools.pairwise(flat))
    assert [c.shard_end for c in flat] == [None, None, ()]
    assert sum(c.bytes for c in flat) == 8 * 11


def test_a_record_over_the_byte_limit_is_given_alone() -> None:
    world = FanOutWorld(FakeReader("a", size=5000))
    world.run(0.5)
    assert [c.records.num_rows for c in world.prefetcher.take(100, 1000)] == [1]
    assert world.prefetcher.take(0, 1000) == []


def test_a_removed_lease_leaves_nothing_not_even_from_a_fetch_under_way() -> None:
    reader = FakeReader("a")
    world = FanOutWorld(reader, FakeReader("b"))
    world.run(1)
    reader.hook = lambda: world.prefetcher.remove("a")
    world.run(1)
    assert set(keys(world.prefetcher.take(1000, MIB))) == {"b"}
    assert (world.prefetcher._bytes, world.prefetcher._cost) == (0, 0)
    assert set(world.prefetcher.lag()) == {"b"}
    count = len(reader.reads)
    world.run(1)
    assert len(reader.reads) == count
    world.prefetcher.remove("never added")


def test_a_new_reader_of_a_lease_replaces_the_old_one_with_its_buffer() -> None:
    old, new = FakeReader("a"), FakeReader("a")
    world = FanOutWorld(old)
    world.run(1)
    new.next = 500
    world.prefetcher.add(new)
    assert not world.prefetcher.caught_up("a")
    assert world.prefetcher.take(10, MIB) == []
    world.run(0.1)
    assert [str(c.through) for c in world.prefetcher.take(10, MIB)] == ["500"]


def test_one_shard_failing_never_stops_the_others_and_is_reported() -> None:
    bad, good = FakeReader("bad", script=[UnavailableError("no answer")] * 1000), FakeReader("good")
    world = FanOutWorld(bad, good)
    world.run(70)
    assert len(good.reads) > 300
    assert 7 <= len(bad.reads) <= 25
    troubles = [e for e in world.events if isinstance(e, AwsTrouble)]
    assert len(troubles) == len(bad.reads)
    assert troubles[0] == AwsTrouble("read of bad", "UnavailableError: no answer")
    state = world.prefetcher.state_of("bad")
    assert state == ReadState(None, has_waiting=False, caught_up=False, error=troubles[0].error)
    good_state = world.prefetcher.state_of("good")
    assert good_state is not None
    assert good_state.error is None
    assert world.prefetcher.state_of("unknown") is None
    assert world.prefetcher.lag().keys() == {"good"}


def test_an_error_that_nobody_expected_is_reported_like_any_other() -> None:
    world = FanOutWorld(FakeReader("a", script=[ZeroDivisionError("never thought of")]))
    world.run(3)
    assert [e for e in world.events if isinstance(e, AwsTrouble)] == [
        AwsTrouble("read of a", "ZeroDivisionError: never thought of")
    ]
    assert world.prefetcher.take(1, MIB)


def test_throttling_backs_off_and_is_reported_only_when_it_lasts() -> None:
    short, long = (
        FakeReader("short", script=[ThrottledError("slow")] * 4),
        FakeReader("long", script=[ThrottledError("slow")] * 10),
    )
    world = FanOutWorld(short, long)
    world.run(90)
    assert [e for e in world.events if isinstance(e, AwsTrouble)] == [
        AwsTrouble("read of long", "ThrottledError: slow")
    ] * 2
    waits = [b - a for a, b in itertools.pairwise(short.reads[:5])]
    assert all(0.5 * 2**i <= wait <= 2.0**i for i, wait in enumerate(waits))


def test_after_a_refusal_two_megabytes_a_second_are_kept_to() -> None:
    free, refused = (
        FakeReader("free", size=1_000_000),
        FakeReader("refused", size=1_000_000, script=[None, ThrottledError("slow")]),
    )
    world = FanOutWorld(free, refused, budget=1000 * MIB)
    world.run(22)
    assert len(free.reads) > 100
    assert 38 <= len(refused.reads) <= 46


def test_caught_up_needs_the_tip_and_an_empty_buffer() -> None:
    reader = FakeReader("a", behind=5000)
    world = FanOutWorld(reader)
    world.run(0.1)
    assert not world.prefetcher.caught_up("a")
    reader.behind = 0
    world.run(0.3)
    assert not world.prefetcher.caught_up("a")
    world.prefetcher.take(100, MIB)
    assert world.prefetcher.caught_up("a")
    assert not world.prefetcher.caught_up("unknown")


@pytest.mark.parametrize("script", [[None], []])
def test_without_a_figure_for_the_lag_only_an_empty_page_is_the_tip(script) -> None:
    world = FanOutWorld(FakeReader("a", behind=None, script=list(script)))
    world.prefetcher.step()
    world.prefetcher.take(100, MIB)
    assert world.prefetcher.caught_up("a") == bool(script)
    assert world.prefetcher.lag() == {}


def test_lag_counts_the_time_in_the_buffer_and_in_failures() -> None:
    reader = FakeReader("a", behind=1500)
    world = FanOutWorld(reader)
    world.prefetcher.step()
    world.clock.advance(3)
    assert world.prefetcher.lag() == {"a": 4500}
    world.prefetcher.take(1, MIB)
    assert world.prefetcher.lag() == {"a": 1500}
    reader.script = [UnavailableError("x")]
    world.prefetcher.step()
    world.clock.advance(2)
    assert world.prefetcher.lag() == {"a": 1500 + 5000}


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 14), st.integers(0, 400))
@examples(200)
def test_splitting_keeps_every_row_and_both_limits(
    sizes: list[int], max_records: int, max_bytes: int
) -> None:
    whole = chunk_of("a", 100, sizes, shard_end=())
    first, rest = split(whole, max_records, max_bytes)
    parts = [part for part in (first, rest) if part is not None]
    assert [n for p in parts for n in p.records.column("sequence_number").to_pylist()] == [
        str(100 + i) for i in range(len(sizes))
    ]
    assert (parts[0].after, parts[-1].through, parts[-1].shard_end) == (
        whole.after,
        whole.through,
        (),
    )
    assert sum(p.bytes for p in parts) == whole.bytes
    assert all(p.bytes == payload_bytes(p.records) for p in parts)
    if first is not None:
        assert first.records.num_rows <= max_records
        assert first.bytes <= max_bytes
    if first is not None and rest is not None:
        assert first.through == rest.after
        assert first.shard_end is None
        assert (
            first.records.num_rows == max_records
            or first.bytes + sizes[first.records.num_rows] + 1 > max_bytes
        )
