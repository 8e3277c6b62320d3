"""A run of the output asset whose application is paused."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ApplicationPausedError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.orchestration.ops.test_consume import execute, materialize
from tests.support.dagster_fakes import FakePipeline


@pytest.fixture
def instance(dagster_instance):
    dagster_instance.wipe()
    return dagster_instance


class PausedPipeline(FakePipeline):
    """Refuses to build a worker."""

    def build_worker(self, worker_id, **kwargs):
        raise ApplicationPausedError("the application 'orders-eu' is paused by ann")


@pytest.mark.parametrize(("start", "succeeds"), [(execute, True), (materialize, False)])
def test_a_run_that_starts_in_a_pause(instance, start, succeeds):
    """A continuous run may start at the moment of the pause; a person started the other one."""
    result = start(PausedPipeline(), instance)
    assert result.success is succeeds
    if not succeeds:
        failure = result.failure_data_for_node("orders_eu__per_minute")
        assert "is paused by ann" in failure.user_failure_data.description


@pytest.mark.parametrize("reason", [StopReason.APPLICATION_PAUSED, StopReason.DRAIN_REQUESTED])
@pytest.mark.parametrize(("start", "succeeds"), [(execute, True), (materialize, False)])
def test_a_run_that_a_pause_or_a_request_ends(instance, start, succeeds, reason):
    def script(stop, mode, on_progress, worker_id):
        return WorkerSummary(worker_id, reason, WorkerStatus(totals=WorkerTotals(1.0)))

    result = start(FakePipeline(script=script), instance)
    assert result.success is succeeds
    if not succeeds:
        failure = result.failure_data_for_node("orders_eu__per_minute")
        assert "before all records were read" in failure.user_failure_data.description
