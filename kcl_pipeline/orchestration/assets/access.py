"""Give assets, sensors and ops typed access to the resources of one pipeline."""

from dataclasses import dataclass
from typing import Any, cast

import dagster as dg

from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.resources import AwsResource, SparkSource
from kcl_pipeline.settings_errors import wrong

Context = (
    dg.AssetCheckExecutionContext
    | dg.AssetExecutionContext
    | dg.OpExecutionContext
    | dg.SensorEvaluationContext
)
"""The Dagster contexts that have resources."""


@dataclass(frozen=True, slots=True)
class PipelineResources:
    """The resources of one pipeline in a context.

    Their keys contain the pipeline's name. They are therefore not fixed attributes of a class.
    """

    names: Names
    context: Context

    @property
    def aws(self) -> AwsResource:
        """The AWS session."""
        return aws_of(self.context.resources, self.names.aws)

    @property
    def spark(self) -> SparkSource:
        """The resource with the Spark session."""
        return cast("SparkSource", self._find(self.names.spark))

    @property
    def leases(self) -> LeaseTable:
        """The lease table."""
        return cast("LeaseTable", self._find(self.names.leases_resource).table())

    @property
    def workers(self) -> WorkerMetricsTable:
        """The worker-metrics table."""
        return cast("WorkerMetricsTable", self._find(self.names.workers_resource).table())

    @property
    def coordinator(self) -> CoordinatorStateTable:
        """The coordinator-state table."""
        return cast("CoordinatorStateTable", self._find(self.names.coordinator_resource).table())

    def _find(self, key: str) -> Any:
        return getattr(self.context.resources, key)


def aws_of(resources: object, key: str) -> AwsResource:
    """Return the AWS session at a key of the resources.

    Raises:
        SettingsError: The resource is another one.
    """
    found = getattr(resources, key)
    if not hasattr(found, "clients"):
        problem = f"is the key of a {type(found).__name__}, not of an AwsResource"
        raise wrong("aws", key, problem, "Write the key of an AwsResource, or AwsResource(...)")
    return cast("AwsResource", found)
