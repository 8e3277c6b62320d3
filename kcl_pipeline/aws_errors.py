"""What a failed AWS call means, for Kinesis and DynamoDB alike; `error_codes` has the table.

`docs/errors.md` says what a worker does with each class of error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from kcl_pipeline.error_codes import class_of
from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    InvalidRequestError,
    UnavailableError,
)
from kcl_pipeline.text import printable

Service = Literal["kinesis", "dynamodb"]

_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_NOT_AN_ANSWER: Final = (
    ResponseParserError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
)
"""What botocore raises for an answer that is malformed, or nested too deeply."""

_MESSAGE_CHARACTERS: Final = 1000
"""Of a service's message (our own limit); those of AWS are shorter, or name a long expression."""

Special = Callable[[ClientError, str, str], AwsError | None]
"""An operation's own meaning of an error: gets the error, its code and our message."""


@contextmanager
def aws_errors(
    service: Service, operation: str, about: str, special: Special | None = None
) -> Iterator[None]:
    """Raise what botocore raises in the block as an `AwsError`.

    A call whose outcome is not known may have been applied: `UnavailableError`.

    Args:
        service: As in the names of its permissions.
        operation: The API's name, such as ``PutItem``.
        about: The table, stream or shard, for the message.
        special: Decides first; None leaves the error to the table.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise translated(error, service, operation, about, special) from error
    except _NOT_AN_ANSWER as error:
        said = printable(f"{type(error).__name__}: {error}")
        raise UnavailableError(
            f"{operation} on {about}: the answer cannot be read: {said}",
            code=type(error).__name__,
            operation=operation,
        ) from error


def translated(
    error: ClientError | BotoCoreError,
    service: Service,
    operation: str,
    about: str,
    special: Special | None = None,
) -> AwsError:
    """The error of this package for one of botocore's; see `aws_errors`."""
    where = f"{operation} on {about}"
    if isinstance(error, ClientError):
        detail = error.response.get("Error", {})
        code = str(detail.get("Code", ""))
        text = printable(f"{where}: {code}: {detail.get('Message', '')}", _MESSAGE_CHARACTERS)
        own = special(error, code, text) if special is not None else None
        if own is not None:
            return own
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = class_of(code, status)
    else:
        code = type(error).__name__
        text = printable(f"{where}: {error}", _MESSAGE_CHARACTERS)
        if isinstance(error, _CREDENTIALS):
            kind = AccessDeniedError
        elif isinstance(error, ParamValidationError | NoRegionError):
            kind = InvalidRequestError
        else:
            kind = UnavailableError
    if kind is AccessDeniedError:
        text = f"{text} ({_needed(service, operation)})"
    return kind(text, code=code, operation=operation)


def _needed(service: Service, operation: str) -> str:
    """A transaction has no action of its own: its parts need theirs."""
    if operation == "TransactWriteItems":
        return "the actions are dynamodb:PutItem and dynamodb:UpdateItem"
    return f"the action is {service}:{operation}"
