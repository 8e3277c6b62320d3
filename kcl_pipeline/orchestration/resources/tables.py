"""Configure the three tables of an application as Dagster resources."""

from collections.abc import Mapping
from typing import Any, Self

import dagster as dg
from pydantic import Field, ValidationError

from kcl_pipeline.aws import open_tables
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.layout.opening import Tables
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.orchestration.resources.aws import AwsResource
from kcl_pipeline.settings_errors import refuse_settings


class ApplicationResource(CheckedFields, dg.ConfigurableResource[Any]):
    """Fields that the three tables share: the application that they belong to."""

    aws: dg.ResourceDependency[AwsResource]
    application_name: str = Field(
        description="The KCL application name. The tables are named after it"
    )
    lease_table_name: str | None = Field(
        default=None, description="Name of the lease table, if a setting names it"
    )
    worker_metrics_table_name: str | None = Field(
        default=None, description="Name of the worker-metrics table, if a setting names it"
    )
    coordinator_state_table_name: str | None = Field(
        default=None, description="Name of the coordinator-state table, if a setting names it"
    )
    settings_json: str | None = Field(
        default=None,
        description="All settings of the application as JSON, with time-outs and table names. "
        "KinesisPipeline.definitions writes it; leave it out",
    )

    @classmethod
    def of(cls, settings: ConsumerSettings, aws: AwsResource) -> Self:
        """Build the resource for an application with these settings."""
        return cls(
            aws=aws,
            application_name=settings.application_name,
            settings_json=settings.model_dump_json(exclude_defaults=True),
        )

    def settings(self) -> ConsumerSettings:
        """All settings of the application.

        Raises:
            errors.SettingsError: A setting is wrong.
        """
        given: Mapping[str, Any] = {
            "application_name": self.application_name,
            "selects_streams": True,
            "streams": (),
            "lease_table": {"table_name": self.lease_table_name},
            "worker_metrics_table": {"table_name": self.worker_metrics_table_name},
            "coordinator_state_table": {"table_name": self.coordinator_state_table_name},
        }
        try:
            if self.settings_json is not None:
                return ConsumerSettings.model_validate_json(self.settings_json)
            return ConsumerSettings.model_validate(given)
        except ValidationError as error:
            refuse_settings(error, ConsumerSettings)

    def _tables(self) -> Tables:
        settings = self.settings()
        return open_tables(settings, self.aws.clients(settings), SystemClock())


class LeaseTableResource(ApplicationResource):
    """The lease table: one row per shard, with its owner and checkpoint.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import AwsResource, LeaseTableResource
        >>> @dg.op
        ... def count_leases(leases: LeaseTableResource) -> int:
        ...     return len(leases.table().list_leases().leases)
        >>> leases = LeaseTableResource(aws=AwsResource(), application_name="orders")
    """

    def table(self) -> LeaseTable:
        """Return the table object, without a call to AWS."""
        return self._tables().lease


class WorkerMetricsTableResource(ApplicationResource):
    """The worker-metrics table: one row per worker, with its recent CPU averages.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import AwsResource, WorkerMetricsTableResource
        >>> @dg.op
        ... def name_workers(workers: WorkerMetricsTableResource) -> list[str]:
        ...     return [one.worker_id for one in workers.table().scan_workers().workers]
        >>> workers = WorkerMetricsTableResource(aws=AwsResource(), application_name="orders")
    """

    def table(self) -> WorkerMetricsTable:
        """Return the table object, without a call to AWS."""
        return self._tables().workers


class CoordinatorStateTableResource(ApplicationResource):
    """The coordinator-state table: the leader's lock and the client version.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import AwsResource, CoordinatorStateTableResource
        >>> @dg.op
        ... def is_paused(state: CoordinatorStateTableResource) -> bool:
        ...     return state.table().read_control().pause is not None
        >>> state = CoordinatorStateTableResource(aws=AwsResource(), application_name="orders")
    """

    def table(self) -> CoordinatorStateTable:
        """Return the table object, without a call to AWS."""
        return self._tables().coordinator
