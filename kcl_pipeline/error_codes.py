"""Map the error codes of Kinesis and DynamoDB to classes of errors."""

from __future__ import annotations

import re
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
_TOO_MANY_REQUESTS: Final = 429
_FIRST_SERVER_ERROR: Final = 500


def class_of(code: str, status: int = 0) -> type[AwsError]:
    """Return the class of an error by its code, or by its HTTP status if the code is unknown.

    Args:
        code: Error code of the service.
        status: HTTP status. 0: unknown.
    """
    if not status and _HTTP_STATUS.fullmatch(code):
        status = int(code)
    known = _CLASS_OF.get(code)
    if known is not None:
        return known
    if status == _TOO_MANY_REQUESTS:
        return ThrottledError
    return UnavailableError if status >= _FIRST_SERVER_ERROR else InvalidRequestError
