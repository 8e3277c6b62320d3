"""Secrets of storage and Spark are in no `repr` and in no message."""

from __future__ import annotations

import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import SessionOptions
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.orchestration.spark import SparkResource
from kcl_pipeline.settings_errors import is_secret, names_only, shown, without_credentials

HIDDEN = "wJalrXUtnFEMI"
OPTIONS = {
    "AWS_SECRET_ACCESS_KEY": HIDDEN,
    "AWS_SESSION_TOKEN": HIDDEN,
    "azure_storage_account_key": HIDDEN,
    "AWS_SSE_CUSTOMER_KEY_BASE64": HIDDEN,
    "AZURE_STORAGE_MASTER_KEY": HIDDEN,
    "bearer": HIDDEN,
    "AWS_REGION": "eu-central-1",
    "AWS_ENDPOINT_URL": f"http://user:{HIDDEN}@store:9000",
}
SPARK = {
    "spark.hadoop.fs.s3a.secret.key": HIDDEN,
    "spark.hadoop.fs.azure.account.key.x.net": HIDDEN,
    "spark.hadoop.fs.azure.sas.token": HIDDEN,
    "spark.ssl.keyPassword": HIDDEN,
    "spark.hadoop.fs.s3a.encryption.key": HIDDEN,
    "spark.mine": HIDDEN,
    "spark.executor.memory": "4g",
}
SESSION = {"aws_secret_access_key": HIDDEN, "spark.ssl.keyPassword": HIDDEN, "lease_table.name": ""}


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
    assert "'spark.executor.memory': '***'" in repr(pipeline)
    assert "name='orders'" in repr(pipeline)
    assert "0x" not in repr(pipeline), "no addresses"


def test_sinks_show_no_secret():
    assert HIDDEN not in texts(DeltaSink("s3://lake/orders", storage_options=OPTIONS))
    sink = ForeachBatchSink(lambda frame, identity: None, storage_options=OPTIONS)
    assert HIDDEN not in texts(sink)
    assert "AWS_REGION" in repr(sink)


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
    for name, value in SESSION.items():
        assert is_secret(name) == bool(value), name
    assert names_only({"AWS_REGION": "x", "token": HIDDEN}) == {"AWS_REGION": "***", "token": "***"}
    assert shown("http://me:pw@host/x") == "'http://***@host/x'"
    assert without_credentials(f"GET https://a/b?sv=1&sig={HIDDEN} failed") == (
        "GET https://a/b?*** failed"
    )
    assert without_credentials("s3://lake/a?b is a path") != "s3://lake/a?b is a path"
    assert without_credentials("lake/a?b") == "lake/a?b"


@pytest.mark.parametrize("value", [HIDDEN.encode(), 5_550_123, [HIDDEN]])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: DeltaSink("s3://b/t", storage_options={"bearer": value}),
        lambda value: DeltaSink("s3://b/t", storage_options=[value]),
        lambda value: ForeachBatchSink(lambda f, i: None, storage_options={"bearer": value}),
        lambda value: SparkResource(app_name="x", spark_config={"spark.mine": value}),
        lambda value: KinesisPipeline(
            "o", ["o"], DeltaSink("t"), spark_config={"spark.mine": value}
        ),
    ],
)
def test_a_value_of_another_type_is_not_shown(make, value):
    with pytest.raises(SettingsError, match=r"storage_options|spark_config") as caught:
        make(value)
    assert HIDDEN not in str(caught.value)
    assert "5550123" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{HIDDEN}@lake/orders",
        f"https://{HIDDEN}@account.blob.core.windows.net/lake",
        f"abfss://box:{HIDDEN}@account.dfs.core.windows.net/t",
        f"abfss://box@account.dfs.core.windows.net/t?sv=2024&sig={HIDDEN}",
        f"https://account.blob.core.windows.net/lake?sig={HIDDEN}",
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        DeltaSink,
        lambda uri: DeltaSink("t", dead_letter_uri=uri),
        lambda uri: ForeachBatchSink(lambda frame, identity: None, dead_letter_uri=uri),
    ],
)
def test_an_address_with_credentials_is_refused(make, uri):
    with pytest.raises(SettingsError, match="storage_options") as caught:
        make(uri)
    assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize("make", [SessionOptions, AwsResource])
def test_an_endpoint_with_credentials_is_refused(make):
    with pytest.raises(SettingsError, match="endpoint_url") as caught:
        make(endpoint_url=f"http://me:{HIDDEN}@host:4566")
    assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize("address", ["lake/a?b", "/data/x@y", "file:///data/a?b", "s3://b/a:b@c"])
def test_a_question_mark_or_an_at_sign_of_a_path_is_no_credential(address):
    assert DeltaSink(address).uri == address
    assert len(shown("x" * 10**6)) < 200
