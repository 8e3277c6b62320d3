"""Translate the errors of botocore into the errors of this package.

`error_codes` has the table of codes. `docs/errors.md` describes what a worker does with each class.
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
from kcl_pipeline.settings_errors import without_credentials
from kcl_pipeline.text import printable

Service = Literal["cloudwatch", "dynamodb", "kinesis"]

_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_UNREADABLE_RESPONSE: Final = (
    ResponseParserError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
)
"""What botocore raises for a response that is malformed or nested too deeply."""

_MESSAGE_CHARACTERS: Final = 1000
"""Largest part of a service's message that is kept (our own limit).

Messages of AWS are shorter, except those that repeat a long expression.
"""

Special = Callable[[ClientError, str, str], AwsError | None]
"""Translates the errors of one operation: takes the error, its code and our message."""


@contextmanager
def aws_errors(
    service: Service, operation: str, about: str, special: Special | None = None
) -> Iterator[None]:
    """Raise an `AwsError` for an error of botocore in the block.

    A call whose outcome is unknown may have been applied: `UnavailableError`.

    Args:
        service: As in the names of its permissions.
        operation: Name of the API operation, such as ``PutItem``.
        about: The table, stream or shard, for the message.
        special: Is called first. If it returns None, the table of codes decides.
    """
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        is_shown = without_credentials(str(error)) == str(error)
        own = translated(error, service, operation, about, special)
        raise own from error if is_shown else None
    except _UNREADABLE_RESPONSE as error:
        detail = printable(f"{type(error).__name__}: {error}")
        raise UnavailableError(
            f"{operation} on {about}: the response cannot be read: {detail}",
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
    """Return the error of this package for an error of botocore; see `aws_errors`."""
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
        # It may name the endpoint, or a proxy with its password.
        text = printable(f"{where}: {without_credentials(str(error))}", _MESSAGE_CHARACTERS)
        if isinstance(error, _CREDENTIALS):
            kind = AccessDeniedError
        elif isinstance(error, ParamValidationError | NoRegionError):
            kind = InvalidRequestError
        else:
            kind = UnavailableError
    if kind is AccessDeniedError:
        text = f"{text} ({_required_action(service, operation)})"
    return kind(text, code=code, operation=operation)


def _required_action(service: Service, operation: str) -> str:
    # IAM has no action for transactions; each of their writes needs its own
    if operation == "TransactWriteItems":
        return (
            "the actions are dynamodb:PutItem and dynamodb:UpdateItem on the lease table, "
            "dynamodb:ConditionCheckItem on the coordinator-state table"
        )
    return f"the action is {service}:{operation}"
