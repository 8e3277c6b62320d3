"""Check the backends that metrics are exported to."""

import math
from collections.abc import Iterator
from typing import Final

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.aws_errors import aws_errors
from kcl_pipeline.cli.doctor.finding import ok, problem
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AccessDeniedError, AwsError, InvalidRequestError
from kcl_pipeline.extras import MODULES, is_installed
from kcl_pipeline.status.findings import Finding

ACTION: Final = "cloudwatch:PutMetricData"


def check_metrics(settings: ConsumerSettings, clients: AwsClients) -> Iterator[Finding]:
    """One finding for each backend of `metrics_backends`; nothing is written."""
    for backend in dict.fromkeys(settings.metrics.metrics_backends):
        if backend == "cloudwatch":
            yield _check_cloudwatch(
                settings.metrics.namespace or settings.application_name, clients
            )
        elif backend in MODULES and not is_installed(backend):
            yield problem(
                f"metrics {backend}",
                f"the extra `{backend}` is not installed here: no metric is exported",
                f"pip install 'kcl-pipeline[{backend}]'",
            )
        else:
            yield ok(f"metrics {backend}", "installed")


def _check_cloudwatch(namespace: str, clients: AwsClients) -> Finding:
    """CloudWatch checks the permission first, and then rejects a value that is not a number."""
    subject = "metrics cloudwatch"
    allowed = ok(subject, f"allowed: {ACTION} for the namespace {namespace}")
    try:
        with aws_errors("cloudwatch", "PutMetricData", f"namespace {namespace}"):
            clients.cloudwatch.put_metric_data(
                Namespace=namespace,
                MetricData=[{"MetricName": "kcl-pipeline-doctor", "Value": math.nan}],
            )
    except InvalidRequestError:
        return allowed
    except AccessDeniedError as error:
        return problem(
            subject,
            f"{ACTION} is denied: {error}",
            f"allow {ACTION} for the namespace {namespace} in the IAM policy of these credentials",
        )
    except AwsError as error:
        return problem(
            subject,
            f"{ACTION} fails: {error}",
            "try again; if it fails again, check the AWS health status and the network",
        )
    return allowed
