"""The jobs of an operator, each executed in process against the embedded AWS."""

from __future__ import annotations

import dagster as dg
import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.leases.application.identity import ApplicationIdentity
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.orchestration.assets.names import python_name
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
        """Execute a job; returns its outcome, or the sentence of its failure."""
        name = f"{self.prefix}_{operation}"
        job = self.defs.resolve_job_def(name)
        result = job.execute_in_process(
            run_config={"ops": {f"{name}_op": {"config": config}}},
            instance=self.instance,
            raise_on_error=False,
        )
        if not result.success:
            return result.failure_data_for_node(f"{name}_op").user_failure_data.description
        (event,) = result.get_asset_observation_events()
        found = event.asset_observation_data.asset_observation.metadata
        assert found["operation"].value == operation
        return found["outcome"].value


@pytest.fixture
def jobs(server, tmp_path):
    with dg.instance_for_test() as instance:
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
    assert jobs.run("drain_worker", worker_id="blue-1", dry_run=True).startswith("dry run: blue-1")
    text = jobs.run("drain_worker", worker_id="blue-1", wait_seconds=0)
    assert "blue-1 is requested to end" in text
    rows = {one.worker_id: one for one in jobs.fleet.tables.workers.scan_workers().workers}
    assert rows["blue-1"].drain_requested
    assert "there is no worker w-7" in jobs.run("drain_worker", worker_id="w-7")


def test_move_a_lease(jobs):
    key = jobs.fleet.keys[3]
    text = jobs.run("move_lease", lease_key=key, to_worker="blue-1", dry_run=True)
    assert text == f"dry run: would move {key} from no owner to blue-1 at once"
    assert jobs.run("move_lease", lease_key=key, to_worker="blue-1").startswith("moved")
    assert jobs.fleet.tables.lease.get(key).owner == "blue-1"


def test_balance(jobs):
    assert "no leader has taken the request" in jobs.run("rebalance", wait_seconds=0)
    assert jobs.fleet.tables.coordinator.read_control().balance is not None


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
    assert "leases are held" in jobs.run("seek", to="LATEST", dry_run=False, pause=False)
    release(fleet)
    text = jobs.run("seek", to="LATEST", shards=[key], dry_run=False, wait_seconds=5)
    assert "1 position changed" in text
    assert fleet.tables.lease.get(key).checkpoint == LATEST
    assert "missing, or given twice" in jobs.run("seek", to="LATEST", ago="1m")


def test_retire(jobs):
    fleet = jobs.fleet
    text = jobs.run("retire")
    assert text.startswith("dry run")
    assert f"would delete the table {fleet.name}-WorkerMetricStats (2 rows)" in text
    assert "the rows of worker blue-1, worker blue-2, leader blue-1 must not change" in text
    release(fleet)
    for worker_id in ("blue-1", "blue-2"):
        fleet.tables.workers.deregister(worker_id)
    coordinator = fleet.tables.coordinator
    assert coordinator.release_lock(coordinator.read_lock())
    assert "is not the name of the application" in jobs.run("retire", dry_run=False)
    assert "is not the name" in jobs.run("retire", dry_run=False, confirm="other")
    text = jobs.run("retire", dry_run=False, confirm=fleet.name)
    assert f"deleted the table {fleet.name}-CoordinatorState" in text
    names = fleet.clients.dynamodb.list_tables()["TableNames"]
    assert not [name for name in names if name.startswith(fleet.name)]


def test_every_field_of_a_form_is_described(jobs):
    for operation in (
        "pause",
        "resume",
        "drain_worker",
        "move_lease",
        "rebalance",
        "seek",
        "retire",
        "replay",
    ):
        name = f"{jobs.prefix}_{operation}"
        job = jobs.defs.resolve_job_def(name)
        assert job.description
        (op,) = [node.definition for node in job.nodes]
        fields = op.config_schema.config_type.fields
        assert all(field.description for field in fields.values()), operation
