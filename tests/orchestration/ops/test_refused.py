"""A worker whose version the leader sensor refuses: its run ends as a failure that says why."""

from __future__ import annotations

from typing import Any

from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from tests.orchestration.ops.test_consume import execute, instance, stopped  # noqa: F401 (fixture)
from tests.support.dagster_fakes import FakePipeline


def test_a_run_that_the_sensor_refuses_ends_as_a_failure(instance):  # noqa: F811 (fixture)
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        (run,) = instance.get_runs()
        instance.add_run_tags(run.run_id, {"kcl/refused": "it has paused 2 shards"})
        return stopped(worker_id, StopReason.DRAIN_REQUESTED)

    result = execute(FakePipeline(script=script), instance)
    failure = result.failure_data_for_node("orders_eu_worker")
    expected = "the leader sensor has ended this worker: it has paused 2 shards"
    assert failure.user_failure_data.description == expected
