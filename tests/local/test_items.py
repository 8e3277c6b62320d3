"""Items of DynamoDB come back as they were written, with each type of value."""

from __future__ import annotations

import boto3

from kcl_pipeline.local import EmbeddedAws

VALUES = {
    "text": {"S": "ü"},
    "empty": {"S": ""},
    "number": {"N": "1.5"},
    "bytes": {"B": b"\x00\xff"},
    "yes": {"BOOL": True},
    "no": {"BOOL": False},
    "nothing": {"NULL": True},
    "texts": {"SS": ["a", "b"]},
    "numbers": {"NS": ["1", "2"]},
    "list": {"L": [{"S": "a"}, {"B": b"\xff"}, {"L": []}]},
    "map": {"M": {"S": {"S": "S"}, "N": {"N": "1"}, "b": {"B": b"\xff"}, "m": {"M": {}}}},
}


def test_each_type_of_value_comes_back() -> None:
    with EmbeddedAws() as aws:
        client = boto3.client(
            "dynamodb",
            endpoint_url=aws.endpoint_url,
            region_name=aws.region,
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        client.create_table(
            TableName="t",
            KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        item = {"k": {"S": "one"}, **VALUES}
        client.put_item(TableName="t", Item=item)
        found = client.get_item(TableName="t", Key={"k": {"S": "one"}})["Item"]
        updated = client.update_item(
            TableName="t",
            Key={"k": {"S": "one"}},
            UpdateExpression="SET yes = :yes",
            ExpressionAttributeValues={":yes": {"BOOL": True}},
            ReturnValues="ALL_NEW",
        )["Attributes"]
        for given in (found, updated, *client.scan(TableName="t")["Items"]):
            for kind in ("texts", "numbers"):  # a set has no order
                ((name, values),) = given[kind].items()
                given[kind] = {name: sorted(values)}
            assert given == item
