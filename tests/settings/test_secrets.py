"""Secrets of storage and Spark are in no `repr` and in no message."""

from __future__ import annotations

import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import SessionOptions
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.settings_errors import is_secret, shown, without_secrets
from kcl_pipeline.spark.foreach import ForeachBatchSink

HIDDEN = "wJalrXUtnFEMI"
OPTIONS = {
    "AWS_SECRET_ACCESS_KEY": HIDDEN,
    "AWS_SESSION_TOKEN": HIDDEN,
    "azure_storage_account_key": HIDDEN,
    "AWS_REGION": "eu-central-1",
    "AWS_ENDPOINT_URL": f"http://user:{HIDDEN}@store:9000",
}
SPARK = {
    "spark.hadoop.fs.s3a.secret.key": HIDDEN,
    "spark.hadoop.fs.azure.account.key.x.net": HIDDEN,
    "spark.hadoop.fs.azure.sas.token": HIDDEN,
    "spark.ssl.keyPassword": HIDDEN,
    "spark.executor.memory": "4g",
}


def texts(value):
    return f"{value!r} {value} {value:}"


def test_a_pipeline_shows_no_secret():
    pipeline = KinesisPipeline(
        "orders",
        ["orders"],
        DeltaSink("s3://lake/orders", storage_options=OPTIONS),
        spark_config=SPARK,
    )
    assert HIDDEN not in texts(pipeline)
    assert HIDDEN not in texts(pipeline.settings)
    assert "spark.executor.memory': '4g'" in repr(pipeline)
    assert "name='orders'" in repr(pipeline)
    assert "0x" not in repr(pipeline), "no addresses"


def test_sinks_show_no_secret():
    assert HIDDEN not in texts(DeltaSink("s3://lake/orders", storage_options=OPTIONS))
    sink = ForeachBatchSink(lambda frame, identity: None, storage_options=OPTIONS)
    assert HIDDEN not in texts(sink)
    assert "eu-central-1" in repr(sink)


def test_sessions_show_no_secret():
    options = SessionOptions(
        aws_access_key_id="AKIA", aws_secret_access_key=HIDDEN, aws_session_token=HIDDEN
    )
    resource = AwsResource(
        aws_access_key_id="AKIA", aws_secret_access_key=HIDDEN, aws_session_token=HIDDEN
    )
    assert HIDDEN not in texts(options)
    assert HIDDEN not in texts(resource)


@pytest.mark.parametrize(
    "arguments",
    [
        {"spark_config": {"spark.hadoop.fs.s3a.secret.key": 5_550_123}},
        {"settings_overrides": {"lease": {"secret_token": 5_550_123}}},
        {"settings_overrides": {"lease_table": {"tags": {"password": 5_550_123}}}},
    ],
)
def test_messages_show_no_secret(arguments):
    with pytest.raises(SettingsError) as caught:
        KinesisPipeline("orders", ["orders"], DeltaSink("lake/x"), **arguments)
    assert "5550123" not in str(caught.value)


def test_what_counts_as_a_secret():
    for name in (*SPARK, *OPTIONS):
        harmless = name in ("spark.executor.memory", "AWS_REGION", "AWS_ENDPOINT_URL")
        assert is_secret(name) != harmless, name
    assert without_secrets({"AWS_REGION": "x", "token": HIDDEN}) == {
        "AWS_REGION": "x",
        "token": "***",
    }
    assert shown("http://me:pw@host/x") == "'http://***@host/x'"
    assert len(shown("x" * 10**6)) < 200
