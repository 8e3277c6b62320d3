"""The one place where botocore's errors on DynamoDB become the package's (protocol §1.4). Every message names the operation and the table."""

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

from kcl_pipeline.errors import AccessDenied, AwsError, InvalidRequest, NotFound, Throttled, Unavailable
from kcl_pipeline.leases.store import Item

CONDITION_FAILED: Final = "ConditionalCheckFailedException"
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
_UNAVAILABLE: Final = frozenset({"InternalServerError", "InternalFailure", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException"})
_CREDENTIALS: Final = (CredentialRetrievalError, NoAuthTokenError, NoCredentialsError, PartialCredentialsError, SSOError, TokenRetrievalError)
_FIRST_SERVER_ERROR: Final = 500


class ConditionFailed(AwsError):  # noqa: N818 (reads as the outcome that it is)
    """A conditional write was refused; `item` is the row as the service found it, None when it did not say or there is none."""

    def __init__(self, message: str, *, operation: str, item: Item | None) -> None:
        super().__init__(message, code=CONDITION_FAILED, operation=operation)
        self.item = item


def call(method: Callable[..., Any], operation: str, table: str, **request: Any) -> dict[str, Any]:
    """Call a client's method on a table. Raises `ConditionFailed`, or the `AwsError` that fits."""
    try:
        answer: dict[str, Any] = method(**request)
    except (ClientError, BotoCoreError) as error:
        raise translated(error, operation, table) from error
    return answer


def translated(error: ClientError | BotoCoreError, operation: str, table: str) -> AwsError:
    """The package's error for one of botocore's. What is not known to have been refused may have been applied: `Unavailable`."""
    where = f"{operation} on table {table}"
    if not isinstance(error, ClientError):
        return _without_answer(error, operation, where)
    detail = error.response.get("Error", {})
    code = detail.get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{where}: {code}: {detail.get('Message', '')}"
    if code == CONDITION_FAILED:
        item: Item | None = dict(error.response).get("Item")  # type: ignore[assignment]
        return ConditionFailed(text, operation=operation, item=item)
    if code in _THROTTLED:
        return Throttled(text, code=code, operation=operation)
    if code in _NOT_FOUND:
        return NotFound(text, code=code, operation=operation)
    if code in _DENIED:
        return AccessDenied(f"{text} (the action is dynamodb:{operation})", code=code, operation=operation)
    if code in _UNAVAILABLE or status >= _FIRST_SERVER_ERROR:
        return Unavailable(text, code=code, operation=operation)
    return InvalidRequest(text, code=code, operation=operation)


def _without_answer(error: BotoCoreError, operation: str, where: str) -> AwsError:
    code = type(error).__name__
    text = f"{where}: {error}"
    if isinstance(error, _CREDENTIALS):
        return AccessDenied(f"{text} (the action is dynamodb:{operation})", code=code, operation=operation)
    if isinstance(error, ParamValidationError | NoRegionError):
        return InvalidRequest(text, code=code, operation=operation)
    return Unavailable(text, code=code, operation=operation)
