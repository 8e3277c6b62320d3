"""What a refused or failed Kinesis call means to the consumer: the one place where service codes
become errors of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
)

from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    ExpiredIteratorError,
    InvalidRequestError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)

THROTTLING_CODES: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "LimitExceededException",
        "KMSThrottlingException",
        "ThrottlingException",
        "Throttling",
        "ThrottledException",
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "SlowDown",
    }
)
UNAVAILABLE_CODES: Final = frozenset(
    {
        "InternalFailure",
        "InternalFailureException",
        "InternalServerError",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "RequestTimeout",
        "RequestTimeoutException",
    }
)
DENIED_CODES: Final = frozenset(
    {
        "AccessDeniedException",
        "AccessDenied",
        "KMSAccessDeniedException",
        "KMSOptInRequired",
        "OptInRequired",
        "UnrecognizedClientException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "SignatureDoesNotMatch",
        "ExpiredTokenException",
        "ExpiredToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
    }
)
_HTTP_STATUS: Final = re.compile(r"^\d{3}$")


@contextmanager
def kinesis_errors(operation: str, about: str) -> Iterator[None]:
    """Raise what botocore raises inside as an error of this package; `about` names the stream or
    shard in the message.
    """
    try:
        yield
    except ClientError as error:
        raise from_client_error(error, operation, about) from error
    except (NoCredentialsError, NoRegionError) as error:
        raise SettingsError(
            f"{operation} on {about} cannot be sent: {error}; set AWS_REGION and "
            "credentials, a profile or a role"
        ) from error
    except ParamValidationError as error:
        raise InvalidRequestError(
            f"{operation} on {about}: {error}", code="ParamValidation", operation=operation
        ) from error
    except RecursionError as error:
        raise UnavailableError(
            f"{operation} on {about}: the answer is nested too deeply to be read",
            code="BrokenBody",
            operation=operation,
        ) from error
    except (HTTPClientError, BotoCoreError) as error:
        raise UnavailableError(
            f"{operation} on {about} got no answer: {error}",
            code=type(error).__name__,
            operation=operation,
        ) from error


def from_client_error(error: ClientError, operation: str, about: str) -> AwsError:
    """The error of this package for a refusal.

    GetRecords takes InvalidArgument for an iterator that the service does not know any more: like
    an expired one it is made anew (protocol §10.3).
    """
    answer = error.response
    detail = answer.get("Error", {})
    code = str(detail.get("Code", ""))
    status = int(
        answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        or (code if _HTTP_STATUS.match(code) else 0)
    )
    message = f"{operation} on {about} was refused: {code} {detail.get('Message', '')}".rstrip()
    if code == "ExpiredIteratorException" or (
        code == "InvalidArgumentException" and operation == "GetRecords"
    ):
        return ExpiredIteratorError(message, code=code, operation=operation)
    if code == "ResourceNotFoundException":
        return NotFoundError(message, code=code, operation=operation)
    if code in THROTTLING_CODES or status == 429:  # noqa: PLR2004 (the HTTP status of throttling)
        return ThrottledError(message, code=code, operation=operation)
    if code in DENIED_CODES:
        return AccessDeniedError(
            f"{message}; the credentials need kinesis:{operation}", code=code, operation=operation
        )
    if code in UNAVAILABLE_CODES or status >= 500:  # noqa: PLR2004 (HTTP's range of server errors)
        return UnavailableError(message, code=code, operation=operation)
    return InvalidRequestError(message, code=code, operation=operation)
