"""A new version that pauses shards is refused: one try, and the outdated workers go on."""

from __future__ import annotations

from dataclasses import replace as changed

import dagster as dg
from dagster import DagsterRunStatus as S

from kcl_pipeline.leases.state.worker_status import PausedLease, WorkerStatus, WorkerTotals
from kcl_pipeline.orchestration.assets.names import REFUSED_TAG
from kcl_pipeline.orchestration.assets.runs.problems import outdated_runs
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats
from kcl_pipeline.orchestration.sensors.scaling.replacement import (
    COMMITTED_SECONDS,
    Replacement,
    WorkerRowsView,
    replace,
    rows_view,
)
from tests.support.dagster_fakes import worker
from tests.support.replaced_fleet import Fleet, fleet_fixture  # noqa: F401 (fixture)
from tests.support.sensor_stage import instance_fixture  # noqa: F401 (fixture)

REASON = "worker w-n3 of version new has paused 2 shards: ValueError: x"


def run(name: str, version: str, **fields: object) -> RunView:
    return RunView(name, S.STARTED, f"w-{name}", continuous=True, version=version, **fields)


def step(new: RunView, *paused: str, draining: tuple[str, ...] = ()) -> Replacement:
    active = [run("o1", "old"), run("o2", "old"), new]
    names = frozenset(one.worker_id for one in active)
    rows = WorkerRowsView(
        reporting=names,
        proven=names - set(paused),
        draining=frozenset(draining),
        paused=dict.fromkeys(paused, "has paused 2 shards: ValueError: x"),
    )
    outdated = outdated_runs(active, "new", None)
    return replace(
        active, active, outdated, rows, version="new", desired=2, most_runs=5, now=1_000.0
    )


def test_a_new_worker_that_pauses_shards_is_drained_and_its_version_refused():
    found = step(run("n3", "new"), "w-n3")
    assert (found.drain, found.refused, found.start) == (("w-n3",), ("n3", REASON), 0)
    assert found.problem == (
        f"the replacement of 2 outdated workers has stopped: {REASON}; the outdated workers go on"
    )


def test_a_refused_worker_is_drained_although_the_sensor_was_killed_before():
    refused = run("n3", "new", refused=REASON)
    assert step(refused).drain == ("w-n3",)
    assert step(refused, "w-n3", draining=("w-n3",)).drain == ()
    assert REASON in (step(refused).problem or "")


def test_shards_that_were_paused_before_do_not_speak_against_the_version():
    found = step(run("n3", "new"), "w-n3", "w-o1")
    assert (found.drain, found.refused, found.problem) == ((), None, None)
    assert "a new one has paused 2 shards" in (found.text or "")


def beats(seconds: float = 40.0, **statuses: WorkerStatus) -> Heartbeats:
    """Rows that were observed for these seconds and changed each time."""
    made = Heartbeats()
    for tick in range(round(seconds / 10) + 1):
        rows = [
            changed(worker(name), status=status, last_update_seconds=tick)
            for name, status in statuses.items()
        ]
        made.observe(rows, [], 10.0 * tick)
    return made


def test_a_new_worker_must_commit_if_others_do():
    old = WorkerStatus(totals=WorkerTotals(batches=9, last_batch_seconds=1.0))
    idle = WorkerStatus(totals=WorkerTotals(batches=9, last_batch_seconds=300.0))
    done, none = WorkerStatus(totals=WorkerTotals(batches=1)), WorkerStatus(totals=WorkerTotals())
    assert rows_view(beats(old=old, new=none), 30.0).proven == {"old"}
    assert rows_view(beats(old=old, new=done), 30.0).proven == {"old", "new"}
    assert rows_view(beats(old=idle, new=none), 30.0).proven == {"old", "new"}
    late = beats(COMMITTED_SECONDS, old=old, new=none)
    assert "new" in rows_view(late, 30.0).proven, "it may have got no lease"


def test_a_worker_that_pauses_shards_or_cannot_write_is_not_proven():
    paused = WorkerStatus(paused=(PausedLease("s", "bad\n", 1.0),), paused_leases=3)
    found = rows_view(beats(a=paused, b=WorkerStatus(failed_batches=1)), 30.0)
    assert found.proven == frozenset()
    assert found.paused == {"a": "has paused 3 shards: bad\\n"}


def test_the_sensor_tries_a_broken_version_once_and_a_corrected_one_goes_on(fleet: Fleet):
    fleet.broken.add(fleet.version)
    results = [fleet.tick() for _ in range(30)]
    assert fleet.log == ["start new", "drain new"]
    assert fleet.kinds() == ["old", "old"]
    sentence = results[-1].skip_reason.skip_message
    assert "the replacement of 2 outdated workers has stopped: worker orders_eu-" in sentence
    assert "has paused 1 shard: ValueError: x; the outdated workers go on" in sentence
    refused = fleet.instance.get_runs(dg.RunsFilter(statuses=[S.FAILURE]))
    assert [f"version {fleet.version}" in one.tags[REFUSED_TAG] for one in refused] == [True]
    fleet.deploy("three")
    for _ in range(40):
        fleet.tick()
    assert fleet.log[2:] == ["start new", "drain old"] * 2


def test_no_worker_of_a_refused_version_fills_a_gap_while_an_old_one_runs(fleet: Fleet):
    fleet.broken.add(fleet.version)
    for _ in range(10):
        fleet.tick()
    fleet.end(fleet.alive[0])
    for _ in range(10):
        fleet.tick()
    assert fleet.kinds() == ["old"]
    fleet.end(fleet.alive[0])
    fleet.tick()
    assert fleet.kinds() == ["new", "new"], "without an old worker, the new version is all there is"
