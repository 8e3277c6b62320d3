"""What only DynamoDB has: creating tables and indexes, errors, paging, segments, requests."""

import botocore.exceptions as botocore
import pytest

from kcl_pipeline.config import ConsumerSettings, TableSettings
from kcl_pipeline.errors import (
    IncompatibleTableError,
    UnavailableError,
)
from kcl_pipeline.leases.dynamodb import open_dynamodb
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.dynamodb_tables import lease_table

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    DynamoTables,
    MemoryTables,
    aws_fixture,
    client_fixture,
    make_client,
)


def describe(client, name):
    return client.describe_table(TableName=name)["Table"]


def test_tables_with_defaults(aws, client):
    tables = DynamoTables(aws, client, exists=False)
    for table, key in (
        (tables.leases, "leaseKey"),
        (tables.workers, "wid"),
        (tables.coordinator, "key"),
    ):
        assert table.ensure_exists()
        assert not table.ensure_exists()
        found = describe(client, table.name)
        assert found["KeySchema"] == [{"AttributeName": key, "KeyType": "HASH"}]
        assert found["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert not found["DeletionProtectionEnabled"]
        assert client.list_tags_of_resource(ResourceArn=found["TableArn"])["Tags"] == []
        assert recovery(client, table.name) == "DISABLED"
    (index,) = describe(client, tables.leases.name)["GlobalSecondaryIndexes"]
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
    settings = ConsumerSettings(
        application_name="single",
        streams=("s",),
        table_layout="three",
        lease_table=TableSettings(point_in_time_recovery_enabled=True),
    )
    tables = open_dynamodb(client, settings, VirtualClock())
    with pytest.raises(IncompatibleTableError, match="table_layout='three', but the application"):
        tables.lease.ensure_exists()
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
