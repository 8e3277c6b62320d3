"""A fault is named by `status`, by `doctor` and by the asset checks (embedded AWS)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import dagster as dg
import pytest
from typer.testing import CliRunner

from kcl_pipeline import ForeachArrowSink, KinesisPipeline
from kcl_pipeline import clock as clock_module
from kcl_pipeline.cli import app
from kcl_pipeline.errors import AwsError, ThrottledError
from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.application import ApplicationIdentity, Loss, Pause
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import string
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.orchestration import checks as checks_module
from kcl_pipeline.orchestration.checks import build_checks
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.position import Position
from kcl_pipeline.status.findings import ADVICE_ON_RUNS
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.worker_status import (
    HungState,
    LeaseLag,
    PausedLease,
    StalledLease,
    WorkerStatus,
    WorkerTotals,
)
from tests.support.cli_fleet import build_fleet, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")

FAULT = re.compile(r"(?:problem|warning) +([a-z_]+): ")
OF_SET_UP = {"rows", "application"}
WORKERS = ("blue-1", "blue-2")
VIEWS = ("status", "doctor", "checks")


class Views:
    """An application in which everything is well, and the three views of it."""

    def __init__(self, server, monkeypatch) -> None:
        self.server, self.patch = server, monkeypatch
        self.fleet = build_fleet(server)
        self.name, self.tables = self.fleet.name, self.fleet.tables
        self.keys = self.fleet.keys
        self.run_problems: tuple[str, ...] = ()
        self.reporting, self.renewed, self.led = set(WORKERS), set(self.keys), True
        assert self.tables.lease.assign(self.tables.lease.get(self.keys[3]), "blue-1")
        stream = self.fleet.kinesis.resolve_stream(self.name, multi_stream=False)
        identity = ApplicationIdentity.of([stream], is_multi_stream=False, sink="function")
        assert self.tables.coordinator.put_application(identity, replacing=None)
        for worker in WORKERS:
            lags = tuple(LeaseLag(key, 100) for key in self.keys)
            self.report(worker, WorkerStatus(100, lags=lags))
        monkeypatch.setattr(clock_module.SystemClock, "sleep", lambda _, seconds: self.live())
        monkeypatch.setattr(
            checks_module, "observe_run_problems", lambda *_: self.run_problems, raising=True
        )

    def report(self, worker: str, status: WorkerStatus | None = None, age: float = 0.0, **more):
        row = WorkerMetrics(
            worker,
            int(time.time() - age),
            {"C": (10.0,)},
            {"C": (90,)},
            run_id=f"run-of-{worker}",
            status=status,
        )
        self.tables.workers.report(replace(row, **more))

    def status_of(self, **status):
        """Let the first worker report this, too."""
        lags = tuple(LeaseLag(key, 100) for key in self.keys)
        self.report("blue-1", WorkerStatus(**{"lag_millis": 100, "lags": lags, **status}))

    def live(self) -> None:
        """What living processes write between two looks, as far as they can."""
        with suppress(AwsError):
            for row in self.tables.workers.scan_workers().workers:
                if row.worker_id in self.reporting:
                    later = replace(row, last_update_seconds=row.last_update_seconds + 1)
                    self.tables.workers.report(later)
        with suppress(AwsError):
            for lease in self.tables.lease.list_leases().leases:
                if lease.lease_key in self.renewed and lease.owner is not None:
                    self.tables.lease.renew(lease)
        with suppress(AwsError):
            lock = self.tables.coordinator.observe_lock()
            if self.led and isinstance(lock, LeaderLock) and not lock.is_released:
                self.tables.coordinator.heartbeat_lock(lock, f"{lock.version}+")

    def deny(self, kind: str, table: str, *operations: str) -> None:
        rules = [
            FaultRule(service="dynamodb", operation=operation, kind=kind, contains=table)
            for operation in operations
        ]
        self.server.fault_rules.replace(rules)

    # -- what each view names

    def status(self) -> set[str]:
        return faults(run_json("status", "-a", self.name, "-s", self.name)["findings"])

    def doctor(self) -> tuple[set[str], str]:
        """The faults of the application, and the last line."""
        result = CliRunner().invoke(app, ["doctor", "-a", self.name, "-s", self.name])
        lines = result.stdout.rstrip().splitlines()
        named = [FAULT.match(line) for line in lines]
        assert result.exit_code == any(line.startswith("problem ") for line in lines), lines
        return {found[1] for found in named if found is not None} - OF_SET_UP, lines[-1]

    def checks(self, instance) -> dict[str, set[str]]:
        """By failed check, the findings in its verdict, when it is executed in Dagster."""
        pipeline = KinesisPipeline(
            name=self.name, streams=[self.name], sink=ForeachArrowSink(lambda rows, identity: None)
        )
        names, seen = Names.of(pipeline), []
        verdicts = checks_module.verdicts
        self.patch.setattr(
            checks_module, "verdicts", lambda findings: seen.append(findings) or verdicts(findings)
        )
        checks = build_checks(pipeline, names, DagsterOptions())
        resources = {
            names.aws: self.fleet.clients,
            names.leases_resource: self.tables.lease,
            names.workers_resource: self.tables.workers,
            names.coordinator_resource: self.tables.coordinator,
        }
        defs = dg.Definitions(
            asset_checks=[checks],
            jobs=[dg.define_asset_job("check", dg.AssetSelection.checks(checks))],
            resources={
                key: dg.ResourceDefinition.hardcoded_resource(Given(value))
                for key, value in resources.items()
            },
        )
        done = defs.resolve_job_def("check").execute_in_process(instance=instance)
        failed = {each.check_name for each in done.get_asset_check_evaluations() if not each.passed}
        found: dict[str, set[str]] = {}
        for finding in seen[-1]:
            if finding.is_fault:
                found.setdefault(finding.check.value, set()).add(finding.name)
        assert set(found) <= failed, "a check with a fault does not pass"
        return found


class Given:
    def __init__(self, value) -> None:
        self.value = value

    def table(self):
        return self.value

    def clients(self, settings):
        return self.value


def faults(findings) -> set[str]:
    return {
        each["name"]
        for each in findings
        if each["level"] in {"warning", "problem"} and each["check"] is not None
    }


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        finding: The name that all views give it.
        make: Makes it.
        views: The views that can see it.
        stands_still: Whether records wait.
        why: Why a view cannot see it.
    """

    finding: str
    make: Callable[[Views], object]
    views: tuple[str, ...] = VIEWS
    stands_still: bool = False
    why: str = ""


TWO_LOOKS = ("doctor", "checks")
ONE_LOOK = "one look does not show who lives, and the page says so"


def lost(views: Views) -> None:
    event = RecordsLost("w", "shardId-1", LossReason.LEFT_RETENTION, Position("7"))
    loss = Loss.of(event, 1_000)
    views.tables.coordinator.change_losses(lambda losses: losses.with_losses([loss]))


def restored(views: Views) -> None:
    loss = Loss.of(TableRestored(58, "the version of yesterday", "t-1"), 1_000)
    views.tables.coordinator.change_losses(lambda losses: losses.with_losses([loss]))


def paused(views: Views) -> None:
    table = views.tables.coordinator
    assert table.put_pause(Pause("ann", 1_000, "a deploy"), replacing=table.read_control())


def unreadable_row(views: Views) -> None:
    item = {"leaseKey": string("shardId-x"), "leaseCounter": string("no")}
    item["checkpoint"] = {"N": "1"}
    views.fleet.clients.dynamodb.put_item(TableName=views.name, Item=item)


def unreadable_record(views: Views) -> None:
    views.fleet.clients.dynamodb.update_item(
        TableName=f"{views.name}-CoordinatorState",
        Key={"key": string("Migration3.0")},
        UpdateExpression="SET kclpLosses = :junk",
        ExpressionAttributeValues={":junk": string("{no")},
    )


def unreadable_lock(views: Views) -> None:
    item = {"key": string("Leader"), "ownerName": {"N": "7"}}
    views.fleet.clients.dynamodb.put_item(TableName=f"{views.name}-CoordinatorState", Item=item)


def no_leader(views: Views) -> None:
    views.led = False
    assert views.tables.coordinator.release_lock(views.tables.coordinator.read_lock())


def dead_worker(views: Views) -> None:
    views.report("blue-2", WorkerStatus(), age=200.0)
    views.reporting = {"blue-1"}
    views.renewed = {views.keys[0], views.keys[3]}


def hole(views: Views) -> None:
    assert views.tables.lease.delete(views.tables.lease.get(views.keys[1]))


def no_lease_at_all(views: Views) -> None:
    for key in views.keys:
        assert views.tables.lease.delete(views.tables.lease.get(key))


def missing_tables(views: Views) -> None:
    for suffix in ("", "-WorkerMetricStats"):
        views.fleet.clients.dynamodb.delete_table(TableName=f"{views.name}{suffix}")


def throttled(views: Views) -> None:
    def read(_: object) -> None:
        raise ThrottledError("the table is throttled", operation="GetItem")

    views.patch.setattr(type(views.tables.coordinator), "read_losses", read)


def lags(millis: int) -> Callable[[Views], object]:
    return lambda views: views.status_of(
        lag_millis=millis,
        lags=(LeaseLag(views.keys[0], millis),),
        more_lags=3,
        more_lags_millis=millis,
    )


def stale_leader(views: Views) -> None:
    views.led = False


def released_lease(views: Views) -> None:
    assert views.tables.lease.evict(views.tables.lease.get(views.keys[2]))


CASES = [
    Case(
        "worker_hung",
        lambda v: v.status_of(hung=HungState("writing", 1_200.0, 2)),
    ),
    Case(
        "shard_paused",
        lambda v: v.status_of(
            paused=(PausedLease(v.keys[0], "16 of 16 records fail", 40.0),), paused_leases=1
        ),
        stands_still=True,
    ),
    Case(
        "shard_stalled",
        lambda v: v.status_of(
            stalled=(StalledLease(v.keys[0], "reading", 130.0, "throttled"),), stalled_leases=1
        ),
        stands_still=True,
    ),
    Case("batches_refused", lambda v: v.status_of(failed_batches=7, failure="SinkError: denied")),
    Case("cpu_not_measured", lambda v: v.report("blue-2", stats={"C": (50.0, -1.0)})),
    Case("dead_letters", lambda v: v.status_of(totals=WorkerTotals(dead_letters=200))),
    Case("records_lost", lost),
    Case("table_restored", restored),
    Case("application_paused", paused, stands_still=True),
    Case("row_unreadable", unreadable_row),
    Case("record_unreadable", unreadable_record),
    Case("lock_unreadable", unreadable_lock),
    Case("no_leader", no_leader),
    Case("no_leader", stale_leader, TWO_LOOKS, why=ONE_LOOK),
    Case("worker_silent", dead_worker, stands_still=True),
    Case("lease_without_worker", dead_worker, stands_still=True),
    Case("lease_without_worker", released_lease, stands_still=True),
    Case("hash_keys_uncovered", hole),
    Case("no_leases", no_lease_at_all),
    Case("table_missing", missing_tables),
    Case("no_permission", lambda v: v.deny("deny", "MetricStats", "Scan")),
    Case("throttled", throttled),
    Case("lag", lags(600_000), stands_still=True),
    Case("checkpoint_still", lags(2_000_000), TWO_LOOKS, stands_still=True, why=ONE_LOOK),
    Case("retention_short", lags(80_000_000), stands_still=True),
    Case(
        "stream_unavailable",
        lambda v: v.fleet.clients.kinesis.delete_stream(StreamName=v.name),
    ),
    *(
        Case(
            name,
            lambda v, name=name: setattr(v, "run_problems", (RunProblem(name, "runs"),)),
            ("checks",),
            why="only Dagster knows its runs",
        )
        for name in ADVICE_ON_RUNS
    ),
]


@pytest.fixture(scope="module")
def instance():
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def views(server, monkeypatch):
    return Views(server, monkeypatch)


def test_a_healthy_application_has_no_fault_in_any_view(views, instance):
    assert views.status() == set()
    found, last = views.doctor()
    assert (found, last) == (set(), "0 problems, 0 warnings")
    assert views.checks(instance) == {}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.finding)
def test_every_view_names_the_fault(views, instance, case):
    look(views, instance, [case])


@pytest.mark.parametrize(
    "findings",
    [
        ["worker_hung", "records_lost", "row_unreadable", "worker_silent", min(ADVICE_ON_RUNS)],
        ["no_leader", "hash_keys_uncovered"],
        ["table_missing"],
        ["stream_unavailable"],
    ],
    ids=lambda findings: findings[0],
)
def test_every_view_names_all_faults(views, instance, findings):
    """One of each source and of each set of views."""
    first = {case.finding: case for case in reversed(CASES)}
    look(views, instance, [first[finding] for finding in findings])


def look(views, instance, cases):
    """Make the faults; each view names those that it can see."""
    for case in cases:
        case.make(views)
    checks = views.checks(instance)
    named = {"checks": {name for group in checks.values() for name in group}}
    named["status"] = views.status()
    named["doctor"], last = views.doctor()
    for case in cases:
        assert [view for view in VIEWS if case.finding in named[view]] == [
            view for view in VIEWS if view in case.views
        ], named
    of_runs = {case.finding for case in cases} & {*ADVICE_ON_RUNS}
    if all(case.views == VIEWS or case.finding in of_runs for case in cases):
        assert named["doctor"] == named["checks"] - of_runs
        assert named["status"] == named["doctor"] - {"checkpoint_still"}, "it needs two looks"
    if any(case.stands_still for case in cases):
        assert "records wait: " in last
    if any("doctor" in case.views for case in cases):
        assert last != "0 problems, 0 warnings"
