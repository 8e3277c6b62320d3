"""Configure the AWS session as a Dagster resource."""

from typing import Any, Final

import dagster as dg
from pydantic import Field

from kcl_pipeline.aws import AwsClients, ClientCache, SessionOptions
from kcl_pipeline.config import ConsumerSettings

_CLIENTS: Final = ClientCache[AwsClients]()


class AwsResource(dg.ConfigurableResource[Any]):
    """Region, endpoint and credentials.

    Without fields the standard environment applies (`AWS_REGION`, `AWS_ENDPOINT_URL`, profiles,
    instance roles). The fields are those of dagster-aws, except retries and timeouts. The lease
    tables must see each attempt: if a conditional write was applied and its response was lost,
    a retry by boto3 fails the condition.
    """

    region_name: str | None = Field(
        default=None, description="AWS region, for example eu-central-1"
    )
    endpoint_url: str | None = Field(
        default=None,
        description="Endpoint for DynamoDB and Kinesis, for example that of the embedded AWS",
    )
    profile_name: str | None = Field(default=None, description="A profile of ~/.aws/config")
    aws_access_key_id: str | None = Field(default=None, description="Give both keys or none")
    aws_secret_access_key: str | None = Field(
        default=None, repr=False, description="Give both keys or none; use an EnvVar"
    )
    aws_session_token: str | None = Field(
        default=None, repr=False, description="For temporary credentials; use an EnvVar"
    )

    def session_options(self) -> SessionOptions:
        """The fields as a value."""
        return SessionOptions(
            region_name=self.region_name,
            profile_name=self.profile_name,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.aws_access_key_id,
            aws_secret_access_key=self.aws_secret_access_key,
            aws_session_token=self.aws_session_token,
        )

    def clients(self, settings: ConsumerSettings) -> AwsClients:
        """The boto3 clients for an application.

        Dagster creates a new resource object for every tick. The process therefore caches the
        clients, one set per configuration.
        """
        options = self.session_options()
        return _CLIENTS.get(settings, options, lambda: AwsClients(settings, options))
