"""Clients and shortcuts for tests against the embedded AWS."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from kcl_pipeline.local import EmbeddedAws

MAX_HASH = 2**128 - 1
ZERO = "shardId-000000000000"
_numbers = itertools.count()


def client(
    aws: EmbeddedAws | str, service: str = "kinesis", *, parameter_validation: bool = False
) -> Any:
    """A client that asks once and sends what it is given, so that the server has to check."""
    config = Config(
        retries={"total_max_attempts": 1},
        parameter_validation=parameter_validation,
        connect_timeout=5,
        read_timeout=20,
    )
    url = aws if isinstance(aws, str) else aws.endpoint_url
    return boto3.client(
        service,
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="k",
        aws_secret_access_key="s",
        config=config,
    )


def fresh_name(prefix: str = "stream") -> str:
    return f"{prefix}-{next(_numbers)}"


@contextmanager
def eager_switching() -> Iterator[None]:
    """Let threads interrupt each other every few microseconds, so that what is not atomic
    breaks.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def new_stream(kinesis: Any, shards: int) -> str:
    name = fresh_name()
    kinesis.create_stream(StreamName=name, ShardCount=shards)
    return name


def refused(code: str, call: Callable[..., Any], *args: Any, **params: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call(*args, **params)
    assert caught.value.response["Error"]["Code"] == code, caught.value
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    return str(caught.value.response["Error"]["Message"])


def iterate(
    kinesis: Any,
    name: str,
    shard: str = "shardId-000000000000",
    kind: str = "TRIM_HORIZON",
    **more: Any,
) -> str:
    return str(
        kinesis.get_shard_iterator(StreamName=name, ShardId=shard, ShardIteratorType=kind, **more)[
            "ShardIterator"
        ]
    )


def read(kinesis: Any, token: str, **more: Any) -> list[bytes]:
    return [r["Data"] for r in kinesis.get_records(ShardIterator=token, **more)["Records"]]


def read_all(kinesis: Any, name: str, shard: str) -> list[dict[str, Any]]:
    token: str | None = iterate(kinesis, name, shard)
    records: list[dict[str, Any]] = []
    for _ in range(1000):
        answer = kinesis.get_records(ShardIterator=token)
        records += answer["Records"]
        token = answer.get("NextShardIterator")
        if token is None or (not answer["Records"] and answer["MillisBehindLatest"] == 0):
            return records
    raise AssertionError("the shard does not end")


def put(kinesis: Any, name: str, *data: bytes, key: str = "k") -> list[str]:
    return [
        kinesis.put_record(StreamName=name, Data=d, PartitionKey=key)["SequenceNumber"]
        for d in data
    ]
