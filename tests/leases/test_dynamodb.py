"""What only DynamoDB has: creating tables and indexes, errors, paging, segments, requests."""

import botocore.exceptions as botocore
import pytest

from kcl_pipeline.aws_errors import translated
from kcl_pipeline.config import LeaseSettings, TableSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    IncompatibleTableError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.aws_errors import ConditionFailed, refused_condition
from kcl_pipeline.leases.dynamodb.leases import DynamoDbLeaseTable
from kcl_pipeline.leases.dynamodb.store import Expression
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.store import Absent, AbsentOrEquals, Changes, Equals, Present
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.clock import VirtualClock

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    DynamoTwin,
    MemoryTwin,
    aws_fixture,
    client_fixture,
    make_client,
)


def describe(client, name):
    return client.describe_table(TableName=name)["Table"]


def lease_table(client, name, clock=None, lease_settings=None, **table):
    return DynamoDbLeaseTable(
        client,
        name,
        TableSettings(**table),
        lease_settings or LeaseSettings(),
        clock or VirtualClock(),
    )


def test_tables_with_defaults(aws, client):
    twin = DynamoTwin(aws, client, exists=False)
    for table, key in ((twin.leases, "leaseKey"), (twin.workers, "wid"), (twin.coordinator, "key")):
        assert table.ensure_exists()
        assert not table.ensure_exists()
        found = describe(client, table.name)
        assert found["KeySchema"] == [{"AttributeName": key, "KeyType": "HASH"}]
        assert found["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert not found["DeletionProtectionEnabled"]
        assert client.list_tags_of_resource(ResourceArn=found["TableArn"])["Tags"] == []
        assert recovery(client, table.name) == "DISABLED"
    (index,) = describe(client, twin.leases.name)["GlobalSecondaryIndexes"]
    assert index["IndexName"] == "LeaseOwnerToLeaseKeyIndex"
    assert index["KeySchema"] == [
        {"AttributeName": "leaseOwner", "KeyType": "HASH"},
        {"AttributeName": "leaseKey", "KeyType": "RANGE"},
    ]
    assert index["Projection"] == {"ProjectionType": "KEYS_ONLY"}


def recovery(client, name):
    backups = client.describe_continuous_backups(TableName=name)["ContinuousBackupsDescription"]
    return backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"]


def test_table_with_everything_set(client):
    table = lease_table(
        client,
        "everything",
        billing_mode="PROVISIONED",
        read_capacity_units=7,
        write_capacity_units=8,
        point_in_time_recovery_enabled=True,
        deletion_protection_enabled=True,
        tags={"team": "data", "cost": "1"},
    )
    assert table.ensure_exists()
    found = describe(client, "everything")
    for part in (found, found["GlobalSecondaryIndexes"][0]):
        assert (
            part["ProvisionedThroughput"]["ReadCapacityUnits"],
            part["ProvisionedThroughput"]["WriteCapacityUnits"],
        ) == (7, 8)
    assert found["DeletionProtectionEnabled"]
    assert client.list_tags_of_resource(ResourceArn=found["TableArn"])["Tags"] == [
        {"Key": "cost", "Value": "1"},
        {"Key": "team", "Value": "data"},
    ]
    assert recovery(client, "everything") == "ENABLED"


def test_an_index_is_added_to_a_table_of_java(client):
    key = {"AttributeName": "leaseKey", "AttributeType": "S"}
    client.create_table(
        TableName="java",
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[key],
        BillingMode="PAY_PER_REQUEST",
    )
    client.put_item(TableName="java", Item={"leaseKey": {"S": "s"}, "leaseOwner": {"S": "w1"}})
    table = lease_table(client, "java", point_in_time_recovery_enabled=True)
    assert not table.ensure_exists()
    assert table.lease_keys_of("w1") == ("s",)
    assert recovery(client, "java") == "ENABLED"


def test_a_refused_table_is_not_changed(client):
    key = {"AttributeName": "leaseKey", "AttributeType": "S"}
    client.create_table(
        TableName="single",
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[key],
        BillingMode="PAY_PER_REQUEST",
    )
    client.put_item(TableName="single", Item={"leaseKey": {"S": "Leader"}})
    with pytest.raises(IncompatibleTableError, match="the lease table single has the row Leader"):
        lease_table(client, "single", point_in_time_recovery_enabled=True).ensure_exists()
    assert not describe(client, "single").get("GlobalSecondaryIndexes")
    assert recovery(client, "single") == "DISABLED"


def test_a_table_with_another_key_is_refused(client):
    client.create_table(
        TableName="foreign",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "N"}],
        BillingMode="PAY_PER_REQUEST",
    )
    with pytest.raises(
        IncompatibleTableError,
        match=r"foreign has the key id \(HASH N\), but this application needs leaseKey",
    ):
        lease_table(client, "foreign").ensure_exists()


class SlowClient:
    """A client whose DescribeTable goes through given statuses (table, index), the last for
    ever.
    """

    def __init__(self, client, *statuses):
        self._client = client
        self._statuses = list(statuses)

    def __getattr__(self, name):
        return getattr(self._client, name)

    def describe_table(self, **request):
        answer = self._client.describe_table(**request)
        table, index = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        answer["Table"]["TableStatus"] = table
        for entry in answer["Table"].get("GlobalSecondaryIndexes", []):
            entry["IndexStatus"] = index
        return answer


def test_waiting_for_table_and_index(client):
    clock = VirtualClock()
    states = (
        [("CREATING", "")] * 3
        + [("ACTIVE", "")] * 2
        + [("UPDATING", "CREATING")] * 4
        + [("ACTIVE", "ACTIVE")]
    )
    slow = SlowClient(client, *states)
    assert lease_table(slow, "slow", clock).ensure_exists()
    assert 3 < clock.monotonic() < 60


def test_waiting_has_an_end(client):
    clock = VirtualClock()
    with pytest.raises(
        UnavailableError, match="creation of the table never was not ready after 600 s"
    ):
        lease_table(SlowClient(client, ("CREATING", "")), "never", clock).ensure_exists()
    assert 580 <= clock.monotonic() <= 600
    with pytest.raises(
        UnavailableError, match=r"index LeaseOwnerToLeaseKeyIndex .* was not ready after 3600 s"
    ):
        lease_table(SlowClient(client, ("ACTIVE", "CREATING")), "never2", clock).ensure_exists()


class BlindClient:
    """A client that does not see the table or index at its first look: another worker makes them in
    between.
    """

    def __init__(self, client):
        self._client = client
        self._looks = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def describe_table(self, **request):
        self._looks += 1
        if self._looks == 1:
            raise botocore.ClientError(
                {"Error": {"Code": "ResourceNotFoundException"}}, "DescribeTable"
            )
        answer = self._client.describe_table(**request)
        if self._looks < 5:
            answer["Table"].pop("GlobalSecondaryIndexes", None)
        return answer


def test_losing_the_race_for_the_table_and_its_index(client):
    lease_table(client, "raced").ensure_exists()
    assert not lease_table(BlindClient(client), "raced").ensure_exists()


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
    table = DynamoTwin(aws, client).leases
    for kind, expected in (
        ("throttle", ThrottledError),
        ("error500", UnavailableError),
        ("deny", AccessDeniedError),
        ("drop_before", UnavailableError),
    ):
        aws.fault_rules.replace(
            [FaultRule(service="dynamodb", operation="GetItem", kind=kind, count=1)]
        )
        with pytest.raises(expected, match=f"GetItem on table {table.name}"):
            table.get("s")
        assert table.get("s") is None


@pytest.mark.parametrize("kind", ["memory", "dynamodb"])
def test_a_missing_table_is_not_found(aws, client, kind):
    twin = MemoryTwin(exists=False) if kind == "memory" else DynamoTwin(aws, client, exists=False)
    lease = Lease("s", TRIM_HORIZON, owner="w1")
    calls = {
        "GetItem": lambda: twin.leases.get("s"),
        "PutItem": lambda: twin.leases.create_lease(lease),
        "UpdateItem": lambda: twin.leases.renew(lease),
        "DeleteItem": lambda: twin.leases.delete(lease),
        "Query": lambda: twin.leases.lease_keys_of("w1"),
    }
    for operation, call in calls.items():
        with pytest.raises(NotFoundError, match=f"{operation} on table {twin.leases.name}"):
            call()
    with pytest.raises(NotFoundError):
        twin.leases.list_leases()
    assert twin.leases.ensure_exists()
    assert not twin.leases.ensure_exists()


def test_no_call_is_made_twice(aws, client):
    """The client of this package gives up after one attempt, so nothing is written behind the
    caller's back.
    """
    table = DynamoTwin(aws, client).leases
    rule = FaultRule(service="dynamodb", operation="UpdateItem", kind="error500", count=5)
    aws.fault_rules.replace([rule])
    with pytest.raises(UnavailableError):
        table.assign(Lease("s", TRIM_HORIZON), "w1")
    assert aws.fault_rules.rules[0].applied == 1
    aws.fault_rules.replace([])


def test_many_pages_and_segments(aws, client):
    name = DynamoTwin(aws, client).leases.name
    table = lease_table(client, name)
    keys = {f"shardId-{n}" for n in range(40)}
    for key in keys:
        client.put_item(TableName=name, Item=_fat(key))
    assert {lease.lease_key for lease in table.list_leases().leases} == keys
    seen = []

    def spy(call, items):
        seen.append(list(items))
        return [call(item) for item in items]

    segmented = DynamoDbLeaseTable(
        client,
        name,
        TableSettings(),
        LeaseSettings(lease_table_scan_total_segments=4),
        VirtualClock(),
        map_segments=spy,
    )
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
    table = DynamoTwin(aws, client).leases
    table.create_lease(Lease("s", TRIM_HORIZON))
    lease = table.assign(table.get("s"), "w1")
    renewed = table.renew(lease)
    assert table.renew(lease) == renewed
    table.initiate_handoff(renewed, "w2")
    assert table.renew(renewed).checkpoint_owner == "w1"
    client.close()
