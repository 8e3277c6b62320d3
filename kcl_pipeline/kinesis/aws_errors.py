"""What a failed Kinesis call means to the consumer."""

from __future__ import annotations

from contextlib import AbstractContextManager

from botocore.exceptions import ClientError

from kcl_pipeline.aws_errors import aws_errors, translated
from kcl_pipeline.errors import AwsError, ExpiredIteratorError


def kinesis_errors(operation: str, about: str) -> AbstractContextManager[None]:
    """As `aws_errors.aws_errors`; `about` names the stream or shard."""
    return aws_errors("kinesis", operation, about, _expired_iterator)


def from_client_error(error: ClientError, operation: str, about: str) -> AwsError:
    """The error of this package for a refusal."""
    return translated(error, "kinesis", operation, about, _expired_iterator)


def _expired_iterator(error: ClientError, code: str, text: str) -> AwsError | None:
    """GetRecords gets InvalidArgument for an iterator that the service does not know any more: like
    an expired one it is made anew (protocol §10.3).
    """
    operation = error.operation_name
    if code == "ExpiredIteratorException" or (
        code == "InvalidArgumentException" and operation == "GetRecords"
    ):
        return ExpiredIteratorError(text, code=code, operation=operation)
    return None
