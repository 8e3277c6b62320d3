"""Workers that join get their share, also directly after other moves and without traffic."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kcl_pipeline.planning.model import LeaseState, PlanInput, WorkerState
from kcl_pipeline.planning.strategies import balanced
from tests.planning.test_balanced import after, fleet


def shares(case: PlanInput) -> list[int]:
    owners = Counter(lease.owner for lease in case.leases)
    return sorted((owners[worker.worker_id] for worker in case.workers), reverse=True)


def test_the_cool_down_does_not_keep_leases_from_a_worker_that_has_nothing() -> None:
    """The second worker has just got its leases when the third one joins."""
    leases = tuple(
        LeaseState(f"s{i}", f"w000{i // 4}", 10.0, seconds_since_move=5.0 if i < 4 else 1e9)
        for i in range(8)
    )
    case = PlanInput(leases, fleet(3))
    done = after(case, balanced(case))
    assert shares(done) == [3, 3, 2]
    cooling = tuple(replace(lease, seconds_since_move=5.0) for lease in done.leases)
    uneven = tuple(
        replace(lease, throughput_kbps=40.0) if lease.owner == "w0000" else lease
        for lease in cooling
    )
    assert balanced(replace(done, leases=uneven)).moves == (), "it prevents moves back and forth"


def test_a_worker_that_joins_in_a_group_of_its_own_gets_no_lease_too_many() -> None:
    """Groups of another size are compared by their load with the lease."""
    workers = (WorkerState("d", group="d"), *(WorkerState(f"w-{w}", group="w") for w in "12"))
    leases = tuple(LeaseState(f"s{i}", f"w-{1 + i % 2}", None) for i in range(4))
    case = PlanInput(leases, workers)
    plan = balanced(case)
    assert [move.to_worker for move in plan.moves] == ["d"]
    assert shares(after(case, plan)) == [2, 1, 1]


@pytest.mark.parametrize("kbps", [0.0, 0.1, 0.5, 2.0])
def test_with_negligible_traffic_leases_are_counted_and_the_plan_says_so(kbps: float) -> None:
    case = PlanInput(tuple(LeaseState(f"s{i}", "w0000", kbps) for i in range(8)), fleet(2))
    plan = balanced(case)
    done = after(case, plan)
    assert shares(done) == [4, 4]
    assert "leases are counted" in plan.notes[0]
    third = replace(done, workers=fleet(3))
    done = after(third, balanced(third))
    assert shares(done) == [3, 3, 2]
    assert balanced(done).moves == ()


def test_with_negligible_traffic_a_worker_with_few_leases_is_given_its_share() -> None:
    owners = ("w0000",) * 4 + ("w0001",) * 3 + ("w0002",)
    case = PlanInput(
        tuple(LeaseState(f"s{i}", owner, 0.5) for i, owner in enumerate(owners)), fleet(3)
    )
    assert shares(after(case, balanced(case))) == [3, 3, 2]


def test_the_cpu_of_a_starting_process_keeps_no_leases_from_it() -> None:
    workers = (
        WorkerState("w0", metrics={"C": 30.0}, limits={"C": 100.0}),
        WorkerState("w1", metrics={"C": 95.0}, limits={"C": 100.0}),
    )
    case = PlanInput(tuple(LeaseState(f"s{i}", "w0", 50.0) for i in range(8)), workers)
    assert shares(after(case, balanced(case))) == [4, 4]


@pytest.mark.parametrize("number", [4, 20])
def test_idle_leases_without_an_owner_are_spread_by_unfinished_leases(number: int) -> None:
    finished = tuple(LeaseState(f"e{i}", "w0000", ended=True) for i in range(number))
    waiting = tuple(LeaseState(f"s{i}", None, 0.0) for i in range(number))
    busy = tuple(LeaseState(f"b{i}", f"w000{i}", 100.0) for i in range(2))
    done = after(case := PlanInput((*finished, *waiting, *busy), fleet(2)), balanced(case))
    open_leases = tuple(lease for lease in done.leases if not lease.ended)
    assert shares(replace(done, leases=open_leases)) == [number // 2 + 1] * 2
