"""The checks of data and of the leader, as the sensor reports them."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg

from kcl_pipeline.errors import NotFoundError, ThrottledError
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker_status import LeaseLag, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)


class Fleet:
    """One worker with a lag, led by the sensor; every event of a tick is stored."""

    def __init__(self, instance, **more):
        self.rows = leases(2, ["w-1"])
        self.more = more
        self.lag, self.letters, self.batches = 0.0, 0, 0
        self.cycle = FakeCycle([self.report()])
        self.stage = Stage(instance, FakePipeline(cycle=self.cycle))
        self.began = self.stage.clock.now

    def report(self) -> CycleReport:
        lag = LeaseLag(self.rows[0].lease_key, round(self.lag * 1000))
        totals = WorkerTotals(seconds=1.0, batches=self.batches, dead_letters=self.letters)
        status = WorkerStatus(lag.millis, lags=(lag,), totals=totals)
        return led(self.rows, [replace(worker("w-1"), status=status)], **self.more)

    def checks(self, seconds: float = 61.0) -> dict[str, dg.AssetCheckEvaluation]:
        report = self.report()
        self.cycle.reports = [report]
        self.stage.workers.rows = {row.worker_id: row for row in report.workers}
        events = self.stage(seconds).asset_events
        for event in events:
            self.stage.instance.report_runless_asset_event(event)
        return {e.check_name: e for e in events if isinstance(e, dg.AssetCheckEvaluation)}


def test_the_time_until_records_are_lost_uses_the_retention_that_the_leader_has_seen(instance):
    fleet = Fleet(instance, streams=(StreamId("orders", retention_hours=24),))
    fleet.lag = 6 * 3_600.0
    assert fleet.checks()["data_within_retention"].passed
    fleet.lag = 13 * 3_600.0
    warned = fleet.checks(10.0)["data_within_retention"]
    assert (warned.passed, warned.severity) == (False, dg.AssetCheckSeverity.WARN)
    fleet.lag = 22 * 3_600.0
    failed = fleet.checks(10.0)["data_within_retention"]
    assert (failed.passed, failed.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert failed.asset_key == fleet.stage.names.output
    # Another process leads: the last known period counts.
    fleet.stage.leases.leases = fleet.rows
    fleet.cycle.reports = [CycleReport(led=False, lock_owner="w-1")]
    events = fleet.stage(3_700).asset_events
    names = {e.check_name for e in events if isinstance(e, dg.AssetCheckEvaluation)}
    assert "data_within_retention" in names


def test_without_a_known_retention_nothing_is_said_about_it(instance):
    assert "data_within_retention" not in Fleet(instance).checks()


def test_a_check_of_the_output_that_is_not_known_now_stays_as_it_was_judged(instance):
    """For example by the run of a worker that has ended, which Dagster shows no longer."""
    fleet = Fleet(instance)
    fleet.checks()
    judged = dg.AssetCheckEvaluation(
        asset_key=fleet.stage.names.output,
        check_name="data_within_retention",
        passed=False,
        description="2.0 h until records are lost",
    )
    instance.report_runless_asset_event(judged)
    assert "data_within_retention" not in fleet.checks(), "nothing was committed"
    fleet.batches = 1
    found = fleet.checks()
    assert found.keys() >= {"lag_below_threshold", "no_new_dead_letters"}
    again = found["data_within_retention"]
    assert (again.passed, again.description) == (False, judged.description)


def test_new_dead_letters_fail_for_an_hour(instance):
    fleet = Fleet(instance)
    fleet.checks()
    assert fleet.checks()["no_new_dead_letters"].passed
    fleet.letters = 12
    failed = fleet.checks()["no_new_dead_letters"]
    assert not failed.passed
    assert failed.metadata["dead_letters_last_hour"].value == 12
    again = [one for _ in range(11) if (one := fleet.checks().get("no_new_dead_letters"))]
    assert [one.passed for one in again] == [False], "once in ten minutes while it fails"


def test_a_checkpoint_that_stands_still_while_records_wait_fails(instance):
    fleet = Fleet(instance)
    fleet.lag = 1_000.0
    passed = [one.passed for _ in range(15) if (one := fleet.checks().get("shards_moving"))]
    assert passed == [True], "it is reported when it changes"
    assert not fleet.checks()["shards_moving"].passed
    fleet.rows[0] = fleet.rows[0].with_(checkpoint=Position("51"))
    assert fleet.checks()["shards_moving"].passed


def test_a_quiet_hour_has_at_most_120_events_also_with_many_streams_and_shards(instance):
    """Materializations, observations and checks of one pipeline, while nothing changes."""
    names = [f"s{number:03}" for number in range(40)]
    rows = [lease for name in names for lease in leases(2, ["w-1", "w-2"], f"1:{name}:5")]
    totals = WorkerTotals(seconds=9_000.0, batches=3)
    workers = [
        replace(worker(name), status=WorkerStatus(0, totals=totals)) for name in ("w-1", "w-2")
    ]
    cycle = FakeCycle([led(rows, workers)])
    stage = Stage(instance, FakePipeline(streams=tuple(names), cycle=cycle))
    stage.workers.rows = {row.worker_id: row for row in workers}
    for _ in range(10):  # the first reports of everything
        stage(60.0)
    count = sum(len(stage(60.0).asset_events) for _ in range(60))
    assert 0 < count <= 120


def test_a_leader_that_is_absent_fails_also_without_tables(instance):
    missing = NotFoundError("no table", code="ResourceNotFoundException", operation="Scan")
    stage = Stage(instance, FakePipeline(cycle=FakeCycle([missing])))

    def no_table() -> None:
        raise missing

    stage.leases.list_leases = no_table

    def check() -> dg.AssetCheckEvaluation:
        events = stage(30.0).asset_events
        found = {e.check_name: e for e in events if isinstance(e, dg.AssetCheckEvaluation)}
        assert found.keys() <= {"leader_present", "workers_running"}
        return found["leader_present"]

    assert check().passed
    stage(31.0)
    failed = check()
    assert (failed.check_name, failed.passed) == ("leader_present", False)
    assert failed.asset_key == stage.names.fleet
    assert "waiting for the first worker" in failed.description


def test_a_leader_that_works_again_passes(instance):
    rows = leases(2, ["w-1"])
    error = ThrottledError("slow down", code="Throttling", operation="GetItem")
    cycle = FakeCycle([error, error, error, led(rows, [worker("w-1")])])
    stage = Stage(instance, FakePipeline(cycle=cycle))
    found = [
        e.passed
        for _ in range(4)
        for e in stage(61.0).asset_events
        if isinstance(e, dg.AssetCheckEvaluation) and e.check_name == "leader_present"
    ]
    assert found == [True, False, True]


def test_a_check_of_the_fleet_that_passes_says_what_is_true_at_the_last_look(instance):
    """The first ticks of an application: no table, a run whose worker starts, then the worker."""
    missing = NotFoundError("no table", code="ResourceNotFoundException", operation="Scan")
    cycle = FakeCycle([missing])
    stage = Stage(instance, FakePipeline(cycle=cycle))
    stage.workers.error = missing

    def shown(seconds: float = 5.0) -> dict[str, str]:
        found = [e for e in stage(seconds).asset_events if isinstance(e, dg.AssetCheckEvaluation)]
        assert all(one.passed for one in found)
        return {one.check_name: str(one.description) for one in found}

    waiting = "there is no leader: waiting for the first worker, which creates the tables"
    assert shown() == {"leader_present": waiting}, "whether a worker reports is not known"
    run = stage.run()
    starts = "no worker reports yet, 1 is starting"
    assert shown() == {"workers_running": starts}, "it is not repeated while nothing changes"
    # The tables exist, the worker still starts, for example its Spark session.
    stage.workers.error = None
    free = leases(1, [None])
    cycle.reports = [led(free, [])]
    found = shown(10.0)
    assert found["leader_present"].endswith(" leads")
    assert "workers_running" not in found, "it says the same"
    name = stage.worker_of(run)
    cycle.reports = [led(leases(1, [name]), [worker(name)])]
    stage.workers.beat(name)
    found = shown(10.0)
    assert found["workers_running"] == "1 worker reports"
    assert shown(61.0).keys() & {"leader_present", "workers_running"} == set(), "nothing is new"


def test_the_fleet_says_that_a_worker_starts(instance):
    cycle = FakeCycle([led(leases(1, [None]), [])])
    stage = Stage(instance, FakePipeline(cycle=cycle))

    def state() -> str:
        found = [e for e in stage(10.0).asset_events if isinstance(e, dg.AssetObservation)]
        return next(e.metadata["state"].text for e in found if e.asset_key == stage.names.fleet)

    assert state() == "no worker"
    run = stage.run()
    assert state() == "1 worker starting"
    name = stage.worker_of(run)
    cycle.reports = [led(leases(1, [name]), [worker(name)])]
    stage.workers.beat(name)
    assert state() == "working"
