"""Tags of worker runs: those of the user, and those that Dagster reads."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S
from dagster._daemon.monitoring.run_monitoring import check_run_timeout
from dagster._utils.tags import normalize_tags

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.specs import code_version
from kcl_pipeline.pipeline.arguments import Fleet
from tests.support.dagster_fakes import FakeFleet, FakePipeline
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

K8S = '{"container_config": {"resources": {"requests": {"cpu": "2"}}}}'
TAGS = {"dagster-k8s/config": K8S, "team": "orders", "dagster/priority": "3"}


def test_the_users_tags_are_on_every_run_of_the_sensor(instance):
    stage = Stage(instance, FakePipeline(workers=FakeFleet(run_tags=TAGS, code_version="7c1")))
    version = {"kcl/version": code_version(stage.pipeline)}
    for request in stage().run_requests:
        assert request.tags == TAGS | stage.names.worker_run_tags | version


def test_dagster_accepts_every_tag_without_a_warning():
    fleet = Fleet(run_tags=TAGS)
    assert normalize_tags(fleet.run_tags, allow_private_system_tags=False) == TAGS


def test_no_tag_of_the_package_can_be_a_users_tag():
    for tag in (*Names.of(FakePipeline()).worker_run_tags, "kcl/replaces", "dagster/run_key"):
        with pytest.raises(SettingsError, match="is a tag of kcl_pipeline or Dagster"):
            Fleet(run_tags={tag: "1"})


def test_the_workers_of_an_application_have_a_pool():
    pipeline = FakePipeline()
    job = build_definitions(pipeline).resolve_job_def(Names.of(pipeline).consume_job)
    assert [node.definition.pool for node in job.nodes] == ["kcl_orders_eu"]


@pytest.mark.parametrize("source", ["sensor", "job"])
def test_run_monitoring_never_ends_a_worker(instance, source):
    stage = Stage(instance)
    job = build_definitions(stage.pipeline).resolve_job_def(stage.names.consume_job)
    tags = stage().run_requests[0].tags if source == "sensor" else job.tags
    worker = stage.run(S.STARTED, **tags)
    other = stage.run(S.STARTED)
    for run in (worker, other):
        record = SimpleNamespace(dagster_run=run, start_time=1.0)
        check_run_timeout(instance, record, logging.getLogger("test"), 60.0)
    assert instance.get_run_by_id(worker.run_id).status is S.STARTED
    assert instance.get_run_by_id(other.run_id).status is S.FAILURE, "the function works"


def test_a_sensor_definition_has_the_tags(instance):
    pipeline = FakePipeline(workers=Fleet(min=1, max=1, run_tags={"team": "orders"}))
    assert Stage(instance, pipeline)().run_requests[0].tags["team"] == "orders"
    assert isinstance(build_definitions(pipeline), dg.Definitions)
