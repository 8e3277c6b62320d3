"""Accounts of the embedded AWS: the access key decides, and ARNs lead to other accounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import cbor2
import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_calls import connect

ONE, TWO = "111111111111", "222222222222"


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


def client(aws: EmbeddedAws, service: str, key: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=aws.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key="local",
    )


def arn_of(kinesis: Any) -> str:
    summary = kinesis.describe_stream_summary(StreamName="orders")["StreamDescriptionSummary"]
    arn: str = summary["StreamARN"]
    return arn


def test_streams_of_one_name_in_three_accounts(aws: EmbeddedAws) -> None:
    clients = [client(aws, "kinesis", key) for key in (ONE, TWO, "local")]
    for count, kinesis in enumerate(clients, 1):
        assert kinesis.list_streams()["StreamNames"] == []
        kinesis.create_stream(StreamName="orders", ShardCount=count)
    arns = [arn_of(kinesis) for kinesis in clients]
    assert [arn.split(":")[4] for arn in arns] == [ONE, TWO, "123456789012"]
    # By ARN, each account reads the streams of the others
    for kinesis in clients:
        counts = [len(kinesis.list_shards(StreamARN=arn)["Shards"]) for arn in arns]
        assert counts == [1, 2, 3]
    assert list(aws.kinesis.world.streams) == ["orders"]


def test_records_are_read_by_the_arn_of_another_account(aws: EmbeddedAws) -> None:
    one, two = client(aws, "kinesis", ONE), client(aws, "kinesis", TWO)
    one.create_stream(StreamName="orders", ShardCount=1)
    two.list_streams()
    arn = arn_of(one)
    put = two.put_record(StreamARN=arn, PartitionKey="k", Data=b"x")
    place = {"ShardId": put["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
    iterator = two.get_shard_iterator(StreamARN=arn, **place)["ShardIterator"]
    (record,) = two.get_records(StreamARN=arn, ShardIterator=iterator)["Records"]
    assert record["Data"] == b"x"
    with pytest.raises(ClientError, match="not found"):
        two.get_shard_iterator(StreamName="orders", **place)


def test_an_arn_in_cbor(aws: EmbeddedAws) -> None:
    one = client(aws, "kinesis", ONE)
    one.create_stream(StreamName="orders", ShardCount=1)
    connection = connect(aws)
    kind = "application/x-amz-cbor-1.1"
    headers = {"X-Amz-Target": "Kinesis_20131202.ListShards", "Content-Type": kind}
    connection.request("POST", "/", cbor2.dumps({"StreamARN": arn_of(one)}), headers)
    answer = cbor2.loads(connection.getresponse().read())
    connection.close()
    assert len(answer["Shards"]) == 1


def create_first_table(dynamodb: Any) -> None:
    assert dynamodb.list_tables()["TableNames"] == []
    dynamodb.create_table(
        TableName="t",
        KeySchema=[{"AttributeName": "k", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )


def test_tables_and_identities_of_two_accounts(aws: EmbeddedAws) -> None:
    for key in (ONE, TWO, "local"):
        create_first_table(client(aws, "dynamodb", key))
        if key != "local":
            assert client(aws, "sts", key).get_caller_identity()["Account"] == key


def test_the_data_of_an_account_ends_with_the_server() -> None:
    for _ in range(2):
        with EmbeddedAws() as aws:
            create_first_table(client(aws, "dynamodb", ONE))
            assert aws.environment(ONE)["AWS_ACCESS_KEY_ID"] == ONE
            assert aws.environment()["AWS_ACCESS_KEY_ID"] == "local"
