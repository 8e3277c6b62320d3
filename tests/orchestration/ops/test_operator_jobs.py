"""The jobs of an operator, each executed in process against the embedded AWS."""

from __future__ import annotations

import dagster as dg
import pytest
import typer

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.cli import app
from kcl_pipeline.control.operations import OPERATIONS
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.orchestration.names import python_name
from kcl_pipeline.position import LATEST, TRIM_HORIZON
from tests.support.cli_fleet import build_fleet

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


class Jobs:
    """The jobs of a pipeline whose rows are those of a fleet."""

    def __init__(self, fleet, folder, instance):
        self.fleet, self.instance = fleet, instance
        self.prefix = python_name(fleet.name)
        self.defs = KinesisPipeline(
            name=fleet.name,
            streams=[fleet.name],
            transform_arrow=lambda records: records,
            sink=DeltaSink(str(folder / "table")),
        ).definitions()

    def run(self, operation, **config):
        """Execute an operation; returns its outcome, or the sentence of its failure."""
        job, op = self.defs.resolve_job_def(f"{self.prefix}_operate"), f"{self.prefix}_operation"
        result = job.execute_in_process(
            run_config={"ops": {op: {"config": {"operation": {operation: config}}}}},
            instance=self.instance,
            raise_on_error=False,
        )
        if not result.success:
            return result.failure_data_for_node(op).user_failure_data.description
        (event,) = result.get_asset_observation_events()
        found = event.asset_observation_data.asset_observation.metadata
        assert found["operation"].value == operation
        return found["outcome"].value


@pytest.fixture
def jobs(server, tmp_path):
    with dg.DagsterInstance.ephemeral() as instance:
        yield Jobs(build_fleet(server), tmp_path, instance)


def release(fleet):
    for lease in fleet.tables.lease.list_leases().leases:
        assert lease.owner is None or fleet.tables.lease.evict(lease)


def test_pause_and_resume(jobs):
    text = jobs.run("pause", reason="a new table", wait_seconds=0)
    assert "by Dagster run" in text
    assert ": a new table" in text
    assert "workers of the Java KCL, which a pause does not stop: blue-2" in text
    assert "1 lease still held by blue-1" in jobs.run("pause", wait_seconds=0.1)
    assert "resumed; it was paused" in jobs.run("resume")
    assert jobs.run("resume") == "it was not paused"


def test_drain_a_worker(jobs):
    assert jobs.run("drain", worker_id="blue-1", dry_run=True).startswith("dry run: blue-1")
    text = jobs.run("drain", worker_id="blue-1", wait_seconds=0)
    assert "blue-1 is requested to end" in text
    rows = {one.worker_id: one for one in jobs.fleet.tables.workers.scan_workers().workers}
    assert rows["blue-1"].drain_requested
    assert "there is no worker w-7" in jobs.run("drain", worker_id="w-7")


def test_seek(jobs):
    fleet = jobs.fleet
    stream = fleet.kinesis.resolve_stream(fleet.name, multi_stream=False)
    identity = ApplicationIdentity.of([stream], is_multi_stream=False)
    ensure_application(
        fleet.name, fleet.tables.coordinator, fleet.tables.lease, identity, lambda: ()
    )
    key = fleet.keys[3]
    text = jobs.run("seek", to="LATEST")
    assert f"{key}: from TRIM_HORIZON to LATEST; unread records are skipped" in text
    assert "dry run: 4 positions would change" in text
    assert fleet.tables.lease.get(key).checkpoint == TRIM_HORIZON
    assert "leases are held" in jobs.run("seek", to="LATEST", yes=True)
    release(fleet)
    text = jobs.run("seek", to="LATEST", shards=[key], yes=True, wait_seconds=5)
    assert "1 position changed" in text
    assert fleet.tables.lease.get(key).checkpoint == LATEST
    assert "missing, or given twice" in jobs.run("seek", to="LATEST", ago="1m")


def test_retire(jobs):
    fleet = jobs.fleet
    text = jobs.run("retire")
    assert f"dry run; confirm with the name {fleet.name} to delete" in text
    assert f"would delete the table {fleet.name}-WorkerMetricStats (2 rows)" in text
    assert "the rows of worker blue-1, worker blue-2, leader blue-1 must not change" in text
    release(fleet)
    for worker_id in ("blue-1", "blue-2"):
        fleet.tables.workers.deregister(worker_id)
    coordinator = fleet.tables.coordinator
    assert coordinator.release_lock(coordinator.read_lock())
    assert "is not the name of the application" in jobs.run("retire", confirm="other")
    text = jobs.run("retire", confirm=fleet.name)
    assert f"deleted the table {fleet.name}-CoordinatorState" in text
    names = fleet.clients.dynamodb.list_tables()["TableNames"]
    assert not [name for name in names if name.startswith(fleet.name)]


def test_accept_and_acknowledge(jobs):
    text = jobs.run("accept")
    assert "no streams are recorded" in text
    assert "acknowledged" in jobs.run("acknowledge")


def test_compact_and_vacuum(jobs):
    for operation in ("compact", "vacuum"):
        assert "there is no table; the first batch creates it" in jobs.run(operation)
    assert "retention_hours" in jobs.run("vacuum", retention_hours=0)


def test_one_job_has_every_operation_with_every_field_described(jobs):
    job = jobs.defs.resolve_job_def(f"{jobs.prefix}_operate")
    (op,) = [node.definition for node in job.nodes]
    operations = op.config_schema.config_type.fields["operation"].config_type.fields
    assert set(operations) == set(OPERATIONS)
    for name, operation in operations.items():
        fields = operation.config_type.fields
        assert set(fields) == set(OPERATIONS[name].model_fields)
        assert operation.description
        assert all(field.description for field in fields.values()), name


def test_the_command_line_has_the_same_operations_and_options():
    commands = typer.main.get_command(app).commands["do"].commands
    assert set(commands) == set(OPERATIONS)
    for name, command in commands.items():
        assert set(OPERATIONS[name].model_fields) <= {one.name for one in command.params}
