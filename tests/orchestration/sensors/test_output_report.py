"""The report of the output: one series for the fleet, from totals in the workers' rows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import dagster as dg
import pytest
from msgspec import structs

from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.orchestration.reports import (
    FleetTotals,
    lag_percentiles,
    output_event,
    output_metadata,
)
from kcl_pipeline.orchestration.runs import worker_id_of
from kcl_pipeline.worker_status import (
    LeaseLag,
    WorkerStatus,
    WorkerTotals,
    lags_of,
    status_of,
    status_text,
)
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)


def row(name: str, process: str, records: int, seconds: float, **more: object) -> WorkerMetrics:
    totals = WorkerTotals(seconds, records, 100 * records, records, records // 10)
    return replace(worker(name), run_id=process, status=WorkerStatus(totals=totals, **more))


def records_of(totals: FleetTotals, now: float) -> int:
    return totals.close_period(now).done.records


def test_a_new_sensor_counts_from_its_first_observation():
    totals = FleetTotals()
    totals.observe([row("a", "1", 5_000, 900.0)], 1_000.0)
    assert records_of(totals, 1_060.0) == 0
    totals.observe([row("a", "1", 5_600, 960.0)], 1_060.0)
    period = totals.close_period(1_120.0)
    assert (period.done.records, period.done.bytes, period.records_per_second) == (600, 60_000, 10)
    assert records_of(totals, 1_180.0) == 0, "the same row again is nothing new"


def test_a_worker_that_starts_later_counts_from_zero():
    totals = FleetTotals()
    totals.observe([], 1_000.0)
    totals.observe([row("a", "1", 300, 30.0)], 1_040.0)
    period = totals.close_period(1_060.0)
    assert (period.done.records, period.records_per_second) == (300, 10.0)


def test_a_worker_that_was_overlooked_at_first_is_not_counted_from_its_start():
    totals = FleetTotals()
    totals.observe([], 1_000.0)
    totals.observe([row("a", "1", 90_000, 900.0)], 1_040.0)
    assert records_of(totals, 1_060.0) == 0


def test_a_restarted_worker_adds_to_what_its_predecessor_did():
    totals = FleetTotals()
    totals.observe([row("a", "1", 100, 50.0)], 1_000.0)
    totals.observe([row("a", "1", 160, 56.0)], 1_006.0)
    totals.observe([row("a", "2", 40, 4.0)], 1_012.0)
    assert records_of(totals, 1_060.0) == 100
    # The same process id with smaller totals is another process, too
    totals.observe([row("a", "2", 7, 1.0)], 1_062.0)
    totals.observe([row("a", "2", 9, 2.0)], 1_063.0)
    assert records_of(totals, 1_120.0) == 9


def test_an_older_row_of_the_same_process_counts_nothing_twice():
    """A scan is eventually consistent."""
    totals = FleetTotals()
    totals.observe([], 1_000.0)
    for now, records, seconds in ((1_010, 100, 8.0), (1_015, 90, 6.0), (1_020, 110, 18.0)):
        written = replace(row("a", "1", records, seconds), last_update_seconds=int(seconds))
        totals.observe([written], float(now))
    assert records_of(totals, 1_060.0) == 110


def test_a_row_that_was_unreadable_for_a_while_is_counted_once():
    totals = FleetTotals()
    totals.observe([row("a", "1", 100, 50.0)], 1_000.0)
    totals.observe([], 1_030.0)
    assert records_of(totals, 1_060.0) == 0
    totals.observe([row("a", "1", 250, 110.0)], 1_061.0)
    assert records_of(totals, 1_120.0) == 150


def test_a_drain_run_is_left_out_also_after_its_end():
    totals = FleetTotals()
    totals.observe([row("d", "1", 10, 5.0)], 1_000.0, left_out=["d"])
    totals.observe([row("d", "1", 500, 10.0)], 1_005.0)
    assert records_of(totals, 1_060.0) == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_periods_add_up_to_what_was_seen(seed):
    """Workers start, end, restart and disappear; nothing is negative, nothing counts twice."""
    rng, now = random.Random(seed), 1_000.0
    totals, periods = FleetTotals(), []
    totals.observe([], now)
    processes: dict[str, tuple[int, float, int]] = {}
    last_seen: dict[tuple[str, int], int] = {}
    for _ in range(400):
        now += 5.0
        for name in ("a", "b", "c"):
            number, born, done = processes.get(name, (0, now, 0))
            if rng.random() < 0.03:
                number, born, done = number + 1, now, 0
            processes[name] = (number, born, done + rng.randrange(50))
        shown = [name for name in processes if rng.random() < 0.9]
        rows = [
            row(name, str(processes[name][0]), processes[name][2], now - processes[name][1])
            for name in shown
        ]
        last_seen.update({(name, processes[name][0]): processes[name][2] for name in shown})
        totals.observe(rows, now)
        if totals.is_due(now, 60.0):
            period = totals.close_period(now)
            assert period.done.records >= 0
            assert period.records_per_second >= 0
            periods.append(period.done.records)
    periods.append(totals.close_period(now).done.records)
    assert sum(periods) == sum(last_seen.values())


def test_forgotten_processes_do_not_fill_the_memory():
    totals = FleetTotals()
    totals.observe([], 0.0)
    for number in range(200):
        totals.observe([row(f"w-{number}", "1", 10, 1.0)], 60.0 * number)
        totals.observe([], 60.0 * number, left_out=[f"d-{number}"])
        totals.close_period(60.0 * number)
    assert len(totals.processes) <= 61
    assert len(totals.left_out) <= 61


def test_percentiles_of_the_lag_are_those_of_all_leases():
    millis = {f"s-{number}": 1_000 * number for number in range(100)}
    status = status_of(status_text(WorkerStatus(99_000, lags=lags_of(millis))))
    calm = WorkerStatus(0, lags=(LeaseLag("c-1", 0), LeaseLag("c-2", 500)))
    found = lag_percentiles(
        [replace(worker("a"), status=status), replace(worker("b"), status=calm)]
    )
    assert found is not None
    assert found[0] == 39.0  # the median of the 80 that the row leaves out
    assert found[1:] == (97.0, 99.0) or found[1:] == (98.0, 99.0)
    assert lag_percentiles([worker("c")]) is None


def test_a_period_without_a_commit_is_an_observation():
    key = dg.AssetKey(["orders", "events"])
    totals = FleetTotals()
    totals.observe([row("a", "1", 100, 50.0)], 1_000.0)
    totals.observe([row("a", "1", 100, 55.0)], 1_005.0)
    idle = totals.close_period(1_060.0)
    assert isinstance(output_event(key, idle, output_metadata(idle, [], 0.0)), dg.AssetObservation)
    totals.observe([row("a", "1", 160, 60.0)], 1_065.0)
    busy = totals.close_period(1_120.0)
    event = output_event(key, busy, output_metadata(busy, [], 0.0))
    assert isinstance(event, dg.AssetMaterialization)


def test_what_is_reported():
    totals = FleetTotals()
    totals.observe([], 940.0)
    times = {"commit_millis_p99": 1_500, "put_to_commit_millis_p99": 2_500, "table_version": 7}
    one = row("a", "1", 1_000, 50.0, last_batch_seconds=1.0, **times)
    two = row("b", "1", 500, 50.0, commit_millis_p99=800, table_version=9)
    assert one.status is not None
    one = replace(
        one,
        last_update_seconds=970,
        status=structs.replace(
            one.status,
            totals=structs.replace(one.status.totals, dead_letters=3),
            lags=(LeaseLag("s-0", 4_000),),
            unknown_lags=2,
        ),
    )
    two = replace(two, last_update_seconds=990)
    totals.observe([one, two], 1_000.0)
    metadata = output_metadata(totals.close_period(1_000.0), [one, two], 1_000.0, "/lake/dead")
    assert metadata.pop("period").value == "60 s"
    assert metadata.pop("dead_letter_table").value == "/lake/dead"
    assert metadata == {
        "records_per_second": 30.0,
        "mb_per_second": 0.003,
        "records": 1_500,
        "bytes": 150_000,
        "rows": 1_500,
        "batches": 150,
        "dead_letters": 3,
        "workers": 2,
        "lag_seconds_p50": 4.0,
        "lag_seconds_p99": 4.0,
        "lag_seconds_max": 4.0,
        "leases_without_lag": 2,
        "oldest_report_seconds": 30,
        "commit_seconds_p99": 1.5,
        "put_to_commit_seconds_p99": 2.5,
        "table_version": 9,
    }


def test_the_sensor_reports_once_per_period_and_leaves_drain_runs_out(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(4, ["w-1"]), [worker("w-1")])]))
    stage = Stage(instance, pipeline)
    drain = worker_id_of(pipeline.name, stage.run(mode="drain").run_id)
    found = []
    for number in range(25):
        stage.workers.rows = {
            "w-1": row("w-1", "1", 100 * number, 5.0 * number),
            drain: row(drain, "1", 1_000 * number, 5.0 * number),
        }
        found += [
            event
            for event in stage().asset_events
            if event.asset_key == stage.names.output
            and not isinstance(event, dg.AssetCheckEvaluation)
        ]
    assert [type(event) for event in found] == [dg.AssetMaterialization] * 2
    assert [event.metadata["records"].value for event in found] == [100, 1_200]
    assert [event.metadata["records_per_second"].value for event in found] == [20.0, 20.0]


@pytest.mark.parametrize("minutes", [6, pytest.param(60, marks=pytest.mark.long)])
def test_minutes_with_100_leases_and_8_workers(instance, minutes):
    """The event log grows by a known number of events, whatever the number of shards is.

    One per minute, and one more because the first minute may begin with one.
    """
    most = minutes + 1
    names = [f"w-{number}" for number in range(8)]
    cycle = FakeCycle([led(leases(100, names), [worker(name, 30.0) for name in names])])
    stage = Stage(instance, FakePipeline(cycle=cycle))
    counts: Counter[str] = Counter()
    for tick in range(12 * minutes):
        rows = {name: row(name, "1", 50 * tick, 5.0 * tick) for name in names}
        stage.workers.rows = rows
        report = cycle.reports[0]
        cycle.reports = [replace(report, workers=tuple(rows.values()))]
        for event in stage().asset_events:
            kind = getattr(event, "check_name", "/".join(event.asset_key.path))
            counts[kind] += 1
    assert counts["orders-eu/per_minute"] in (minutes, most)
    assert counts["orders-eu/fleet"] <= 2, "nothing of it changes"
    # The checks of the output follow each of its materializations.
    assert counts["lag_below_threshold"] in (0, minutes, most)
    assert counts["shards_moving"] <= 2
    assert all(count <= most for count in counts.values()), counts
    assert sum(counts.values()) <= most * len(counts)
