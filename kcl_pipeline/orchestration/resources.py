"""Configure what a pipeline needs as Dagster resources.

In reading order: the AWS session, the Spark session, and the three tables of an application.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, Union, cast

import dagster as dg
from dagster_aws.utils import ResourceWithBoto3Configuration
from pydantic import Field, PrivateAttr, ValidationError, field_validator

from kcl_pipeline.arguments import check_options
from kcl_pipeline.aws import AwsClients, ClientCache, SessionOptions, open_tables
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.layout import Tables
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.settings_errors import refuse_settings, without_credentials, wrong

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource, PySparkResource
    from pyspark.sql import SparkSession


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


# Configure the Spark session as a Dagster resource.

# dagster-pyspark imports pyspark, which most runs do not need.
SparkSource: TypeAlias = Union["SparkResource", "PySparkResource", "LazyPySparkResource"]
"""A resource with a Spark session: this package's, or one of dagster-pyspark."""


_HIDDEN: Final = "***"
_VALUES: Final[dict[str, dict[str, str]]] = {}
"""By application name, the properties that resources of this process were created with."""


class SparkResource(CheckedFields, dg.ConfigurableResource[Any]):
    """Name and properties of the Spark session.

    The session is created at its first use and shared by the process. Creation takes about five
    seconds, so that runs without Spark do not create it.

    Dagster stores the fields of a resource and shows them in its UI, and any property may be a
    secret. So the field has the names of the properties only. Each process keeps the values of the
    resources that its code creates. An `EnvVar` stays what it is.

    Example:
        >>> from kcl_pipeline import SparkResource
        >>> spark = SparkResource(app_name="shop", spark_config={"spark.driver.memory": "4g"})
    """

    app_name: str = Field(description="Application name in Spark's UI")
    spark_config: dict[str, str] = Field(
        default_factory=dict,
        description="Spark properties; they override those of this package. Values are not shown",
    )
    _values: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        config, values = given.get("spark_config"), dict[str, str]()
        if config is not None:
            check_options("spark_config", config, "{'spark.executor.memory': '4g'}", hidden=True)
            # An EnvVar is a subclass of str
            values = {k: v for k, v in config.items() if type(v) is str and v != _HIDDEN}
            given["spark_config"] = {k: _HIDDEN if k in values else v for k, v in config.items()}
        super().__init__(**given)
        self._values = values
        _VALUES.setdefault(self.app_name, {}).update(values)

    def session(self) -> "SparkSession":
        """Return the session of this process.

        Raises:
            errors.SettingsError: No usable Java was found.
        """
        # Loaded here, because most runs do not need pyspark.
        from kcl_pipeline.spark.session import build_session  # noqa: PLC0415

        return build_session(self.app_name, self._properties())

    def _properties(self) -> dict[str, str]:
        known = _VALUES.get(self.app_name, {}) | self._values
        return {
            key: known.get(key, value) if value == _HIDDEN else value
            for key, value in self.spark_config.items()
        }


def spark_resource(app_name: str, spark_config: Mapping[str, str]) -> SparkResource:
    """Return the resource of a pipeline."""
    return SparkResource(app_name=app_name, spark_config=dict(spark_config))


def open_session(resource: SparkSource) -> "SparkSession":
    """Return the session of a resource.

    A session that a `LazyPySparkResource` would create begins with the settings of this package,
    and those of the resource override them. Another session of dagster-pyspark gets those that can
    change at run time, except those that its resource sets.

    Raises:
        errors.SettingsError: No usable Java was found.
    """
    # Not `hasattr(resource, "spark_session")`, which would create a lazy session.
    found: Any = resource
    if hasattr(type(found), "session"):
        return cast("SparkSession", found.session())
    from dagster_pyspark import LazyPySparkResource  # noqa: PLC0415 (it needs pyspark)

    from kcl_pipeline.spark import session  # noqa: PLC0415 (likewise)

    session.prepare_process()
    if isinstance(found, LazyPySparkResource):
        config = dict(_flat(found.spark_config))
        session.build_session(config.get("spark.app.name", "kcl-pipeline"), config)
    return session.adopt_session(found.spark_session)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the properties of a resource of dagster-pyspark, which may be nested."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value).lower() if isinstance(value, bool) else str(value)


def check_spark(resource: object) -> None:
    """Check the argument `spark` of `definitions`.

    Raises:
        errors.SettingsError: It has no Spark session.
    """
    if isinstance(resource, SparkResource):
        return
    from dagster_pyspark import LazyPySparkResource, PySparkResource  # noqa: PLC0415 (as above)

    if not isinstance(resource, PySparkResource | LazyPySparkResource):
        raise wrong(
            "spark",
            resource,
            "has no Spark session",
            "Write SparkResource(...), PySparkResource(...) or LazyPySparkResource(...), or None",
        )


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
