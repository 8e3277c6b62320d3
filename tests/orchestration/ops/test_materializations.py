"""Which runs materialize the output, and when a continuous worker reports a check."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.runs import last_drain
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.orchestration.ops.test_consume import (
    events_of,
    execute,
    materialize,
    observations_of,
    stopped,
)
from tests.support.dagster_fakes import FakePipeline


@pytest.fixture
def instance(dagster_instance):
    dagster_instance.wipe()
    return dagster_instance


@pytest.mark.parametrize("reason", [StopReason.DRAIN_REQUESTED, StopReason.STOPPED])
@pytest.mark.parametrize("batches", [0, 2])
def test_a_continuous_worker_reports_once_at_its_end_and_materializes_if_it_committed(
    instance, reason, batches
):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        for _ in range(3):
            on_progress(WorkerStatus(totals=WorkerTotals(60.0, records=5, batches=1)))
        return WorkerSummary(
            worker_id, reason, WorkerStatus(totals=WorkerTotals(200.0, records=17, batches=batches))
        )

    result = execute(FakePipeline(script=script), instance)
    assert result.success is (reason is StopReason.DRAIN_REQUESTED)
    materialized = events_of(instance, result.run_id)
    observed = observations_of(instance, result.run_id)
    assert (len(materialized), len(observed)) == ((1, 0) if batches else (0, 1))
    for event in (*materialized, *observed):
        # The sensor reports the numbers: a number here would be in the same plot a second time.
        assert not {"records", "rows", "bytes", "batches", "dead_letters"} & {*event.metadata}
        text = f"17 records, 0 bytes, 0 rows, {batches} batch"
        assert event.metadata["whole_run"].value.startswith(text)


def test_a_drain_that_landed_nothing_is_an_observation(instance):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        return stopped(worker_id, StopReason.DRAINED)

    result = materialize(FakePipeline(script=script), instance)
    assert result.success
    assert events_of(instance, result.run_id) == []
    (event,) = observations_of(instance, result.run_id)
    assert event.metadata["records"].value == 0


@pytest.mark.parametrize("elsewhere", [{}, {"w-2": 3}])
def test_a_drain_beside_a_fleet_says_so_in_the_log_of_its_run(instance, elsewhere):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        total = WorkerStatus(totals=WorkerTotals(1.0))
        return WorkerSummary(worker_id, StopReason.DRAINED, total, elsewhere=elsewhere)

    result = materialize(FakePipeline(script=script), instance)
    text = "3 shards are held by other workers, which read their records: w-2 (3)"
    logged = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert (text in logged) is bool(elsewhere)
    (event,) = observations_of(instance, result.run_id)
    assert ("left_to_others" in event.metadata) is bool(elsewhere)
    # Only a drain that was alone says that everything is in the table.
    tags = instance.get_run_by_id(result.run_id).tags
    assert ("kcl/drained_at" in tags) is not bool(elsewhere)
    assert (last_drain(instance, "orders-eu") is None) is bool(elsewhere)


def test_the_end_of_a_worker_keeps_the_checks_and_the_figures_of_the_output(instance):
    pipeline = FakePipeline()
    output = Names.of(pipeline).output
    figures = {"lag_seconds_max": 1.5, "dead_letters": 3, "period": dg.MetadataValue.text("60 s")}
    instance.report_runless_asset_event(dg.AssetMaterialization(output, metadata=figures))
    reported = instance.get_latest_materialization_event(output)
    for name, passed in (("lag_below_threshold", True), ("no_new_dead_letters", False)):
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=output,
                check_name=name,
                passed=passed,
                severity=dg.AssetCheckSeverity.WARN,
                description=f"sentence of {name}",
                metadata={"number": 3},
            )
        )

    def judged(name: str) -> bool:
        """What the UI shows: an evaluation of the run of the latest materialization."""
        key = dg.AssetCheckKey(output, name)
        record = instance.get_latest_asset_check_evaluation_record(key)
        latest = instance.get_latest_materialization_event(output)
        assert record.event.run_id == latest.run_id, "Not Evaluated"
        check = record.event.dagster_event.event_specific_data
        assert check.severity is dg.AssetCheckSeverity.WARN
        assert (check.description, check.metadata["number"].value) == (f"sentence of {name}", 3)
        return check.passed

    run = execute(pipeline, instance).run_id
    for _ in range(2):
        assert judged("lag_below_threshold")
        assert not judged("no_new_dead_letters")
        (event,) = events_of(instance, run)
        # As text: a number would be in the plot a second time.
        shown = {name: event.metadata[name].value for name in figures}
        assert shown == {"lag_seconds_max": "1.5", "dead_letters": "3", "period": "60 s"}
        assert event.metadata["figures_of"].value == reported.timestamp
        run = execute(pipeline, instance).run_id

    drain = materialize(pipeline, instance).run_id
    assert not judged("no_new_dead_letters")
    (event,) = events_of(instance, drain)
    assert "lag_seconds_max" not in event.metadata, "a drain has its own figures"
