"""`kcl-pipeline doctor` on the backends of metrics: permissions and extras, without a write."""

import boto3
import pytest

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.cli.doctor import setup as metrics
from kcl_pipeline.cli.doctor.setup import check_metrics
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.local.faults import FaultRule

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


def found(*backends: str, **options: str) -> list[tuple[str, str]]:
    settings = ConsumerSettings.model_validate(
        {
            "application_name": "orders",
            "streams": ["orders"],
            "metrics": {"metrics_backends": backends, **options},
        }
    )
    return [(f.level.value, f.sentence) for f in check_metrics(settings, AwsClients(settings))]


def test_the_permission_of_cloudwatch_is_tried_and_nothing_is_written(server):
    assert found("cloudwatch") == [
        ("ok", "allowed: cloudwatch:PutMetricData for the namespace orders")
    ]
    assert found("cloudwatch", namespace="own")[0][1].endswith("for the namespace own")
    assert boto3.client("cloudwatch").list_metrics(Namespace="orders")["Metrics"] == []


@pytest.mark.parametrize(
    ("kind", "said"), [("deny", "PutMetricData is denied: "), ("error500", "PutMetricData fails: ")]
)
def test_a_refusal_of_cloudwatch_is_a_problem(server, kind, said):
    server.fault_rules.replace(
        [FaultRule(service="monitoring", operation="PutMetricData", kind=kind)]
    )
    ((level, text),) = found("cloudwatch")
    assert level == "problem"
    assert said in text


def test_a_missing_extra_is_a_problem(monkeypatch):
    assert found("prometheus", "otel") == [("ok", "installed"), ("ok", "installed")]
    monkeypatch.setattr(metrics, "is_installed", lambda extra: extra != "prometheus")
    assert found("prometheus", "otel") == [
        ("problem", "the extra `prometheus` is not installed here: no metric is exported"),
        ("ok", "installed"),
    ]


def test_no_backend_is_no_finding():
    assert found() == []
