"""One leader sensor with its runs and fake tables."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from kcl_pipeline.orchestration.leader import LeaderTick
from kcl_pipeline.orchestration.names import Names, worker_id_of
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from tests.support.dagster_fakes import (
    FakeLeaseTable,
    FakePipeline,
    FakeWorkerTable,
    ManualClock,
    resources,
)


@pytest.fixture(name="instance")
def instance_fixture(dagster_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """An instance without runs and events."""
    dagster_instance.wipe()
    return dagster_instance


def queued_job(name: str) -> RemoteJobOrigin:
    """Where the code of a job is. Dagster needs it for a run in its queue."""
    location = RegisteredCodeLocationOrigin("shop")
    return RemoteJobOrigin(RemoteRepositoryOrigin(location, "__repository__"), name)


class Stage:
    """A tick with everything around it."""

    def __init__(
        self, instance: dg.DagsterInstance, pipeline: FakePipeline | None = None, **options: Any
    ) -> None:
        self.instance = instance
        self.pipeline = pipeline or FakePipeline()
        self.names = Names.of(self.pipeline)
        self.clock = ManualClock()
        self.leases = FakeLeaseTable()
        self.workers = FakeWorkerTable()
        self.coordinator = InMemoryCoordinatorStateTable()
        self.cursor: str | None = '{"open_shards": 8}'
        self.tick = LeaderTick(self.pipeline, self.names, DagsterOptions(**options), self.clock)

    def __call__(self, seconds: float = 5.0) -> dg.SensorResult:
        self.clock.advance(seconds)
        made = resources(self.pipeline, self.leases, self.workers, coordinator=self.coordinator)
        with dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources=made,
            sensor_name=self.names.leader_sensor,
        ) as context:
            result = self.tick(context)
        self.cursor = result.cursor
        return result

    def run(self, status: S = S.STARTED, mode: str = "continuous", **tags: str) -> dg.DagsterRun:
        job = dg.JobDefinition(name=self.names.consume_job, graph_def=dg.GraphDefinition(name="g"))
        return self.instance.create_run_for_job(
            job,
            status=status,
            tags={"kcl/application": self.pipeline.name, "kcl/mode": mode, **tags},
            remote_job_origin=queued_job(job.name) if status is S.QUEUED else None,
        )

    def worker_of(self, run: dg.DagsterRun) -> str:
        return worker_id_of(self.pipeline.name, run.run_id)
