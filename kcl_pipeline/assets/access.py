"""Give assets, sensors and ops typed access to the resources of one pipeline."""

from dataclasses import dataclass
from typing import Any

import dagster as dg

from kcl_pipeline.assets.names import Names
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.resources import (
    AwsResource,
    CoordinatorStateTableResource,
    LeaseTableResource,
    SparkSource,
    WorkerMetricsTableResource,
)

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
        found: AwsResource = self._find(self.names.aws)
        return found

    @property
    def spark(self) -> SparkSource:
        """The resource with the Spark session."""
        found: SparkSource = self._find(self.names.spark)
        return found

    @property
    def leases(self) -> LeaseTable:
        """The lease table."""
        found: LeaseTableResource = self._find(self.names.leases_resource)
        return found.table()

    @property
    def workers(self) -> WorkerMetricsTable:
        """The worker-metrics table."""
        found: WorkerMetricsTableResource = self._find(self.names.workers_resource)
        return found.table()

    @property
    def coordinator(self) -> CoordinatorStateTable:
        """The coordinator-state table."""
        found: CoordinatorStateTableResource = self._find(self.names.coordinator_resource)
        return found.table()

    def _find(self, key: str) -> Any:
        return getattr(self.context.resources, key)
