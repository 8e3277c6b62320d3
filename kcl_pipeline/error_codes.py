"""Map the error codes of Kinesis and DynamoDB to classes of errors."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)

CODES: Final[dict[type[AwsError], frozenset[str]]] = {
    ThrottledError: frozenset(
        {
            "KMSThrottlingException",
            "LimitExceededException",
            "ProvisionedThroughputExceededException",
            "ReplicatedWriteConflictException",
            "RequestLimitExceeded",
            "SlowDown",
            "ThrottledException",
            "Throttling",
            "ThrottlingException",
            "TooManyRequestsException",
            "TransactionConflictException",
        }
    ),
    UnavailableError: frozenset(
        {
            "InternalFailure",
            "InternalFailureException",
            "InternalServerError",
            "RequestAbortedException",
            "RequestTimeout",
            "RequestTimeoutException",
            "ServiceUnavailable",
            "ServiceUnavailableException",
            "TransactionInProgressException",
        }
    ),
    AccessDeniedError: frozenset(
        {
            "AccessDenied",
            "AccessDeniedException",
            "ExpiredToken",
            "ExpiredTokenException",
            "IncompleteSignature",
            "IncompleteSignatureException",
            "InvalidClientTokenId",
            "InvalidSignatureException",
            "KMSAccessDeniedException",
            "KMSOptInRequired",
            "MissingAuthenticationToken",
            "MissingAuthenticationTokenException",
            "NotAuthorized",
            "OptInRequired",
            "RequestExpired",
            "SignatureDoesNotMatch",
            "UnrecognizedClientException",
        }
    ),
    NotFoundError: frozenset({"ResourceNotFoundException", "TableNotFoundException"}),
}
"""Codes of each class, for both services. All other codes mean `InvalidRequestError`."""

_CLASS_OF: Final = {code: kind for kind, codes in CODES.items() for code in codes}
_HTTP_STATUS: Final = re.compile(r"[1-5]\d\d")


def class_of(code: str, status: int = 0) -> type[AwsError]:
    """Return the class of an error by its code, or by its HTTP status if the code is unknown.

    Args:
        code: Error code of the service.
        status: HTTP status. 0: unknown.
    """
    if not status and _HTTP_STATUS.fullmatch(code):
        status = int(code)
    if code in _CLASS_OF:
        return _CLASS_OF[code]
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ThrottledError
    is_unavailable = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return UnavailableError if is_unavailable else InvalidRequestError
