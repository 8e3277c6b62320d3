"""Find and deregister the fan-out consumer that an application has registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kcl_pipeline.errors import AwsError, NotFoundError
from kcl_pipeline.kinesis.aws_errors import kinesis_errors

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient

_NOT_FOUND: Final = "ResourceNotFoundException"
_IN_USE: Final = "ResourceInUseException"


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
        about = f"consumer {self.name} of {stream_arn}"
        try:
            with kinesis_errors("DescribeStreamConsumer", about):
                found = self._client.describe_stream_consumer(
                    StreamARN=stream_arn, ConsumerName=self.name
                )["ConsumerDescription"]
        except AwsError as error:
            if error.code == _NOT_FOUND:
                return None
            raise
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
        except NotFoundError:
            return None
        return found["StreamDescriptionSummary"]["StreamARN"]

    def deregister(self, consumer: RegisteredConsumer) -> None:
        """Request the deregistration once.

        The ARN identifies the registration, so a consumer that another process registers under the
        name meanwhile is not deregistered. The caller repeats it until `find` returns another one
        or none.
        """
        about = f"consumer {consumer.name} of {consumer.stream_arn}"
        try:
            with kinesis_errors("DeregisterStreamConsumer", about):
                self._client.deregister_stream_consumer(ConsumerARN=consumer.arn)
        except AwsError as error:
            if error.code not in (_NOT_FOUND, _IN_USE):
                raise
