"""Configure the three tables of an application as Dagster resources."""

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
        description="The KCL application name. The tables are named after it, unless a setting "
        "names them"
    )
    streams: list[str] = Field(
        description="Names or ARNs of the streams that the application reads"
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings that differ from their default, by section, for example "
        '{"lease_table": {"table_name": "orders-leases"}}',
    )

    @classmethod
    def of(cls, settings: ConsumerSettings, aws: AwsResource) -> Self:
        """Build the resource for an application with these settings."""
        overrides = settings.model_dump(
            mode="json", exclude_defaults=True, exclude={"application_name", "streams"}
        )
        return cls(
            aws=aws,
            application_name=settings.application_name,
            streams=list(settings.streams),
            overrides=overrides,
        )

    def settings(self) -> ConsumerSettings:
        """All settings of the application.

        Raises:
            errors.SettingsError: A setting is wrong.
        """
        given = {
            **self.overrides,
            "application_name": self.application_name,
            "streams": tuple(self.streams),
        }
        try:
            return ConsumerSettings.model_validate(given)
        except ValidationError as error:
            refuse_settings(error, ConsumerSettings)

    def _tables(self) -> Tables:
        settings = self.settings()
        return open_tables(settings, self.aws.clients(settings), SystemClock())


class LeaseTableResource(ApplicationResource):
    """The lease table: one row per shard, with its owner and checkpoint."""

    def table(self) -> LeaseTable:
        """Return the table object, without a call to AWS."""
        return self._tables().lease


class WorkerMetricsTableResource(ApplicationResource):
    """The worker-metrics table: one row per worker, with its recent CPU averages."""

    def table(self) -> WorkerMetricsTable:
        """Return the table object, without a call to AWS."""
        return self._tables().workers


class CoordinatorStateTableResource(ApplicationResource):
    """The coordinator-state table: the leader's lock and the client version."""

    def table(self) -> CoordinatorStateTable:
        """Return the table object, without a call to AWS."""
        return self._tables().coordinator
