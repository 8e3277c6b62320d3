"""When leases may move for balance."""

from __future__ import annotations

from kcl_pipeline.leader.assign import JOIN_SECONDS, BalanceSchedule
from kcl_pipeline.planning.model import LeaseState, PlanInput, PlanLimits, WorkerState
from kcl_pipeline.planning.state import Prepared

INTERVAL, SETTLING, AGAIN = 60.0, 30.0, 20.0


class Fleet:
    def __init__(self):
        self.schedule = BalanceSchedule(INTERVAL, AGAIN)

    def limits(self, now, workers, owners, *, has_settled=True):
        leases = tuple(LeaseState(f"s{n}", owner) for n, owner in enumerate(owners))
        states = tuple(WorkerState(name.lower(), accepts_leases=name.islower()) for name in workers)
        given = PlanInput(leases, states, PlanLimits(balance=False))
        prepared = Prepared(given, ())
        applied = self.schedule.applied(prepared, now, SETTLING, has_settled=has_settled)
        return applied.given.limits

    def is_due(self, *given, **options):
        return self.limits(*given, **options).balance


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


def joined_at_1():
    """A calm fleet after a join. It is not due at an interval before the second 90."""
    fleet = Fleet()
    assert not fleet.is_due(-60, "a", "aaaa")
    assert fleet.is_due(0, "a", "aaaa")
    fleet.schedule.note_balanced(0, is_calm=True)
    assert fleet.is_due(1, "ab", "aaaa")
    fleet.schedule.note_balanced(1, is_calm=True)
    return fleet


def test_it_is_due_once_more_when_the_throughputs_have_settled_after_a_join():
    fleet = joined_at_1()
    assert not fleet.is_due(20, "ab", "aabb")
    assert not fleet.is_due(21, "ab", "aabb", has_settled=False)
    assert fleet.is_due(25, "ab", "aabb")
    fleet.schedule.note_balanced(25, is_calm=False)
    assert not fleet.is_due(26, "ab", "aabb"), "once"
    assert not fleet.is_due(59, "ab", "aabb")
    assert fleet.is_due(60, "ab", "aabb"), "the interval is as before"


def test_throughputs_that_do_not_settle_delay_it_once():
    fleet = joined_at_1()
    assert not fleet.is_due(40, "ab", "aabb", has_settled=False)
    assert fleet.is_due(41, "ab", "aabb", has_settled=False)
    assert not fleet.is_due(42, "ab", "aabb", has_settled=False)


def test_another_join_delays_it():
    fleet = joined_at_1()
    assert fleet.is_due(15, "abc", "aabb")
    fleet.schedule.note_balanced(15, is_calm=True)
    assert not fleet.is_due(34, "abc", "abbc")
    assert fleet.is_due(35, "abc", "abbc")


def test_a_new_term_forgets_it():
    fleet = joined_at_1()
    fleet.schedule.restart()
    assert not fleet.is_due(21, "ab", "aabb")


def test_only_leases_that_were_moved_without_a_throughput_may_move_again_at_once():
    fleet = Fleet()
    assert fleet.limits(0, "a", "aaaa", has_settled=False).cool_down_seconds == 120
    assert fleet.limits(1, "ab", "aaaa", has_settled=False).cool_down_seconds == 120
    assert fleet.limits(21, "ab", "aabb").cool_down_seconds == 0
    fleet.schedule.note_balanced(21, is_calm=True)
    assert fleet.limits(30, "ab", "aabb").cool_down_seconds == 120
    assert joined_at_1().limits(21, "ab", "aabb").cool_down_seconds == 120
    blind = Fleet()
    for second in (0, 1, 41):
        limits = blind.limits(second, "a" if second == 0 else "ab", "aaaa", has_settled=False)
        assert limits.cool_down_seconds == 120
    assert limits.balance
