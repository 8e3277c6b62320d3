"""A run whose worker is hung: its log and its check say so while the worker blocks."""

from __future__ import annotations

import time
from typing import Any

import dagster as dg

from kcl_pipeline.events import HangStep, WorkerHung, WorkerResumed
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.worker.summary import StopReason, WorkerProgress, WorkerSummary
from tests.orchestration.ops.test_consume import execute
from tests.support import worker_world
from tests.support.dagster_fakes import FakePipeline
from tests.support.worker_world import World
from tests.worker.test_hung import Blocking

STACKS = "thread processing:\n  orders.py:7 per_minute"


def verdict(instance: dg.DagsterInstance, pipeline: FakePipeline) -> dg.AssetCheckEvaluation | None:
    key = dg.AssetCheckKey(Names.of(pipeline).fleet, "no_worker_hung")
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])
    if not found:
        return None
    return found[key].event.dagster_event.event_specific_data


def log_of(instance: dg.DagsterInstance, run_id: str) -> str:
    return "\n".join(entry.message for entry in instance.all_logs(run_id))


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_hung_worker_fails_the_check_and_its_stacks_are_in_the_log_of_the_run():
    seen = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        built = pipeline.built_workers[0]
        built["events"](WorkerHung(worker_id, HangStep.WRITING, 900.0, ("s-0",), STACKS))
        until(lambda: verdict(instance, pipeline))
        seen.append(verdict(instance, pipeline))
        seen.append(log_of(instance, built["run_id"]))
        built["events"](WorkerResumed(worker_id))
        return WorkerSummary(StopReason.DRAIN_REQUESTED, WorkerProgress(worker_id, 1.0))

    with dg.instance_for_test() as instance:
        pipeline = FakePipeline(script=script)
        assert execute(pipeline, instance).success
        hung, log = seen
        assert not hung.passed
        assert hung.severity is dg.AssetCheckSeverity.ERROR
        assert "in step writing for 900 s while records of 1 lease wait" in hung.description
        assert "worker_hung worker_id=" in log
        assert STACKS in log
        assert verdict(instance, pipeline).passed, "it goes on"


def test_a_worker_that_goes_on_does_not_hide_another_one_that_is_hung():
    seen = []

    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        send = pipeline.built_workers[-1]["events"]
        other = WorkerHung("w-other", HangStep.COMMITTING, 700.4, ("s-1", "s-2"), STACKS)
        for event in (
            WorkerHung(worker_id, HangStep.WRITING, 900.0, ("s-0",), STACKS),
            other,
            WorkerResumed(worker_id),
            WorkerResumed("w-other"),
        ):
            before = verdict(instance, pipeline)
            send(event)
            until(lambda before=before: verdict(instance, pipeline) != before)
            seen.append(verdict(instance, pipeline))
        return WorkerSummary(StopReason.DRAIN_REQUESTED, WorkerProgress(worker_id, 1.0))

    with dg.instance_for_test() as instance:
        pipeline = FakePipeline(script=script)
        assert execute(pipeline, instance).success
        one, both, other, none = seen
        assert [found.passed for found in seen] == [False, False, False, True]
        assert one.description.startswith("1 worker is hung. The first, orders")
        assert both.description.startswith("2 workers are hung. The first, orders")
        assert other.description.startswith(
            "1 worker is hung. The first, w-other, has been in step committing for 700 s while "
            "records of 2 leases wait."
        )
        assert none.description == "no worker is hung"


def test_a_report_that_fails_does_not_fail_the_run(monkeypatch):
    def script(stop: Any, mode: str, on_progress: Any, worker_id: str) -> WorkerSummary:
        pipeline.built_workers[0]["events"](
            WorkerHung(worker_id, HangStep.WRITING, 900.0, ("s-0",), STACKS)
        )
        return WorkerSummary(StopReason.DRAIN_REQUESTED, WorkerProgress(worker_id, 1.0))

    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("kcl_pipeline.orchestration.ops.hangs.hung", broken)
    with dg.instance_for_test() as instance:
        pipeline = FakePipeline(script=script)
        assert execute(pipeline, instance).success


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
    with dg.instance_for_test() as instance:
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
        found = verdict(instance, pipeline)
        assert found is not None
        assert not found.passed
        log = log_of(instance, result.run_id)
        assert "thread processing:" in log
        assert "test_hung.py" in log
        assert " __call__" in log
        assert "a-secret-record" not in log
        assert world.leases.get("shardId-000000000000").owner is None
