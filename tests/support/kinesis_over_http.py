"""The boto3 adapter against the embedded AWS, with every call recorded."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
from botocore.config import Config

from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.kinesis.boto import BotoKinesis
from kcl_pipeline.local import EmbeddedAws, FaultRule
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock

SHARD = "shardId-000000000000"


class Side:
    """An embedded AWS with a boto3 client, and a clock that shows how long the adapter waited."""

    def __init__(self, aws: EmbeddedAws) -> None:
        self.aws = aws
        self.clock = VirtualClock()
        self.calls: list[tuple[str, dict]] = []
        self.client = boto3.client(
            "kinesis",
            endpoint_url=aws.endpoint_url,
            region_name=aws.region,
            aws_access_key_id="local",
            aws_secret_access_key="local",
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=5),
        )
        self.client.meta.events.register(
            "provide-client-params.kinesis",
            lambda params, model, **_: self.calls.append((model.name, dict(params))),
        )
        self.kinesis = self.adapter()

    def adapter(self, **more) -> BotoKinesis:
        return BotoKinesis(
            self.client,
            RetrievalSettings(),
            ShardSyncSettings(max_list_shards_retry_attempts=4),
            self.clock,
            **more,
        )

    def stream(self, name: str, shards: int = 1, records: int = 0) -> StreamId:
        self.aws.kinesis.call("CreateStream", StreamName=name, ShardCount=shards)
        for i in range(records):
            self.aws.kinesis.call(
                "PutRecord", StreamName=name, PartitionKey=f"k{i}", Data=bytes([i, 255, 0])
            )
        return StreamId(name)

    def fault(self, operation: str, kind: str, count: int | None = None, code: str = "") -> None:
        self.aws.fault_rules.replace(
            [FaultRule(service="kinesis", operation=operation, kind=kind, count=count, code=code)]
        )


@pytest.fixture(scope="module", name="aws")
def aws_fixture() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture(name="side")
def side_fixture(aws: EmbeddedAws) -> Iterator[Side]:
    for name in list(aws.kinesis.world.streams):
        aws.kinesis.call("DeleteStream", StreamName=name)
    aws.kinesis.world.streams.clear()
    side = Side(aws)
    yield side
    aws.fault_rules.replace([])
    side.client.close()


def iterator_of(side: Side, stream: StreamId) -> str:
    return side.kinesis.get_shard_iterator(stream, SHARD, "TRIM_HORIZON")
