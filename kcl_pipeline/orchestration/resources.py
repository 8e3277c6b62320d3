"""Configure what a pipeline needs as Dagster resources.

In reading order: the AWS session, and the three tables of an application. The Spark session is in
`orchestration.spark`, which loads pyspark.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

import dagster as dg
from dagster_aws.utils import ResourceWithBoto3Configuration
from pydantic import Field, ValidationError, field_validator

from kcl_pipeline.aws import AwsClients, ClientCache, SessionOptions, open_tables
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.layout import Tables
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.settings_errors import refuse_settings, without_credentials

# Configure the AWS session as a Dagster resource.

_CLIENTS: Final = ClientCache[AwsClients]()


class AwsResource(CheckedFields, ResourceWithBoto3Configuration):
    """Region, endpoint and credentials: the boto3 configuration of dagster-aws.

    Without fields the standard environment applies (`AWS_REGION`, `AWS_ENDPOINT_URL`, profiles,
    instance roles). The number of attempts is 1, because the lease tables must see each attempt: if
    a conditional write was applied and its response was lost, a retry by boto3 fails the condition.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import AwsResource
        >>> aws = AwsResource(
        ...     region_name="eu-central-1",
        ...     aws_access_key_id=dg.EnvVar("KEY"),
        ...     aws_secret_access_key=dg.EnvVar("SECRET"),
        ... )
    """

    region_name: str | None = Field(
        default=None, description="AWS region, for example eu-central-1"
    )
    max_attempts: int = Field(
        default=1, description="Always 1: this package repeats calls by itself"
    )
    verify: bool | None = Field(
        default=None,
        description="Whether certificates are verified. None: as AWS_CA_BUNDLE and the "
        "configuration files say",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="Endpoint for DynamoDB and Kinesis, for example that of the embedded AWS",
    )
    aws_access_key_id: str | None = Field(default=None, description="Give both keys or none")
    aws_secret_access_key: str | None = Field(
        default=None, repr=False, description="Give both keys or none; use an EnvVar"
    )
    aws_session_token: str | None = Field(
        default=None, repr=False, description="For temporary credentials; use an EnvVar"
    )

    @field_validator("endpoint_url")
    @classmethod
    def _no_credentials(cls, value: str | None) -> str | None:
        if value is not None and without_credentials(value) != value:
            raise ValueError(
                f"endpoint_url={without_credentials(value)} has a user or a query, which Dagster "
                "would show. Write the scheme, the host and the port."
            )
        return value

    @field_validator("max_attempts")
    @classmethod
    def _one_attempt(cls, value: int) -> int:
        if value != 1:
            raise ValueError(
                f"max_attempts={value} is not 1. This package repeats calls by itself. "
                "Leave max_attempts out."
            )
        return value

    def session_options(self) -> SessionOptions:
        """The fields as a value."""
        return SessionOptions(
            region_name=self.region_name,
            profile_name=self.profile_name,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.aws_access_key_id,
            aws_secret_access_key=self.aws_secret_access_key,
            aws_session_token=self.aws_session_token,
            use_ssl=self.use_ssl,
            verify=self.verify,
        )

    def clients(self, settings: ConsumerSettings) -> AwsClients:
        """The boto3 clients for an application.

        Dagster creates a new resource object for every tick. The process therefore caches the
        clients, one set per configuration.
        """
        options = self.session_options()
        return _CLIENTS.get(settings, options, lambda: AwsClients(settings, options))


# Configure the three tables of an application as Dagster resources.


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
