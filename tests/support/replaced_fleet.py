"""A leader sensor whose code changes, and runs that Dagster and the workers play."""

from __future__ import annotations

import time
from dataclasses import replace as changed

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leases.state.worker_status import PausedLease, WorkerStatus
from kcl_pipeline.orchestration.assets.names import REFUSED_TAG
from kcl_pipeline.orchestration.assets.pipeline_version import pipeline_version
from kcl_pipeline.orchestration.assets.runs.runs import ACTIVE
from tests.support.dagster_fakes import FakeFleet, FakePipeline, worker
from tests.support.sensor_stage import Stage


class Fleet:
    """A sensor, and runs that Dagster and the workers play."""

    def __init__(self, instance: dg.DagsterInstance, version: str = "one", **fleet) -> None:
        fleet = {"min": 2, "max": 2, **fleet}
        self.instance = instance
        self.fleet = fleet
        self.alive: list[dg.DagsterRun] = []
        self.most = 0
        self.broken: set[str] = set()
        """Versions whose workers pause a shard at once."""
        self.log: list[str] = []
        self.deploy(version)

    def deploy(self, version: str) -> None:
        """Load the code again: nothing of the sensor's memory but the cursor stays."""
        fleet = FakeFleet(rolling_replacement=True, code_version=version, **self.fleet)
        before = getattr(self, "stage", None)
        self.stage = Stage(self.instance, FakePipeline(workers=fleet))
        self.stage.clock.now = time.time() if before is None else before.clock.now
        if before is not None:
            self.stage.cursor, self.stage.workers = before.cursor, before.workers
        self.version = pipeline_version(self.stage.pipeline)

    def tick(self, *, status: S = S.STARTED, fails: bool = False) -> dg.SensorResult:
        self.stage.workers.beat(*(self.stage.worker_of(run) for run in self.alive))
        result = self.stage()
        for worker_id in self.stage.workers.drained:
            for run in [one for one in self.alive if self.stage.worker_of(one) == worker_id]:
                self.end(run)
        self.stage.workers.drained.clear()
        for request in result.run_requests or ():
            run = self.stage.run(status, **request.tags)
            self.log.append(f"start {self.kind(run)}")
            if fails:
                self.instance.report_run_failed(run)
            elif status is S.STARTED:
                self.alive.append(run)
                if self.version in self.broken:
                    worker_id = self.stage.worker_of(run)
                    paused = PausedLease("s-0", "ValueError: x", 1.0)
                    status_row = WorkerStatus(paused=(paused,), paused_leases=1)
                    row = changed(worker(worker_id), status=status_row)
                    self.stage.workers.rows[worker_id] = row
        active = self.instance.get_runs(dg.RunsFilter(statuses=list(ACTIVE)))
        self.most = max(self.most, len(active))
        return result

    def end(self, run: dg.DagsterRun) -> None:
        self.log.append(f"drain {self.kind(run)}")
        self.alive.remove(run)
        del self.stage.workers.rows[self.stage.worker_of(run)]
        ended = self.instance.get_run_by_id(run.run_id)
        if REFUSED_TAG in ended.tags:
            self.instance.report_run_failed(ended)
        else:
            self.instance.report_run_canceled(ended)

    def kind(self, run: dg.DagsterRun) -> str:
        return "new" if run.tags["kcl/version"] == self.version else "old"

    def kinds(self) -> list[str]:
        return sorted(self.kind(run) for run in self.alive)


@pytest.fixture(name="fleet")
def fleet_fixture(instance):
    made = Fleet(instance)
    for _ in range(10):
        made.tick()
    assert made.kinds() == ["new", "new"]
    made.log.clear()
    made.deploy("two")
    assert made.kinds() == ["old", "old"]
    return made
