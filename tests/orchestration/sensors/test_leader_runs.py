"""What the leader sensor does about runs: it closes, replaces, drains and delays them."""

from __future__ import annotations

import json
import threading

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.errors import AccessDeniedError, NotFoundError, ThrottledError
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.orchestration.specs import code_version
from kcl_pipeline.orchestration.supervision import AutoscalerMemory
from kcl_pipeline.worker_status import WorkerStatus
from tests.support.dagster_fakes import (
    FakeCycle,
    FakeFleet,
    FakePipeline,
    worker,
)
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)


def test_keeps_the_minimum_of_workers_running(instance):
    stage = Stage(instance)
    first = stage()
    assert len(first.run_requests) == 2
    assert first.skip_reason is None
    assert len({r.run_key for r in first.run_requests}) == 2
    for request in first.run_requests:
        assert not request.run_config
        assert request.tags == {
            "kcl/application": "orders-eu",
            "kcl/mode": "continuous",
            "dagster/max_retries": "0",
            "dagster/max_runtime": "0",
            "kcl/version": code_version(stage.pipeline),
        }
    stage.run(S.NOT_STARTED)
    assert len(stage().run_requests) == 1
    stage.run(S.STARTING)
    last = stage()
    assert not last.run_requests
    assert last.skip_reason.skip_message.endswith("0 of 2 workers run, 2 are starting")


def test_runs_of_another_application_are_not_counted(instance):
    stage = Stage(instance)
    other = Stage(instance, FakePipeline(name="clicks"))
    other.run()
    other.run()
    assert len(stage().run_requests) == 2


def test_a_silent_run_is_closed_and_replaced(instance):
    stage = Stage(instance)
    silent, fine = stage.run(), stage.run()
    stage.workers.beat(stage.worker_of(silent), stage.worker_of(fine))
    requested = []
    for _ in range(8):
        stage.workers.beat(stage.worker_of(fine))
        requested.append(len(stage().run_requests or []))
    assert instance.get_run_by_id(silent.run_id).status is S.FAILURE
    assert instance.get_run_by_id(fine.run_id).status is S.STARTED
    assert requested.index(1) >= 6
    assert stage.workers.drained == [stage.worker_of(silent)]


def test_a_run_stuck_in_canceling_is_drained_through_the_table(instance):
    stage = Stage(instance)
    stuck = stage.run(S.CANCELING)
    stage.run()
    for _ in range(9):
        stage.workers.beat(stage.worker_of(stuck))
        assert not stage().run_requests
    assert set(stage.workers.drained) == {stage.worker_of(stuck)}
    assert instance.get_run_by_id(stuck.run_id).status is S.CANCELING


def test_workers_that_keep_dying_are_replaced_more_slowly_and_the_cursor_remembers(instance):
    stage = Stage(instance)
    assert len(stage().run_requests) == 2
    for _ in range(2):
        instance.report_run_failed(stage.run())
    waiting = stage()
    assert not waiting.run_requests
    assert "failed within a minute" in waiting.skip_reason.skip_message
    memory = json.loads(waiting.cursor)
    assert memory["retry_at"] == stage.clock.wall() + 10
    assert not stage(5.0).run_requests
    assert len(stage(5.0).run_requests) == 2


def test_a_corrected_version_is_started_without_the_delay_of_the_former_one(instance):
    stage = Stage(instance)
    for _ in range(8):
        instance.report_run_failed(stage.run(**{"kcl/version": "former"}))
    stage.cursor = AutoscalerMemory(
        desired=2, open_shards=4, last_death="x", retry_at=stage.clock.wall() + 300
    ).model_dump_json()
    result = stage()
    assert len(result.run_requests) == 2
    assert "failed" not in json.loads(result.cursor)["tick"]
    own = {"kcl/version": code_version(stage.pipeline)}
    for _ in range(2):
        instance.report_run_failed(stage.run(**own))
    waiting = stage()
    assert not waiting.run_requests
    assert waiting.skip_reason.skip_message.endswith(
        "0 of 2 workers run: next start in 10 s; "
        "the last 2 worker runs failed within a minute of the start"
    )


def test_more_workers_than_the_maximum_are_asked_to_drain(instance):
    stage = Stage(instance, FakePipeline(workers=FakeFleet(min=1, max=1)))
    stage.run()
    newer = stage.run()
    stage.workers.beat(*(stage.worker_of(run) for run in instance.get_runs()))
    stage()
    assert stage.workers.drained == [stage.worker_of(newer)]


def test_a_drain_without_a_run_is_no_worker_too_many(instance):
    """`kcl-pipeline worker --drain` beside the fleet."""
    stage = Stage(instance, FakePipeline(workers=FakeFleet(min=1, max=1)))
    worker_id = stage.worker_of(stage.run())
    status = WorkerStatus(is_drain=True)
    stage.workers.rows["eu-1"] = worker("eu-1", status=status)
    stage.workers.beat(worker_id, "eu-1")
    result = stage()
    assert stage.workers.drained == []
    assert result.skip_reason.skip_message.endswith("1 of 1 worker runs")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotFoundError("no table"), "waiting for the first worker, which creates the tables"),
        (ThrottledError("slow down"), "slow down"),
    ],
)
def test_trouble_that_passes_is_told_and_workers_are_still_started(instance, error, told):
    stage = Stage(instance, FakePipeline(cycle=FakeCycle([error])))
    stage.workers.error = error
    assert len(stage().run_requests) == 2
    stage.run()
    stage.run()
    assert f"did not lead: {told}; " in stage().skip_reason.skip_message


def test_what_only_a_person_can_mend_fails_the_tick_and_the_next_tick_can_go_in(instance):
    stage = Stage(
        instance,
        FakePipeline(
            cycle=FakeCycle([AccessDeniedError("dynamodb:UpdateItem"), CycleReport(led=False)])
        ),
    )
    with pytest.raises(AccessDeniedError, match="UpdateItem"):
        stage()
    assert len(stage().run_requests) == 2


def test_a_tick_that_overlaps_one_at_work_does_nothing(instance):
    stage = Stage(instance)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(FakeCycle):
        def run_once(self, deadline_seconds: float) -> CycleReport:
            inside.set()
            assert go_on.wait(20)
            return super().run_once(deadline_seconds)

    stage.pipeline.cycle = Slow([CycleReport(led=False)])
    slow = threading.Thread(target=stage)
    slow.start()
    assert inside.wait(20)
    overlapping = stage()
    go_on.set()
    slow.join(20)
    assert not overlapping.run_requests
    assert "still running" in overlapping.skip_reason.skip_message
    assert stage.pipeline.cycle.calls == 1
