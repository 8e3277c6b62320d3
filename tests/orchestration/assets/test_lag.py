"""The lag check: an execution and the sensor judge the same fleet in the same way."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
import pytest

from kcl_pipeline.events import ignore_events
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.state.worker_status import (
    HungState,
    LeaseLag,
    StalledLease,
    WorkerStatus,
    WorkerTotals,
)
from kcl_pipeline.orchestration.assets.checks.lag import LagObservation, lag, observe_lag
from kcl_pipeline.orchestration.assets.checks.unread import unread_seconds
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.runs import RunView, active_runs, last_drain
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.position import Position
from tests.support.dagster_fakes import (
    FakeCycle,
    FakeLeaseTable,
    FakePipeline,
    FakeWorkerTable,
    ManualClock,
    leases,
    led,
    resources,
    worker,
)
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

NOON = 12 * 3_600.0
ROWS = leases(2, ["a", "b"])
KEYS = [row.lease_key for row in ROWS]
HUNG = (
    f"{KEYS[1]} of worker b lags most, since 11:43:20 UTC (17 min): its worker is hung in step "
    "writing for 16 min"
)


def row(worker_id: str, lag_seconds: float, lease_key: str, **status):
    lags = (LeaseLag(lease_key, round(lag_seconds * 1000)),)
    found = WorkerStatus(lags[0].millis, lags=lags, **status)
    return replace(worker(worker_id), last_update_seconds=int(NOON), status=found)


HANGS = [
    row("a", 0.2, KEYS[0]),
    row("b", 1_000.0, KEYS[1], hung=HungState("writing", 980.0, 1)),
]
CONTINUOUS = RunView("r", dg.DagsterRunStatus.STARTED, "b", True, lag_millis=0, lag_at=NOON)


def executed(rows=ROWS, workers=(), alive=("a", "b"), runs=(CONTINUOUS,), world=None, **more):
    """Execute the check while the rows of the workers in `alive` change."""
    clock, table, lease_table = ManualClock(NOON), FakeWorkerTable(workers), FakeLeaseTable(rows)

    def on_sleep() -> None:
        table.beat(*[one for one in alive if one in table.rows])
        if world is not None:
            world(lease_table)

    clock.on_sleep = on_sleep
    given = {"drained_at": None, "pause": None} | more
    return observe_lag(
        lease_table,
        table,
        runs,
        threshold_seconds=60.0,
        error_seconds=900.0,
        silence_seconds=20.0,
        clock=clock,
        rejected=RejectedRows(ignore_events),
        **given,
    )


def test_an_executed_check_names_the_hung_worker_although_its_run_reported_no_lag():
    found = executed(workers=HANGS)
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert HUNG.replace("11:43:20", "11:43:21") in found.description
    assert found.metadata["lag_seconds"] == 1_000.0


@pytest.mark.parametrize("runs", [(), (CONTINUOUS,)], ids=["other supervisor", "dagster"])
def test_one_shard_that_does_not_move_fails_the_check_whoever_runs_the_worker(runs):
    """Its lag may be small, or not known: a child that waits has no records yet."""
    stalled = (StalledLease(KEYS[1], "waiting_for_parent", 130.0),)
    workers = [
        row("a", 0.2, KEYS[0]),
        row("b", 0.1, KEYS[1], stalled=stalled, stalled_leases=1),
    ]
    found = executed(workers=workers, runs=runs)
    assert not found.passed
    assert found.metadata["stalled_shards"] == 1
    assert f"such as {KEYS[1]}, in the step waiting_for_parent for 2 min" in found.description
    assert executed(workers=[row("a", 0.2, KEYS[0]), row("b", 0.1, KEYS[1])], runs=runs).passed


def test_an_executed_check_and_the_sensor_agree(instance):
    """Same fleet, same verdict, same shard, same cause."""
    stage = Stage(instance, FakePipeline(cycle=FakeCycle([led(ROWS, HANGS)])))
    stage.clock.now = NOON - 5
    stage.run(**{"kcl/lag_millis": "0", "kcl/lag_reported_at": "1970-01-01T12:00:00+00:00"})
    (reported,) = [
        event
        for event in stage().asset_events
        if isinstance(event, dg.AssetCheckEvaluation) and event.check_name == "lag_below_threshold"
    ]
    pressed = executed(workers=HANGS)
    assert (reported.passed, reported.severity) == (pressed.passed, pressed.severity)
    assert HUNG in reported.description
    assert reported.metadata["lag_seconds"].value == pressed.metadata["lag_seconds"]


def test_the_button_in_the_dagster_ui_reads_the_rows_and_not_the_tags(instance):
    pipeline = FakePipeline()
    names, table = Names.of(pipeline), FakeWorkerTable(HANGS)

    class Reporting(FakeWorkerTable):
        def scan_workers(self):
            self.beat("a", "b")
            return super().scan_workers()

    table = Reporting(HANGS)
    stage = Stage(instance, pipeline)
    stage.run(**{"kcl/lag_millis": "0"})
    defs = build_definitions(pipeline)
    job = dg.define_asset_job(
        "check", dg.AssetSelection.checks(dg.AssetCheckKey(names.output, "lag_below_threshold"))
    )
    bound = dg.Definitions(
        assets=defs.assets,
        asset_checks=defs.asset_checks,
        jobs=[job],
        resources=resources(pipeline, FakeLeaseTable(ROWS), table),
    )
    result = bound.resolve_job_def("check").execute_in_process(instance=instance)
    (found,) = result.get_asset_check_evaluations()
    assert not found.passed
    assert "of worker b lags most" in found.description
    assert "its worker is hung in step writing" in found.description


def read_up_to(seconds_ago: float):
    return [one.with_(read_up_to_millis=round((NOON - seconds_ago) * 1000)) for one in ROWS]


def test_a_dead_worker_leaves_a_small_lag_in_its_row_and_fails_the_check():
    fine = [row("a", 0.2, KEYS[0]), row("b", 0.1, KEYS[1])]
    assert executed(read_up_to(5.0), fine).passed
    found = executed(read_up_to(300.0), fine, alive=["a"])
    assert not found.passed
    assert f"{KEYS[1]} of worker b lags most, since 11:55:00 UTC (5 min): it has no live owner" in (
        found.description
    )


def test_without_a_live_worker_an_unknown_age_fails():
    found = executed(workers=[row("a", 0.2, KEYS[0])])
    assert not found.passed
    assert "without a worker, so that the lag is not known: 1 shard" in found.description
    assert not executed([], []).passed


def test_a_drain_that_left_no_lease_to_others_counts_for_leases_without_a_worker():
    rows = [one.with_(owner=None, read_up_to_millis=1) for one in ROWS]
    assert not executed(rows).passed
    assert executed(rows, drained_at=NOON - 2).passed
    assert not executed(rows, drained_at=NOON - 61).passed
    # It says nothing about leases that a worker holds now.
    behind = [row("a", 500.0, KEYS[0]), row("b", 0.0, KEYS[1])]
    assert not executed(workers=behind, drained_at=NOON - 2).passed


def test_a_pause_is_the_cause_while_it_lasts():
    pause = Pause("me", reason="maintenance")
    found = executed([one.with_(owner=None) for one in read_up_to(70.0)], pause=pause)
    assert "the application is paused by me: maintenance" in found.description


@pytest.mark.parametrize(
    ("moves", "cause"),
    [
        (False, "its checkpoint has not changed for 60 s: a batch takes long or is repeated"),
        (True, "its worker commits less than arrives, as on 1 of 2 shards"),
    ],
)
def test_an_execution_looks_whether_the_checkpoint_moves_before_it_names_the_cause(moves, cause):
    late = [row("a", 0.2, KEYS[0]), row("b", 90.0, KEYS[1])]

    def move(table: FakeLeaseTable) -> None:
        if moves:
            before = int(table.leases[1].checkpoint.sequence_number)
            table.leases[1] = ROWS[1].with_(checkpoint=Position(str(before + 1)))

    assert cause in executed(workers=late, world=move).description


def test_a_worker_that_commits_nothing_is_the_cause():
    silent = WorkerTotals(seconds=4_000.0, last_batch_seconds=300.0)
    late = [row("a", 0.2, KEYS[0]), row("b", 320.0, KEYS[1], totals=silent)]
    text = "its worker has committed no batch for 5 min: a batch takes long or is repeated"
    assert text in executed(workers=late).description


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (None, "nothing has arrived since the workers started at 11:00:00 UTC (60 min ago)"),
        (840.0, "has arrived since the last batch was committed at 11:46:00 UTC (14 min ago)"),
        (
            2 * 86_400.0,
            "arrived since the last batch was committed at 1969-12-30 12:00:00 UTC (48.0 h ago)",
        ),
        (59.0, None),
    ],
)
def test_an_idle_fleet_passes_and_says_since_when_nothing_arrived(last, text):
    totals = WorkerTotals(seconds=3_600.0, last_batch_seconds=last)
    workers = [row("a", 0.0, KEYS[0], totals=totals), row("b", 0.0, KEYS[1], totals=totals)]
    unread = unread_seconds(ROWS, workers, NOON)
    found = lag(LagObservation(ROWS, workers, unread, {}, {}, (), NOON, 60.0), 900.0)
    assert found is not None
    assert found.passed
    assert found.description.startswith("0.0 s behind the end of the stream, reported 0 s ago")
    assert (text in found.description) if text else "nothing" not in found.description


def test_a_lease_without_a_live_owner_lags_although_the_other_workers_are_at_the_end(instance):
    """The sensor: the worker is gone, nobody takes its lease, and its row is gone, too."""
    rows = [ROWS[0], ROWS[1].with_(owner="gone", read_up_to_millis=round((NOON - 1) * 1000))]
    pipeline = FakePipeline(cycle=FakeCycle([led(rows, [row("a", 0.2, KEYS[0])])]))
    stage = Stage(instance, pipeline)
    stage.clock.now = NOON

    def checks() -> dict[str, dg.AssetCheckEvaluation]:
        events = stage(61.0).asset_events
        return {e.check_name: e for e in events if isinstance(e, dg.AssetCheckEvaluation)}

    first = checks()["lag_below_threshold"]
    assert (first.passed, first.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert f"{KEYS[1]} of worker gone lags most, since 11:59:59 UTC" in first.description
    for _ in range(15):
        last = checks()["lag_below_threshold"]
    assert (last.passed, last.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "it has had no live owner for 15 min" in last.description


def test_the_lag_of_a_shard_without_a_worker_is_in_the_plot_and_in_the_table(instance):
    rows = [ROWS[0], ROWS[1].with_(owner="gone", read_up_to_millis=round((NOON - 1) * 1000))]
    status = {"totals": WorkerTotals(seconds=1.0)}
    pipeline = FakePipeline(cycle=FakeCycle([led(rows, [row("a", 0.2, KEYS[0], **status)])]))
    stage = Stage(instance, pipeline)
    stage.clock.now = NOON
    stage.workers.rows = {"a": row("a", 0.2, KEYS[0], **status)}
    stage(61.0)
    events = [e for e in stage(61.0).asset_events if not isinstance(e, dg.AssetCheckEvaluation)]
    by_name = {e.asset_key.path[-1]: e.metadata for e in events}
    assert by_name["per_minute"]["lag_seconds_max"].value == 123.0
    first = by_name["fleet"]["lease_rows"].records[0].data
    assert (first["shard"], first["lag"]) == ("1", "≤ 123.0 s")


def test_only_a_drain_that_said_so_is_the_last_drain(instance):
    stage = Stage(instance)
    assert last_drain(instance, "orders-eu") is None
    stage.run(mode="drain", **{"kcl/lag_millis": "0"})
    stage.run(**{"kcl/drained_at": "1970-01-01T11:00:00+00:00"})
    assert last_drain(instance, "orders-eu") is None
    stage.run(mode="drain", **{"kcl/drained_at": "1970-01-01T10:00:00+00:00"})
    stage.run(mode="drain", **{"kcl/drained_at": "1970-01-01T09:00:00+00:00"})
    assert last_drain(instance, "orders-eu") == 10 * 3_600.0
    assert last_drain(instance, "others") is None
    assert len(active_runs(instance, "orders-eu", "-")) == 4


def test_reports_without_data_say_since_when_nothing_arrived(instance):
    totals = WorkerTotals(seconds=900.0, records=5, batches=1, last_batch_seconds=840.0)
    rows = [row("a", 0.0, KEYS[0], totals=totals), row("b", 0.0, KEYS[1], totals=totals)]
    stage = Stage(instance, FakePipeline(cycle=FakeCycle([led(ROWS, rows)])))
    stage.workers.rows = {one.worker_id: one for one in rows}
    stage.clock.now = NOON - 122.0
    stage(61.0)
    (report,) = [
        event
        for event in stage(61.0).asset_events
        if event.asset_key == stage.names.output and not isinstance(event, dg.AssetCheckEvaluation)
    ]
    assert isinstance(report, dg.AssetObservation)
    assert report.metadata["state"].value == (
        "nothing waits, and nothing has arrived since the last batch was committed at 11:46:00 "
        "UTC (14 min ago)"
    )
