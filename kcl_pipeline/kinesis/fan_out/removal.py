"""Find and deregister the fan-out consumer that an application has registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kcl_pipeline.errors import AwsError, NotFoundError
from kcl_pipeline.kinesis.boto import kinesis_errors
from kcl_pipeline.kinesis.fan_out.boto import IN_USE, described_consumer

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer of a stream.

    Attributes:
        stream_arn: The stream.
        name: Its name.
        arn: Its ARN. A consumer that is registered again has another one.
        created_seconds: When it was registered, in epoch seconds of the service.
        is_leaving: Whether it is being deregistered.
    """

    stream_arn: str
    name: str
    arn: str
    created_seconds: float | None = None
    is_leaving: bool = False


class ConsumerRemoval:
    """Finds and deregisters consumers of one name.

    Args:
        client: The boto3 client.
        name: Name of the consumer in every stream.
    """

    def __init__(self, client: BotoKinesisClient, name: str) -> None:
        self._client = client
        self.name = name

    def find(self, stream_arn: str) -> RegisteredConsumer | None:
        """Return the consumer of a stream. None also if the stream does not exist."""
        found = described_consumer(self._client, stream_arn, self.name)
        if found is None:
            return None
        created = found.get("ConsumerCreationTimestamp")
        return RegisteredConsumer(
            stream_arn,
            self.name,
            found["ConsumerARN"],
            None if created is None else created.timestamp(),
            found["ConsumerStatus"] == "DELETING",
        )

    def arn_of(self, stream_name: str) -> str | None:
        """Return the ARN of a stream; None if it does not exist."""
        try:
            with kinesis_errors("DescribeStreamSummary", stream_name):
                found = self._client.describe_stream_summary(StreamName=stream_name)
                return found["StreamDescriptionSummary"]["StreamARN"]
        except NotFoundError:
            return None

    def deregister(self, consumer: RegisteredConsumer) -> None:
        """Request the deregistration once.

        The ARN identifies the registration, so a consumer that another process registers under the
        name meanwhile is not deregistered. The caller repeats it until `find` returns another one
        or none.
        """
        try:
            with kinesis_errors(
                "DeregisterStreamConsumer", f"consumer {consumer.name} of {consumer.stream_arn}"
            ):
                self._client.deregister_stream_consumer(ConsumerARN=consumer.arn)
        except NotFoundError:
            return
        except AwsError as error:
            if error.code != IN_USE:
                raise
