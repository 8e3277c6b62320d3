"""Throughputs whose first samples contain a backlog, and the balance after a worker has joined."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import LeaseMoved
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON
from tests.support.leader_world import World

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))
BALANCED = {"lease_assignment_strategy": "balanced"}


class Averages:
    """The averages of workers that renew every three seconds: the first sample has the backlog."""

    def __init__(self, world, steady, backlog):
        self.steady, self.backlog, self.last = steady, backlog, {}
        world.kbps = self

    def __call__(self, key):
        number = int(key[-2:])
        before, sample = self.last.get(key), self.steady(number)
        if before is None:
            self.last[key] = sample + self.backlog(number)
        else:
            self.last[key] = (before + sample) / 2
        return self.last[key]


def fresh(steady, backlog):
    """Eight shards; worker "a" has just read their backlogs, and "b" joins."""
    world = World(shards=8, assignment=BALANCED)
    Averages(world, steady, backlog)
    world.join("a")
    world.leader()
    world.run_until(lambda: len(world.kbps.last) == 8, limit=30)
    world.join("b")
    return world


def shares(world):
    return sorted(map(len, world.held().values()))


def test_leases_that_were_just_read_from_their_beginning_are_shared_out_evenly():
    """The averages say that three leases of the first worker have nearly all of the traffic."""
    world = fresh(lambda _: 10.0, lambda number: 300.0 if number < 3 else 0.0)
    assert world.run_until(lambda: shares(world) == [4, 4], limit=60) <= 16
    world.events.clear()
    world.run(300)
    assert world.happened(LeaseMoved) == []


def test_an_uneven_load_is_balanced_when_the_averages_have_settled():
    world = fresh(lambda number: 100.0 if number < 2 else 10.0, lambda _: 300.0)
    began = world.clock.monotonic()
    world.run_until(lambda: shares(world) == [4, 4], limit=60)
    heavy = [key for key in world.table() if int(key[-2:]) < 2]
    world.run_until(lambda: len({world.owners()[key] for key in heavy}) == 2, limit=60)
    assert 30 <= world.clock.monotonic() - began <= 46
    world.run(40)
    world.events.clear()
    world.run(300)
    assert world.happened(LeaseMoved) == []


def lease(kbps, counter=1):
    return Lease("s", TRIM_HORIZON, counter=counter, owner="a", throughput_kbps=kbps)


def unsettled(liveness, now, *leases):
    liveness.observe(leases, (), now, now)
    return liveness.observation(now).unsettled


def test_a_throughput_is_too_new_for_nine_renewals_after_its_first_sample():
    liveness = Liveness(SETTINGS)
    assert liveness.sampling_seconds == pytest.approx(9 * 3.308, abs=0.01)
    assert unsettled(liveness, 0, lease(None)) == frozenset()
    assert unsettled(liveness, 5, lease(90.0, 2)) == {"s"}
    assert unsettled(liveness, 34, lease(20.0, 10)) == {"s"}
    assert unsettled(liveness, 35, lease(20.0, 11)) == frozenset()


def test_a_leader_uses_the_throughputs_that_it_finds():
    assert unsettled(Liveness(SETTINGS), 0, lease(90.0)) == frozenset()
