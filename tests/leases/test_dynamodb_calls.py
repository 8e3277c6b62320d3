"""Errors of calls, and how a scan follows pages and segments."""

import botocore.exceptions as botocore
import pytest

from kcl_pipeline.aws_calls import translated
from kcl_pipeline.config import LeaseSettings, TableSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.dynamodb import ConditionFailed, Expression, lease_store, refused_condition
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.store import Absent, AbsentOrEquals, Changes, Equals, Present
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import create_lease
from tests.support.dynamodb_tables import lease_table
from tests.support.lease_tables import (  # noqa: F401
    DynamoTables,
    MemoryTables,
    aws_fixture,
    client_fixture,
    make_client,
)


def client_error(code, status=400):
    return botocore.ClientError(
        {"Error": {"Code": code, "Message": "why"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "UpdateItem",
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (client_error("ProvisionedThroughputExceededException"), ThrottledError),
        (client_error("ThrottlingException"), ThrottledError),
        (client_error("RequestLimitExceeded"), ThrottledError),
        (client_error("TransactionConflictException"), ThrottledError),
        (client_error("ResourceNotFoundException"), NotFoundError),
        (client_error("AccessDeniedException"), AccessDeniedError),
        (client_error("ExpiredTokenException"), AccessDeniedError),
        (client_error("UnrecognizedClientException"), AccessDeniedError),
        (client_error("InternalServerError", 500), UnavailableError),
        (client_error("SomethingNew", 503), UnavailableError),
        (client_error("ValidationException"), InvalidRequestError),
        (client_error("ConditionalCheckFailedException"), ConditionFailed),
        (botocore.ReadTimeoutError(endpoint_url="x"), UnavailableError),
        (botocore.ConnectTimeoutError(endpoint_url="x"), UnavailableError),
        (botocore.EndpointConnectionError(endpoint_url="x"), UnavailableError),
        (botocore.ConnectionClosedError(endpoint_url="x"), UnavailableError),
        (botocore.NoCredentialsError(), AccessDeniedError),
        (botocore.ParamValidationError(report="x"), InvalidRequestError),
    ],
)
def test_errors_name_operation_and_table(error, kind):
    result = translated(error, "dynamodb", "UpdateItem", "table orders", refused_condition)
    assert type(result) is kind
    assert "UpdateItem on table orders" in str(result)
    assert result.operation == "UpdateItem"
    assert result.code
    assert ("dynamodb:UpdateItem" in str(result)) == (kind is AccessDeniedError)


def test_errors_on_the_wire(aws, client):
    table = DynamoTables(aws, client).leases
    for kind, count, expected in (
        ("throttle", 100, ThrottledError),
        ("error500", 1, UnavailableError),
        ("deny", 1, AccessDeniedError),
        ("drop_before", 1, UnavailableError),
    ):
        aws.fault_rules.replace(
            [FaultRule(service="dynamodb", operation="GetItem", kind=kind, count=count)]
        )
        with pytest.raises(expected, match=f"GetItem on table {table.name}"):
            table.get("s")
        aws.fault_rules.replace([])
        assert table.get("s") is None


@pytest.mark.parametrize("operation", ["GetItem", "Query", "Scan"])
def test_a_throttled_read_is_repeated(aws, client, operation):
    table = DynamoTables(aws, client).leases
    aws.fault_rules.replace(
        [FaultRule(service="dynamodb", operation=operation, kind="throttle", count=2)]
    )
    assert table.get("s") is None
    assert table.lease_keys_of("w") == ()
    assert table.list_leases().leases == ()
    aws.fault_rules.replace([])


@pytest.mark.parametrize("kind", ["memory", "dynamodb"])
def test_a_missing_table_is_not_found(aws, client, kind):
    tables = (
        MemoryTables(exists=False) if kind == "memory" else DynamoTables(aws, client, exists=False)
    )
    lease = Lease("s", TRIM_HORIZON, owner="w1")
    calls = {
        "GetItem": lambda: tables.leases.get("s"),
        "PutItem": lambda: create_lease(tables.leases, lease),
        "UpdateItem": lambda: tables.leases.renew(lease),
        "DeleteItem": lambda: tables.leases.delete(lease),
        "Query": lambda: tables.leases.lease_keys_of("w1"),
    }
    for operation, call in calls.items():
        with pytest.raises(NotFoundError, match=f"{operation} on table {tables.leases.name}"):
            call()
    with pytest.raises(NotFoundError):
        tables.leases.list_leases()
    assert tables.leases.ensure_exists()
    assert not tables.leases.ensure_exists()


def test_no_call_is_made_twice(aws, client):
    """The client of this package gives up after one attempt, so nothing is written behind the
    caller's back.
    """
    table = DynamoTables(aws, client).leases
    rule = FaultRule(service="dynamodb", operation="UpdateItem", kind="error500", count=5)
    aws.fault_rules.replace([rule])
    with pytest.raises(UnavailableError):
        table.assign(Lease("s", TRIM_HORIZON), "w1")
    assert aws.fault_rules.rules[0].applied == 1
    aws.fault_rules.replace([])


def test_many_pages_and_segments(aws, client):
    name = DynamoTables(aws, client).leases.name
    table = lease_table(client, name)
    keys = {f"shardId-{n}" for n in range(40)}
    for key in keys:
        client.put_item(TableName=name, Item=_fat(key))
    assert {lease.lease_key for lease in table.list_leases().leases} == keys
    seen = []

    def spy(call, items):
        seen.append(list(items))
        return [call(item) for item in items]

    four = LeaseSettings(lease_table_scan_total_segments=4)
    segmented = LeaseTable(lease_store(client, name, TableSettings(), four, VirtualClock(), spy))
    assert sorted(lease.lease_key for lease in segmented.list_leases().leases) == sorted(keys)
    assert seen == [[{"Segment": n, "TotalSegments": 4} for n in range(4)]]


def _fat(key):
    return {
        "leaseKey": {"S": key},
        "leaseCounter": {"N": "0"},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        "checkpoint": {"S": "LATEST"},
        "padding": {"S": "x" * 60_000},
    }


class SizedClient:
    def __init__(self, size):
        self.size = size
        self.asked = 0

    def describe_table(self, **request):
        self.asked += 1
        if self.size is None:
            raise client_error("InternalServerError", 500)
        return {"Table": {"TableSizeBytes": self.size}}


@pytest.mark.parametrize(
    ("size", "segments"),
    [
        (0, 1),
        (1, 1),
        (200_000_000, 1),
        (200_000_001, 2),
        (1_000_000_000, 5),
        (10**12, 32),
        (None, 10),
    ],
)
def test_segments_by_table_size(size, segments):
    client, clock = SizedClient(size), VirtualClock()
    store = lease_table(client, "sized", clock)._store
    assert store._segment_count() == segments
    assert store._segment_count() == segments
    assert client.asked == (2 if size is None else 1)
    clock.advance(7200)
    assert store._segment_count() == segments
    assert client.asked == (3 if size is None else 2)


def test_expressions_use_placeholders_only():
    expression = Expression()
    condition = expression.condition(
        [
            Present("key"),
            Absent("size"),
            Equals("name", {"S": "a"}),
            AbsentOrEquals("name", {"S": "b"}),
        ]
    )
    update = expression.update(Changes({"name": {"S": "c"}}, ("size",), {"count": 1}))
    assert (
        condition == "attribute_exists(#n0) AND attribute_not_exists(#n1) AND #n2 = :v0 AND "
        "(attribute_not_exists(#n2) OR #n2 = :v1)"
    )
    assert update == "SET #n2 = :v2 REMOVE #n1 ADD #n3 :v3"
    assert expression.parameters(ConditionExpression=condition) == {
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {"#n0": "key", "#n1": "size", "#n2": "name", "#n3": "count"},
        "ExpressionAttributeValues": {
            ":v0": {"S": "a"},
            ":v1": {"S": "b"},
            ":v2": {"S": "c"},
            ":v3": {"N": "1"},
        },
    }


def test_an_endpoint_that_does_not_return_the_refused_row(aws):
    """The row is then read strongly: lost answers are still recognised."""
    client = make_client(aws)

    def strip(params, **_):
        params.pop("ReturnValuesOnConditionCheckFailure", None)

    client.meta.events.register("provide-client-params.dynamodb.UpdateItem", strip)
    table = DynamoTables(aws, client).leases
    create_lease(table, Lease("s", TRIM_HORIZON))
    lease = table.assign(table.get("s"), "w1")
    again = table.assign(lease, "w1")
    assert table.assign(lease, "w1") == again
    renewed = table.renew(again)
    table.initiate_handoff(renewed, "w2")
    assert table.renew(renewed).checkpoint_owner == "w1"
    client.close()
