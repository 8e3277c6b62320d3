"""Two processes with one worker id take turns, and do not refuse each other's batches for ever."""

import random

import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.held.rivals import FIRST_SECONDS, FORGET_SECONDS, MOST_SECONDS, Rivals
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from verification.simulation import simulate

KEY = "shardId-000000000000"


class Longest(random.Random):
    """Draws the longest wait."""

    def uniform(self, a, b):
        return max(a, b)


def test_the_wait_doubles_up_to_a_limit_and_is_forgotten():
    rivals, now, waits = Rivals(Longest()), 100.0, []
    for _ in range(7):
        rivals.lost(KEY, now)
        step = 0.25
        while not rivals.may_take(KEY, now + step):
            step += 0.25
        waits.append(step)
        now += step
    assert waits == [FIRST_SECONDS, 1.0, 2.0, 4.0, MOST_SECONDS, MOST_SECONDS, MOST_SECONDS]
    now += FORGET_SECONDS
    rivals.lost(KEY, now)
    assert rivals.may_take(KEY, now + FIRST_SECONDS)


def test_another_lease_does_not_wait():
    rivals = Rivals(Longest())
    rivals.lost(KEY, 0.0)
    assert not rivals.may_take(KEY, 0.1)
    assert rivals.may_take("shardId-000000000001", 0.1)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_lost_lease_is_taken_after_a_wait_while_the_worker_id_is_shared(is_shared):
    clock = VirtualClock()
    table = InMemoryLeaseTable(clock=clock)
    create_lease(table, Lease(KEY, TRIM_HORIZON, owner="w1"))
    leases = HeldLeases(table, "w1", LeaseSettings(), clock, lambda _: None, rng=Longest())
    leases.shares_its_id = is_shared
    (held,) = leases.discover()
    leases.drop(held, "the table has another commit")
    leases.drop(held, "a second time")
    assert bool(leases.discover()) != is_shared
    clock.advance(FIRST_SECONDS)
    leases.discover()
    assert leases.get(KEY) is not None


def test_seed_8700001065_commits_all_records():
    """Two processes refused each other's batches for more than 30 seconds."""
    assert simulate(8700001065).violations == ()
