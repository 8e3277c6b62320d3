"""A pipeline and tables without AWS or Spark, for the tests of Dagster's face."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import boto3
import dagster as dg
from botocore.exceptions import ClientError

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.assign import CycleReport, StreamCoverage
from kcl_pipeline.leases.row import BadRow, Lease, LeaseListing
from kcl_pipeline.leases.workers import WorkerListing, WorkerMetrics
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import CountedWorkers
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import LeaseLag, WorkerStatus, WorkerTotals


class ManualClock:
    """Time that only `sleep` and `advance` move; `on_sleep` plays the rest of the world."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeFleet:
    min: int = 2
    max: int = 4
    run_tags: dict[str, str] = field(default_factory=dict)
    max_starting: int = 4
    run_hours: float | None = None
    rolling_replacement: bool = False
    code_version: str | None = None


@dataclass
class FakeSink:
    uri: str = "/nowhere/lake/per_minute/"


class FakeWorker:
    """Plays a script: a function of (stop, mode, on_progress) that returns the summary."""

    def __init__(self, script: Callable[..., WorkerSummary], worker_id: str) -> None:
        self.script = script
        self.worker_id = worker_id

    def run(
        self, stop: Any, *, mode: str, on_progress: Any, progress_seconds: float
    ) -> WorkerSummary:
        return self.script(stop, mode, on_progress, self.worker_id)


class FakeCycle:
    """A leader whose next reports (or errors) are given; the last one repeats."""

    def __init__(self, reports: Sequence[CycleReport | Exception]) -> None:
        self.reports = list(reports)
        self.calls = 0
        self.deadlines: list[float] = []
        self.expiries: list[float] = []
        self.misses_table = False

    def next_expiry_seconds(self, now: float) -> float:
        return self.expiries.pop(0) if self.expiries else math.inf

    def run_once(self, deadline_seconds: float) -> CycleReport:
        self.calls += 1
        self.deadlines.append(deadline_seconds)
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        if isinstance(report, Exception):
            raise report
        return report

    def wait_for_sync(self, seconds: float) -> bool:
        return False

    def release(self) -> None:
        raise AssertionError("the sensor never releases")


def drained(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
    on_progress(
        WorkerStatus(
            lag_millis=1500,
            lags=(LeaseLag("s-0", 1500),),
            positions={"s-0": "49"},
            table_version=3,
            totals=WorkerTotals(60.0, records=10, bytes=100, rows=5, batches=2),
        )
    )
    return WorkerSummary(
        worker_id,
        StopReason.DRAINED,
        WorkerStatus(
            positions={"s-0": "50"},
            table_version=4,
            totals=WorkerTotals(70.0, records=12, bytes=120, rows=6, batches=3),
        ),
    )


@dataclass
class FakePipeline:
    name: str = "orders-eu"
    streams: tuple[str, ...] = ("orders",)
    workers: FakeFleet = field(default_factory=FakeFleet)
    sink: Any = field(default_factory=FakeSink)
    transform: Any = None
    transform_arrow: Any = None
    output_asset_key: Any = None
    spark_config: dict[str, str] = field(default_factory=dict)
    script: Callable[..., WorkerSummary] = drained
    cycle: FakeCycle = field(default_factory=lambda: FakeCycle([CycleReport(led=False)]))
    overrides: dict[str, Any] = field(default_factory=dict)
    built_workers: list[dict[str, Any]] = field(default_factory=list)
    built_leaders: list[dict[str, Any]] = field(default_factory=list)

    @property
    def settings(self) -> ConsumerSettings:
        return ConsumerSettings(application_name=self.name, streams=self.streams, **self.overrides)

    def build_worker(self, worker_id: str, **kwargs: Any) -> FakeWorker:
        self.built_workers.append({"worker_id": worker_id, **kwargs})
        return FakeWorker(self.script, worker_id)

    def build_leader(self, owner_name: str, **kwargs: Any) -> FakeCycle:
        self.built_leaders.append({"owner_name": owner_name, **kwargs})
        return self.cycle


class FakeLeaseTable:
    name = "leases"

    def __init__(self, leases: Sequence[Lease] = ()) -> None:
        self.leases = list(leases)

    def list_leases(self) -> LeaseListing:
        return LeaseListing(tuple(self.leases))


class FakeWorkerTable:
    name = "workers"

    def __init__(self, rows: Sequence[WorkerMetrics] = ()) -> None:
        self.rows = {row.worker_id: row for row in rows}
        self.bad_rows: list[BadRow] = []
        self.drained: list[str] = []
        self.error: Exception | None = None

    def scan_workers(self) -> WorkerListing:
        if self.error:
            raise self.error
        return WorkerListing(tuple(self.rows.values()), tuple(self.bad_rows))

    def request_drain(self, worker_id: str) -> bool:
        self.drained.append(worker_id)
        if worker_id not in self.rows:
            return False
        self.rows[worker_id] = replace(self.rows[worker_id], drain_requested=True)
        return True

    def beat(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            row = self.rows.get(worker_id) or worker(worker_id)
            self.rows[worker_id] = replace(row, last_update_seconds=row.last_update_seconds + 1)


class _Box:
    """A resource that gives what it was given."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def table(self) -> Any:
        return self.content

    def clients(self, settings: ConsumerSettings) -> Any:
        return self.content


@cache
def kinesis_without_streams() -> Any:
    """A client that makes no call: every stream is missing."""
    client = boto3.client(
        "kinesis", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )

    def refuse(**_: Any) -> None:
        error = {"Code": "ResourceNotFoundException", "Message": "there is no stream"}
        raise ClientError({"Error": error}, "DescribeStreamSummary")

    client.meta.events.register("before-call.kinesis", refuse)
    return client


def resources(
    pipeline: FakePipeline,
    leases: Any = None,
    workers: Any = None,
    session: Any = None,
    coordinator: Any = None,
) -> dict[str, Any]:
    names = Names.of(pipeline)
    boxes = {
        names.aws: SimpleNamespace(kinesis=kinesis_without_streams()),
        names.leases_resource: leases if leases is not None else FakeLeaseTable(),
        names.workers_resource: workers if workers is not None else FakeWorkerTable(),
        names.coordinator_resource: coordinator or InMemoryCoordinatorStateTable(),
    }
    given = {key: _Box(content) for key, content in boxes.items()}
    if names.spark is not None:
        given[names.spark] = session
    return {
        key: dg.ResourceDefinition.hardcoded_resource(resource) for key, resource in given.items()
    }


def worker(worker_id: str, cpu: float | None = None, **changes: Any) -> WorkerMetrics:
    stats = {} if cpu is None else {"C": (cpu,)}
    return WorkerMetrics(worker_id, 1, stats, {} if cpu is None else {"C": (80,)}, **changes)


def counted(active: Sequence[RunView], ready: Collection[str] | None = None) -> CountedWorkers:
    """These runs as workers. Those that have started, or those of `ready`, have rows that move."""
    runs = {run.worker_id: run for run in active if run.continuous}
    has_row = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)
    moving = {
        key
        for key, run in runs.items()
        if run.status in has_row and (ready is None or key in ready)
    }
    return CountedWorkers(runs, frozenset(moving), {key: worker(key) for key in moving})


def leases(count: int, owners: Sequence[str | None], stream: str | None = None) -> list[Lease]:
    """`count` leases that cover all hash keys, owned in turn by `owners`."""
    width = (MAX_HASH_KEY + 1) // count
    prefix = f"{stream}:" if stream else ""
    return [
        Lease(
            f"{prefix}shardId-{i:012d}",
            Position("49") if i else TRIM_HORIZON,
            owner=owners[i % len(owners)],
            hash_key_range=HashKeyRange(
                i * width, MAX_HASH_KEY if i == count - 1 else (i + 1) * width - 1
            ),
            throughput_kbps=10.0,
            stream=stream,
        )
        for i in range(count)
    ]


def led(rows: Sequence[Lease], workers: Sequence[WorkerMetrics], **changes: Any) -> CycleReport:
    return CycleReport(
        led=True,
        lock_owner="dagster/x",
        leases=tuple(rows),
        workers=tuple(workers),
        coverage=(StreamCoverage("orders", complete=True),),
        **changes,
    )
