"""Runs that Dagster's queue holds back: the sentence of the tick and the check say which limit."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S
from dagster._core.instance.types import InstanceType
from dagster._core.launcher.sync_in_memory_run_launcher import SyncInMemoryRunLauncher
from dagster._core.run_coordinator import QueuedRunCoordinator
from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES
from dagster._core.storage.event_log import InMemoryEventLogStorage
from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager
from dagster._core.storage.root import TemporaryLocalArtifactStorage
from dagster._core.storage.runs import InMemoryRunStorage
from dagster._utils.tags import TagConcurrencyLimitsCounter

from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import VERSION_TAG, Names
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.runs import (
    IN_PROGRESS,
    RunView,
    queue_problem,
    reached_limits,
)
from tests.support.dagster_fakes import FakeFleet, FakePipeline, resources
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

NOW = 1_000_000.0
TAGS = Names.of(FakePipeline()).worker_run_tags
APPLICATION = {"key": "kcl/application", "value": "orders-eu", "limit": 1}
EACH = {"key": "kcl/mode", "value": {"applyLimitPerUniqueValue": True}, "limit": 2}
ANY = {"key": "kcl/mode", "value": {"applyLimitPerUniqueValue": False}, "limit": 3}
THREE = "the run limit 2 (max_concurrent_runs) is reached by 3 runs in progress"
# A place may have become free a moment ago.
UNKNOWN = (
    "no run limit or tag limit is reached now; if it stays queued, a pool limit or Dagster's "
    "daemon holds it back"
)
CONTINUOUS_RUNS = {"key": "kcl/mode", "value": "continuous", "limit": 1}
TEAM = {"key": "team", "limit": 1}
LETTER = {"key": "letter", "value": "b", "limit": 2}
WITHOUT_VALUE = {"key": "dagster/max_retries", "limit": 2}


def queued_instance(**config: Any) -> dg.DagsterInstance:
    """As `DagsterInstance.ephemeral`, with a run queue."""
    return dg.DagsterInstance(
        instance_type=InstanceType.EPHEMERAL,
        local_artifact_storage=TemporaryLocalArtifactStorage(),
        run_storage=InMemoryRunStorage(),
        event_storage=InMemoryEventLogStorage(),
        compute_log_manager=NoOpComputeLogManager(),
        run_coordinator=QueuedRunCoordinator(**config),
        run_launcher=SyncInMemoryRunLauncher(),
    )


def queued(seconds: float) -> RunView:
    return RunView("r", S.QUEUED, "w", continuous=True, created=NOW - seconds)


def test_the_statuses_that_count_are_those_of_dagster():
    assert set(IN_PROGRESS) == set(IN_PROGRESS_RUN_STATUSES) - {S.SUSPENDED}


@pytest.mark.parametrize(
    ("config", "running", "reason"),
    [
        (
            {"max_concurrent_runs": 2},
            [{}, {}],
            "the run limit 2 (max_concurrent_runs) is reached by 2 runs in progress",
        ),
        (
            {"max_concurrent_runs": 25, "tag_concurrency_limits": [CONTINUOUS_RUNS]},
            [TAGS],
            "the tag limit 1 of kcl/mode: continuous is reached",
        ),
        (
            {"max_concurrent_runs": 2, "tag_concurrency_limits": [TEAM, LETTER]},
            [{"team": "data"}, {"letter": "b"}, {}],
            f"{THREE} and the tag limit 1 of team is reached",
        ),
        ({"max_concurrent_runs": 25}, [{}, {}, {}], UNKNOWN),
        ({"max_concurrent_runs": -1}, [{}], UNKNOWN),
    ],
)
def test_the_limit_is_named(config, running, reason):
    with queued_instance(**config) as instance:
        stage = Stage(instance)
        for tags in running:
            stage.run(S.STARTED, **tags)
        wanted = {**TAGS, "team": "data", "letter": "b"}
        assert queue_problem([queued(61), queued(200)], instance, wanted, NOW) == (
            f"2 worker runs have been queued for up to 3 min: {reason}"
        )
        assert queue_problem([queued(60)], instance, wanted, NOW) is None


@pytest.mark.parametrize("limit", [APPLICATION, EACH, ANY, WITHOUT_VALUE])
@pytest.mark.parametrize("running", [0, 1, 2, 3])
def test_a_tag_limit_is_judged_as_dagster_judges_it(limit, running):
    with queued_instance(tag_concurrency_limits=[limit]) as instance:
        stage = Stage(instance)
        for index in range(running):
            stage.run(S.STARTED if index else S.STARTING, **TAGS)
        stage.run(S.STARTED, "drain", **{"kcl/application": "other"})
        waiting = stage.run(S.QUEUED, **TAGS)
        progressing = instance.get_runs(dg.RunsFilter(statuses=list(IN_PROGRESS_RUN_STATUSES)))
        counter = TagConcurrencyLimitsCounter([limit], progressing)
        assert bool(reached_limits(instance, TAGS)) == counter.is_blocked(waiting)


def test_limits_of_other_runs_are_left_out():
    other = {"key": "kcl/application", "value": "clicks", "limit": 1}
    with queued_instance(max_concurrent_runs=-1, tag_concurrency_limits=[other]) as instance:
        Stage(instance).run(S.STARTED, **{"kcl/application": "clicks"})
        assert reached_limits(instance, TAGS) == ()


def test_an_instance_without_a_queue_has_no_limits(instance):
    Stage(instance).run(S.STARTED, **TAGS)
    assert reached_limits(instance, TAGS) == ()


def evaluation(result: dg.SensorResult) -> dg.AssetCheckEvaluation | None:
    found = [
        event
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation) and event.check_name == "workers_running"
    ]
    return found[0] if found else None


def test_runs_that_wait_in_the_queue_count_and_the_limit_is_named():
    pipeline = FakePipeline(workers=FakeFleet(min=4, max=8))
    with queued_instance(max_concurrent_runs=2) as instance:
        stage = Stage(instance, pipeline)
        assert len(stage().run_requests) == 4
        running = [stage.run(S.STARTED, **TAGS) for _ in range(2)]
        waiting = [stage.run(S.QUEUED, **TAGS) for _ in range(2)]
        record = instance.get_run_record_by_id(running[0].run_id)
        stage.clock.now = record.create_timestamp.timestamp()
        texts = []
        for _ in range(20):
            stage.workers.beat(*(stage.worker_of(run) for run in running))
            result = stage()
            assert not result.run_requests, "queued runs count"
            texts.append(result.skip_reason.skip_message)
            found = evaluation(result)
            if found is not None and not found.passed:
                break
        assert "2 of 4 workers run, 2 are queued" in texts[0]
        assert "max_concurrent_runs" not in texts[0]
        reason = (
            "2 worker runs have been queued for up to 65 s: the run limit 2 (max_concurrent_runs) "
            "is reached by 2 runs in progress"
        )
        assert reason in texts[-1]
        assert reason in found.description
        assert found.severity is dg.AssetCheckSeverity.WARN
        for run in waiting:
            instance.report_run_canceled(run)
            stage.run(S.STARTED, **TAGS)
        assert "max_concurrent_runs" not in stage().cursor


def test_workers_that_keep_dying_fail_the_check_until_one_lives(instance):
    stage = Stage(instance)
    assert evaluation(stage()).passed
    for _ in range(2):
        instance.report_run_failed(stage.run())
    failed = evaluation(stage(10))
    assert not failed.passed
    assert "the last 2 worker runs failed within a minute of the start" in failed.description
    assert "the last 2 worker runs failed" in stage.cursor


@pytest.mark.parametrize("version", [None, "former"])
def test_the_button_evaluates_the_same(version):
    """Failures of former code of the user say nothing about the code of now."""
    tags = TAGS if version is None else {**TAGS, VERSION_TAG: version}
    overrides = {
        "lease": {"failover_time_millis": 1_000},
        "worker": {"worker_metrics_reporter_freq_in_millis": 200},
    }
    pipeline = FakePipeline(overrides=overrides)
    defs = build_definitions(pipeline, DagsterOptions(leader_default_running=True))
    key = dg.AssetCheckKey(Names.of(pipeline).fleet, "workers_running")
    with queued_instance(max_concurrent_runs=8) as instance:
        stage = Stage(instance, pipeline)
        for _ in range(2):
            instance.report_run_failed(stage.run(**tags))
        job = dg.define_asset_job("check", selection=dg.AssetSelection.checks(key))
        merged = dg.Definitions.merge(
            defs, dg.Definitions(jobs=[job], executor=dg.in_process_executor)
        )
        result = merged.resolve_job_def("check").execute_in_process(
            instance=instance, resources=resources(pipeline), raise_on_error=True
        )
        (found,) = result.get_asset_check_evaluations()
        assert found.passed == (version is not None)
        assert ("the last 2 worker runs failed" in found.description) == (version is None)
