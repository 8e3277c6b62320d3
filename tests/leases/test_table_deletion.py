"""Tables are deleted although an answer was lost, and other errors are not swallowed."""

import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.errors import AwsError
from kcl_pipeline.leases.dynamodb import delete_tables


class Client:
    """Refuses the deletion of some tables."""

    def __init__(self, **refusals):
        self.refusals = refusals
        self.called = []

    def delete_table(self, TableName):  # noqa: N803 (the name of the AWS parameter)
        self.called.append(TableName)
        if code := self.refusals.get(TableName):
            raise ClientError({"Error": {"Code": code, "Message": "refused"}}, "DeleteTable")
        return {}


@pytest.mark.parametrize("code", ["ResourceNotFoundException", "ResourceInUseException"])
def test_a_table_that_is_gone_or_leaving_does_not_stop_the_others(code):
    client = Client(first=code)
    delete_tables(client, ["first", "second"])
    assert client.called == ["first", "second"]


def test_another_error_is_raised():
    client = Client(first="AccessDeniedException")
    with pytest.raises(AwsError, match="refused"):
        delete_tables(client, ["first", "second"])
    assert client.called == ["first"]
