"""The load of the workers: which lag and which CPU count, and what they lead to."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import (
    LONGEST_CALM_SECONDS,
    SCALE_COOLDOWN_SECONDS,
    SCALE_DOWN_AFTER_SECONDS,
    AutoscalerMemory,
    Load,
    LoadLimits,
    ScalingDecision,
    cpu_limit,
    decide,
)
from kcl_pipeline.worker_status import HungState, LeaseLag, PausedLease, WorkerStatus
from tests.support.dagster_fakes import FakeFleet, FakePipeline, counted, leases, led
from tests.support.sensor_stage import Stage, instance_fixture  # noqa: F401 (fixture)

NOW = 1_000_000.0
BOTH = LoadLimits(120, 80)
ABOVE = "above scale_up_cpu_percent (80)"
CALM = "the lag has been at most 12 s and the other workers need at most 72 % of CPU"


def measured(worker_id: str, *cpu: float, **status: Any) -> WorkerMetrics:
    return WorkerMetrics(worker_id, 7, stats={"C": cpu}, status=WorkerStatus(**status))


def test_the_cpu_is_the_mean_of_the_newest_averages_of_all_workers():
    old = measured("w-1", 10, 90, 90, 70, 90, -1)
    assert Load.of(5, [old, measured("w-2", 50, 50)]) == Load(5, pytest.approx(200 / 3), 2)


def test_a_new_worker_and_one_without_a_metric_do_not_count():
    assert Load.of(None, [measured("w-1", 95), measured("w-2")]) == Load()
    own = WorkerMetrics("w-3", 7, own_cpu=(40.0, 60.0))
    assert Load.of(None, [own, measured("w-1", 95)]) == Load(None, 50, 1)


def test_a_lag_that_another_worker_cannot_reduce_does_not_count():
    paused = PausedLease("s-0", "the sink refused it", 900.0)
    lags = (LeaseLag("s-0", 900_000), LeaseLag("s-1", 3_000))
    workers = [measured("w-1", lag_millis=900_000, lags=lags, paused=(paused,), paused_leases=1)]
    assert Load.of(900_000, workers).lag_millis == 3_000
    hung = HungState("writing", 900, 4)
    workers.append(measured("w-2", lag_millis=800_000, lags=(LeaseLag("s-2", 800_000),), hung=hung))
    refused = (LeaseLag("s-3", 700_000),)
    workers.append(measured("w-3", lag_millis=700_000, lags=refused, failed_batches=3))
    assert Load.of(900_000, workers).lag_millis == 3_000
    assert Load.of(900_000, workers[1:]).lag_millis is None
    waiting = measured("w-4", lags=(LeaseLag("s-4", 1),), more_lags=9, more_lags_millis=50_000)
    assert Load.of(900_000, [*workers, waiting]).lag_millis == 50_000


def test_a_lag_without_such_a_worker_is_that_of_the_application():
    assert Load.of(900_000, [measured("w-1", lag_millis=1)]).lag_millis == 900_000


@pytest.mark.parametrize(
    ("limits", "load", "excess"),
    [
        (BOTH, Load(120_000, 80, 2), None),
        (BOTH, Load(130_000, 95, 2), "the lag of 130 s is above scale_up_lag_seconds (120)"),
        (
            BOTH,
            Load(5, 91.4, 2),
            f"the mean CPU of the workers, 91 %, is {ABOVE}",
        ),
        (LoadLimits(120), Load(5, 99, 2), None),
        (LoadLimits(None, 80), Load(900_000, 10, 2), None),
        (BOTH, Load(), None),
    ],
)
def test_which_limit_is_exceeded(limits, load, excess):
    assert limits.excess(load) == excess


@pytest.mark.parametrize(
    ("limits", "load", "calm"),
    [
        (LoadLimits(120), Load(12_000, 99, 2), "the lag has been at most 12 s"),
        (LoadLimits(120), Load(12_001), None),
        (LoadLimits(120), Load(None, 10, 2), None),
        (
            BOTH,
            Load(0, 36, 2),
            CALM,
        ),
        (BOTH, Load(0, 36.1, 2), None),
        (
            BOTH,
            Load(0, 47, 3),
            CALM,
        ),
        (BOTH, Load(0, 10, 1), None),
        (BOTH, Load(0), "the lag has been at most 12 s"),
        (LoadLimits(None, 80), Load(None, 10, 4), "the other workers need at most 72 % of CPU"),
        (LoadLimits(), Load(0, 0, 4), None),
    ],
)
def test_when_a_worker_less_is_enough(limits, load, calm):
    assert limits.calm(load) == calm


def decided(memory: AutoscalerMemory, load: Load, now: float) -> ScalingDecision:
    active = [
        RunView(f"r{i}", S.STARTED, f"w-{i}", continuous=True, created=i)
        for i in range(memory.desired)
    ]
    return decide(
        counted(active), [], memory, minimum=1, maximum=4, now=now, load=load, limits=BOTH
    )


def test_the_cpu_adds_one_worker_at_a_time():
    busy = Load(0, 95, 2)
    grown = decided(AutoscalerMemory(desired=2), busy, NOW)
    text = f"the mean CPU of the workers, 95 %, is {ABOVE}"
    assert (grown.start, grown.reason) == (1, f"2 workers, 3 desired: starting 1, because {text}")
    soon = decided(grown.memory, busy, NOW + SCALE_COOLDOWN_SECONDS - 1)
    assert (soon.start, soon.memory.desired) == (0, 3)
    assert decided(grown.memory, busy, NOW + SCALE_COOLDOWN_SECONDS).start == 1


def test_a_worker_that_is_needed_is_not_drained_for_its_low_lag():
    memory = AutoscalerMemory(desired=2, calm_since=NOW - 9_999)
    kept = decided(memory, Load(0, 50, 2), NOW)
    assert (kept.drain, kept.memory.calm_since) == ((), None)
    assert decided(memory, Load(0, 30, 2), NOW).drain == ("w-1",)


def test_a_worker_that_was_needed_again_stays_twice_as_long():
    memory, now, calms = AutoscalerMemory(desired=2), NOW, []
    for _ in range(7):
        began = now
        while not (found := decided(memory, Load(0), now)).drain:
            memory, now = found.memory, now + 60
        calms.append(now - began)
        now += SCALE_COOLDOWN_SECONDS
        grown = decided(found.memory, Load(130_000), now)
        assert grown.start == 1
        memory = grown.memory
    first = SCALE_DOWN_AFTER_SECONDS
    assert calms == [min(first * 2**i, LONGEST_CALM_SECONDS) for i in range(7)]
    late = memory.model_copy(update={"drained_at": now - 2 * LONGEST_CALM_SECONDS - 1})
    again = decided(late.model_copy(update={"desired": 1}), Load(130_000), now + 999)
    assert again.memory.calm_seconds == first


def test_runs_that_share_the_machine_of_the_code_server_have_no_default_limit():
    with dg.instance_for_test() as local:
        assert isinstance(local.run_launcher, dg.DefaultRunLauncher)
        assert cpu_limit(None, local) is None
        assert cpu_limit(60, local) == 60
    with dg.DagsterInstance.ephemeral() as ephemeral:
        assert cpu_limit(None, ephemeral) is None


def test_a_launcher_whose_package_is_absent_is_not_loaded():
    launcher = {"module": "not_installed_here", "class": "K8sRunLauncher"}
    with dg.instance_for_test(overrides={"run_launcher": launcher}) as cluster:
        assert cpu_limit(None, cluster) == 80
        assert cpu_limit(100, cluster) is None
        with pytest.raises(Exception, match="not_installed_here"):
            _ = cluster.run_launcher


def test_the_sensor_starts_a_worker_for_the_cpu_in_the_rows(instance: dg.DagsterInstance):
    pipeline = FakePipeline(workers=FakeFleet(min=1, max=4))
    stage = Stage(instance, pipeline, scale_up_cpu_percent=80.0)
    worker_id = stage.worker_of(stage.run())
    rows = [measured(worker_id, 90.0, 92.0)]
    pipeline.cycle.reports[:] = [led(leases(4, [worker_id]), rows)]
    stage.workers.rows = {worker_id: rows[0]}
    found = stage()
    assert len(found.run_requests) == 1
    assert "the mean CPU of the workers, 91 %" in json.loads(found.cursor)["scaled"]
