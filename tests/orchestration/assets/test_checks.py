"""The asset checks: how findings are shown, and what an execution does."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from kcl_pipeline.orchestration.checks import build_checks, dead_letters_last_hour, verdicts
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.runs import NO_ROW_SECONDS, RunView, silent_runs
from kcl_pipeline.status.findings import CheckName, Finding, FindingLevel
from kcl_pipeline.worker_status import LeaseLag, PausedLease, WorkerStatus
from tests.support.dagster_fakes import (
    FakeLeaseTable,
    FakePipeline,
    FakeWorkerTable,
    ManualClock,
    leases,
    resources,
    worker,
)

NOON = 1_000_000.0
STARTED = dg.DagsterRunStatus.STARTED


@pytest.fixture
def instance(dagster_instance):
    dagster_instance.wipe()
    return dagster_instance


def execute(pipeline, instance, table, rows, clock, *names: str):
    """Execute checks as the button in the Dagster UI does."""
    found = Names.of(pipeline)
    checks = build_checks(pipeline, found, DagsterOptions(), clock)
    keys = [key for key in checks.check_keys if key.name in names]
    defs = dg.Definitions(
        asset_checks=[checks],
        jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(*keys))],
        resources=resources(pipeline, table, rows),
    )
    done = defs.resolve_job_def("check").execute_in_process(instance=instance)
    return {one.check_name: one for one in done.get_asset_check_evaluations()}


def test_a_pipeline_has_at_most_eight_checks_in_one_definition():
    defs = build_definitions(FakePipeline())
    (checks,) = defs.asset_checks
    assert len(list(checks.check_keys)) == len(CheckName) <= 8


def test_executing_one_check_takes_one_snapshot_with_two_looks(instance):
    class Table(FakeLeaseTable):
        looks = 0

        def list_leases(self):
            self.looks += 1
            return super().list_leases()

    pipeline, clock, rows = FakePipeline(), ManualClock(NOON), leases(2, ["w-1"])
    table, workers = Table(rows), FakeWorkerTable([worker("w-1")])

    def go_on() -> None:
        table.leases = [row.with_(counter=row.counter + 1) for row in table.leases]
        workers.beat("w-1")

    clock.on_sleep = go_on
    found = execute(pipeline, instance, table, workers, clock, "shards_moving", "workers_running")
    assert table.looks == 2
    assert {name: one.passed for name, one in found.items()} == {
        "shards_moving": True,
        "workers_running": True,
    }
    assert clock.now - NOON < 60, "nobody waits for minutes"


def test_a_worker_that_does_not_write_its_row_between_two_looks_is_no_worker(instance):
    pipeline, clock = FakePipeline(), ManualClock(NOON)
    rows = FakeWorkerTable([replace(worker("w-1"), run_id="r-1", last_update_seconds=int(NOON))])
    table = FakeLeaseTable(leases(2, ["w-1"]))
    found = execute(pipeline, instance, table, rows, clock, "shards_moving", "workers_running")
    assert not found["workers_running"].passed
    assert "w-1 for" in found["workers_running"].description
    assert "2 leases without a live worker" in found["shards_moving"].description


def test_a_paused_shard_is_in_the_check_with_its_reason_and_a_table(instance):
    status = WorkerStatus(
        5, paused=(PausedLease("s", "it fails", 9.0),), paused_leases=1, lags=(LeaseLag("s", 5),)
    )
    rows = FakeWorkerTable([replace(worker("w-1"), status=status, run_id="r-1")])
    clock = ManualClock(NOON)
    clock.on_sleep = lambda: rows.beat("w-1")
    found = execute(
        FakePipeline(), instance, FakeLeaseTable(leases(1, ["w-1"])), rows, clock, "shards_moving"
    )["shards_moving"]
    assert not found.passed
    assert found.severity is dg.AssetCheckSeverity.ERROR
    assert "1 shard is paused: s of worker w-1 for 9 s, it fails. Do what" in found.description
    assert found.metadata["shard_paused"].records[0].data["why"] == "it fails"


def test_a_verdict_has_every_fault_and_the_severity_of_the_worst():
    warning = Finding(CheckName.LAG, "lag", FindingLevel.WARNING, "late", "scale")
    problem = Finding(CheckName.LEADER, "no_leader", FindingLevel.PROBLEM, "nobody", "start")
    unknown = Finding(CheckName.RETENTION, "x", FindingLevel.UNKNOWN, "not known")
    fine = Finding(CheckName.LOSSES, "no_records_lost", FindingLevel.OK, "none")
    found = {one.check: one for one in verdicts([warning, problem, unknown, fine])}
    assert [found[check].passed for check in found] == [False, True, True, False]
    assert found[CheckName.LAG].severity is dg.AssetCheckSeverity.WARN
    assert found[CheckName.LAG].description == "late. Scale"
    assert found[CheckName.LEADER].severity is dg.AssetCheckSeverity.ERROR
    key = dg.AssetKey(["x"])
    assert not found[CheckName.RETENTION].is_known
    assert not found[CheckName.RETENTION].result(key).passed, "what is not known does not pass"
    assert found[CheckName.LOSSES].result(key).passed


def test_dead_letters_are_counted_from_the_reports_of_the_last_hour(instance):
    key = dg.AssetKey(["out"])
    assert dead_letters_last_hour(instance, key, 0.0) is None
    for kind, count in ((dg.AssetMaterialization, 3), (dg.AssetObservation, 4)):
        instance.report_runless_asset_event(kind(key, metadata={"dead_letters": count}))
    (record,) = instance.fetch_materializations(key, limit=1).records
    assert dead_letters_last_hour(instance, key, record.timestamp) == 7
    assert dead_letters_last_hour(instance, key, record.timestamp + 3_700) is None


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
