"""Translate the errors of Kinesis calls."""

from __future__ import annotations

from contextlib import AbstractContextManager

from botocore.exceptions import ClientError

from kcl_pipeline.aws_errors import aws_errors, translated
from kcl_pipeline.errors import AwsError, ExpiredIteratorError


def kinesis_errors(operation: str, about: str) -> AbstractContextManager[None]:
    """Translate errors in a block, like `aws_errors.aws_errors`.

    Args:
        operation: Name of the API operation.
        about: The stream or shard.
    """
    return aws_errors("kinesis", operation, about, _expired_iterator)


def from_client_error(error: ClientError, operation: str, about: str) -> AwsError:
    """Return the error of this package for an error response."""
    return translated(error, "kinesis", operation, about, _expired_iterator)


def _expired_iterator(error: ClientError, code: str, text: str) -> AwsError | None:
    # GetRecords returns InvalidArgument for an iterator that the service does not know any more.
    # The reader requests a new one, as for an expired one (protocol §10.3).
    operation = error.operation_name
    if code == "ExpiredIteratorException" or (
        code == "InvalidArgumentException" and operation == "GetRecords"
    ):
        return ExpiredIteratorError(text, code=code, operation=operation)
    return None
