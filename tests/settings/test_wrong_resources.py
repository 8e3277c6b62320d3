"""Wrong arguments of sessions, resources, faults and the embedded AWS: one sentence each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kcl_pipeline import (
    AwsResource,
    DeltaSink,
    EmbeddedAws,
    Fault,
    FaultRule,
    Fleet,
    KinesisPipeline,
    LeaseTableResource,
    SessionOptions,
    SettingsError,
    SparkResource,
)

SECRET = "a-secret-of-someone"
WRONG_SETTING = '{"application_name": "a", "streams": ["b"], "lease": {"failover_time_milis": 5}}'


def leases(**arguments: object) -> LeaseTableResource:
    return LeaseTableResource(**({"aws": AwsResource(), "application_name": "orders"} | arguments))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: AwsResource(endpoint="http://127.0.0.1:4566"),
            "endpoint is not a field of AwsResource. Did you mean endpoint_url?",
        ),
        (lambda: AwsResource(region_name=5), "region_name=5 is not a string."),
        (lambda: SparkResource(app_nam="x"), "Did you mean app_name?"),
        (
            lambda: leases(lease_tabel_name="x"),
            "is not a field of LeaseTableResource. Did you mean",
        ),
        (lambda: leases(application_name=5), "application_name=5 is not a string."),
        (
            lambda: leases(settings_json=WRONG_SETTING).table(),
            "Did you mean lease.failover_time_millis?",
        ),
        (
            lambda: SessionOptions(regoin_name="x"),
            "regoin_name is not an argument of SessionOptions. Did you mean region_name?",
        ),
        (lambda: SessionOptions(region_name=5), "SessionOptions region_name=5 is not a string."),
        (lambda: SessionOptions(endpoint_url="a\nb"), "has characters that do not print."),
        (lambda: SessionOptions(use_ssl="no"), "use_ssl='no' is not True or False."),
        (lambda: SessionOptions(verify="ca.pem"), "verify='ca.pem' is not True or False."),
        (lambda: Fault("thottle"), "Fault kind='thottle' is not a kind. Write one of throttle,"),
        (lambda: Fault("delay", delay_seconds=-1), "Fault delay_seconds=-1 is too small."),
        (lambda: Fault(knd="delay"), "knd is not an argument of Fault. Did you mean kind?"),
        (lambda: FaultRule(kind="thottle"), "is not one of its values. Did you mean 'throttle'?"),
        (lambda: FaultRule(knd="deny"), "knd is not a field of FaultRule. Did you mean kind?"),
        (lambda: EmbeddedAws(prot=1), "prot is not an argument of EmbeddedAws. Did you mean port?"),
        (lambda: EmbeddedAws(port=70_000), "port=70000 is too large. Write a port, 0 to 65535."),
        (lambda: Fleet(min=10**400), "Fleet min=1000"),
        (lambda: Fleet(max_starting=2**63), "is too large. Write a number of runs, 1 or more."),
    ],
)
def test_a_wrong_argument(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: AwsResource(aws_secret_access_key=[SECRET]),
        lambda: AwsResource(aws_session_token={"token": SECRET}),
        lambda: SparkResource(app_name="x", spark_config={"fs.s3a.secret.key": [SECRET]}),
        lambda: SessionOptions(aws_secret_access_key=SECRET.encode()),
        lambda: SessionOptions(aws_session_token=SECRET + "\n"),
        lambda: KinesisPipeline("orders", ["orders"], f"s3://key:{SECRET}@lake/orders"),
    ],
)
def test_the_sentence_has_no_secret(make: Callable[[], object]) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: KinesisPipeline("orders", "x" * 5_000, DeltaSink("lake/orders")),
        lambda: KinesisPipeline("orders", ["orders"], "x" * 5_000),
        lambda: DeltaSink("lake/orders", partition_by="x" * 5_000),
    ],
)
def test_the_sentence_is_short(make: Callable[[], object]) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert len(str(caught.value)) < 500
