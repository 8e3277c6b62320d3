"""The AWS session as a Dagster resource."""

from typing import Any, Final

import dagster as dg
from pydantic import Field

from kcl_pipeline.aws import AwsClients, ClientCache, SessionOptions
from kcl_pipeline.config import ConsumerSettings

_CLIENTS: Final = ClientCache[AwsClients]()


class AwsResource(dg.ConfigurableResource[Any]):
    """Where AWS is and who asks; leave everything out to use the standard environment
    (`AWS_REGION`, `AWS_ENDPOINT_URL`, profiles, instance roles).

    The fields are those of dagster-aws; retries and time-outs are not among them, because the
    client library has to know about each attempt (a repeated conditional write fails on its own
    first attempt).
    """

    region_name: str | None = Field(default=None, description="AWS region, such as eu-central-1")
    endpoint_url: str | None = Field(
        default=None,
        description="Another address for DynamoDB and Kinesis, such as that of the embedded AWS",
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
        """The same as a value."""
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

        Dagster makes a resource anew for every tick, so they are kept by the process, one set per
        configuration.
        """
        options = self.session_options()
        return _CLIENTS.get(settings, options, lambda: AwsClients(settings, options))
