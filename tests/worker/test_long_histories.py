"""Looks at leases cost as much as there are leases, not streams times leases or 2^reshards."""

from __future__ import annotations

from types import SimpleNamespace

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST, Position
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.worker.parents import ParentCheck
from kcl_pipeline.worker.stopping.drain import LOOK_SECONDS, DrainWatch

WHOLE = HashKeyRange(0, 2**128 - 1)
ROUNDS = 40


def drain_of(streams, leases):
    clock = VirtualClock()
    listing = SimpleNamespace(leases=tuple(leases), bad_rows=())
    parts = SimpleNamespace(
        clock=clock,
        events=lambda _: None,
        worker_id="me",
        settings=ConsumerSettings(application_name="orders", streams=("orders",)),
        lease_table=SimpleNamespace(list_leases=lambda: listing),
        kinesis=SimpleNamespace(list_shards=lambda _: ()),
        coordinator_table=SimpleNamespace(read_lock=lambda: None),
    )
    lifecycle = SimpleNamespace(consumers={}, deleted=())
    source = SimpleNamespace(state_of=lambda _: None)
    watch = DrainWatch(parts, streams, lifecycle, source, dict)
    clock.advance(LOOK_SECONDS)
    return watch


class CountedLease(Lease):
    """Counts how often all leases together are asked whether they have ended."""

    read = 0

    @property
    def ended(self) -> bool:
        type(self).read += 1
        return super().ended


def test_a_drain_looks_at_each_lease_a_constant_number_of_times(monkeypatch):
    """100 streams of 50 leases took 1.8 s of CPU per look, once a second."""
    streams = [StreamId(f"s{n}", "123456789012", 1_700_000_000 + n) for n in range(100)]
    leases = [
        CountedLease(
            stream.lease_key(f"shardId-{n:012}"),
            Position("49" * 28),
            5,
            "other",
            hash_key_range=WHOLE,
            stream=stream.serialized,
        )
        for stream in streams
        for n in range(50)
    ]
    parsed = []
    parse = StreamId.parse
    monkeypatch.setattr(StreamId, "parse", lambda text: parsed.append(text) or parse(text))
    monkeypatch.setattr(CountedLease, "read", 0)
    drain = drain_of(streams, leases)
    assert not drain.done()
    assert len(parsed) <= 2 * len(streams)
    assert len(leases) <= CountedLease.read <= 4 * len(leases)


def ladder():
    """Shards of `ROUNDS` splits and merges: each has two parents, or two children."""
    shards = [Shard("m0", WHOLE, "1")]
    for n in range(1, ROUNDS + 1):
        shards += [
            Shard(f"l{n}", WHOLE, "1", parent_shard_id=f"m{n - 1}"),
            Shard(f"r{n}", WHOLE, "1", parent_shard_id=f"m{n - 1}"),
            Shard(f"m{n}", WHOLE, "1", parent_shard_id=f"l{n}", adjacent_parent_shard_id=f"r{n}"),
        ]
    return shards


def lease_of(shard, checkpoint=LATEST):
    return Lease(shard.shard_id, checkpoint, 1, "me", parent_shard_ids=frozenset(shard.parents))


def test_the_descendants_of_an_ended_shard_are_read_once():
    read = []
    parts = SimpleNamespace(
        clock=VirtualClock(),
        kinesis=SimpleNamespace(
            list_shards=lambda _: tuple(ladder()),
            resolve_stream=lambda *_, **__: StreamId("orders"),
        ),
        lease_table=SimpleNamespace(get=read.append),
    )
    check = ParentCheck(parts, None, lambda _: None, lambda: None)
    consumer = SimpleNamespace(
        stream=StreamId("orders"), held=SimpleNamespace(lease=lease_of(ladder()[0]))
    )
    assert not check.is_passed_over(consumer, "m0")
    assert len(read) == len(set(read)) == 3 * ROUNDS
