"""What a failed DynamoDB call means to the tables (protocol §1.4).

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
_PASSING: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError"}
)
"""Reasons in a canceled transaction: a condition, and what passes."""


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
    """Call a client's method on a table. Raises `ConditionFailed`, `TransactionRefused`, or the
    `AwsError` that fits.
    """
    with aws_errors("dynamodb", operation, f"table {table}", refused_condition):
        answer: dict[str, Any] = method(**request)
        return answer


def refused_condition(error: ClientError, code: str, text: str) -> AwsError | None:
    """The outcome of a conditional write or transaction that was refused; None for other codes."""
    operation = error.operation_name
    if code == CONDITION_FAILED:
        item: Any = dict(error.response).get("Item")
        found = item if isinstance(item, dict) else None
        return ConditionFailed(text, operation=operation, item=found)
    return _canceled(error, operation, text) if code == TRANSACTION_CANCELED else None


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
