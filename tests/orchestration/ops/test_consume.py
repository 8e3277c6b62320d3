"""The output asset: one worker per run, and how a run ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S

import kcl_pipeline.spark.session as session_module
from kcl_pipeline import SparkResource
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.events import AwsTrouble, BatchCommitted, LeaseGained
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names, worker_id_of
from kcl_pipeline.orchestration.worker_op import RunEvents, stop_when_orphaned
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import LeaseLag, PausedLease, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import FakeFleet, FakePipeline, FakeSink, drained, resources


@pytest.fixture
def instance(dagster_instance):
    dagster_instance.wipe()
    return dagster_instance


def definitions(pipeline: FakePipeline, session: Any = None) -> dg.Definitions:
    """The pipeline's definitions with its resources replaced by fakes, without the checks, which
    look at the rows for ten seconds.
    """
    defs = build_definitions(pipeline)
    return dg.Definitions(
        assets=defs.assets,
        jobs=defs.jobs,
        sensors=defs.sensors,
        resources=resources(pipeline, session=session),
    )


def execute(
    pipeline: FakePipeline, instance: dg.DagsterInstance, session: Any = None
) -> dg.ExecuteInProcessResult:
    """Run a continuous worker."""
    job = definitions(pipeline, session).resolve_job_def(Names.of(pipeline).consume_job)
    return job.execute_in_process(instance=instance, raise_on_error=False)


def materialize(pipeline: FakePipeline, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    """Materialize the output."""
    job = definitions(pipeline).resolve_implicit_global_asset_job_def()
    output = Names.of(pipeline).output
    return job.execute_in_process(instance=instance, asset_selection=[output], raise_on_error=False)


def observations_of(instance: dg.DagsterInstance, run_id: str) -> list[dg.AssetObservation]:
    records = instance.get_records_for_run(
        run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION
    ).records
    return [
        r.event_log_entry.dagster_event.asset_observation_data.asset_observation for r in records
    ]


def events_of(instance: dg.DagsterInstance, run_id: str) -> list[dg.AssetMaterialization]:
    records = instance.get_records_for_run(
        run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION
    ).records
    return [r.asset_materialization for r in records]


def stopped(worker_id: str, reason: StopReason = StopReason.STOPPED) -> WorkerSummary:
    return WorkerSummary(worker_id, reason, WorkerStatus(totals=WorkerTotals(1.0)))


def test_dead_letters_are_linked_from_the_materialization(instance):
    def script(stop, mode, on_progress, worker_id):
        total = WorkerStatus(totals=WorkerTotals(120.0, batches=1, dead_letters=3))
        return WorkerSummary(worker_id, StopReason.DRAINED, total)

    sink = FakeSink()
    sink.dead_letters = "/nowhere/lake/per_minute_dead_letters"
    pipeline = FakePipeline(script=script, sink=sink)
    result = materialize(pipeline, instance)
    (event,) = events_of(instance, result.run_id)
    assert event.metadata["dead_letter_table"].value == sink.dead_letters
    log = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert any(line.endswith(" after 0 records in 1 batch") for line in log)
    output = Names.of(pipeline).output
    defined = build_definitions(pipeline).resolve_asset_graph().get(output).metadata
    assert defined["dead_letter_table"].value == sink.dead_letters


def test_materialize_drains_and_reports_once_with_the_totals(instance):
    pipeline = FakePipeline()
    names = Names.of(pipeline)
    result = materialize(pipeline, instance)
    assert result.success
    (event,) = events_of(instance, result.run_id)
    figures = {name: event.metadata[name].value for name in ("records", "rows", "batches")}
    assert (event.asset_key, figures) == (names.output, {"records": 12, "rows": 6, "batches": 3})
    assert event.metadata["positions"].records[0].data["position"] == "50"
    assert event.metadata["table_version"].value == "4"
    log = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert "10 records in 60 s; lag 1.5 s" in log
    (built,) = pipeline.built_workers
    assert built["worker_id"] == f"orders_eu-{result.run_id[:8]}"
    assert (built["run_id"], built["leads"], built["leader_patience_seconds"]) == (
        result.run_id,
        True,
        0.0,
    )
    tags = instance.get_run_by_id(result.run_id).tags
    assert (tags["kcl/application"], tags["kcl/mode"]) == ("orders-eu", "drain")
    totals = (tags["kcl/read"], tags["kcl/landed"], tags["kcl/handed_over"])
    assert totals == ("12 records", "6 rows in 3 batches", "0 shards")
    assert "kcl/drained_at" in tags, "after a drain nothing is behind"


def test_a_worker_with_a_paused_shard_that_fails_fails_its_run(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        total = WorkerStatus(totals=WorkerTotals(1.0))
        return WorkerSummary(worker_id, StopReason.FAILED, total, "a shard is paused because ...")

    result = execute(FakePipeline(script=script), instance)
    assert not result.success
    failure = result.failure_data_for_node("orders_eu_worker")
    assert "a shard is paused because" in failure.user_failure_data.description


def test_the_consume_job_runs_a_continuous_worker_and_no_checks(instance):
    modes = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        modes.append(mode)
        drained(stop, mode, on_progress, worker_id)
        return stopped(worker_id, StopReason.DRAIN_REQUESTED)

    pipeline = FakePipeline(script=script)
    result = execute(pipeline, instance)
    assert (result.success, modes) == (True, ["continuous"])
    assert pipeline.built_workers[0]["leader_patience_seconds"] > 0
    tags = instance.get_run_by_id(result.run_id).tags
    assert tags["kcl/mode"] == "continuous"
    assert not instance.get_records_for_run(
        result.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION
    ).records
    again = materialize(pipeline, instance)
    assert modes == ["continuous", "drain"]
    assert instance.get_run_by_id(again.run_id).tags["kcl/mode"] == "drain"


def test_a_spark_pipeline_gets_its_session_before_the_worker_starts(instance, monkeypatch):
    monkeypatch.setattr(session_module, "build_session", lambda *_: "the session")
    pipeline = FakePipeline(transform=lambda records: records)
    assert execute(pipeline, instance, SparkResource(app_name="orders")).success
    assert pipeline.built_workers[0]["session_factory"]() == "the session"


def test_a_successor_knows_the_worker_that_it_replaces(instance):
    pipeline = FakePipeline()
    job = definitions(pipeline).resolve_job_def("orders_eu_consume")
    job.execute_in_process(instance=instance, tags={"kcl/replaces": "orders_eu-1"})
    job.execute_in_process(instance=instance)
    assert [built["replaces"] for built in pipeline.built_workers] == ["orders_eu-1", None]


def test_a_run_has_the_version_of_the_code_that_it_has_loaded(instance):
    pipeline = FakePipeline(workers=FakeFleet(code_version="7c1"))
    job = definitions(pipeline).resolve_job_def("orders_eu_consume")
    result = job.execute_in_process(instance=instance, tags={"kcl/version": "of the sensor"})
    assert instance.get_run_by_id(result.run_id).tags["kcl/version"] == "7c1"


def test_a_worker_that_ends_with_a_paused_shard_is_a_failed_run(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        total = WorkerStatus(
            paused=(PausedLease("s-0", "ValueError: x", 1.0),), totals=WorkerTotals(9.0)
        )
        return WorkerSummary(worker_id, StopReason.DRAIN_REQUESTED, total)

    result = execute(FakePipeline(script=script), instance)
    assert not result.success
    failure = result.failure_data_for_node("orders_eu_worker")
    assert failure.user_failure_data.description == (
        "the worker was asked to end, and s-0 was paused: ValueError: x"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminated_run_ends_canceled_after_the_worker_has_released(instance, number):
    before = signal.getsignal(number)
    order = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        run = instance.get_run_by_id(pipeline.built_workers[0]["run_id"])
        instance.report_run_canceling(run)
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        order.append("released")
        return WorkerSummary(
            worker_id, StopReason.STOPPED, WorkerStatus(totals=WorkerTotals(1.0, batches=1))
        )

    pipeline = FakePipeline(script=script)
    run_id = execute(pipeline, instance).run_id
    assert order == ["released"]
    assert instance.get_run_by_id(run_id).status is S.CANCELED
    assert events_of(instance, run_id)[-1].metadata["stopped"].value == "stopped"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_whose_process_is_told_to_end_is_a_green_run(instance, number):
    """As at the end of `dagster dev` or of a container: a planned end."""

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        os.kill(os.getpid(), number)
        assert stop.wait(10)
        return WorkerSummary(
            worker_id, StopReason.STOPPED, WorkerStatus(totals=WorkerTotals(1.0, batches=1))
        )

    result = execute(FakePipeline(script=script), instance)
    assert result.success
    (event,) = events_of(instance, result.run_id)
    assert event.metadata["stopped"].value == "stopped"


def test_a_drain_that_is_told_to_end_before_its_end_fails(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
        return stopped(worker_id)

    run_id = materialize(FakePipeline(script=script), instance).run_id
    assert instance.get_run_by_id(run_id).status is S.FAILURE


def test_a_drain_that_was_done_before_the_signal_counts_as_done(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
        return stopped(worker_id, StopReason.DRAINED)

    assert materialize(FakePipeline(script=script), instance).success


def test_a_worker_that_raises_fails_the_run_and_what_happened_is_in_its_log(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        pipeline.built_workers[0]["events"](LeaseGained(worker_id, "s-0", 7))
        raise SinkError("the table went away")

    pipeline = FakePipeline(script=script)
    result = execute(pipeline, instance)
    assert not result.success
    assert (
        "the table went away" in result.failure_data_for_node("orders_eu_worker").error.to_string()
    )
    log = "\n".join(entry.message for entry in instance.all_logs(result.run_id))
    assert "lease_gained" in log


def test_a_run_that_was_closed_from_outside_stops_its_worker(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        instance.report_run_failed(instance.get_run_by_id(pipeline.built_workers[0]["run_id"]))
        assert not stop.is_set()
        on_progress(WorkerStatus(totals=WorkerTotals(60.0)))
        assert stop.is_set()
        return stopped(worker_id)

    pipeline = FakePipeline(script=script)
    assert not execute(pipeline, instance).success


def test_a_report_that_does_not_reach_dagster_does_not_stop_the_worker(instance, monkeypatch):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        monkeypatch.setattr(dg.DagsterInstance, "add_run_tags", broken)
        on_progress(
            WorkerStatus(
                lag_millis=1, lags=(LeaseLag("s-0", 1),), totals=WorkerTotals(60.0, records=1)
            )
        )
        return WorkerSummary(
            worker_id, StopReason.DRAINED, WorkerStatus(totals=WorkerTotals(60.0, records=1))
        )

    def broken(*args: Any) -> None:
        raise RuntimeError("database is locked")

    result = execute(FakePipeline(script=script), instance)
    assert result.success


ORPHAN = """
import multiprocessing, os, sys, time
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.orchestration.worker_op import stop_when_orphaned

def step(path):
    stop = SystemClock().signal()
    with stop_when_orphaned(stop, SystemClock(), enabled=True):
        open(path + ".ready", "w").close()
        stopped = stop.wait(30)
    with open(path, "w") as out:
        out.write(str(stopped))

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=step, args=(sys.argv[1],))
    child.start()
    child.join()
"""


def wait_for(path: Path, seconds: float = 120.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (path.suffix == ".ready" or path.read_text()):
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def test_a_step_whose_run_was_killed_stops(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    result = tmp_path / "result"
    parent = subprocess.Popen(
        [sys.executable, str(script), str(result)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    wait_for(tmp_path / "result.ready")
    parent.kill()
    parent.wait(10)
    assert wait_for(result) == "True"


def test_the_guard_ends_with_its_block(monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    before = set(threading.enumerate())
    with stop_when_orphaned(SystemClock().signal(), SystemClock(), enabled=True):
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) - before == set()


def test_run_events_keep_what_is_rare_and_are_bounded():
    events = RunEvents()
    events(BatchCommitted("w", "b", 1, 1, (), {}))
    assert events.drain() is None
    for i in range(60):
        events(AwsTrouble("GetRecords", f"error {chr(200 + i)}"))
    text = events.drain()
    assert text.startswith("(10 earlier events")
    assert text.count("\n") == 50
    assert events.drain() is None


def test_two_workers_of_one_application_share_a_group_and_nothing_else(instance):
    pipeline = FakePipeline()
    ids = [execute(replace(pipeline, built_workers=[]), instance).run_id for _ in range(2)]
    workers = {worker_id_of(pipeline.name, run_id) for run_id in ids}
    assert len(workers) == 2
    assert {w.split("-")[0] for w in workers} == {"orders_eu"}
