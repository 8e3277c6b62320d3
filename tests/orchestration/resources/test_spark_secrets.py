"""Secrets of `spark_config` reach the Spark session, and not what Dagster stores."""

from __future__ import annotations

import json

import pytest

import kcl_pipeline.spark.session as session_module
from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.orchestration.resources import SparkResource

HIDDEN = "wJalrXUtnFEMI"
SPARK = {
    "spark.hadoop.fs.s3a.secret.key": HIDDEN,
    "spark.hadoop.fs.s3a.proxy": f"http://user:{HIDDEN}@proxy:3128",
    "spark.executor.memory": "4g",
}


@pytest.fixture(name="resource")
def resource_fixture() -> SparkResource:
    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink("lake/o"), spark_config=SPARK)
    (found,) = [
        resource
        for resource in (pipeline.definitions().resources or {}).values()
        if isinstance(resource, SparkResource)
    ]
    return found


def test_dagster_stores_no_secret(resource: SparkResource) -> None:
    stored = resource.get_resource_definition().config_schema.default_value
    assert "spark.executor.memory" in json.dumps(stored)
    assert HIDDEN not in json.dumps(stored)
    assert HIDDEN not in repr(resource)


def test_the_session_gets_them(resource: SparkResource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(session_module, "build_session", lambda name, config: asked.append(config))
    SparkResource(app_name=resource.app_name, spark_config=resource.spark_config).session()
    assert asked == [SPARK]


def test_a_property_that_was_written_at_run_time_wins(
    resource: SparkResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(session_module, "build_session", lambda name, config: asked.append(config))
    written = {"spark.hadoop.fs.s3a.secret.key": "other", "spark.executor.memory": "8g"}
    SparkResource(app_name=resource.app_name, spark_config=written).session()
    assert asked == [written]
