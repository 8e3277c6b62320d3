"""Runs of another code location are counted, and neither replaced nor drained."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.assets.runs.problems import outdated_runs
from kcl_pipeline.orchestration.assets.runs.runs import RunView, active_runs
from kcl_pipeline.orchestration.sensors.scaling.autoscaler import AutoscalerMemory, decide
from kcl_pipeline.orchestration.sensors.scaling.observation import replaced_elsewhere
from tests.support.sensor_stage import Stage, instance_fixture  # noqa: F401 (fixture)


@pytest.mark.parametrize(
    ("tags", "location"),
    [
        ({"dagster/code_location": "west"}, "west"),  # of a run that a sensor started
        ({".dagster/repository": "__repository__@west"}, "west"),
        ({}, None),
    ],
)
def test_the_location_of_a_run_is_known(instance, tags, location):
    stage = Stage(instance)
    stage.run(S.STARTED, **tags, **{"kcl/version": "one"})
    (run,) = active_runs(instance, stage.pipeline.name, "-")
    assert run.location == location
    outdated = outdated_runs([run], "two", "east")
    assert bool(outdated) is (location is None)
    assert outdated_runs([run], "two", "west") == (run,)


def run(number: int, location: str | None, version: str) -> RunView:
    return RunView(
        f"r{number}",
        S.STARTED,
        f"w-{number}",
        continuous=True,
        created=number,
        location=location,
        version=version,
    )


@pytest.mark.parametrize(
    ("versions", "is_replaced"),
    [
        (["east 1", "west 1"], False),
        (["east 1", "west 1", "west 2"], True),
        (["east 1", "east 2", "west 1"], False),
        (["west 1", "west 1"], False),
    ],
)
def test_a_replacement_in_another_location_has_its_run_more(versions, is_replaced):
    runs = [run(i, *one.split()) for i, one in enumerate(versions)]
    assert replaced_elsewhere(runs, "east") is is_replaced
    assert replaced_elsewhere(runs, None) is False
    found = decide(
        runs,
        [],
        AutoscalerMemory(desired=2),
        minimum=2,
        maximum=2,
        now=0.0,
        spare=replaced_elsewhere(runs, "east"),
    )
    assert len(found.drain) == max(len(runs) - 2 - is_replaced, 0)
