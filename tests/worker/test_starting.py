"""A worker that starts while the tables are throttled or failing begins when they are not any
more.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter

import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import AccessDeniedError, ThrottledError, UnavailableError
from kcl_pipeline.events import LossReason, RecordsLost, WorkerStarted
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.local import EmbeddedAws, FaultRule
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.threads import (
    START_UP,
    StoppedWhileRetryingError,
    retry_transient,
)
from kcl_pipeline.worker.summary import StopReason
from tests.support.shortened import shortened
from tests.support.worker_world import World


@pytest.fixture
def aws():
    with EmbeddedAws() as aws:
        yield aws


@pytest.fixture
def pipeline(aws, tmp_path):
    fast = {
        "lease": {"failover_time_millis": 1_000},
        "leader": {"leader_lease_duration_millis": 500, "leader_heartbeat_period_millis": 100},
    }
    return KinesisPipeline(
        "orders", ["orders"], DeltaSink(str(tmp_path / "raw")), settings_overrides=fast
    )


def clients_of(aws, pipeline):
    options = SessionOptions(
        endpoint_url=aws.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    return AwsClients(pipeline.settings, options)


@pytest.mark.parametrize("first_start", shortened([True, False], bool))
def test_throttled_tables_delay_a_start_and_do_not_end_it(aws, pipeline, first_start):
    clients = clients_of(aws, pipeline)
    clients.kinesis.create_stream(StreamName="orders", ShardCount=2)
    clients.kinesis.put_records(
        StreamName="orders", Records=[{"Data": b"x", "PartitionKey": f"{n}"} for n in range(10)]
    )
    pipeline.ensure_tables(clients=clients)
    if not first_start:
        before = pipeline.build_worker("w-0", clients=clients)
        before.start_up()
        before.reporter.deregister()
    rules = [
        FaultRule(service="dynamodb", operation="DescribeTable", kind="throttle", count=2),
        FaultRule(service="dynamodb", operation="GetItem", kind="error500", count=1),
        FaultRule(service="dynamodb", operation="UpdateItem", kind="throttle", count=1),
    ]
    aws.fault_rules.replace(rules)
    events = []
    worker = pipeline.build_worker("w-1", clients=clients, events=events.append)
    aws.fault_rules.replace(rules)
    summary = worker.run(threading.Event(), mode="drain")
    assert [rule.count for rule in aws.fault_rules.rules] == [0, 0, 0]
    assert summary.reason is StopReason.DRAINED
    assert summary.total.records == 10
    troubled = {event.operation for event in events if type(event).__name__ == "AwsTrouble"}
    first_update = (
        "look at the identity of the application" if first_start else "first worker metrics report"
    )
    assert {"look at the tables", first_update} <= troubled


def test_the_first_row_of_a_drain_says_that_it_drains(aws, pipeline):
    """The sensor counts it as a worker of the fleet otherwise, and ends another one."""
    clients = clients_of(aws, pipeline)
    clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
    workers, rows = open_tables(pipeline.settings, clients, SystemClock()).workers, []

    def note(event):
        if isinstance(event, WorkerStarted):
            rows.extend(workers.scan_workers().workers)

    worker = pipeline.build_worker("w-1", clients=clients, events=note)
    assert worker.run(threading.Event(), mode="drain").reason is StopReason.DRAINED
    assert [row.status.is_drain for row in rows] == [True]


@pytest.mark.parametrize("kind", ["worker", "leader"])
def test_lost_records_are_recorded_and_passed_on(aws, pipeline, kind):
    clients, events = clients_of(aws, pipeline), []
    clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
    built = pipeline.build_worker("w-1", clients=clients, events=events.append)
    if kind == "leader":
        built = pipeline.build_leader("w-1", clients=clients, events=events.append)
    table = open_tables(pipeline.settings, clients, SystemClock()).coordinator
    ensure_client_version(table, "w-1", SystemClock())
    lost = RecordsLost("w-1", "shardId-1", LossReason.ROW_DELETED, stream="orders")
    (built._dependencies if kind == "worker" else built.dependencies).events(lost)
    assert events[-1] == lost
    end = time.monotonic() + 30
    while not table.read_losses().count and time.monotonic() < end:
        time.sleep(0.05)
    losses = table.read_losses()
    assert (losses.count, losses.last.shard) == (1, "orders shardId-1")


def test_a_worker_that_is_told_to_stop_before_it_could_start_has_stopped(aws, pipeline):
    clients = clients_of(aws, pipeline)
    clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
    stop = threading.Event()

    def note(event):
        if "client version" in str(event):
            stop.set()

    worker = pipeline.build_worker("w-1", clients=clients, events=note)
    aws.fault_rules.replace([FaultRule(service="dynamodb", operation="GetItem", kind="throttle")])
    assert worker.run(stop).reason is StopReason.STOPPED
    aws.fault_rules.replace([])
    assert clients.dynamodb.scan(TableName="orders-WorkerMetricStats")["Items"] == []


@pytest.mark.parametrize(
    ("error", "tries_at_least", "seconds"),
    [
        (ThrottledError("slow down"), 10, START_UP.limit_seconds),
        (UnavailableError("500"), 10, START_UP.limit_seconds),
        (UnavailableError("refused", code="EndpointConnectionError"), 1, 0),
        (AccessDeniedError("no"), 1, 0),
    ],
)
def test_patience_has_an_end_and_is_for_what_may_pass(error, tries_at_least, seconds):
    clock, tries = VirtualClock(), []
    began = clock.monotonic()

    def step():
        tries.append(clock.monotonic())
        raise error

    with pytest.raises(type(error)):
        retry_transient("step", step, clock, random.Random(1), lambda _: None, clock.signal())
    assert len(tries) >= tries_at_least
    assert len(tries) == 1 or len(tries) < 60
    assert seconds / 2 <= clock.monotonic() - began <= seconds


def test_a_stop_ends_the_patience():
    def step():
        raise ThrottledError("slow down")

    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedWhileRetryingError, match="step"):
        retry_transient("step", step, SystemClock(), random.Random(1), lambda _: None, stop)


def test_a_worker_that_stops_takes_nothing_more(aws, pipeline):
    clients = clients_of(aws, pipeline)
    clients.kinesis.create_stream(StreamName="orders", ShardCount=8)
    stop, events = threading.Event(), []

    def note(event):
        events.append(type(event).__name__)
        if events[-1] == "LeaseGained":
            stop.set()

    worker = pipeline.build_worker("w-1", clients=clients, events=note)
    steps, start = [], worker.lifecycle.progress.start

    def started(consumers, seen):
        steps.extend(consumers)
        return start(consumers, seen)

    worker.lifecycle.progress.start = started
    discoveries, discover = [], worker.leases.discover

    def counted(*args, **options):
        discoveries.append(stop.is_set())
        return discover(*args, **options)

    worker.leases.discover = counted
    assert worker.run(stop).reason is StopReason.STOPPED
    assert discoveries.count(True) == 1, (
        "once more at the end, to release what was assigned meanwhile"
    )
    assert steps == []
    rows = clients.dynamodb.scan(TableName="orders")["Items"]
    assert len(rows) == 8
    assert not [row for row in rows if "leaseOwner" in row]
    assert clients.dynamodb.scan(TableName="orders-WorkerMetricStats")["Items"] == []


def test_the_second_report_comes_soon():
    """A leader that finds the row knows that its worker is alive when the row changes."""
    world = World()
    reports = []
    report = world.rows.report

    def noted(row, *, takes_over):
        reports.append(world.clock.monotonic())
        return report(row, takes_over=takes_over)

    world.rows.report = noted
    began = world.clock.monotonic()
    world.run(30)
    seconds = [at - began for at in reports]
    assert seconds[0] <= 3
    assert [round(b - a) for a, b in itertools.pairwise(seconds)] == [10, 10]


def test_the_first_commit_is_reported_at_once():
    """Dagster's sensor reports the first rows at its next tick, and reads them from the row."""
    world = World()
    world.run(5)
    world.put(b"1")
    world.run(2)
    (row,) = world.rows.scan_workers().workers
    assert row.status.totals.records == 1


def test_a_worker_opens_its_application_once(aws, pipeline, monkeypatch):
    clients = clients_of(aws, pipeline)
    clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
    worker = pipeline.build_worker("w-1", clients=clients)
    tables = (
        worker._dependencies.lease_table,
        worker._dependencies.worker_table,
        worker._dependencies.coordinator_table,
    )
    again = []
    for table in tables:
        monkeypatch.setattr(table, "ensure_exists", lambda name=table.name: again.append(name))
    worker.start_up()
    worker.reporter.deregister()
    assert again == []


@pytest.mark.parametrize(
    ("first_start", "created", "described"),
    [
        # Each table: that it is missing, that it is active. The lease table: before any table is
        # created, and its size before the scans of two objects. Its index comes with it.
        (True, 3, 9),
        # Each table once. The lease table: its size before the scans of two objects.
        (False, 0, 5),
    ],
)
def test_a_start_ensures_streams_and_tables_once(tmp_path, first_start, created, described):
    """The server counts the calls."""
    calls = Counter()
    with EmbeddedAws(faults=lambda service, operation, _body: calls.update([operation])) as aws:
        pipeline = KinesisPipeline("orders", ["orders"], DeltaSink(str(tmp_path / "raw")))
        clients = clients_of(aws, pipeline)
        clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
        if not first_start:
            pipeline.ensure_tables(clients=clients)
        calls.clear()
        worker = pipeline.build_worker("w-1", clients=clients)
        worker.start_up()
        worker.reporter.deregister()
    assert (calls["DescribeStreamSummary"], calls["ListShards"]) == (1, 0)
    assert (calls["CreateTable"], calls["DescribeTable"]) == (created, described)
    assert calls["UpdateTable"] == 0
