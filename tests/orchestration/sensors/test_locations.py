"""Runs of another code location are counted, and not replaced."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.runs import active_runs
from kcl_pipeline.orchestration.supervision import Code
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
    assert Code("two", "east").is_outdated(run) is (location is None)
    assert Code("two", "west").is_outdated(run)
    assert not Code("one", "west").is_outdated(run)
    assert not Code(None, "west").is_outdated(run), "the version is not known"
