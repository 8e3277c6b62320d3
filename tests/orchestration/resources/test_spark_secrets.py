"""Secrets of `spark_config` reach the Spark session, and not what Dagster stores."""

import json

import dagster as dg
import pytest

import kcl_pipeline.spark.session as session_module
from kcl_pipeline import DeltaSink, KinesisPipeline, SparkResource

HIDDEN = "wJalrXUtnFEMI"
SPARK = {
    "spark.hadoop.fs.s3a.secret.key": HIDDEN,
    "spark.hadoop.fs.s3a.proxy": f"http://user:{HIDDEN}@proxy:3128",
    "spark.hadoop.fs.s3a.encryption.key": HIDDEN,
    "spark.mine": HIDDEN,
    "spark.executor.memory": "4g",
}


def own_resource() -> SparkResource:
    return SparkResource(app_name="shared", spark_config=SPARK)


def resource_of_a_pipeline() -> SparkResource:
    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink("lake/o"), spark_config=SPARK)
    (found,) = [
        resource
        for resource in (pipeline.definitions().resources or {}).values()
        if isinstance(resource, SparkResource)
    ]
    return found


@pytest.fixture(name="resource", params=[resource_of_a_pipeline, own_resource])
def resource_fixture(request: pytest.FixtureRequest) -> SparkResource:
    made: SparkResource = request.param()
    return made


def test_dagster_stores_no_secret(resource: SparkResource) -> None:
    stored = resource.get_resource_definition().config_schema.default_value
    assert "spark.executor.memory" in json.dumps(stored)
    assert HIDDEN not in json.dumps(stored)
    assert HIDDEN not in repr(resource)
    assert HIDDEN not in resource.model_dump_json()
    assert "4g" not in json.dumps(stored), "which property is a secret cannot be seen in its name"


def test_the_session_gets_them(resource: SparkResource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(session_module, "build_session", lambda name, config: asked.append(config))
    _ = SparkResource(app_name=resource.app_name, spark_config=resource.spark_config).spark_session
    assert asked == [SPARK]


def test_a_property_that_was_written_at_run_time_wins(
    resource: SparkResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(session_module, "build_session", lambda name, config: asked.append(config))
    written = {"spark.hadoop.fs.s3a.secret.key": "other", "spark.executor.memory": "8g"}
    _ = SparkResource(app_name=resource.app_name, spark_config=written).spark_session
    assert asked == [written]


def test_an_environment_variable_is_read_by_dagster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(session_module, "build_session", lambda name, config: asked.append(config))
    monkeypatch.setenv("OF_A_STORE", HIDDEN)
    resource = SparkResource(app_name="env", spark_config={"spark.mine": dg.EnvVar("OF_A_STORE")})
    stored = resource.get_resource_definition().config_schema.default_value
    assert HIDDEN not in json.dumps(stored, default=str)

    @dg.op
    def opens(spark: SparkResource) -> None:
        dg.get_dagster_logger().info(repr(spark))
        _ = spark.spark_session

    @dg.job(resource_defs={"spark": resource})
    def one() -> None:
        opens()

    with dg.DagsterInstance.ephemeral() as instance:
        result = one.execute_in_process(instance=instance)
        logged = [str(entry) for entry in instance.all_logs(result.run_id)]
    assert asked == [{"spark.mine": HIDDEN}]
    assert not [entry for entry in logged if HIDDEN in entry]
