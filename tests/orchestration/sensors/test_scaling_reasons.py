"""The tick and the cursor say why the number of workers changed, or why it does not."""

from __future__ import annotations

import json

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import (
    SCALE_DOWN_AFTER_SECONDS,
    AutoscalerMemory,
    Load,
    LoadLimits,
    ScalingDecision,
    decide,
)
from tests.support.dagster_fakes import (
    FakeCycle,
    FakeFleet,
    FakePipeline,
    counted,
    leases,
    led,
    worker,
)
from tests.support.sensor_stage import Stage, instance_fixture  # noqa: F401 (fixture)

NOON = 1_700_049_600.0 - 1_700_049_600.0 % 86_400 + 43_200
ABOVE = "the lag of 130 s is above scale_up_lag_seconds (120)"


def decided(
    memory: AutoscalerMemory,
    lag: int | None,
    runs: int,
    *,
    minimum: int = 1,
    maximum: int = 3,
    shards: int = 4,
    now: float = NOON,
) -> ScalingDecision:
    active = [
        RunView(f"r{i}", S.STARTED, f"w-{i}", continuous=True, created=i) for i in range(runs)
    ]
    return decide(
        counted(active),
        [],
        memory,
        minimum=minimum,
        maximum=maximum,
        now=now,
        load=Load(lag),
        limits=LoadLimits(120),
        shards=shards,
    )


def test_a_lag_that_adds_a_worker_is_named_and_remembered():
    grown = decided(AutoscalerMemory(desired=1), 130_000, 1)
    assert grown.reason == f"1 worker, 2 desired: starting 1, because {ABOVE}"
    assert grown.memory.scaled == f"1 to 2 at 12:00 UTC: {ABOVE}"
    later = decided(grown.memory, 130_000, 2, now=NOON + 60)
    assert (later.reason, later.memory.scaled) == ("2 workers, 2 desired", grown.memory.scaled)


def test_the_last_possible_worker_is_not_refused_when_it_starts():
    grown = decided(AutoscalerMemory(desired=2), 130_000, 2, shards=3)
    assert (grown.start, grown.limit) == (1, None)


def test_a_calm_that_drains_a_worker_is_named_and_remembered():
    memory = AutoscalerMemory(desired=2, calm_since=NOON - SCALE_DOWN_AFTER_SECONDS)
    less = decided(memory, 1_000, 2)
    calm = "the lag has been at most 12 s for 10 min"
    assert less.drain == ("w-1",)
    assert less.reason == f"2 workers, 1 desired: draining 1, because {calm}"
    assert less.memory.scaled == f"2 to 1 at 12:00 UTC: {calm}"


@pytest.mark.parametrize(
    ("lag", "runs", "minimum", "maximum", "shards", "limit"),
    [
        (130_000, 3, 1, 3, 4, f"{ABOVE}, but Fleet.max is 3"),
        (130_000, 2, 1, 3, 2, f"{ABOVE}, but only 2 shards are open"),
        (130_000, 1, 1, 3, 1, f"{ABOVE}, but only 1 shard is open"),
        (130_000, 2, 3, 3, 2, f"{ABOVE}, but only 2 shards are open"),
        (1_000, 2, 4, 8, 2, "Fleet.min is 4, but only 2 shards are open"),
        (None, 2, 4, 8, 2, "Fleet.min is 4, but only 2 shards are open"),
        (1_000, 3, 1, 3, 4, None),
        (1_000, 1, 1, 3, 1, None),
        (130_000, 2, 1, 3, 4, None),
    ],
)
def test_what_limits_the_workers_is_named(lag, runs, minimum, maximum, shards, limit):
    memory = AutoscalerMemory(desired=runs, scaled_at=NOON - 1)
    found = decided(memory, lag, runs, minimum=minimum, maximum=maximum, shards=shards)
    assert (found.limit, found.start, found.drain) == (limit, 0, ())


def test_the_rest_of_a_delay_is_never_zero():
    failed = [RunView("r", S.FAILURE, "w", continuous=True, started=NOON - 20, ended=NOON - 9.6)]
    memory = AutoscalerMemory(desired=1, open_shards=4, last_death="r", retry_at=NOON + 0.4)
    found = decide(counted([]), failed, memory, minimum=1, maximum=3, now=NOON)
    assert found.reason == "0 workers, 1 desired: next start in 1 s"


def test_the_page_says_both(instance):
    cycle = FakeCycle([led(leases(2, ["w"]), [worker("w")])])
    stage = Stage(instance, FakePipeline(cycle=cycle, workers=FakeFleet(min=4, max=8)))
    stage.cursor = None
    stage.run()
    stage.run()
    found = stage()
    sentence = "2 of 2 workers run; Fleet.min is 4, but only 2 shards are open"
    assert found.skip_reason.skip_message.endswith(sentence)
    stage.cursor = json.dumps({"desired": 2, "scaled": "1 to 2 at 12:00 UTC: it was so"})
    assert json.loads(stage().cursor)["scaled"] == "1 to 2 at 12:00 UTC: it was so"
