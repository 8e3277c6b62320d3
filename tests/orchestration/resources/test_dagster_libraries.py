"""The resources build on dagster-aws and dagster-pyspark."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import dagster as dg
import pytest
from dagster_aws.utils import ResourceWithBoto3Configuration
from dagster_pyspark import LazyPySparkResource, PySparkResource

import kcl_pipeline.spark.session as session_module
from kcl_pipeline import AwsResource, DeltaSink, KinesisPipeline, SettingsError, SparkResource
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.orchestration.definitions import build_resources
from kcl_pipeline.orchestration.names import Names
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.spark import open_session

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


@pytest.fixture
def pipeline():
    return KinesisPipeline("orders", ["orders"], DeltaSink("/nowhere/orders"))


def test_the_aws_resource_has_every_field_of_dagster_aws():
    assert issubclass(AwsResource, ResourceWithBoto3Configuration)
    assert set(AwsResource.model_fields) == set(ResourceWithBoto3Configuration.model_fields)


def test_its_fields_reach_the_clients():
    clients = AwsResource(
        region_name="eu-central-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        use_ssl=False,
        verify=False,
    ).clients(SETTINGS)
    assert clients.dynamodb.meta.endpoint_url == "http://dynamodb.eu-central-1.amazonaws.com"
    assert clients.kinesis._endpoint.http_session._verify is False


def test_more_than_one_attempt_is_refused():
    with pytest.raises(SettingsError, match=r"max_attempts=5 is not 1\..* Leave max_attempts out"):
        AwsResource(max_attempts=5)
    assert AwsResource(max_attempts=1).max_attempts == 1


def test_the_default_of_a_pipeline_with_spark_is_a_lazy_resource_of_dagster_pyspark(
    pipeline, monkeypatch
):
    asked = []
    monkeypatch.setattr(session_module, "build_session", lambda *given: asked.append(given))
    config = {"spark.executor.memory": "2g"}
    with_spark = replace(pipeline, transform=lambda records: records, spark_config=config)
    resources = with_spark.definitions().resources or {}
    assert isinstance(resources["orders_spark"], LazyPySparkResource)

    @dg.op
    def count(orders_spark: LazyPySparkResource) -> None:
        _ = orders_spark.spark_session

    @dg.job(resource_defs=dict(resources))
    def job() -> None:
        count()

    with dg.instance_for_test() as instance:
        assert job.execute_in_process(instance=instance).success
    assert asked == [("orders", config)]


def test_a_pipeline_without_spark_has_no_spark_resource(pipeline):
    defs = pipeline.definitions()
    assert "orders_spark" not in (defs.resources or {})
    dg.Definitions.validate_loadable(defs)


@pytest.mark.parametrize(
    "spark",
    [
        SparkResource(app_name="mine"),
        PySparkResource(spark_config={}),
        LazyPySparkResource(spark_config={}),
    ],
)
def test_definitions_take_a_spark_resource(pipeline, spark):
    pipeline.definitions(spark=spark)
    options = DagsterOptions(spark=spark)
    names = Names.of(pipeline).with_resources(options)
    assert build_resources(pipeline, names, options)["orders_spark"] is spark


@pytest.mark.parametrize("spark", ["local[*]", AwsResource()])
def test_another_value_is_refused(pipeline, spark):
    with pytest.raises(SettingsError, match=r"spark=.* has no Spark session\. Write SparkResource"):
        pipeline.definitions(spark=spark)


def test_a_lazy_session_gets_the_settings_of_this_package(spark, monkeypatch):
    """The session of the tests has all of them; two are taken away and one is the user's."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    taken = {"spark.sql.parquet.outputTimestampType"}

    class Conf:
        def getAll(self):  # noqa: N802 (as pyspark)
            return [
                pair
                for pair in type(spark.sparkContext).getConf(spark.sparkContext).getAll()
                if pair[0] not in taken
            ]

    monkeypatch.setattr(spark.sparkContext, "getConf", Conf)
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        found = open_session(LazyPySparkResource(spark_config={"spark.sql.caseSensitive": "true"}))
        assert found.conf.get("spark.sql.parquet.outputTimestampType") == "TIMESTAMP_MICROS"
        assert found.conf.get("spark.sql.session.timeZone") == "Europe/Berlin"
        assert found.conf.get("spark.sql.caseSensitive") == "true"
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        spark.conf.unset("spark.sql.caseSensitive")


def test_a_lazy_session_begins_with_the_settings_of_this_package(spark, monkeypatch):
    begun = []
    monkeypatch.setattr(session_module, "build_session", lambda *given: begun.append(given))
    config = {"spark.executor": {"memory": "2g", "cores": 2}, "spark.app.name": "shop"}
    open_session(LazyPySparkResource(spark_config=config))
    properties = {"spark.executor.memory": "2g", "spark.executor.cores": "2"}
    assert begun == [("shop", properties | {"spark.app.name": "shop"})]
