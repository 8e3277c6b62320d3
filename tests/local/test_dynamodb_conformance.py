"""What leases need of DynamoDB, requested through boto3 from the embedded AWS."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import client, eager_switching, fresh_name


@pytest.fixture(scope="module")
def dynamodb(aws: EmbeddedAws) -> Any:
    return client(aws, "dynamodb")


@pytest.fixture
def table(dynamodb: Any) -> str:
    name = fresh_name("leases")
    dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    dynamodb.get_waiter("table_exists").wait(
        TableName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 5}
    )
    return name


def lease(key: str, owner: str | None = None, counter: int = 0) -> dict[str, Any]:
    item: dict[str, Any] = {
        "leaseKey": {"S": key},
        "leaseCounter": {"N": str(counter)},
        "checkpoint": {"S": "TRIM_HORIZON"},
    }
    return item if owner is None else item | {"leaseOwner": {"S": owner}}


def condition_fails(call: Callable[..., Any], **params: Any) -> dict[str, Any] | None:
    with pytest.raises(ClientError) as caught:
        call(**params)
    assert caught.value.response["Error"]["Code"] == "ConditionalCheckFailedException"
    item: dict[str, Any] | None = caught.value.response.get("Item")
    return item


def renew(table: str, key: str, expected: int, owner: str) -> dict[str, Any]:
    return {
        "TableName": table,
        "Key": {"leaseKey": {"S": key}},
        "UpdateExpression": "SET leaseCounter = :next, leaseOwner = :owner",
        "ConditionExpression": "attribute_exists(leaseKey) AND leaseCounter = :expected",
        "ExpressionAttributeValues": {
            ":next": {"N": str(expected + 1)},
            ":expected": {"N": str(expected)},
            ":owner": {"S": owner},
        },
    }


def test_conditional_put(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(
        TableName=table, Item=lease("a"), ConditionExpression="attribute_not_exists(leaseKey)"
    )
    old = condition_fails(
        dynamodb.put_item,
        TableName=table,
        Item=lease("a", counter=9),
        ConditionExpression="attribute_not_exists(leaseKey)",
        ReturnValuesOnConditionCheckFailure="ALL_OLD",
    )
    assert old == lease("a")


def test_conditional_update_returns_the_row_on_failure(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item=lease("a", "me", 7))
    assert condition_fails(dynamodb.update_item, **renew(table, "a", 6, "you")) is None
    assert condition_fails(
        dynamodb.update_item,
        **renew(table, "a", 6, "you"),
        ReturnValuesOnConditionCheckFailure="ALL_OLD",
    ) == lease("a", "me", 7)
    new = dynamodb.update_item(**renew(table, "a", 7, "you"), ReturnValues="ALL_NEW")["Attributes"]
    assert new == lease("a", "you", 8)
    condition_fails(dynamodb.update_item, **renew(table, "missing", 0, "you"))
    assert "Item" not in dynamodb.get_item(
        TableName=table, Key={"leaseKey": {"S": "missing"}}, ConsistentRead=True
    )


def test_conditional_delete(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item=lease("a", "me", 7))
    params: dict[str, Any] = {
        "TableName": table,
        "Key": {"leaseKey": {"S": "a"}},
        "ConditionExpression": "leaseCounter = :c",
    }
    old = condition_fails(
        dynamodb.delete_item,
        **params,
        ExpressionAttributeValues={":c": {"N": "6"}},
        ReturnValuesOnConditionCheckFailure="ALL_OLD",
    )
    assert old == lease("a", "me", 7)
    assert dynamodb.get_item(TableName=table, Key={"leaseKey": {"S": "a"}})["Item"] == lease(
        "a", "me", 7
    )
    gone = dynamodb.delete_item(
        **params, ExpressionAttributeValues={":c": {"N": "7"}}, ReturnValues="ALL_OLD"
    )["Attributes"]
    assert gone == lease("a", "me", 7)
    condition_fails(dynamodb.delete_item, **params, ExpressionAttributeValues={":c": {"N": "7"}})


def test_remove_add_and_sets(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(
        TableName=table, Item=lease("a", "me", 1) | {"parentShardId": {"SS": ["p1", "p2"]}}
    )
    answer = dynamodb.update_item(
        TableName=table,
        Key={"leaseKey": {"S": "a"}},
        UpdateExpression="REMOVE leaseOwner ADD leaseCounter :one",
        ConditionExpression="leaseOwner = :me AND attribute_not_exists(checkpointOwner)",
        ExpressionAttributeValues={":one": {"N": "1"}, ":me": {"S": "me"}},
        ReturnValues="ALL_NEW",
    )["Attributes"]
    assert "leaseOwner" not in answer
    assert answer["leaseCounter"] == {"N": "2"}
    assert sorted(answer["parentShardId"]["SS"]) == ["p1", "p2"]


def refused_delete(dynamodb: Any, table: str, **condition: Any) -> None:
    condition_fails(
        dynamodb.delete_item, TableName=table, Key={"leaseKey": {"S": "a"}}, **condition
    )
    assert "Item" in dynamodb.get_item(TableName=table, Key={"leaseKey": {"S": "a"}})


def test_legacy_conditions_of_the_java_library(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item=lease("a", "me", 7))
    key = {"leaseKey": {"S": "a"}}
    refused_delete(
        dynamodb, table, Expected={"leaseCounter": {"Value": {"N": "6"}, "Exists": True}}
    )
    refused_delete(dynamodb, table, Expected={"leaseOwner": {"Exists": False}})
    refused_delete(
        dynamodb,
        table,
        Expected={"leaseCounter": {"AttributeValueList": [{"N": "7"}], "ComparisonOperator": "LT"}},
    )
    either = {"leaseOwner": {"Value": {"S": "you"}}, "leaseCounter": {"Value": {"N": "7"}}}
    condition_fails(dynamodb.put_item, TableName=table, Item=lease("a"), Expected=either)
    update = {
        "leaseCounter": {"Action": "PUT", "Value": {"N": "8"}},
        "leaseOwner": {"Action": "DELETE"},
    }
    condition_fails(
        dynamodb.update_item,
        TableName=table,
        Key=key,
        AttributeUpdates=update,
        Expected={"leaseOwner": {"Value": {"S": "you"}}},
    )
    new = dynamodb.update_item(
        TableName=table,
        Key=key,
        AttributeUpdates=update,
        Expected=either,
        ConditionalOperator="OR",
        ReturnValues="ALL_NEW",
    )["Attributes"]
    assert new == lease("a", None, 8)
    dynamodb.delete_item(
        TableName=table,
        Key=key,
        Expected={"leaseCounter": {"Value": {"N": "8"}}, "leaseOwner": {"Exists": False}},
    )
    assert "Item" not in dynamodb.get_item(TableName=table, Key=key)


def test_index_on_owner_by_update_table(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item=lease("a", "me"))
    dynamodb.put_item(TableName=table, Item=lease("b", "you"))
    dynamodb.put_item(TableName=table, Item=lease("c"))
    dynamodb.update_table(
        TableName=table,
        AttributeDefinitions=[
            {"AttributeName": "leaseKey", "AttributeType": "S"},
            {"AttributeName": "leaseOwner", "AttributeType": "S"},
        ],
        GlobalSecondaryIndexUpdates=[
            {
                "Create": {
                    "IndexName": "LeaseOwnerToLeaseKeyIndex",
                    "KeySchema": [
                        {"AttributeName": "leaseOwner", "KeyType": "HASH"},
                        {"AttributeName": "leaseKey", "KeyType": "RANGE"},
                    ],
                    "Projection": {"ProjectionType": "KEYS_ONLY"},
                }
            }
        ],
    )
    index = dynamodb.describe_table(TableName=table)["Table"]["GlobalSecondaryIndexes"][0]
    assert (index["IndexName"], index["IndexStatus"]) == ("LeaseOwnerToLeaseKeyIndex", "ACTIVE")

    def owned(owner: str) -> list[str]:
        answer = dynamodb.query(
            TableName=table,
            IndexName="LeaseOwnerToLeaseKeyIndex",
            KeyConditionExpression="leaseOwner = :o",
            ExpressionAttributeValues={":o": {"S": owner}},
        )
        return [i["leaseKey"]["S"] for i in answer["Items"]]

    assert (owned("me"), owned("you")) == (["a"], ["b"])
    dynamodb.update_item(**renew(table, "c", 0, "me"))
    assert owned("me") == ["a", "c"]


def test_table_life(dynamodb: Any, table: str) -> None:
    described = dynamodb.describe_table(TableName=table)["Table"]
    assert (described["TableStatus"], described["BillingModeSummary"]["BillingMode"]) == (
        "ACTIVE",
        "PAY_PER_REQUEST",
    )
    with pytest.raises(ClientError, match="ResourceInUseException"):
        dynamodb.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
    dynamodb.update_continuous_backups(
        TableName=table, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True}
    )
    backups = dynamodb.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    assert backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"
    dynamodb.update_table(TableName=table, DeletionProtectionEnabled=True)
    with pytest.raises(ClientError, match="ValidationException"):
        dynamodb.delete_table(TableName=table)
    dynamodb.update_table(TableName=table, DeletionProtectionEnabled=False)
    dynamodb.tag_resource(
        ResourceArn=described["TableArn"], Tags=[{"Key": "team", "Value": "orders"}]
    )
    assert dynamodb.list_tags_of_resource(ResourceArn=described["TableArn"])["Tags"] == [
        {"Key": "team", "Value": "orders"}
    ]
    dynamodb.delete_table(TableName=table)
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        dynamodb.describe_table(TableName=table)


def test_scan_pages_and_segments(dynamodb: Any, table: str) -> None:
    for i in range(60):
        dynamodb.put_item(TableName=table, Item=lease(f"{i:03d}"))
    found = [
        i["leaseKey"]["S"]
        for page in dynamodb.get_paginator("scan").paginate(TableName=table, Limit=7)
        for i in page["Items"]
    ]
    assert sorted(found) == [f"{i:03d}" for i in range(60)]
    split = [dynamodb.scan(TableName=table, Segment=s, TotalSegments=4)["Items"] for s in range(4)]
    assert sorted(i["leaseKey"]["S"] for part in split for i in part) == sorted(found)


def test_transactions_are_all_or_nothing(dynamodb: Any, table: str) -> None:
    dynamodb.put_item(TableName=table, Item=lease("a", "me", 1))
    items = [
        {"Put": {"TableName": table, "Item": lease("b")}},
        {
            "Update": {
                "TableName": table,
                "Key": {"leaseKey": {"S": "a"}},
                "UpdateExpression": "SET leaseCounter = :n",
                "ConditionExpression": "leaseOwner = :o",
                "ExpressionAttributeValues": {":n": {"N": "2"}, ":o": {"S": "you"}},
            }
        },
    ]
    with pytest.raises(ClientError) as caught:
        dynamodb.transact_write_items(TransactItems=items)
    assert caught.value.response["Error"]["Code"] == "TransactionCanceledException"
    assert [r["Code"] for r in caught.value.response["CancellationReasons"]] == [
        "None",
        "ConditionalCheckFailed",
    ]
    assert "Item" not in dynamodb.get_item(TableName=table, Key={"leaseKey": {"S": "b"}})


def test_eight_workers_race_for_a_lease_and_one_wins(
    aws: EmbeddedAws, dynamodb: Any, table: str
) -> None:
    rounds, workers = 25, 8
    dynamodb.put_item(TableName=table, Item=lease("a"))
    barrier = threading.Barrier(workers)
    winners: list[list[str]] = [[] for _ in range(rounds)]

    def race(worker: str) -> None:
        own = client(aws, "dynamodb")
        for round_ in range(rounds):
            barrier.wait(20)
            try:
                own.update_item(**renew(table, "a", round_, worker))
            except ClientError as error:
                # either outcome is right
                code = error.response["Error"]["Code"]
                assert code == "ConditionalCheckFailedException"
            else:
                winners[round_].append(worker)

    threads = [threading.Thread(target=race, args=(f"w{i}",)) for i in range(workers)]
    with eager_switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [len(w) for w in winners] == [1] * rounds
    row = dynamodb.get_item(TableName=table, Key={"leaseKey": {"S": "a"}}, ConsistentRead=True)[
        "Item"
    ]
    assert (row["leaseCounter"], row["leaseOwner"]) == ({"N": str(rounds)}, {"S": winners[-1][0]})


def test_two_embedded_aws_do_not_see_each_other(dynamodb: Any, table: str) -> None:
    with EmbeddedAws() as other:
        second = client(other, "dynamodb")
        assert second.list_tables()["TableNames"] == []
        second.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        assert (
            second.describe_table(TableName=table)["Table"]["KeySchema"][0]["AttributeName"] == "k"
        )
    assert (
        dynamodb.describe_table(TableName=table)["Table"]["KeySchema"][0]["AttributeName"]
        == "leaseKey"
    )
    with EmbeddedAws() as third:
        assert client(third, "dynamodb").list_tables()["TableNames"] == []
