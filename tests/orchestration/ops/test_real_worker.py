"""A run with a real worker on the embedded AWS: its page, and an op of the project beside it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from deltalake import DeltaTable

from kcl_pipeline import (
    AwsResource,
    CoordinatorStateTableResource,
    DeltaSink,
    EmbeddedAws,
    KinesisPipeline,
    LeaseTableResource,
    WorkerMetricsTableResource,
)
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.orchestration import worker_op

LONGEST_SECONDS = 300.0
FAST = {
    "lease": {"failover_time_millis": 1000},
    "leader": {"leader_lease_duration_millis": 1000, "leader_heartbeat_period_millis": 250},
}


def session() -> AwsResource:
    """The embedded AWS of this test. Clients are cached by the fields."""
    return AwsResource(endpoint_url=os.environ["AWS_ENDPOINT_URL"])


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KinesisPipeline]:
    with EmbeddedAws() as aws:
        for name, value in aws.environment().items():
            monkeypatch.setenv(name, value)
        pipeline = KinesisPipeline(
            "orders", ["orders"], DeltaSink(str(tmp_path / "orders")), settings_overrides=FAST
        )
        kinesis = session().clients(pipeline.settings).kinesis
        kinesis.create_stream(StreamName="orders", ShardCount=1)
        kinesis.get_waiter("stream_exists").wait(StreamName="orders")
        for number in range(7):
            kinesis.put_record(StreamName="orders", PartitionKey=str(number), Data=b"an order")
        yield pipeline


def pause_after(pipeline: KinesisPipeline, rows: int) -> None:
    """Pause the application when its table has the rows, or the time is over."""
    deadline = time.monotonic() + LONGEST_SECONDS
    uri = pipeline.sink.uri
    while time.monotonic() < deadline and (
        not DeltaTable.is_deltatable(uri) or DeltaTable(uri).count() < rows
    ):
        time.sleep(0.2)
    state = CoordinatorStateTableResource(aws=session(), application_name="orders").table()
    assert state.put_pause(Pause("ann"), replacing=state.read_control())


def test_a_planned_end_is_a_green_run_whose_page_has_the_totals(
    orders: KinesisPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no sensor runs that the worker could wait for
    monkeypatch.setattr(worker_op, "CONTINUOUS_LEADER_PATIENCE_SECONDS", 0.5)
    orders.ensure_tables()
    job = orders.definitions(aws=session()).resolve_job_def("orders_consume")
    operator = threading.Thread(target=pause_after, args=(orders, 7), daemon=True)
    with dg.instance_for_test() as instance:
        operator.start()
        result = job.execute_in_process(instance=instance)
        run = instance.get_run_by_id(result.run_id)
        log = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert run is not None
    assert run.status is dg.DagsterRunStatus.SUCCESS
    assert run.tags["kcl/read"] == "7 records"
    assert run.tags["kcl/landed"].startswith("7 rows in ")
    assert run.tags["kcl/handed_over"] == "0 shards"
    assert any("after 7 records" in text for text in log)
    (event,) = result.get_asset_materialization_events()
    assert event.asset_key == orders.output_key
    metadata = event.materialization.metadata
    assert metadata["run_records"].value == 7
    assert metadata["dagster/row_count"].value == 7
    assert "dagster/column_schema" in metadata
    assert "dagster/column_lineage" in metadata


def test_an_asset_of_the_project_reads_the_tables_with_two_arguments(
    orders: KinesisPipeline,
) -> None:
    orders.ensure_tables()

    @dg.asset
    def report(leases: LeaseTableResource, workers: WorkerMetricsTableResource) -> tuple[int, int]:
        return len(leases.table().list_leases().leases), len(workers.table().scan_workers().workers)

    resources = {
        "leases": LeaseTableResource(aws=session(), application_name="orders"),
        "workers": WorkerMetricsTableResource(aws=session(), application_name="orders"),
    }
    result = dg.materialize([report], resources=resources, instance=dg.DagsterInstance.ephemeral())
    assert result.output_for_node("report") == (0, 0)
