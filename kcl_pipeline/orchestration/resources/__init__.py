"""Dagster resources: the AWS session, the three tables and the Spark session."""

from kcl_pipeline.orchestration.resources.aws import AwsResource
from kcl_pipeline.orchestration.resources.spark import SparkResource, SparkSource
from kcl_pipeline.orchestration.resources.tables import (
    CoordinatorStateTableResource,
    LeaseTableResource,
    WorkerMetricsTableResource,
)

__all__ = [
    "AwsResource",
    "CoordinatorStateTableResource",
    "LeaseTableResource",
    "SparkResource",
    "SparkSource",
    "WorkerMetricsTableResource",
]
