"""Translate the errors of DynamoDB calls (protocol §1.4).

Every message names the operation and the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from botocore.exceptions import ClientError

from kcl_pipeline.aws_errors import aws_errors
from kcl_pipeline.errors import AwsError, InvalidRequestError, ThrottledError
from kcl_pipeline.leases.store import Item

CONDITION_FAILED: Final = "ConditionalCheckFailedException"
TRANSACTION_CANCELED: Final = "TransactionCanceledException"
IN_USE: Final = "ResourceInUseException"

_REFUSED: Final = "ConditionalCheckFailed"
_TRANSIENT: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError"}
)
"""Transient reasons of a canceled transaction."""


class ConditionFailed(AwsError):  # noqa: N818 (an outcome, not an error of the caller)
    """A conditional write was refused.

    Attributes:
        item: The row that the service found. None: there is no row, or it was not returned.
    """

    def __init__(self, message: str, *, operation: str, item: Item | None) -> None:
        super().__init__(message, code=CONDITION_FAILED, operation=operation)
        self.item = item


class TransactionRefused(AwsError):  # noqa: N818 (an outcome, not an error of the caller)
    """A transaction was refused, and nothing was applied.

    Attributes:
        indexes: Indexes of the writes whose conditions do not hold.
    """

    def __init__(self, message: str, *, operation: str, indexes: frozenset[int]) -> None:
        super().__init__(message, code=TRANSACTION_CANCELED, operation=operation)
        self.indexes = indexes


def call(method: Callable[..., Any], operation: str, table: str, **request: Any) -> dict[str, Any]:
    """Call a method of the client on a table.

    Raises:
        ConditionFailed: A conditional write was refused.
        TransactionRefused: A transaction was refused because of its conditions.
        AwsError: The call failed.
    """
    with aws_errors("dynamodb", operation, f"table {table}", refused_condition):
        response: dict[str, Any] = method(**request)
        return response


def refused_condition(error: ClientError, code: str, text: str) -> AwsError | None:
    """Return the error of a refused conditional write or transaction; None for other codes."""
    operation = error.operation_name
    if code == CONDITION_FAILED:
        item: Any = dict(error.response).get("Item")
        found = item if isinstance(item, dict) else None
        return ConditionFailed(text, operation=operation, item=found)
    return _canceled(error, operation, text) if code == TRANSACTION_CANCELED else None


def _canceled(error: ClientError, operation: str, text: str) -> AwsError:
    # The reasons are in the order of the writes.
    reasons: Any = dict(error.response).get("CancellationReasons")
    codes = [
        str(reason.get("Code", "")) if isinstance(reason, dict) else ""
        for reason in (reasons if isinstance(reasons, list) else [])
    ]
    if _TRANSIENT.intersection(codes):
        return ThrottledError(text, code=TRANSACTION_CANCELED, operation=operation)
    indexes = frozenset(index for index, code in enumerate(codes) if code == _REFUSED)
    if indexes:
        return TransactionRefused(text, operation=operation, indexes=indexes)
    return InvalidRequestError(text, code=TRANSACTION_CANCELED, operation=operation)
