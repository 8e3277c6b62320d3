"""The one place where botocore's errors on DynamoDB become the package's (protocol §1.4).

Every message names the operation and the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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

from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.store import Item
from kcl_pipeline.text import printable

CONDITION_FAILED: Final = "ConditionalCheckFailedException"
TRANSACTION_CANCELED: Final = "TransactionCanceledException"
IN_USE: Final = "ResourceInUseException"

_THROTTLED: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "ThrottlingException",
        "Throttling",
        "RequestLimitExceeded",
        "LimitExceededException",
        "TooManyRequestsException",
        "TransactionConflictException",
        "ReplicatedWriteConflictException",
    }
)
_NOT_FOUND: Final = frozenset({"ResourceNotFoundException", "TableNotFoundException"})
_DENIED: Final = frozenset(
    {
        "AccessDeniedException",
        "AccessDenied",
        "UnrecognizedClientException",
        "MissingAuthenticationTokenException",
        "IncompleteSignatureException",
        "InvalidSignatureException",
        "InvalidClientTokenId",
        "ExpiredTokenException",
        "ExpiredToken",
        "OptInRequired",
        "KMSAccessDeniedException",
    }
)
_UNAVAILABLE: Final = frozenset(
    {
        "InternalServerError",
        "InternalFailure",
        "ServiceUnavailable",
        "RequestTimeout",
        "RequestTimeoutException",
        "TransactionInProgressException",
    }
)
_REFUSED: Final = "ConditionalCheckFailed"
_PASSING: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError"}
)
"""Reasons in a canceled transaction: a condition, and what passes."""

_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_FIRST_SERVER_ERROR: Final = 500
_MESSAGE_CHARACTERS: Final = 1000
"""Of a service's message (our own limit); those of AWS are shorter, or name a long expression."""

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


class ConditionFailed(AwsError):  # noqa: N818 (reads as the outcome that it is)
    """A conditional write was refused; `item` is the row as the service found it, None when it did
    not say or there is none.
    """

    def __init__(self, message: str, *, operation: str, item: Item | None) -> None:
        super().__init__(message, code=CONDITION_FAILED, operation=operation)
        self.item = item


class TransactionRefused(AwsError):  # noqa: N818 (reads as the outcome that it is)
    """A transaction was refused for conditions of the writes at `places`; nothing was applied."""

    def __init__(self, message: str, *, operation: str, places: frozenset[int]) -> None:
        super().__init__(message, code=TRANSACTION_CANCELED, operation=operation)
        self.places = places


def call(method: Callable[..., Any], operation: str, table: str, **request: Any) -> dict[str, Any]:
    """Call a client's method on a table. Raises `ConditionFailed`, or the `AwsError` that fits.

    A write whose answer cannot be read may have been applied: `UnavailableError`.
    """
    try:
        answer: dict[str, Any] = method(**request)
    except (ClientError, BotoCoreError) as error:
        raise translated(error, operation, table) from error
    except _NOT_AN_ANSWER as error:
        said = printable(f"{type(error).__name__}: {error}")
        raise UnavailableError(
            f"{operation} on table {table}: the answer cannot be read: {said}",
            code=type(error).__name__,
            operation=operation,
        ) from error
    return answer


def translated(error: ClientError | BotoCoreError, operation: str, table: str) -> AwsError:
    """The package's error for one of botocore's.

    What is not known to have been refused may have been applied: `UnavailableError`.
    """
    where = f"{operation} on table {table}"
    if not isinstance(error, ClientError):
        return _without_answer(error, operation, where)
    detail = error.response.get("Error", {})
    code = str(detail.get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = printable(f"{where}: {code}: {detail.get('Message', '')}", _MESSAGE_CHARACTERS)
    if code == CONDITION_FAILED:
        item: Any = dict(error.response).get("Item")
        found = item if isinstance(item, dict) else None
        return ConditionFailed(text, operation=operation, item=found)
    if code == TRANSACTION_CANCELED:
        return _canceled(error, operation, text)
    if code in _THROTTLED:
        return ThrottledError(text, code=code, operation=operation)
    if code in _NOT_FOUND:
        return NotFoundError(text, code=code, operation=operation)
    if code in _DENIED:
        return AccessDeniedError(f"{text} ({_needed(operation)})", code=code, operation=operation)
    if code in _UNAVAILABLE or status >= _FIRST_SERVER_ERROR:
        return UnavailableError(text, code=code, operation=operation)
    return InvalidRequestError(text, code=code, operation=operation)


def _needed(operation: str) -> str:
    """A transaction has no action of its own: its parts need theirs."""
    if operation == "TransactWriteItems":
        return "the actions are dynamodb:PutItem and dynamodb:UpdateItem"
    return f"the action is dynamodb:{operation}"


def _canceled(error: ClientError, operation: str, text: str) -> AwsError:
    """Nothing of the transaction was applied; the reasons stand in the order of its writes."""
    reasons: Any = dict(error.response).get("CancellationReasons")
    codes = [
        str(reason.get("Code", "")) if isinstance(reason, dict) else ""
        for reason in (reasons if isinstance(reasons, list) else [])
    ]
    if _PASSING.intersection(codes):
        return ThrottledError(text, code=TRANSACTION_CANCELED, operation=operation)
    places = frozenset(place for place, code in enumerate(codes) if code == _REFUSED)
    if places:
        return TransactionRefused(text, operation=operation, places=places)
    return InvalidRequestError(text, code=TRANSACTION_CANCELED, operation=operation)


def _without_answer(error: BotoCoreError, operation: str, where: str) -> AwsError:
    code = type(error).__name__
    text = printable(f"{where}: {error}", _MESSAGE_CHARACTERS)
    if isinstance(error, _CREDENTIALS):
        return AccessDeniedError(f"{text} ({_needed(operation)})", code=code, operation=operation)
    if isinstance(error, ParamValidationError | NoRegionError):
        return InvalidRequestError(text, code=code, operation=operation)
    return UnavailableError(text, code=code, operation=operation)
