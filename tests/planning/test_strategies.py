"""The strategies as pure functions: properties, and the defects of KCL (protocol §5.3 and §5.5)
that are not copied.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, PlanLimits, WorkerState
from tests.support.plans import NAMES, after, counts, fleet, plan

both = pytest.mark.parametrize("name", NAMES)


@st.composite
def inputs(draw, *, with_metrics=True):
    ids = [f"w{i:02}" for i in range(draw(st.integers(0, 6)))]
    reports = with_metrics and draw(st.booleans())
    percent = st.one_of(st.just(0.0), st.floats(0, 100, allow_nan=False))
    workers = [
        WorkerState(
            w,
            metrics={"C": draw(percent)} if reports and draw(st.integers(0, 4)) else {},
            limits={"C": float(draw(st.integers(20, 100)))} if reports else {},
            accepts_leases=draw(st.integers(0, 5)) > 0,
        )
        for w in ids
    ]
    owners = st.sampled_from([None, None, "stranger", *ids])
    load = st.one_of(st.none(), st.just(0.0), st.floats(0.001, 5000))
    leases = [
        LeaseState(
            f"s{i:02}",
            draw(owners),
            draw(load),
            ended=draw(st.integers(0, 7)) == 0,
            movable=draw(st.integers(0, 7)) > 0,
            waited_seconds=draw(st.floats(0, 99)),
        )
        for i in range(draw(st.integers(0, 24)))
    ]
    leases = [replace(lease, movable=True) if lease.owner is None else lease for lease in leases]
    limits = PlanLimits(
        max_leases_for_worker=draw(st.sampled_from([1, 3, 10, 2**31 - 1])),
        max_throughput_per_host_kbps=draw(st.sampled_from([100.0, math.inf])),
        allow_throughput_overshoot=draw(st.booleans()),
        balance=draw(st.booleans()),
    )
    return PlanInput(tuple(leases), tuple(workers), limits)


@both
@given(given_=inputs())
def test_a_plan_is_sound(name, given_):
    made = strategies.get(name)(given_)
    leases = {lease.lease_key: lease for lease in given_.leases}
    accepting = {w.worker_id for w in given_.workers if w.accepts_leases}
    assert len({m.lease_key for m in made.moves}) == len(made.moves), "at most one move per lease"
    for move in made.moves:
        lease = leases[move.lease_key]
        assert move.to_worker in accepting
        assert lease.movable
        assert move.from_worker == lease.owner != move.to_worker
        assert lease.owner is None or lease.owner in accepting, (
            "who does not accept leases keeps what it has"
        )
        assert given_.limits.balance or lease.owner is None
        assert move.reason
    placed = {m.lease_key for m in made.moves if leases[m.lease_key].owner is None}
    unowned = {key for key, lease in leases.items() if lease.owner is None}
    assert placed | set(made.spilled) == unowned
    assert not placed & set(made.spilled)


@given(given_=inputs())
def test_limits_hold_and_nothing_is_spilled_while_somebody_can_take_it(given_):
    """As in KCL, the last lease of a worker may exceed the limit of throughput."""
    made = strategies.get("kcl_variance")(given_)
    before = {
        w.worker_id: [le for le in given_.leases if le.owner == w.worker_id]
        for w in given_.workers
        if w.accepts_leases
    }
    held = {w: len(mine) for w, mine in before.items()}
    load = {
        w: sum(le.throughput_kbps or 0.0 for le in mine if not le.ended)
        for w, mine in before.items()
    }
    leases = {lease.lease_key: lease for lease in given_.leases}
    for move in made.moves:
        lease = leases[move.lease_key]
        kbps = 0.0 if lease.ended else lease.throughput_kbps or 0.0
        assert held[move.to_worker] < given_.limits.max_leases_for_worker
        assert load[move.to_worker] <= given_.limits.max_throughput_per_host_kbps + 1e-6
        held[move.to_worker] += 1
        load[move.to_worker] += kbps
        if lease.owner is not None:
            assert load[move.to_worker] <= given_.limits.max_throughput_per_host_kbps + 1e-6
            held[lease.owner] -= 1
            load[lease.owner] -= kbps
    if made.spilled:
        placed = [m for m in made.moves if m.from_worker is None]
        for worker, mine in before.items():
            got = [leases[m.lease_key] for m in placed if m.to_worker == worker]
            kbps = sum(le.throughput_kbps or 0.0 for le in [*mine, *got] if not le.ended)
            assert (
                len(mine) + len(got) >= given_.limits.max_leases_for_worker
                or kbps > given_.limits.max_throughput_per_host_kbps
            )


@both
@given(given_=inputs(), data=st.data())
def test_the_order_of_the_input_means_nothing(name, given_, data):
    strategy = strategies.get(name)
    mixed = replace(
        given_,
        leases=tuple(data.draw(st.permutations(given_.leases))),
        workers=tuple(data.draw(st.permutations(given_.workers))),
    )
    assert strategy(mixed) == strategy(given_)


@both
@given(given_=inputs(with_metrics=False))
def test_repeated_application_comes_to_rest(name, given_):
    """With static load and workers without metrics (whose load is that of their leases) moving
    ends, and no lease returns to a worker it left.
    """
    strategy = strategies.get(name)
    current = replace(given_, limits=replace(given_.limits, balance=True))
    left: set[tuple[str, str]] = set()
    for _ in range(60):
        moves = [m for m in strategy(current).moves if m.from_worker is not None or m.to_worker]
        moved = [m for m in moves if m.from_worker is not None]
        for move in moved:
            assert (move.lease_key, move.to_worker) not in left, f"{move} goes back"
            left.add((move.lease_key, move.from_worker))
        current = replace(current, leases=after(current.leases, moves))
        if not moves:
            return
    pytest.fail("still moving after 60 plans")


@given(
    loads=st.lists(st.floats(1, 1000), min_size=2, max_size=24),
    speeds=st.lists(st.floats(0.01, 0.02), min_size=2, max_size=5),
    data=st.data(),
)
def test_repeated_application_comes_to_rest_when_cpu_follows_the_leases(loads, speeds, data):
    """CPU of a worker = 2 % + its leases' throughput × its own cost: the fleet settles."""
    ids = [f"w{i}" for i in range(len(speeds))]
    leases = tuple(
        LeaseState(f"s{i:02}", data.draw(st.sampled_from(ids)), kbps)
        for i, kbps in enumerate(loads)
    )
    for _ in range(80):
        cpu = {
            w: 2.0 + sum(le.throughput_kbps for le in leases if le.owner == w) * cost
            for w, cost in zip(ids, speeds, strict=True)
        }
        workers = tuple(WorkerState(w, metrics={"C": cpu[w]}, limits={"C": 1e9}) for w in ids)
        moves = strategies.get("kcl_variance")(PlanInput(leases, workers)).moves
        if not moves:
            return
        leases = after(leases, moves)
    pytest.fail("still moving after 80 plans")


@both
@pytest.mark.parametrize("workers", [2, 3, 4, 7])
@pytest.mark.parametrize("kbps", [None, 0.0, 12.5])
def test_equal_workers_share_new_leases_equally(name, workers, kbps):
    """KCL's queue gives the middle of a tie nothing, and 0/0 makes all workers tie (protocol
    §5.5).
    """
    leases = [LeaseState(f"s{i:02}", None, kbps) for i in range(20)]
    for metrics in ({}, {"C": 0.0}, {"C": 35.0}):
        members = fleet(workers, metrics=metrics)
        result = counts(after(leases, plan(name, leases, members).moves), members)
        assert max(result) - min(result) <= 1, (metrics, result)


@both
def test_leases_that_weigh_nothing_are_spread_too(name):
    leases = [LeaseState(f"s{i}", None, 5.0, ended=True) for i in range(6)]
    assert Counter(m.to_worker for m in plan(name, leases, fleet(3)).moves) == {
        "w00": 2,
        "w01": 2,
        "w02": 2,
    }


@both
def test_a_fleet_without_traffic_is_balanced(name):
    """KCL waits for traffic: without throughput every comparison is with NaN."""
    leases = tuple(LeaseState(f"s{i:02}", "w00", kbps) for i, kbps in enumerate([None, 0.0] * 6))
    members = fleet(3)
    for _ in range(10):
        leases = after(leases, plan(name, leases, members).moves)
    assert counts(leases, members) == [4, 4, 4]


@both
def test_workers_that_do_not_accept_are_no_targets_even_when_they_look_best(name):
    dead = WorkerState("dead", metrics={"C": 0.0}, accepts_leases=False)
    busy = WorkerState("busy", metrics={"C": 90.0})
    made = plan(name, [LeaseState("s1", None), LeaseState("s2", None)], [dead, busy])
    assert {m.to_worker for m in made.moves} == {"busy"}
    alone = plan(name, [LeaseState("s1", None)], [dead])
    assert alone.moves == ()
    assert alone.spilled == ("s1",)


@both
def test_a_new_worker_gets_its_share(name):
    leases = tuple(LeaseState(f"s{i:02}", f"w{i % 2:02}", 10.0) for i in range(12))
    members = fleet(3)
    for _ in range(10):
        leases = after(leases, plan(name, leases, members).moves)
    assert counts(leases, members) == [4, 4, 4]


def test_a_new_worker_on_the_same_busy_host_is_not_idle_for_ever():
    leases = tuple(LeaseState(f"s{i}", f"w{i % 2:02}", 10.0) for i in range(8))
    members = fleet(3, metrics={"C": 60.0}, limits={"C": 100.0})
    made = plan("kcl_variance", leases, members)
    assert [m.to_worker for m in made.moves] == ["w02"]
    assert plan("kcl_variance", after(leases, made.moves), members).moves == ()


def test_names():
    assert set(NAMES) <= set(strategies.names())
    assert strategies.get("WORKER_UTILIZATION_AWARE") is strategies.get("worker_utilization_aware")
    with pytest.raises(
        SettingsError,
        match=r"lease_assignment_strategy='fastest' is not known; write one of .*lease_count_based",
    ):
        strategies.get("fastest")

    def keep(given_: PlanInput) -> Plan:
        return Plan("keep", (Move("s", None, "w", "because"),))

    strategies.register("test_keep", keep)
    assert strategies.get("test_keep") is keep
