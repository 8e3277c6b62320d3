"""Operations as `kcl-pipeline do` and the job of an operator run them, on tables in memory."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.control.operations import OPERATIONS, OperationRequest
from kcl_pipeline.errors import NotFoundError, SettingsError
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.leases.application import Loss
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import Position
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


@pytest.fixture
def context() -> OperationContext:
    clock = VirtualClock()
    control = ApplicationControl(
        SETTINGS,
        InMemoryLeaseTable("orders", clock=clock),
        InMemoryWorkerMetricsTable(clock=clock),
        InMemoryCoordinatorStateTable(clock=clock),
        clock,
        "me@host",
    )
    ensure_client_version(control.coordinator, "w-1", clock)
    assert create_lease(control.leases, Lease("shardId-0", Position("7"), owner="w-1"))
    control.workers.report(WorkerMetrics("w-1", int(clock.wall()), run_id="run-1"))
    return OperationContext(lambda: control, lambda _: None)


def run(context: OperationContext, operation: str, **options: object):
    done = OPERATIONS[operation](**options).run(context)
    assert json.loads(json.dumps(done.result)) is not None, "the result is JSON"
    assert done.sentences
    return done


def test_a_pause_is_not_complete_while_a_lease_is_held(context):
    done = run(context, "pause", reason="new table", wait_seconds=2.0)
    assert not done.is_complete
    assert "1 lease still held by w-1" in done.sentences
    assert context.control.coordinator.read_control().pause.reason == "new table"
    assert run(context, "pause", wait_seconds=0.0).is_complete, "nobody waits for the result"
    assert run(context, "resume").sentences[0].startswith("resumed; it was paused")
    assert run(context, "resume").sentences == ["it was not paused"]


def test_a_drain_asks_the_worker_and_waits(context):
    shown = run(context, "drain", worker_id="w-1", dry_run=True)
    assert shown.sentences == ["dry run: w-1 would end and give up 1 lease"]
    assert not run(context, "drain", worker_id="w-1", wait_seconds=1.0).is_complete
    (row,) = context.control.workers.scan_workers().workers
    assert row.drain_requested
    with pytest.raises(NotFoundError, match="there is no worker w-7"):
        run(context, "drain", worker_id="w-7")


def test_losses_are_acknowledged(context):
    event = RecordsLost("w-1", "shardId-0", LossReason.ROW_DELETED, Position("7"), stream="orders")
    lost = Loss.of(event, 1_000)
    context.control.coordinator.change_losses(lambda losses: losses.with_losses([lost]))
    done = run(context, "acknowledge")
    assert done.sentences[-1] == "1 of 1 acknowledged"
    assert done.result["unacknowledged"] == 0
    assert context.control.coordinator.read_losses().unacknowledged == 0


def test_accept_shows_the_record_and_needs_what_it_records(context):
    assert "no streams are recorded" in run(context, "accept").sentences[0]
    with pytest.raises(SettingsError, match="the sink is not known"):
        run(context, "accept", sink=True)
    with pytest.raises(SettingsError, match="the streams are not known"):
        run(context, "accept", streams=True)


@pytest.mark.parametrize("operation", ["compact", "vacuum"])
def test_a_sink_without_a_table_is_refused_and_a_missing_one_is_said(context, tmp_path, operation):
    with pytest.raises(SettingsError, match="has no such table: output"):
        run(context, operation)
    sink = SimpleNamespace(uri=str(tmp_path / "table"), storage_options={})
    pipeline = SimpleNamespace(sink=sink)
    done = run(OperationContext(context.open_control, lambda _: None, pipeline), operation)
    assert "there is no table; the first batch creates it" in done.sentences[0]
    assert done.result["tables"][0]["exists"] is False


@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("pause", {"wait_seconds": -1}),
        ("vacuum", {"retention_hours": 0}),
        ("compact", {"table": "none"}),
        ("drain", {}),
        ("resume", {"reason": "x"}),
    ],
)
def test_wrong_options_are_refused(operation, options):
    with pytest.raises(ValidationError):
        OPERATIONS[operation](**options)


def test_every_option_is_described_and_every_operation_says_what_it_does():
    for request in OPERATIONS.values():
        assert issubclass(request, OperationRequest)
        assert request.__doc__
        assert all(field.description for field in request.model_fields.values())
