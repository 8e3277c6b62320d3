"""When leases may move for balance."""

from __future__ import annotations

from kcl_pipeline.leader.balance_schedule import JOIN_SECONDS, BalanceSchedule
from kcl_pipeline.planning.model import LeaseState, PlanInput, PlanLimits, WorkerState
from kcl_pipeline.planning.state import Prepared

INTERVAL, SETTLING = 60.0, 30.0


class Fleet:
    def __init__(self):
        self.schedule = BalanceSchedule(INTERVAL)

    def is_due(self, now, workers, owners):
        leases = tuple(LeaseState(f"s{n}", owner) for n, owner in enumerate(owners))
        states = tuple(WorkerState(name.lower(), accepts_leases=name.islower()) for name in workers)
        given = PlanInput(leases, states, PlanLimits(balance=False))
        applied = self.schedule.applied(Prepared(given, (), (), ()), now, SETTLING)
        return applied.given.limits.balance


def test_it_is_due_after_settling_and_then_at_intervals():
    fleet = Fleet()
    assert not fleet.is_due(0, "ab", "aabb")
    assert not fleet.is_due(29, "ab", "aabb")
    assert fleet.is_due(30, "ab", "aabb")
    fleet.schedule.note_balanced(30, is_calm=True)
    assert not fleet.is_due(89, "ab", "aabb")
    assert fleet.is_due(90, "ab", "aabb")


def test_a_worker_that_joins_makes_it_due_until_the_fleet_is_calm():
    fleet = Fleet()
    assert not fleet.is_due(0, "a", "aaaa")
    assert fleet.is_due(1, "ab", "aaaa")
    fleet.schedule.note_balanced(1, is_calm=False)
    assert fleet.is_due(2, "ab", "aabb"), "a handoff may run, and a third worker join"
    fleet.schedule.note_balanced(2, is_calm=True)
    assert not fleet.is_due(3, "ab", "aabb")


def test_a_worker_that_stays_without_leases_does_not_keep_it_due():
    fleet = Fleet()
    assert fleet.is_due(0, "ab", "aaaa")
    fleet.schedule.note_balanced(0, is_calm=False)
    assert fleet.is_due(JOIN_SECONDS - 1, "ab", "aaaa")
    assert not fleet.is_due(JOIN_SECONDS, "ab", "aaaa")


def test_only_a_worker_that_accepts_leases_where_one_has_several_joins():
    fleet = Fleet()
    assert not fleet.is_due(0, "aB", "aaaa")
    assert not fleet.is_due(1, "abc", "ab")
    assert fleet.is_due(2, "ab", "aaaa")
