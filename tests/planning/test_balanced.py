"""What holds for every plan of `balanced`, and for fleets that people really have."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import LeaseState, Plan, PlanInput, PlanLimits, WorkerState
from kcl_pipeline.planning.strategies import balanced
from tests.support.examples import examples


def fleet(count: int, groups: int = 1) -> tuple[WorkerState, ...]:
    return tuple(WorkerState(f"w{w:04}", group=f"az{w % groups}") for w in range(count))


def after(case: PlanInput, plan: Plan) -> PlanInput:
    to = {move.lease_key: move.to_worker for move in plan.moves}
    return replace(
        case,
        leases=tuple(
            replace(lease, owner=to.get(lease.lease_key, lease.owner)) for lease in case.leases
        ),
    )


def load_of(case: PlanInput) -> Counter[str]:
    load: Counter[str] = Counter({worker.worker_id: 0 for worker in case.workers})
    for lease in case.leases:
        if lease.owner is not None:
            load[lease.owner] += lease.throughput_kbps or 0.0
    return load


def max_over_mean(case: PlanInput) -> float:
    load, capacity = load_of(case), {worker.worker_id: worker.capacity for worker in case.workers}
    return max(load[w] / capacity[w] for w in capacity) / (
        sum(load.values()) / sum(capacity.values())
    )


def random_case(seed: int, leases: int, workers: int, groups: int = 3) -> PlanInput:
    rng = random.Random(seed)
    crew = fleet(workers, groups)
    return PlanInput(
        tuple(
            LeaseState(f"s{i:05}", rng.choice(crew).worker_id, 50 * rng.lognormvariate(0, 1))
            for i in range(leases)
        ),
        crew,
    )


def test_it_is_registered() -> None:
    assert strategies.get("balanced") is balanced


def test_even_across_groups_as_well_as_workers() -> None:
    crew = tuple(WorkerState(f"{group}-{w:03}", group=group) for group in "ab" for w in range(100))
    case = PlanInput(tuple(LeaseState(f"s{i:03}", None, 100.0) for i in range(500)), crew)
    done = after(case, balanced(case))
    counts = Counter(lease.owner for lease in done.leases)
    assert Counter((lease.owner or "")[0] for lease in done.leases) == {"a": 250, "b": 250}
    assert set(counts.values()) == {2, 3}


def test_an_uneven_group_is_evened() -> None:
    crew = tuple(WorkerState(f"{group}-{w:03}", group=group) for group in "ab" for w in range(100))
    owners = [f"a-{i % 100:03}" for i in range(300)] + [f"b-{i % 100:03}" for i in range(200)]
    case = PlanInput(
        tuple(LeaseState(f"s{i:03}", owner, 100.0) for i, owner in enumerate(owners)), crew
    )
    plan = balanced(case)
    in_a = sum(1 for lease in after(case, plan).leases if (lease.owner or "")[0] == "a")
    assert 249 <= in_a <= 252
    assert len(plan.moves) <= 51
    assert max(Counter(lease.owner for lease in after(case, plan).leases).values()) == 3


@examples(40)
@given(
    st.integers(0, 10_000),
    st.integers(1, 120),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_input_does_not_matter(
    seed: int, leases: int, workers: int, shuffler: random.Random
) -> None:
    case = random_case(seed, leases, workers)
    shuffled_leases, shuffled_workers = list(case.leases), list(case.workers)
    shuffler.shuffle(shuffled_leases)
    shuffler.shuffle(shuffled_workers)
    assert balanced(case) == balanced(
        replace(case, leases=tuple(shuffled_leases), workers=tuple(shuffled_workers))
    )


@examples(40)
@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(1, 12))
def test_static_load_moves_nothing_more(seed: int, leases: int, workers: int) -> None:
    case = random_case(seed, leases, workers)
    for _ in range(3):
        case = after(case, balanced(case))
    assert balanced(case).moves == ()


@pytest.mark.parametrize(("leases", "workers"), [(2_000, 100), (600, 30), (400, 7)])
def test_one_plan_is_enough(leases: int, workers: int) -> None:
    case = random_case(3, leases, workers)
    plan = balanced(case)
    assert max_over_mean(after(case, plan)) <= 1.05
    assert len({move.lease_key for move in plan.moves}) == len(plan.moves)
    assert balanced(after(case, plan)).moves == ()


def test_leases_of_the_dead_come_first_and_the_longest_waiting_leads() -> None:
    case = random_case(5, 200, 10)
    orphans = {f"s{i:05}": float(i) for i in range(20)}
    case = replace(
        case,
        leases=tuple(
            replace(lease, owner=None, waited_seconds=orphans[lease.lease_key])
            if lease.lease_key in orphans
            else lease
            for lease in case.leases
        ),
    )
    plan = balanced(case)
    assert [move.lease_key for move in plan.moves[:20]] == sorted(
        orphans, key=lambda key: -orphans[key]
    )
    assert all(move.from_worker is None for move in plan.moves[:20])
    assert plan.moves[0].reason.startswith("no owner, waited 19 s; ")


def test_inside_the_dead_band_nothing_moves() -> None:
    crew = fleet(10)
    case = PlanInput(
        tuple(
            LeaseState(f"s{i:03}", f"w{i % 10:04}", 100.0 + (9 if i % 10 == 0 else 0))
            for i in range(200)
        ),
        crew,
    )
    assert 1.05 < max_over_mean(case) < 1.10
    assert balanced(case).moves == ()
    eager = replace(case, limits=PlanLimits(re_balance_threshold_percentage=5))
    assert max_over_mean(after(eager, balanced(eager))) <= 1.05


def test_near_zero_traffic_moves_nothing_until_a_worker_has_no_leases() -> None:
    rng = random.Random(1)
    crew = fleet(10)
    owners = [f"w{0 if i < 40 else i % 10:04}" for i in range(100)]
    case = PlanInput(
        tuple(LeaseState(f"s{i:03}", owner, rng.random() / 100) for i, owner in enumerate(owners)),
        crew,
    )
    assert balanced(case).moves == ()
    wider = replace(case, workers=fleet(11))
    done = after(wider, balanced(wider))
    counts = Counter(lease.owner for lease in done.leases)
    assert (min(counts.values()), max(counts.values())) in ((9, 10), (8, 10)), "in one plan"
    assert balanced(done).moves == ()


def test_without_any_sample_counts_are_balanced() -> None:
    crew = fleet(4)
    case = PlanInput(tuple(LeaseState(f"s{i:03}", "w0000") for i in range(40)), crew)
    assert sorted(
        Counter(lease.owner for lease in after(case, balanced(case)).leases).values()
    ) == [10, 10, 10, 10]


def test_a_fresh_lease_counts_as_the_stated_quantile() -> None:
    crew = fleet(2)
    known = [
        LeaseState(f"k{i:02}", "w0000" if i % 2 else "w0001", float(100 * (i + 1)))
        for i in range(20)
    ]
    fresh = [LeaseState(f"n{i:02}", "w0000") for i in range(10)]
    plan = balanced(PlanInput((*known, *fresh), crew, PlanLimits(fresh_lease_quantile=0.75)))
    as_known = balanced(
        PlanInput((*known, *(replace(lease, throughput_kbps=1500.0) for lease in fresh)), crew)
    )
    assert [(m.lease_key, m.to_worker) for m in plan.moves] == [
        (m.lease_key, m.to_worker) for m in as_known.moves
    ]
    assert plan.moves


def test_ended_leases_cost_nothing_and_do_not_move_but_are_placed() -> None:
    crew = fleet(3)
    ended = [LeaseState(f"e{i:02}", "w0000", 500.0, ended=True) for i in range(10)]
    orphan = LeaseState("x", None, ended=True)
    live = [LeaseState(f"s{i:02}", f"w{i % 3:04}", 100.0) for i in range(30)]
    plan = balanced(PlanInput((*ended, *live, orphan), crew))
    assert [move.lease_key for move in plan.moves] == ["x"]
    assert plan.moves[0].to_worker != "w0000"


def test_unmovable_cooling_and_reserved_leases_stay() -> None:
    rng = random.Random(9)
    crew = (*fleet(8), WorkerState("w-leaving", accepts_leases=False))
    leases = [
        LeaseState(
            f"s{i:03}",
            rng.choice(["w0000", "w0001", "w-leaving", "w-unknown"]),
            rng.uniform(20, 200),
            movable=i % 5 != 0,
            seconds_since_move=10.0 if i % 7 == 0 else 1e9,
        )
        for i in range(200)
    ]
    # No worker is without a lease: the cool-down holds
    leases += [LeaseState(f"t{w}", f"w{w:04}", 1.0, movable=False) for w in range(8)]
    plan = balanced(PlanInput(tuple(leases), crew))
    by_key = {lease.lease_key: lease for lease in leases}
    assert plan.moves
    for move in plan.moves:
        lease = by_key[move.lease_key]
        assert lease.movable
        assert lease.seconds_since_move > 120
        assert move.from_worker in ("w0000", "w0001")
        assert move.to_worker != "w-leaving"


def test_caps_are_hard_and_what_fits_nowhere_is_spilled() -> None:
    crew = fleet(5)
    leases = tuple(LeaseState(f"s{i:03}", None, 100.0) for i in range(60))
    plan = balanced(PlanInput(leases, crew, PlanLimits(max_leases_for_worker=10)))
    assert len(plan.moves) == 50
    assert len(plan.spilled) == 10
    assert set(Counter(move.to_worker for move in plan.moves).values()) == {10}
    by_kbps = balanced(PlanInput(leases, crew, PlanLimits(max_throughput_per_host_kbps=850.0)))
    assert set(Counter(move.to_worker for move in by_kbps.moves).values()) == {8}


def test_a_lease_above_the_throughput_cap_is_read_alone() -> None:
    plan = balanced(
        PlanInput(
            (LeaseState("big", None, 900.0), LeaseState("small", None, 10.0)),
            fleet(2),
            PlanLimits(max_throughput_per_host_kbps=500.0),
        )
    )
    assert len({move.to_worker for move in plan.moves}) == 2
    assert not plan.spilled


def test_a_worker_over_a_cap_gives_up_what_is_too_much() -> None:
    crew = fleet(20)
    leases = [LeaseState(f"s{i:03}", f"w{i % 20:04}", 100.0) for i in range(200)]
    leases += [LeaseState(f"t{i:03}", "w0000", 0.001) for i in range(10)]
    plan = balanced(PlanInput(tuple(leases), crew, PlanLimits(max_leases_for_worker=12)))
    assert len(plan.moves) >= 8
    assert {move.from_worker for move in plan.moves} == {"w0000"}


def test_group_limits_hold() -> None:
    crew = tuple(WorkerState(f"{group}-{w}", group=group) for group in "ab" for w in range(10))
    leases = tuple(LeaseState(f"s{i:03}", None, 100.0) for i in range(100))
    plan = balanced(PlanInput(leases, crew, PlanLimits(max_leases_for_group=40)))
    assert Counter(move.to_worker[0] for move in plan.moves) == {"a": 40, "b": 40}
    assert len(plan.spilled) == 20


def test_one_oversized_shard_does_not_excuse_the_rest() -> None:
    rng = random.Random(4)
    crew = fleet(50, 3)
    leases = [LeaseState("oversized", "w0007", 9_000.0)]
    leases += [
        LeaseState(f"s{i:04}", rng.choice(crew).worker_id, rng.uniform(10, 90))
        for i in range(2_000)
    ]
    case = PlanInput(tuple(leases), crew)
    done = after(case, balanced(case))
    load = load_of(done)
    mean = sum(load.values()) / 50
    host = next(lease.owner for lease in done.leases if lease.lease_key == "oversized")
    assert host is not None
    assert load[host] <= 1.02 * 9_000.0 + 1e-6
    assert max(value for worker, value in load.items() if worker != host) <= 1.05 * mean


def test_capacity_counts() -> None:
    rng = random.Random(6)
    crew = tuple(WorkerState(f"w{w:03}", capacity=(1.0, 2.0, 4.0)[w % 3]) for w in range(60))
    case = PlanInput(
        tuple(
            LeaseState(f"s{i:04}", rng.choice(crew).worker_id, rng.uniform(10, 90))
            for i in range(3_000)
        ),
        crew,
    )
    assert max_over_mean(after(case, balanced(case))) <= 1.05


@pytest.mark.parametrize("is_own", [False, True])
def test_the_worse_of_cpu_and_throughput_counts(is_own: bool) -> None:
    # Equal bytes; the leases of five workers cost more, and their CPU shows it.
    crew, leases = [], []
    for w in range(20):
        heavy = w < 5
        cpu = 70.0 if heavy else 25.0
        seen = {"own_cpu": cpu} if is_own else {"metrics": {"C": cpu}, "limits": {"C": 80.0}}
        crew.append(WorkerState(f"w{w:02}", **seen))
        leases += [LeaseState(f"s{w:02}-{k:02}", f"w{w:02}", 100.0) for k in range(20)]
    plan = balanced(PlanInput(tuple(leases), tuple(crew)))
    assert plan.moves
    to = {move.lease_key: move.to_worker for move in plan.moves}
    points: Counter[str] = Counter()  # of CPU, if each lease keeps its share
    for lease in leases:
        owner = lease.owner or ""
        points[to.get(lease.lease_key, owner)] += 70.0 / 20 if owner < "w05" else 25.0 / 20
    mean = sum(points.values()) / 20
    assert max(points.values()) / mean < 1.35 < 70.0 / mean


def test_the_churn_budget_is_kept_and_spent_where_it_helps_most() -> None:
    case = random_case(8, 2_000, 100)
    hot = load_of(case).most_common(1)[0][0]
    plan = balanced(replace(case, limits=PlanLimits(churn_budget_percentage=1.0)))
    assert len(plan.moves) == 20
    assert hot in {move.from_worker for move in plan.moves}
    assert max_over_mean(after(case, plan)) < max_over_mean(case)


def test_balance_off_places_only() -> None:
    case = random_case(2, 100, 5)
    case = replace(
        case, leases=(*case.leases, LeaseState("zz", None, 10.0)), limits=PlanLimits(balance=False)
    )
    assert [move.lease_key for move in balanced(case).moves] == ["zz"]


@pytest.mark.parametrize("workers", [(), (WorkerState("a", accepts_leases=False),)])
def test_nobody_takes_leases(workers: tuple[WorkerState, ...]) -> None:
    plan = balanced(PlanInput((LeaseState("s", None, 5.0), LeaseState("t", "a", 5.0)), workers))
    assert plan.moves == ()
    assert plan.spilled == ("s",)


def test_no_leases_and_more_workers_than_leases() -> None:
    assert balanced(PlanInput((), fleet(3))).moves == ()
    plan = balanced(
        PlanInput(tuple(LeaseState(f"s{i}", None, 50.0) for i in range(30)), fleet(100, 4))
    )
    assert len({move.to_worker for move in plan.moves}) == 30


def test_everything_on_one_worker_of_many() -> None:
    rng = random.Random(3)
    crew = fleet(60, 3)
    case = PlanInput(
        tuple(LeaseState(f"s{i:04}", "w0000", rng.uniform(10, 200)) for i in range(1_500)), crew
    )
    done = after(case, balanced(case))
    assert max_over_mean(done) <= 1.05
    assert min(load_of(done).values()) > 0


def test_bad_samples_are_no_load() -> None:
    leases = [
        LeaseState(f"s{i}", None, value)
        for i, value in enumerate((float("nan"), float("inf"), -5.0, 100.0, 100.0))
    ]
    assert len(balanced(PlanInput(tuple(leases), fleet(2))).moves) == 5


def test_a_worker_that_joins_an_even_fleet_with_cpu_figures_gets_a_lease():
    """Idle processes may look as busy as working ones; without a lease the new one would stay idle
    for ever.
    """
    workers = tuple(
        WorkerState(f"a-{n}", "a", {"C": cpu}, {"C": 100.0})
        for n, cpu in ((1, 3.0), (2, 3.1), (3, 2.6))
    )
    leases = tuple(LeaseState(f"s{n}", f"a-{1 + n % 2}", throughput_kbps=2.0) for n in range(6))
    plan = balanced(PlanInput(leases, workers))
    assert {move.to_worker for move in plan.moves} == {"a-3"}
    after = {lease.lease_key: lease.owner for lease in leases} | {
        move.lease_key: move.to_worker for move in plan.moves
    }
    settled = PlanInput(
        tuple(replace(lease, owner=after[lease.lease_key]) for lease in leases), workers
    )
    assert balanced(settled).moves == ()
