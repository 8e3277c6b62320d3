"""A worker that takes many leases resolves their pending batches."""

from __future__ import annotations

import pytest

from kcl_pipeline.batch import Batch, CommitEntry, ShardRange, TxnVersions
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    SinkError,
)
from kcl_pipeline.events import AwsTrouble, PendingResolved
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.sink import InMemorySink
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ShardConsumer
from tests.support.commit_world import (
    KEYS,
    NO_RECORDS,
    World,
    world_fixture,  # noqa: F401 (a fixture)
)


def test_many_takeovers_read_the_tables_end_once(world: World) -> None:
    """Some batches of the old owner landed, some did not, and one lands between the look and the
    settling.
    """
    assert world.commit(5) is not None
    batch = Batch(
        "b9", tuple(ShardRange(key, Position("5"), Position("9")) for key in KEYS), NO_RECORDS
    )
    assert world.committer._prepare_all(batch, world.consumers) == {}
    entries = [
        CommitEntry(key, c.prepared[1], c.versions)
        for key, c in world.consumers.items()
        if c.prepared
    ]
    old, landed, late = InMemorySink(world.rows, clock=world.clock), entries[:4], entries[4]
    assert old.commit(world.writer.write(batch), landed).version is not None
    taker = HeldLeases(world.table.view(), "w", LeaseSettings(), world.clock, world.events.append)
    consumers = [ShardConsumer(held, StreamId("s")) for held in taker.discover()]
    committer = TwoPhaseCommit(taker, world.sink, world.clock, world.events.append, "w")
    world.asked.clear()
    seen = committer.look_up(consumers)
    assert world.asked == [("txn_versions", KEYS)]
    assert old.commit(world.writer.write(batch), [late]).version is not None
    positions = {
        consumer.lease_key: committer.resolve(consumer, seen[consumer.lease_key])
        for consumer in consumers
    }
    assert positions == {key: Position("9" if key in KEYS[:5] else "5") for key in KEYS}
    assert [event.landed for event in world.events if isinstance(event, PendingResolved)] == [
        True
    ] * 5 + [False] * 7
    assert [keys for operation, keys in world.asked[1:] if operation == "txn_versions"] == [
        (KEYS[4],)
    ], "the one whose fence was refused"
    for consumer in consumers:
        assert consumer.versions == world.rows.txn_versions(consumer.lease_key) != TxnVersions()
    for entry in entries[5:]:
        assert old.commit(world.writer.write(batch), [entry]).version is None, "fenced"


def test_a_sink_that_cannot_be_looked_at_is_asked_by_each(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_keys: object) -> None:
        raise SinkError("no route to the store")

    with monkeypatch.context() as patched:
        patched.setattr(world.sink, "txn_versions", broken)
        assert world.committer.look_up(world.consumers.values()) == {}
    assert [event.error for event in world.events if isinstance(event, AwsTrouble)] == [
        "no route to the store"
    ]
    assert world.committer.look_up([]) == {}
