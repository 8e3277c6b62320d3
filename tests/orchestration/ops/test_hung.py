"""A run whose worker is hung: its log says so while the worker blocks."""

from __future__ import annotations

import time
from typing import Any

import dagster as dg

from kcl_pipeline.events import HangStep, WorkerHung, WorkerResumed
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.orchestration.ops.test_consume import execute
from tests.support import worker_world
from tests.support.dagster_fakes import FakePipeline
from tests.support.worker_world import World
from tests.worker.test_hung import Blocking

STACKS = 'Thread processing (most recent call first):\n  File "orders.py", line 7 in per_minute'


def log_of(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(entry.message for entry in instance.all_logs(run_id))


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_stacks_of_a_hung_worker_are_in_the_log_of_the_run_while_it_blocks():
    seen = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        built = pipeline.built_workers[0]
        built["events"](WorkerHung(worker_id, HangStep.WRITING, 900.0, ("s-0",), STACKS))
        until(lambda: STACKS in log_of(instance, built["run_id"]))
        seen.append(log_of(instance, built["run_id"]))
        built["events"](WorkerResumed(worker_id))
        return WorkerSummary(
            worker_id, StopReason.DRAIN_REQUESTED, WorkerStatus(totals=WorkerTotals(1.0))
        )

    with dg.DagsterInstance.ephemeral() as instance:
        pipeline = FakePipeline(script=script)
        assert execute(pipeline, instance).success
        assert "worker_hung worker_id=" in seen[0]


class RealWorker(FakePipeline):
    """Its worker is a real one with tables in memory, whose transform blocks."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def build_worker(self, worker_id: str, **given: Any) -> Any:
        super().build_worker(worker_id, **given)
        return self.world.make_worker(worker_id, events=given["events"])


def test_a_run_whose_transform_blocks_for_ever_ends_as_failed(monkeypatch):
    monkeypatch.setattr(worker_world, "VirtualClock", ShiftedClock)
    blocking = Blocking()
    world = World(
        shards=1,
        buffered=True,
        transform=blocking,
        parallel=True,
        worker={"hung_after_millis": 400, "stop_hung_after_millis": 800},
    )
    world.worker.reporter.deregister()
    world.put(b"a-secret-record")
    with dg.DagsterInstance.ephemeral() as instance:
        pipeline = RealWorker(world)
        began = time.monotonic()
        result = execute(pipeline, instance)
        assert time.monotonic() - began < 60
        assert not blocking.release.is_set()
        blocking.release.set()
        assert not result.success
        failure = result.failure_data_for_node("orders_eu_worker").user_failure_data
        assert "the worker was hung in step writing for" in failure.description
        assert "its leases are released" in failure.description
        log = log_of(instance, result.run_id)
        assert "Thread processing (most recent call first):" in log
        assert "test_hung.py" in log
        assert " __call__" in log
        assert "a-secret-record" not in log
        assert world.leases.get("shardId-000000000000").owner is None
