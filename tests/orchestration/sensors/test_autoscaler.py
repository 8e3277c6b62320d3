"""How many workers to start or drain, and how slowly after failures."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.orchestration import supervision
from kcl_pipeline.orchestration.runs import ACTIVE, RunView, early_failures
from kcl_pipeline.orchestration.supervision import (
    LONGEST_BACKOFF_SECONDS,
    SCALE_COOLDOWN_SECONDS,
    SCALE_DOWN_AFTER_SECONDS,
    AutoscalerMemory,
    Load,
    LoadLimits,
    ScalingDecision,
    backoff_seconds,
)
from tests.support.dagster_fakes import counted

NOW = 1_000_000.0
LAG_LIMIT = LoadLimits(120)


def decide(active, *given, **limits) -> ScalingDecision:
    return supervision.decide(counted(active), *given, **limits)


def run(
    number: int,
    status: S = S.STARTED,
    *,
    lived: float = 10.0,
    age: float = 100.0,
    continuous: bool = True,
) -> RunView:
    ended = None if status in ACTIVE else NOW - age + lived
    return RunView(
        f"run-{number}",
        status,
        f"w-{number}",
        continuous,
        NOW - age + number / 1000,
        NOW - age,
        ended,
    )


@pytest.mark.parametrize(
    ("statuses", "started"),
    [
        ([], 2),
        ([S.STARTED], 1),
        ([S.STARTED, S.STARTED], 0),
        ([S.QUEUED, S.NOT_STARTED], 0),
        ([S.STARTING, S.MANAGED], 0),
        ([S.CANCELING, S.STARTED], 0),
        ([S.STARTED, S.STARTED, S.STARTED], 0),
    ],
)
def test_every_run_that_may_have_a_worker_counts(statuses, started):
    decision = decide(
        [run(i, s) for i, s in enumerate(statuses)],
        [],
        AutoscalerMemory(),
        minimum=2,
        maximum=4,
        now=NOW,
    )
    assert (decision.start, decision.drain, decision.memory.desired) == (started, (), 2)


def test_drain_runs_are_no_supply():
    assert (
        decide(
            [run(1, continuous=False), run(2, continuous=False)],
            [],
            AutoscalerMemory(),
            minimum=2,
            maximum=4,
            now=NOW,
        ).start
        == 2
    )


@pytest.mark.parametrize(("edited", "expected"), [(0, 2), (1, 2), (3, 3), (9, 4)])
def test_a_desired_count_edited_on_the_page_is_kept_between_min_and_max(edited, expected):
    decision = decide([], [], AutoscalerMemory(desired=edited), minimum=2, maximum=4, now=NOW)
    assert (decision.start, decision.memory.desired) == (expected, expected)


def test_workers_above_the_maximum_are_drained_newest_first():
    decision = decide(
        [run(i) for i in range(6)], [], AutoscalerMemory(desired=2), minimum=2, maximum=4, now=NOW
    )
    assert decision.drain == ("w-5", "w-4")


def test_a_worker_that_is_being_cancelled_is_not_drained_a_second_time():
    runs = [run(0), run(1), run(2), run(3), run(4, S.CANCELING)]
    assert decide(runs, [], AutoscalerMemory(desired=2), minimum=2, maximum=4, now=NOW).drain == ()


def test_the_first_death_is_replaced_at_once():
    decision = decide(
        [run(2)],
        [run(2), run(1, S.FAILURE, lived=5)],
        AutoscalerMemory(),
        minimum=2,
        maximum=4,
        now=NOW,
    )
    assert decision.start == 1


def test_when_all_died_young_the_next_try_waits_and_the_wait_is_remembered():
    dead = [run(2, S.FAILURE, lived=5), run(1, S.FAILURE, lived=5)]
    first = decide([], dead, AutoscalerMemory(), minimum=2, maximum=4, now=NOW)
    assert first.start == 0
    assert first.memory.retry_at == NOW + 10
    again = decide(
        [],
        dead,
        AutoscalerMemory.parse(first.memory.model_dump_json()),
        minimum=2,
        maximum=4,
        now=NOW + 9,
    )
    assert again.start == 0
    assert again.memory == first.memory
    assert decide([], dead, again.memory, minimum=2, maximum=4, now=NOW + 10).start == 2


def test_an_older_run_that_dies_last_also_counts():
    newest_first = decide(
        [run(1)],
        [run(2, S.FAILURE, lived=1), run(1)],
        AutoscalerMemory(),
        minimum=2,
        maximum=4,
        now=NOW,
    )
    both = [run(2, S.FAILURE, lived=1), run(1, S.FAILURE, lived=8)]
    assert decide([], both, newest_first.memory, minimum=2, maximum=4, now=NOW).start == 0


def test_a_clock_that_was_set_back_cannot_hold_a_replacement_back_for_ever():
    dead = [run(2, S.FAILURE), run(1, S.FAILURE)]
    memory = AutoscalerMemory(last_death="run-2", retry_at=NOW + 1e9)
    waiting = decide([], dead, memory, minimum=2, maximum=4, now=NOW)
    assert "next start in 10 s" in waiting.reason


@pytest.mark.parametrize("status", [S.SUCCESS, S.CANCELED])
def test_runs_that_were_ended_on_purpose_are_no_failures(status):
    assert early_failures([run(3, status), run(2, S.FAILURE)], NOW) == ()


def test_a_worker_that_lived_ends_the_row_of_failures():
    runs = [
        run(4, S.FAILURE, age=5, lived=4),
        run(3, S.STARTED, age=61),
        run(2, S.FAILURE),
        run(1, S.FAILURE),
    ]
    assert [r.run_id for r in early_failures(runs, NOW)] == ["run-4"]
    assert early_failures([run(2, S.FAILURE, lived=60)], NOW) == ()


def test_a_run_that_never_started_died_young():
    assert (
        len(early_failures([RunView("r", S.FAILURE, "w", True, NOW - 9, None, NOW - 8)], NOW)) == 1
    )


@given(deaths=st.integers(0, 10_000), desired=st.integers(0, 50))
def test_the_wait_grows_with_the_deaths_and_is_bounded(deaths, desired):
    assert (
        0
        <= backoff_seconds(deaths, desired)
        <= backoff_seconds(deaths + 1, desired)
        <= LONGEST_BACKOFF_SECONDS
    )


def test_lag_adds_one_worker_at_a_time():
    runs, behind = [run(1), run(2)], Load(500_000)
    grown = decide(
        runs,
        [],
        AutoscalerMemory(desired=2),
        minimum=2,
        maximum=4,
        now=NOW,
        load=behind,
        limits=LAG_LIMIT,
    )
    assert (grown.start, grown.memory.desired) == (1, 3)
    soon = decide(
        [*runs, run(3)],
        [],
        grown.memory,
        minimum=2,
        maximum=4,
        now=NOW + SCALE_COOLDOWN_SECONDS - 1,
        load=behind,
        limits=LAG_LIMIT,
    )
    assert (soon.start, soon.memory.desired) == (0, 3)
    later = decide(
        [*runs, run(3)],
        [],
        grown.memory,
        minimum=2,
        maximum=4,
        now=NOW + SCALE_COOLDOWN_SECONDS,
        load=behind,
        limits=LAG_LIMIT,
    )
    assert later.start == 1
    full = decide(
        [*runs, run(3), run(4)],
        [],
        later.memory,
        minimum=2,
        maximum=4,
        now=NOW + 9999,
        load=behind,
        limits=LAG_LIMIT,
    )
    assert (full.start, full.memory.desired) == (0, 4)


def test_a_long_calm_lets_one_worker_go():
    runs, current = [run(1), run(2), run(3)], Load(10)
    calm = decide(
        runs,
        [],
        AutoscalerMemory(desired=3),
        minimum=2,
        maximum=4,
        now=NOW,
        load=current,
        limits=LAG_LIMIT,
    )
    assert (calm.drain, calm.memory.calm_since) == ((), NOW)
    later = decide(
        runs,
        [],
        calm.memory,
        minimum=2,
        maximum=4,
        now=NOW + SCALE_DOWN_AFTER_SECONDS,
        load=current,
        limits=LAG_LIMIT,
    )
    assert (later.drain, later.memory.desired) == (("w-3",), 2)
    assert (
        decide(
            runs,
            [],
            later.memory,
            minimum=2,
            maximum=4,
            now=NOW + SCALE_DOWN_AFTER_SECONDS + 5,
            load=current,
            limits=LAG_LIMIT,
        ).drain
        == ()
    )


def test_a_lag_between_the_two_edges_ends_the_calm():
    memory = AutoscalerMemory(desired=3, calm_since=NOW - 599)
    assert (
        decide(
            [run(1)],
            [],
            memory,
            minimum=2,
            maximum=4,
            now=NOW,
            load=Load(60_000),
            limits=LAG_LIMIT,
        ).memory.calm_since
        is None
    )


@pytest.mark.parametrize("cursor", [None, "", "not json", '{"desired": -3}', "[]"])
def test_a_cursor_that_is_none_starts_afresh(cursor):
    assert AutoscalerMemory.parse(cursor) == AutoscalerMemory()


@given(
    active=st.lists(st.sampled_from(sorted(ACTIVE, key=str)), max_size=12),
    desired=st.integers(0, 20),
    minimum=st.integers(1, 6),
    extra=st.integers(0, 6),
    lag=st.none() | st.integers(0, 10**7),
)
def test_never_more_than_the_maximum_and_never_both_ways(active, desired, minimum, extra, lag):
    runs = [run(i, s) for i, s in enumerate(active)]
    decision = decide(
        runs,
        [],
        AutoscalerMemory(desired=desired),
        minimum=minimum,
        maximum=minimum + extra,
        now=NOW,
        load=Load(lag),
        limits=LAG_LIMIT,
    )
    assert not (decision.start and decision.drain)
    assert decision.start == 0 or len(runs) + decision.start <= minimum + extra
    assert minimum <= decision.memory.desired <= minimum + extra
    assert len(runs) + decision.start >= minimum
    has_row = (S.STARTED, S.CANCELING)
    assert set(decision.drain) <= {r.worker_id for r in runs if r.status in has_row}
