"""Executed checks do not believe rows and reports that a dead or hung worker has left."""

from __future__ import annotations

import time
from dataclasses import replace

import dagster as dg
import pytest

from kcl_pipeline.events import ignore_events
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.state.worker_status import LeaseLag, WorkerStatus
from kcl_pipeline.orchestration.assets.checks import definitions as checks_module
from kcl_pipeline.orchestration.assets.checks.history import ReportPoint, missing_reports
from kcl_pipeline.orchestration.assets.checks.living import observe_live_workers
from kcl_pipeline.orchestration.assets.checks.unread import observe_checkpoints, unread_seconds
from kcl_pipeline.orchestration.assets.checks.worker_runs import NO_ROW_SECONDS, silent_runs
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.runs import RunView, silent_lag_millis
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from tests.support.dagster_fakes import (
    FakeLeaseTable,
    FakePipeline,
    FakeWorkerTable,
    ManualClock,
    leases,
    resources,
    worker,
)

NOON = 12 * 3_600.0
(LEASE,) = leases(1, ["w"])
SMALL = replace(worker("w"), status=WorkerStatus(100, lags=(LeaseLag(LEASE.lease_key, 100),)))
STARTED = dg.DagsterRunStatus.STARTED


def rejected() -> RejectedRows:
    return RejectedRows(ignore_events)


def test_a_request_to_drain_is_not_a_report():
    table, clock = FakeWorkerTable([worker("dead"), worker("w")]), ManualClock(0.0)
    clock.on_sleep = lambda: (table.beat("w"), table.request_drain("dead"))
    found = observe_live_workers(table, 20.0, clock, rejected())
    assert [one.worker_id for one in found] == ["w"]


def test_a_worker_that_starts_is_alive_and_one_that_ends_is_not_waited_for():
    table, clock = FakeWorkerTable([worker("old"), worker("w")]), ManualClock(0.0)

    def world() -> None:
        table.rows.pop("old", None)
        table.beat("w", "new")

    clock.on_sleep = world
    found = observe_live_workers(table, 20.0, clock, rejected())
    assert [one.worker_id for one in found] == ["new", "w"]
    assert clock.now == 1.0


def test_a_lag_that_a_worker_does_not_list_is_at_most_its_smallest_listed_one():
    rows = [one.with_(read_up_to_millis=1) for one in leases(2, ["w"])]
    status = WorkerStatus(9_000, lags=(LeaseLag(rows[0].lease_key, 9_000),), more_lags=1)
    found = unread_seconds(rows, [replace(worker("w"), status=status)], NOON)
    assert found == {rows[0].lease_key: 9.0, rows[1].lease_key: 9.0}


@pytest.mark.parametrize("alive", [True, False])
def test_a_checkpoint_that_stands_still_is_found_although_the_dead_worker_left_a_small_lag(alive):
    hour_old = LEASE.with_(read_up_to_millis=round((NOON - 3_600) * 1000))
    table, workers, clock = FakeLeaseTable([hour_old]), FakeWorkerTable([SMALL]), ManualClock(NOON)
    clock.on_sleep = lambda: workers.beat("w") if alive else None
    found = observe_checkpoints(table, workers, 900.0, clock, rejected())
    assert found.passed is alive
    assert (clock.now - NOON < 20) is alive


@pytest.mark.parametrize("alive", [True, False])
def test_retention_is_judged_without_the_rows_of_dead_workers(alive, monkeypatch):
    model = KinesisModel(VirtualClock())
    model.create_stream("orders", 1)
    monkeypatch.setattr(checks_module, "open_kinesis", lambda *_: InMemoryKinesis(model))
    clock = ManualClock(NOON + 86_400)
    monkeypatch.setattr(checks_module, "SystemClock", lambda: clock)
    table = FakeWorkerTable([SMALL])
    clock.on_sleep = lambda: table.beat("w") if alive else None
    pipeline = FakePipeline()
    key = dg.AssetCheckKey(Names.of(pipeline).output, "data_within_retention")
    defs = build_definitions(pipeline)
    old = LEASE.with_(read_up_to_millis=round((clock.now - 23 * 3_600) * 1000))
    bound = dg.Definitions(
        assets=defs.assets,
        asset_checks=defs.asset_checks,
        jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(key))],
        resources=resources(pipeline, FakeLeaseTable([old]), table),
    )
    (found,) = bound.resolve_job_def("check").execute_in_process().get_asset_check_evaluations()
    assert found.passed is alive, found.description


@pytest.mark.parametrize(
    ("ages", "text"),
    [
        ([], "the output was not reported in the last hour, so nothing is known"),
        ([2_000.0, 181.0], "the output was not reported for 3 min, so nothing is known"),
        ([2_000.0, 180.0], None),
    ],
)
def test_missing_reports_of_the_output_are_not_good_news(ages, text):
    found = missing_reports([ReportPoint(NOON - age, 0.0) for age in ages], 10.0, NOON)
    assert (found or "").startswith(text or "")
    assert (found is None) is (text is None)
    assert missing_reports([ReportPoint(NOON - 899.0, 0.0)], 300.0, NOON) is None


def test_a_started_run_whose_worker_does_not_report_is_no_running_worker():
    runs = [
        RunView("1", STARTED, "w-1", True, started=NOON - NO_ROW_SECONDS - 1),
        RunView("2", STARTED, "w-2", True, started=NOON - NO_ROW_SECONDS - 1),
        RunView("3", STARTED, "w-3", True, started=NOON - NO_ROW_SECONDS),
        RunView("4", dg.DagsterRunStatus.QUEUED, "w-4", True),
        RunView("5", STARTED, "w-5", False, started=0.0),
    ]
    assert silent_runs(runs, {"w-1", "w-2"}, NOON) is None
    assert silent_runs(runs, {"w-1"}, NOON) == (
        "the workers of 1 run do not report; the first is w-2"
    )


def test_the_button_of_worker_runs_finds_the_run_of_a_dead_worker(instance, monkeypatch):
    clock = ManualClock(time.time())
    monkeypatch.setattr(checks_module, "SystemClock", lambda: clock)
    pipeline = FakePipeline()
    key = dg.AssetCheckKey(Names.of(pipeline).fleet, "workers_running")
    defs = build_definitions(pipeline)
    bound = dg.Definitions(
        assets=defs.assets,
        asset_checks=defs.asset_checks,
        jobs=[*defs.jobs, dg.define_asset_job("check", dg.AssetSelection.checks(key))],
        resources=resources(pipeline, workers=FakeWorkerTable([worker("other")])),
    )
    run = instance.create_run_for_job(
        bound.resolve_job_def(Names.of(pipeline).consume_job),
        tags={"kcl/application": pipeline.name, "kcl/mode": "continuous"},
    )
    instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", run.job_name), run.run_id)
    job = bound.resolve_job_def("check")

    def found() -> dg.AssetCheckEvaluation:
        (one,) = job.execute_in_process(instance=instance).get_asset_check_evaluations()
        return one

    assert found().passed, "it has just started"
    clock.now = time.time() + NO_ROW_SECONDS + 1
    late = found()
    assert not late.passed
    assert "the workers of 1 run do not report; the first is orders_eu-" in late.description


@pytest.fixture
def instance():
    with dg.instance_for_test() as made:
        yield made


def test_the_lag_of_a_run_that_stopped_to_report_grows():
    def run(age: float | None, lag: int | None = 500, status=STARTED) -> RunView:
        at = None if age is None else NOON - age
        return RunView("r", status, "w", True, lag_millis=lag, lag_at=at)

    ended = dg.DagsterRunStatus.SUCCESS
    quiet = (run(None), run(180.0), run(9_999.0, status=ended))
    assert silent_lag_millis(quiet, NOON, 60.0) is None
    assert silent_lag_millis((*quiet, run(181.0)), NOON, 60.0) == 181_500
    assert silent_lag_millis((run(400.0, None),), NOON, 60.0) == 400_000
    assert silent_lag_millis((run(400.0),), NOON, 300.0) is None
