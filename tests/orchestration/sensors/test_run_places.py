"""One place of Dagster's run limit is kept for runs that are not workers."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.assets.runs.queue import Places, observe_places, places_problem
from tests.orchestration.sensors.test_run_queue import TAGS, evaluation, queued_instance
from tests.support.dagster_fakes import FakeFleet, FakePipeline
from tests.support.replaced_fleet import Fleet
from tests.support.sensor_stage import Stage, instance_fixture  # noqa: F401 (fixture)

NOT_STARTED = (
    "3 workers are not started: the run limit 2 (max_concurrent_runs) has 1 place for all "
    "workers, and 1 is kept for other runs"
)


@pytest.mark.parametrize(
    ("limit", "workers", "free"), [(2, 0, 1), (2, 1, 0), (2, 2, -1), (10, 4, 5), (1, 0, 1)]
)
def test_worker_runs_of_all_applications_count_also_those_queued(limit, workers, free):
    with queued_instance(max_concurrent_runs=limit) as instance:
        stage = Stage(instance)
        for index in range(workers):
            other = {"kcl/application": "clicks"} if index % 2 else {}
            stage.run(S.QUEUED if index else S.STARTED, **{**TAGS, **other})
        stage.run(S.STARTED, "drain")
        assert observe_places(instance) == Places(limit, free)


def test_no_limit_is_no_problem(instance):
    assert observe_places(instance) == Places()
    assert places_problem(9, Places()) is None
    assert places_problem(2, Places(10, 2)) is None
    with queued_instance(max_concurrent_runs=-1) as unlimited:
        assert observe_places(unlimited) == Places()


def test_the_reason_is_named():
    assert places_problem(3, Places(2, 0)) == NOT_STARTED
    assert places_problem(3, Places(10, 2)) == (
        "1 worker is not started: the run limit 10 (max_concurrent_runs) has 9 places for all "
        "workers, and 1 is kept for other runs"
    )
    assert places_problem(1, Places(1, 0)) == (
        "1 worker is not started: the run limit 1 (max_concurrent_runs) is too small for "
        "workers and other runs"
    )


def test_a_fleet_of_four_leaves_one_of_two_places_and_says_so():
    with queued_instance(max_concurrent_runs=2) as instance:
        stage = Stage(instance, FakePipeline(workers=FakeFleet(min=4, max=8)))
        assert len(stage().run_requests) == 1
        run = stage.run(S.STARTED, **TAGS)
        stage.clock.now = instance.get_run_record_by_id(run.run_id).create_timestamp.timestamp()
        stage.workers.beat(stage.worker_of(run))
        result = stage()
        assert not result.run_requests
        assert f"1 of 4 workers runs; {NOT_STARTED}" in result.skip_reason.skip_message
        assert not evaluation(result).passed
        assert NOT_STARTED in evaluation(result).description


def test_the_workers_that_have_a_place_are_replaced():
    with queued_instance(max_concurrent_runs=3) as instance:
        fleet = Fleet(instance, min=4, max=4)
        for _ in range(3):
            fleet.tick()
        assert fleet.kinds() == ["new", "new"]
        fleet.log.clear()
        fleet.deploy("two")
        for _ in range(40):
            fleet.tick()
        assert fleet.log == ["start new", "drain old"] * 2
        assert (fleet.kinds(), fleet.most) == (["new", "new"], 3)
