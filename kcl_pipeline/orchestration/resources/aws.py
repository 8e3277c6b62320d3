"""Configure the AWS session as a Dagster resource."""

from typing import Final

from dagster_aws.utils import ResourceWithBoto3Configuration
from pydantic import Field, field_validator

from kcl_pipeline.aws import AwsClients, ClientCache, SessionOptions
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.settings_errors import without_credentials

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
