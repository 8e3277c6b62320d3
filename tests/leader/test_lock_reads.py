"""With which consistency a candidate reads the lock of another one."""

from __future__ import annotations

from random import Random

import pytest

from kcl_pipeline.config import LeaderSettings
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable


@pytest.fixture
def world():
    clock = VirtualClock()
    table = InMemoryCoordinatorStateTable(clock=clock)
    settings = LeaderSettings(leader_lease_duration_millis=30_000)

    def candidate(name):
        return LeaderElection(table, name, clock, lambda _event: None, settings, Random(name))

    return clock, table, candidate


def test_a_lock_that_another_one_holds_is_read_without_strong_consistency(world):
    """Such a read costs half. It alone never takes the lock."""
    clock, table, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    assert not b.try_lead()
    reads = []
    get = table.store.get

    def noted(key, *, consistent=True):
        reads.append(consistent)
        return get(key, consistent=consistent)

    table.store.get = noted
    for _ in range(5):
        clock.advance(10)
        assert a.confirm()
        assert not b.try_lead()
    assert reads == [False] * 5
    table.store.read_lag_seconds = 40.0
    clock.advance(20)
    assert a.confirm()
    clock.advance(29)
    assert not b.try_lead(), "the stale read shows an old version"
    assert not b.try_lead()
    table.store.read_lag_seconds = 0.0
    clock.advance(31)
    reads.clear()
    assert not b.try_lead()
    clock.advance(31)
    assert b.try_lead()
    assert reads[-1] is True


def test_a_stale_read_of_an_expired_lock_is_repeated_consistently(world):
    clock, table, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    assert not b.try_lead()
    table.store.read_lag_seconds = 100.0
    table.store._as_of = lambda _lag, rows=dict(table.store._rows): rows
    clock.advance(25)
    assert a.confirm()
    clock.advance(6)
    assert not b.try_lead()
    assert table.read_lock().owner_name == "a"


def test_a_stale_read_without_the_lock_does_not_take_it(world):
    """The lock is read again, consistently, and is watched for its whole time."""
    clock, table, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    assert not b.try_lead()
    observe = table.observe_lock
    table.observe_lock = lambda *, consistent=True: observe() if consistent else None
    for _ in range(3):
        clock.advance(9)
        assert not b.try_lead()
    clock.advance(4)
    assert b.try_lead()
