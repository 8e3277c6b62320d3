"""Dagster's runs against the workers' heartbeats."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.row import BadRow
from kcl_pipeline.orchestration.runs import RunView, silence_limit_seconds
from kcl_pipeline.orchestration.supervision import (
    MISSING_ROW_SECONDS,
    START_SECONDS,
    STUCK_CANCELING_SECONDS,
    Heartbeats,
    RunMismatch,
    apply_findings,
    find_mismatches,
)
from tests.support.dagster_fakes import FakeWorkerTable, worker

LIMIT = 30.0


def run(status: S = S.STARTED) -> RunView:
    return RunView("run-1", status, "w-1", True)


def watch(
    seconds: float,
    *,
    status: S = S.STARTED,
    row: bool = True,
    beats: bool = False,
    step: float = 5.0,
) -> tuple[RunMismatch, ...]:
    """Look every `step` seconds for so long."""
    table = FakeWorkerTable([worker("w-1")] if row else [])
    memory = Heartbeats()
    now = 0.0
    while now <= seconds:
        memory.observe(table.scan_workers().workers, [run(status)], now)
        if beats:
            table.beat("w-1")
        now += step
    return find_mismatches(memory, [run(status)], LIMIT)


@pytest.mark.parametrize(
    ("reporting_millis", "limit"), [(1_000, 20.0), (10_000, 30.0), (30_000, 90.0)]
)
def test_three_reports_missed_and_never_less_than_twenty_seconds(reporting_millis, limit):
    settings = ConsumerSettings(
        application_name="orders",
        streams=("s",),
        worker={"worker_metrics_reporter_freq_in_millis": reporting_millis},
    )
    assert silence_limit_seconds(settings) == limit


def test_a_worker_whose_row_moves_is_alive():
    assert watch(600, beats=True) == ()


def test_a_row_that_stood_still_belongs_to_a_silent_worker():
    assert watch(LIMIT) == ()
    (finding,) = watch(LIMIT + 5)
    assert (finding.action, finding.run_id) == ("report_failed", "run-1")
    assert watch(LIMIT + 5, status=S.CANCELING)[0].action == "report_canceled"


def test_an_outage_in_which_nobody_could_look_proves_nothing():
    memory = Heartbeats()
    memory.observe([worker("w-1")], [run()], 0.0)
    memory.observe([worker("w-1")], [run()], 500.0)
    assert find_mismatches(memory, [run()], LIMIT) == ()


def test_a_drain_request_is_no_heartbeat():
    memory = Heartbeats()
    for i in range(8):
        memory.observe([worker("w-1", drain_requested=i > 3)], [run()], i * 5.0)
    assert len(find_mismatches(memory, [run()], LIMIT)) == 1


def test_a_run_without_a_row_is_given_time_to_start():
    """A Spark session on a small host needs more than two minutes."""
    assert watch(START_SECONDS, row=False) == ()
    assert watch(START_SECONDS + 5, row=False)[0].action == "report_failed"
    canceled = watch(MISSING_ROW_SECONDS + 5, row=False, status=S.CANCELING)
    assert canceled[0].action == "report_canceled"


def test_a_run_whose_worker_has_deleted_its_row_is_given_time_to_finish():
    memory = Heartbeats()
    memory.observe([worker("w-1")], [run()], 0.0)
    for now in range(5, round(MISSING_ROW_SECONDS) + 10, 5):
        assert find_mismatches(memory, [run()], LIMIT) == ()
        memory.observe([], [run()], float(now))
    memory.observe([], [run()], MISSING_ROW_SECONDS + 15)
    (finding,) = find_mismatches(memory, [run()], LIMIT)
    assert finding.reason == "worker w-1 has had no row for 120 s"


def test_runs_that_wait_in_the_queue_are_left_alone():
    assert watch(999, row=False, status=S.QUEUED) == ()


def test_a_run_that_cannot_be_terminated_is_told_to_drain():
    assert watch(STUCK_CANCELING_SECONDS, status=S.CANCELING, beats=True) == ()
    assert (
        watch(STUCK_CANCELING_SECONDS + 5, status=S.CANCELING, beats=True)[0].action
        == "request_drain"
    )


@pytest.mark.parametrize(
    ("action", "status"), [("report_failed", S.FAILURE), ("report_canceled", S.CANCELED)]
)
def test_closing_a_run_also_drains_a_worker_that_may_only_be_paused(action, status):
    with dg.DagsterInstance.ephemeral() as instance:
        created = instance.create_run_for_job(
            dg.JobDefinition(name="j", graph_def=dg.GraphDefinition(name="g")), status=S.STARTED
        )
        table = FakeWorkerTable([worker("w-1")])
        finding = RunMismatch(created.run_id, "w-1", action, "worker w-1 has not reported for 31 s")
        (done,) = apply_findings([finding], instance, table)
        assert "w-1" in done
        assert table.drained == ["w-1"]
        assert instance.get_run_by_id(created.run_id).status is status
        assert apply_findings([finding], instance, table) == ()


def test_a_drain_for_a_worker_without_a_row_is_not_claimed():
    with dg.DagsterInstance.ephemeral() as instance:
        assert (
            apply_findings(
                [RunMismatch("r", "w-9", "request_drain", "x")], instance, FakeWorkerTable()
            )
            == ()
        )


def test_a_row_that_cannot_be_read_shows_whether_its_worker_lives():
    memory = Heartbeats()
    for i in range(60):
        bad = BadRow("workers", "w-1", "sts is 'x'", str(i // 2))
        memory.observe([], [run()], i * 5.0, unreadable=[bad])
    assert find_mismatches(memory, [run()], LIMIT) == ()
    for i in range(60, 70):
        memory.observe([], [run()], i * 5.0, unreadable=[bad])
    (finding,) = find_mismatches(memory, [run()], LIMIT)
    assert "has not reported" in finding.reason
