"""From rows to a strategy's input: protocol §2.4, §5.2, §5.3."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.config import AssignmentSettings
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.planning.state import (
    Observation,
    is_failing,
    is_valid,
    moving_average,
    prepare,
    worker_state,
)
from kcl_pipeline.position import LATEST, SHARD_END

SETTINGS = AssignmentSettings()


def cpu(worker_id, *values, limit=100, **attributes):
    return WorkerMetrics(worker_id, 1, {"C": tuple(values)}, {"C": (limit,)}, **attributes)


def states(leases, workers, **seen):
    prepared = prepare(leases, workers, Observation(**seen), SETTINGS)
    return {state.lease_key: state for state in prepared.given.leases}, prepared


@pytest.mark.parametrize(
    ("values", "average"),
    [
        ((), None),
        ((-1.0,), None),
        ((8.0,), 8.0),
        ((8.0, 4.0), 6.0),
        ((8.0, -1.0, 4.0), 6.0),
        ((0.0, 0.0), 0.0),
        ((8.0, 4.0, 2.0), 4.0),
        ((math.nan, 3.0), 3.0),
    ],
)
def test_the_moving_average(values, average):
    assert moving_average(values, 0.5) == average


@given(st.lists(st.one_of(st.just(-1.0), st.floats(0, 100)), max_size=10), st.floats(0.01, 1))
def test_the_moving_average_lies_between_the_samples(values, alpha):
    average = moving_average(values, alpha)
    samples = [v for v in values if v != -1.0]
    assert (average is None) == (not samples)
    if average is not None:
        assert min(samples) - 1e-9 <= average <= max(samples) + 1e-9


@pytest.mark.parametrize(
    ("row", "valid", "failing"),
    [
        (WorkerMetrics("w", 1), True, False),
        (cpu("w", 5.0), True, False),
        (cpu("w", 5.0, -1.0), True, True),
        (cpu("w", -1.0, 5.0), True, False),
        (cpu("w", 5.0, limit=0), False, False),
        (WorkerMetrics("w", 1, {"C": (5.0,)}, {}), False, False),
        (WorkerMetrics("w", 1, {"C": (5.0,)}, {"C": ()}), False, False),
    ],
)
def test_validity_and_failure(row, valid, failing):
    assert is_valid(row) is valid
    assert is_failing(row) is failing


def test_invalid_workers_are_left_out_and_failing_draining_distrusted_ones_take_nothing():
    rows = [
        cpu("bad", 5.0, limit=0),
        cpu("failing", 5.0, -1.0),
        cpu("draining", 5.0, drain_requested=True),
        cpu("silent", 5.0),
        cpu("good", 5.0, 7.0),
    ]
    prepared = prepare([], rows, Observation(distrusted=frozenset({"silent"})), SETTINGS)
    assert {w.worker_id: w.accepts_leases for w in prepared.given.workers} == {
        "failing": False,
        "draining": False,
        "silent": False,
        "good": True,
    }


def test_a_worker_as_strategies_see_it():
    state = worker_state(cpu("blue-7", 8.0, 4.0, limit=80), 0.5, "-")
    assert (state.group, state.metrics, state.limits) == ("blue", {"C": 6.0}, {"C": 80.0})
    bare = worker_state(WorkerMetrics("solo", 1), 0.5, "-")
    assert (bare.group, bare.metrics, bare.limits, bare.accepts_leases) == ("solo", {}, {}, True)


WORKERS = [WorkerMetrics("a", 1), WorkerMetrics("b", 1)]


def test_plain_leases():
    found, _ = states(
        [
            Lease("held", LATEST, owner="a", throughput_kbps=3.0),
            Lease("free", LATEST),
            Lease("done", SHARD_END, owner="b"),
            Lease("foreign", LATEST, owner="x"),
        ],
        WORKERS,
        waited_seconds={"free": 4.0},
        last_owners={"free": "b"},
        moved_seconds={"held": 9.0},
    )
    assert (
        found["held"].owner,
        found["held"].throughput_kbps,
        found["held"].seconds_since_move,
    ) == ("a", 3.0, 9.0)
    assert (found["free"].owner, found["free"].unowned_because, found["free"].waited_seconds) == (
        None,
        "b does not hold it any more",
        4.0,
    )
    assert (found["done"].owner, found["done"].ended) == ("b", True)
    assert found["foreign"].owner == "x", "an owner without a row keeps what it renews"
    assert all(state.movable for state in found.values())


def test_expired_leases_have_no_owner():
    found, prepared = states(
        [Lease("s", LATEST, owner="a")],
        WORKERS,
        expired=frozenset({"s"}),
        waited_seconds={"s": 12.0},
    )
    assert (
        found["s"].owner,
        found["s"].unowned_because,
        found["s"].waited_seconds,
        found["s"].movable,
    ) == (None, "its owner a expired", 12.0, True)
    assert prepared.forced == ()


def test_a_running_handoff_counts_for_its_destination_and_does_not_move():
    found, prepared = states([Lease("s", LATEST, owner="b", checkpoint_owner="a")], WORKERS)
    assert (found["s"].owner, found["s"].movable) == ("b", False)
    assert prepared.forced == ()


@pytest.mark.parametrize(
    ("seen", "from_worker", "words"),
    [
        ({"expired": frozenset({"s"})}, None, "stopped renewing during"),
        ({"overdue_handoffs": frozenset({"s"})}, "a", "is overdue"),
    ],
)
def test_a_stuck_handoff_is_finished_by_force(seen, from_worker, words):
    found, prepared = states([Lease("s", LATEST, owner="b", checkpoint_owner="a")], WORKERS, **seen)
    (move,) = prepared.forced
    assert (move.lease_key, move.from_worker, move.to_worker) == ("s", from_worker, "b")
    assert words in move.reason
    assert (found["s"].owner, found["s"].movable) == ("b", False), "no strategy moves it as well"


@pytest.mark.parametrize(
    "workers",
    [[WorkerMetrics("a", 1)], [WorkerMetrics("a", 1), WorkerMetrics("b", 1, drain_requested=True)]],
)
def test_a_handoff_to_a_worker_that_is_gone_or_leaving_is_placed_anew(workers):
    found, prepared = states([Lease("s", LATEST, owner="b", checkpoint_owner="a")], workers)
    assert (found["s"].owner, found["s"].movable) == (None, True)
    assert found["s"].unowned_because == "b does not take it over"
    assert prepared.forced == ()


def test_an_overdue_handoff_to_a_worker_that_takes_nothing_is_placed_anew():
    found, prepared = states(
        [Lease("s", LATEST, owner="b", checkpoint_owner="a")],
        WORKERS,
        overdue_handoffs=frozenset({"s"}),
        distrusted=frozenset({"b"}),
    )
    assert (found["s"].owner, found["s"].movable) == (None, True)
    assert prepared.forced == ()


def test_leases_of_a_draining_worker_are_placed_elsewhere():
    found, _ = states(
        [Lease("s", LATEST, owner="a")],
        [WorkerMetrics("a", 1, drain_requested=True), WorkerMetrics("b", 1)],
    )
    assert (found["s"].owner, found["s"].movable) == (None, True)
    assert found["s"].unowned_because == "its owner a drains"


def replaced_by(successor="b", **attributes):
    return [WorkerMetrics("a", 1), WorkerMetrics(successor, 1, replaces="a", **attributes)]


def test_the_leases_of_a_replaced_worker_move_to_its_successor_and_count_for_it():
    leases = [
        Lease("s0", LATEST, owner="a"),
        Lease("s1", LATEST, owner="b", checkpoint_owner="a"),
        Lease("s2", LATEST, owner="c"),
        Lease("s3", SHARD_END, owner="a"),
    ]
    found, prepared = states(leases, [*replaced_by(), WorkerMetrics("c", 1)])
    assert [(m.lease_key, m.from_worker, m.to_worker, m.reason) for m in prepared.forced] == [
        ("s0", "a", "b", "b replaces a")
    ]
    assert {key: (state.owner, state.movable) for key, state in found.items()} == {
        "s0": ("b", False),
        "s1": ("b", False),
        "s2": ("c", True),
        "s3": ("a", True),
    }
    accepts = {state.worker_id: state.accepts_leases for state in prepared.given.workers}
    assert accepts == {"a": False, "b": True, "c": True}


def test_a_replaced_worker_that_drains_gives_to_its_successor():
    workers = [WorkerMetrics("a", 1, drain_requested=True), WorkerMetrics("b", 1, replaces="a")]
    _, prepared = states([Lease("s", LATEST, owner="a")], workers)
    assert [(m.from_worker, m.to_worker) for m in prepared.forced] == [("a", "b")]


def test_a_handoff_to_a_worker_that_is_replaced_ends_first():
    found, prepared = states([Lease("s", LATEST, owner="a", checkpoint_owner="c")], replaced_by())
    assert prepared.forced == ()
    assert (found["s"].owner, found["s"].movable) == ("b", False)


@pytest.mark.parametrize(
    ("workers", "seen"),
    [
        (replaced_by(drain_requested=True), {}),
        (replaced_by(stats={"C": (-1.0,)}, operating_range={"C": (100,)}), {}),
        (replaced_by(), {"distrusted": frozenset({"b"})}),
        (replaced_by(), {"unconfirmed": frozenset({"b"})}),
        ([WorkerMetrics("a", 1), WorkerMetrics("b", 1, replaces="gone")], {}),
        ([WorkerMetrics("a", 1, replaces="b"), WorkerMetrics("b", 1, replaces="a")], {}),
        ([WorkerMetrics("a", 1, replaces="a")], {}),
    ],
)
def test_without_a_successor_that_takes_leases_a_worker_goes_on(workers, seen):
    found, prepared = states([Lease("s", LATEST, owner="a")], workers, **seen)
    assert prepared.forced == ()
    assert (found["s"].owner, found["s"].movable) == ("a", True)
    accepts = {state.worker_id: state.accepts_leases for state in prepared.given.workers}
    assert accepts["a"]


def test_an_expired_lease_of_a_replaced_worker_has_no_owner():
    found, prepared = states(
        [Lease("s", LATEST, owner="a")], replaced_by(), expired=frozenset({"s"})
    )
    assert (found["s"].owner, prepared.forced) == (None, ())


def test_limits_are_those_of_the_settings():
    settings = AssignmentSettings(
        max_leases_for_worker=3,
        max_throughput_per_host_kbps=7.0,
        re_balance_threshold_percentage=5,
        dampening_percentage=40,
    )
    limits = prepare([], [], Observation(), settings, balance=False).given.limits
    assert (limits.max_leases_for_worker, limits.max_throughput_per_host_kbps) == (3, 7.0)
    assert (
        limits.re_balance_threshold_percentage,
        limits.dampening_percentage,
        limits.balance,
    ) == (5, 40, False)
