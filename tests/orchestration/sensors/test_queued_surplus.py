"""Runs that wait in the queue are canceled before workers that run are drained."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import (
    AutoscalerMemory,
    ScalingDecision,
    decide,
)
from tests.support.dagster_fakes import FakeFleet, FakePipeline, counted
from tests.support.sensor_stage import Stage, instance_fixture  # noqa: F401 (fixture)


def decided(statuses: list[S], most: int) -> ScalingDecision:
    runs = [
        RunView(f"r{i}", status, f"w-{i}", continuous=True, created=i)
        for i, status in enumerate(statuses)
    ]
    memory = AutoscalerMemory(desired=4)
    return decide(counted(runs), [], memory, minimum=most, maximum=most, now=0.0)


@pytest.mark.parametrize(
    ("statuses", "canceled", "drained", "action"),
    [
        ([S.STARTED, S.STARTED, S.QUEUED, S.QUEUED], "r3 r2", "", "canceling 2 queued runs"),
        ([S.QUEUED, S.STARTED, S.STARTED], "r0", "", "canceling 1 queued run"),
        (
            [S.STARTED, S.STARTED, S.STARTED, S.QUEUED],
            "r3",
            "w-2",
            "canceling 1 queued run, draining 1",
        ),
        ([S.STARTED, S.STARTED, S.STARTED], "", "w-2", "draining 1"),
        ([S.STARTED, S.STARTING, S.STARTING], "", "w-0", "draining 1"),
    ],
)
def test_the_newest_queued_runs_go_first(statuses, canceled, drained, action):
    found = decided(statuses, 2)
    assert (found.cancel, found.drain) == (tuple(canceled.split()), tuple(drained.split()))
    assert found.reason.endswith(f"2 desired: {action}")
    assert found.start == 0


def test_a_smaller_fleet_keeps_its_workers_and_empties_the_queue(instance):
    """As with a tag limit of 2 and Fleet(min=4), which is then corrected to two workers."""
    stage = Stage(instance, FakePipeline(workers=FakeFleet(min=2, max=2)))
    started = [stage.run(), stage.run()]
    queued = [stage.run(S.QUEUED), stage.run(S.QUEUED)]
    stage.workers.beat(*(stage.worker_of(run) for run in started))
    result = stage()
    assert not result.run_requests
    assert stage.workers.drained == []
    assert {instance.get_run_by_id(run.run_id).status for run in queued} == {S.CANCELED}
    assert {instance.get_run_by_id(run.run_id).status for run in started} == {S.STARTED}
    assert "canceling 2 queued runs" in result.skip_reason.skip_message
    assert stage().skip_reason.skip_message.endswith("2 of 2 workers run")


def test_no_other_worker_is_drained_while_the_run_of_a_drained_one_ends(instance):
    """A worker deletes its row when it ends. Its run ends some seconds later."""
    stage = Stage(instance, FakePipeline(workers=FakeFleet(min=2, max=2)))
    workers = [stage.worker_of(stage.run()) for _ in range(3)]
    stage.workers.beat(*workers)
    stage()
    (drained,) = stage.workers.drained
    del stage.workers.rows[drained]
    for _ in range(3):
        stage.workers.beat(*(worker_id for worker_id in workers if worker_id != drained))
        assert not stage().run_requests
    assert stage.workers.drained == [drained]
