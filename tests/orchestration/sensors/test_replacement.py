"""Outdated workers are replaced one by one: the order, failures, restarts and full queues."""

from __future__ import annotations

from dataclasses import replace as changed

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.leases.state.worker_status import HungState, WorkerStatus
from kcl_pipeline.orchestration.assets.runs.problems import (
    NEW_FAILURE_SECONDS,
    new_failures,
    outdated_runs,
)
from kcl_pipeline.orchestration.assets.runs.runs import ACTIVE, RunView
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.scaling.replacement import (
    Replacement,
    WorkerRowsView,
    replace,
    rows_view,
)
from tests.support.dagster_fakes import worker
from tests.support.replaced_fleet import Fleet, fleet_fixture  # noqa: F401 (fixture)
from tests.support.sensor_stage import instance_fixture  # noqa: F401 (fixture)

NOW = 1_000_000.0


def view(name: str, status: S = S.STARTED, *, lived: float | None = None, **fields) -> RunView:
    """A run; `o...` has the old version, `n...` the new one."""
    version = "new" if name.startswith("n") else "old"
    order = int(name[1:])
    started = None if status in (S.QUEUED, S.STARTING) else NOW - 100
    ended = None if status in ACTIVE else NOW - 100 + (lived or 0.0)
    return RunView(
        name,
        status,
        f"w-{name}",
        continuous=True,
        created=NOW - 200 + order,
        started=started,
        ended=ended,
        version=version,
        **fields,
    )


def step(active, *, proven=None, reporting=None, draining=(), recent=(), desired=2, most=5):
    names = [run.worker_id for run in active if run.status is S.STARTED]
    rows = WorkerRowsView(
        reporting=frozenset(names if reporting is None else reporting),
        proven=frozenset(names if proven is None else proven),
        draining=frozenset(draining),
    )
    return replace(
        active,
        recent,
        outdated_runs(active, "new", "here"),
        rows,
        version="new",
        desired=desired,
        most_runs=most,
        now=NOW,
    )


def test_nothing_happens_without_an_outdated_worker():
    assert step([view("n1"), view("n2")]) == Replacement()


def test_a_new_worker_starts_first():
    assert step([view("o1"), view("o2")]).start == 1


@pytest.mark.parametrize("status", [S.QUEUED, S.NOT_STARTED, S.STARTING])
def test_a_new_worker_that_has_not_started_is_waited_for(status):
    found = step([view("o1"), view("o2"), view("n3", status)])
    assert (found.start, found.drain) == (0, ())
    assert ("is queued" if status is S.QUEUED else "is starting") in found.text


def test_a_new_worker_that_is_not_proven_is_waited_for():
    active = [view("o1"), view("o2"), view("n3")]
    assert step(active, proven=["w-o1", "w-o2"]).drain == ()
    assert step(active).drain == ("w-o1",)


def test_the_oldest_is_drained_and_only_one_at_a_time():
    active = [view("o2"), view("o1"), view("n3")]
    assert step(active).drain == ("w-o1",)
    for waiting in (
        step(active, draining=["w-o1"]),
        step(active, reporting=["w-o2", "w-n3"]),
        step([view("o2"), view("o1", S.CANCELING), view("n3")]),
    ):
        assert (waiting.start, waiting.drain) == (0, ())
        assert "one is stopping" in waiting.text


def test_never_more_than_the_maximum_and_one_more():
    active = [view("o1"), view("o2"), view("o3", S.QUEUED)]
    assert step(active, desired=3, most=4).start == 1
    full = step(active, desired=3, most=3)
    assert (full.start, full.drain) == (0, ())
    assert "waiting for one of 3 runs to end" in full.text


def test_missing_workers_are_left_to_the_autoscaler():
    found = step([view("o1")], desired=2)
    assert (found.start, found.drain) == (0, ())


def test_runs_of_another_code_location_are_left_alone():
    there, here = view("o1", location="there"), view("o2", location="here")
    assert outdated_runs([there, here], "new", "here") == (here,)
    assert step([there]) == Replacement()
    assert outdated_runs([there, here], "new", None) == (there, here)
    drain = RunView("d", S.STARTED, "w-d", continuous=False)
    assert outdated_runs([drain], "new", None) == ()


def test_three_failures_stop_it_and_a_worker_that_lives_begins_anew():
    active = [view("o1"), view("o2")]
    dead = [view(f"n{i}", S.FAILURE, lived=200) for i in (3, 4, 5)]
    assert step(active, recent=[*active, *dead[:2]]).start == 1
    stopped = step(active, recent=[*active, *dead])
    assert (stopped.start, stopped.drain) == (0, ())
    assert stopped.problem == (
        "the replacement of 2 outdated workers has stopped: the last 3 runs of version new failed; "
        "the outdated workers go on"
    )
    lives = changed(view("n6"), started=NOW - NEW_FAILURE_SECONDS)
    assert new_failures([*dead, lives], "new", NOW) == 0
    assert new_failures([*dead, view("n6")], "new", NOW) == 3, "it may still fail"
    assert new_failures([*dead, view("n6", S.FAILURE, lived=301)], "new", NOW) == 0
    assert new_failures([view("o9", S.FAILURE), *dead], "new", NOW) == 3
    assert new_failures([*dead, view("n7", S.CANCELED)], "new", NOW) == 0


@given(
    statuses=st.lists(
        st.tuples(st.sampled_from("on"), st.sampled_from(sorted(ACTIVE, key=str))), max_size=8
    ),
    proven=st.sets(st.integers(0, 7)),
    draining=st.sets(st.integers(0, 7)),
    desired=st.integers(1, 6),
    most=st.integers(2, 7),
)
def test_a_drain_always_leaves_enough_proven_workers(statuses, proven, draining, desired, most):
    active = [view(f"{kind}{i}", status) for i, (kind, status) in enumerate(statuses)]
    ids = [run.worker_id for run in active]
    found = step(
        active,
        proven=[ids[i] for i in proven if i < len(ids)],
        draining=[ids[i] for i in draining if i < len(ids)],
        desired=desired,
        most=most,
    )
    assert not (found.start and found.drain)
    assert not found.start or len(active) < most
    if found.drain:
        new = [run for run in active if run.version == "new"]
        assert new
        assert all(ids.index(run.worker_id) in proven for run in new)
        assert not any(i in draining for i in range(len(ids)))
        assert not any(run.status is S.CANCELING for run in active)
        assert len(active) > desired


def test_a_worker_is_proven_by_rows_that_change():
    beats, rows = Heartbeats(), {"a": worker("a", 1.0), "stuck": worker("stuck", 1.0)}
    rows["hung"] = changed(worker("hung"), status=WorkerStatus(hung=HungState("writing", 9.0, 1)))
    rows["drains"] = changed(worker("drains"), drain_requested=True)
    rows["fails"] = worker("fails", -1.0)
    for tick in range(4):
        assert rows_view(beats, 30.0).proven == frozenset(), tick
        for name in rows.keys() - {"stuck"}:
            rows[name] = changed(rows[name], last_update_seconds=tick)
        beats.observe(rows.values(), [], 10.0 * tick)
    found = rows_view(beats, 30.0)
    assert found.proven == {"a"}
    assert found.draining == {"drains"}
    assert found.reporting == set(rows)


ORDER = ["start new", "drain old", "start new", "drain old"]


def test_every_worker_is_replaced_after_a_new_one_is_ready(fleet):
    texts = [fleet.tick().cursor for _ in range(40)]
    assert fleet.log == ORDER
    assert (fleet.kinds(), fleet.most) == (["new", "new"], 3)
    assert f"replacing 2 outdated workers by version {fleet.version}: starting 1" in texts[0]
    assert "replacing" not in texts[-1]


def test_the_same_code_replaces_nothing(fleet):
    fleet.deploy("one")
    for _ in range(20):
        fleet.tick()
    assert fleet.log == []


def test_it_can_be_switched_off(instance):
    fleet = Fleet(instance)
    for _ in range(3):
        fleet.tick()
    fleet.log.clear()
    fleet.deploy("two")
    fleet.stage.pipeline.workers.rolling_replacement = False
    for _ in range(20):
        fleet.tick()
    assert fleet.log == []


@pytest.mark.parametrize("restart", range(1, 24, 2))
def test_a_sensor_that_restarts_in_the_middle_continues(fleet, restart):
    for tick in range(50):
        if tick == restart:
            fleet.deploy("two")
        fleet.tick()
    assert fleet.log == ORDER
    assert (fleet.kinds(), fleet.most) == (["new", "new"], 3)


def test_a_cursor_that_is_lost_changes_nothing(fleet):
    for _ in range(50):
        fleet.stage.cursor = '{"open_shards": 8}'
        fleet.tick()
    assert fleet.log == ORDER


def test_new_workers_that_fail_stop_it_and_the_old_ones_go_on(fleet):
    results = [fleet.tick(fails=True) for _ in range(20)]
    assert fleet.log == ["start new"] * 3
    assert fleet.kinds() == ["old", "old"]
    sentence = results[-1].skip_reason.skip_message
    assert (
        "the replacement of 2 outdated workers has stopped: the last 3 runs of version" in sentence
    )
    checks = [
        event
        for result in results
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation) and event.check_name == "workers_running"
    ]
    assert not checks[-1].passed
    assert "has stopped" in checks[-1].description
    fleet.deploy("three")
    for _ in range(40):
        fleet.tick()
    assert fleet.log[3:] == ORDER


def test_a_queue_that_holds_the_new_run_back_leaves_the_old_workers(fleet):
    results = [fleet.tick(status=S.QUEUED) for _ in range(30)]
    assert fleet.log == ["start new"]
    assert fleet.kinds() == ["old", "old"]
    assert "a new one is queued" in results[-1].cursor
    assert "been queued for up to" in results[-1].cursor


def test_a_worker_without_a_version_is_outdated(instance):
    fleet = Fleet(instance, min=1, max=1)
    run = fleet.stage.run(S.STARTED)
    fleet.alive.append(run)
    run.tags["kcl/version"] = "before"
    for _ in range(20):
        fleet.tick()
    assert fleet.log == ["start new", "drain old"]
