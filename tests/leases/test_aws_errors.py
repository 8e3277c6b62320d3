"""Both services give the same code, and the same failure to send, the same meaning."""

from __future__ import annotations

import botocore.exceptions as botocore
import pytest

from kcl_pipeline.aws_calls import translated
from kcl_pipeline.error_codes import CODES
from kcl_pipeline.errors import (
    AccessDeniedError,
    ExpiredIteratorError,
    InvalidRequestError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.kinesis.boto import kinesis_errors
from kcl_pipeline.leases.dynamodb import call


def raised_by(error):
    """The errors of a Kinesis and of a DynamoDB call that botocore ends with `error`."""

    def method(**_):
        raise error

    found = []
    for send in (
        lambda: call(method, "UpdateItem", "orders"),
        lambda: _kinesis(method),
    ):
        with pytest.raises(Exception) as caught:
            send()
        found.append(caught.value)
    return found


def _kinesis(method):
    with kinesis_errors("GetRecords", "s-0 of orders"):
        method()


def refusal(code, status=400):
    return botocore.ClientError(
        {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "Operation",
    )


CASES = [(code, kind) for kind, codes in CODES.items() for code in sorted(codes)]


@pytest.mark.parametrize(("code", "kind"), CASES)
def test_every_code_means_the_same_to_both_services(code, kind):
    errors = raised_by(refusal(code))
    assert [type(error) for error in errors] == [kind, kind]
    assert [error.code for error in errors] == [code, code]
    assert [error.operation for error in errors] == ["UpdateItem", "GetRecords"]
    named = ["dynamodb:UpdateItem" in str(errors[0]), "kinesis:GetRecords" in str(errors[1])]
    assert named == [kind is AccessDeniedError] * 2


def test_a_code_has_one_class():
    codes = [code for code, _ in CASES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (botocore.NoCredentialsError(), AccessDeniedError),
        (botocore.PartialCredentialsError(provider="env", cred_var="key"), AccessDeniedError),
        (botocore.CredentialRetrievalError(provider="role", error_msg="no"), AccessDeniedError),
        (botocore.TokenRetrievalError(provider="sso", error_msg="no"), AccessDeniedError),
        (botocore.NoRegionError(), InvalidRequestError),
        (botocore.ParamValidationError(report="x"), InvalidRequestError),
        (botocore.ReadTimeoutError(endpoint_url="x"), UnavailableError),
        (botocore.EndpointConnectionError(endpoint_url="x"), UnavailableError),
        (refusal("SomethingNew", 503), UnavailableError),
        (refusal("503", 0), UnavailableError),
        (refusal("SomethingNew", 429), ThrottledError),
        (refusal("429", 0), ThrottledError),
        (refusal("SomethingNew"), InvalidRequestError),
        (RecursionError(), UnavailableError),
        (KeyError("Item"), UnavailableError),
    ],
)
def test_both_services_agree_where_there_is_no_known_code(error, kind):
    assert [type(one) for one in raised_by(error)] == [kind, kind]


def test_an_iterator_that_is_not_known_any_more_has_expired():
    for code in ("ExpiredIteratorException", "InvalidArgumentException"):
        error = botocore.ClientError({"Error": {"Code": code}}, "GetRecords")
        assert type(raised_by(error)[1]) is ExpiredIteratorError
    error = botocore.ClientError({"Error": {"Code": "InvalidArgumentException"}}, "ListShards")
    assert type(translated(error, "kinesis", "ListShards", "orders")) is InvalidRequestError
