"""The same application name with another stream or another table, on the embedded AWS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.errors import KclError
from kcl_pipeline.local import EmbeddedAws

FAST: dict[str, Any] = {
    "lease": {"failover_time_millis": 1_000},
    "leader": {"leader_lease_duration_millis": 500, "leader_heartbeat_period_millis": 100},
}


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


class Applications:
    """Runs of one application name with different settings, in this process."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
        self.options = SessionOptions(
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.folder = folder
        clients = AwsClients(self.pipeline(["clicks"]).settings, self.options)
        self.kinesis, self.dynamodb = clients.kinesis, clients.dynamodb

    def pipeline(self, streams: list[str], table: str | None = None) -> KinesisPipeline:
        return KinesisPipeline(
            "application",
            streams,
            DeltaSink(str(self.folder / (table or "rows"))),
            settings_overrides=FAST,
        )

    def worker(self, streams: list[str], table: str | None = None, name: str = "w-1"):
        pipeline = self.pipeline(streams, table)
        return pipeline.build_worker(name, clients=AwsClients(pipeline.settings, self.options))

    def drain(self, streams: list[str], table: str | None = None, seconds: float = 60.0) -> int:
        """Records read by a drain; one that does not end within the time is stopped."""
        stop = threading.Event()
        timer = threading.Timer(seconds, stop.set)
        timer.start()
        try:
            return self.worker(streams, table).run(stop, mode="drain").total.records
        finally:
            timer.cancel()

    def publish(self, stream: str, count: int, prefix: str) -> None:
        for start in range(0, count, 500):
            answer = self.kinesis.put_records(
                StreamName=stream,
                Records=[
                    {"Data": f"{prefix}-{n}".encode(), "PartitionKey": f"k{n}"}
                    for n in range(start, min(start + 500, count))
                ],
            )
            assert answer["FailedRecordCount"] == 0

    def rows(self, table: str = "rows") -> list[bytes]:
        column = DeltaTable(str(self.folder / table)).to_pyarrow_table(columns=["data"])
        return sorted(column.column("data").to_pylist())

    def leases(self) -> dict[str, dict[str, Any]]:
        items = self.dynamodb.scan(TableName="application", ConsistentRead=True)["Items"]
        return {item["leaseKey"]["S"]: item for item in items}

    def forget_identity(self) -> None:
        """As a table made by Java, or by a version that recorded nothing."""
        self.dynamodb.update_item(
            TableName="application-CoordinatorState",
            Key={"key": {"S": "Migration3.0"}},
            UpdateExpression="REMOVE kclpApplication",
        )


@pytest.fixture
def applications(aws: EmbeddedAws, tmp_path: Path) -> Applications:
    made = Applications(aws, tmp_path)
    made.kinesis.create_stream(StreamName="clicks", ShardCount=3)
    made.kinesis.create_stream(StreamName="other", ShardCount=2)
    return made


def published(count: int, prefix: str) -> list[bytes]:
    return [f"{prefix}-{n}".encode() for n in range(count)]


@pytest.mark.parametrize("recorded", [True, False])
def test_another_stream_under_the_same_name_is_refused_and_loses_nothing(
    applications: Applications, recorded: bool
) -> None:
    """Without a record the leases themselves show it: other hash ranges."""
    applications.publish("clicks", 1_000, "clicks")
    applications.publish("other", 1_000, "other")
    assert applications.drain(["clicks"]) == 1_000
    if not recorded:
        applications.forget_identity()
    before = applications.leases()
    with pytest.raises(KclError, match="do accept") as caught:
        applications.drain(["other"])
    assert "clicks" in str(caught.value) or "hash keys" in str(caught.value)
    assert applications.leases() == before
    applications.publish("clicks", 996, "more")
    assert applications.drain(["clicks"]) == 996
    assert applications.rows() == sorted(published(1_000, "clicks") + published(996, "more"))


def test_another_mode_under_the_same_name_is_refused(applications: Applications) -> None:
    applications.publish("clicks", 100, "clicks")
    assert applications.drain(["clicks"]) == 100
    with pytest.raises(KclError, match="names several"):
        applications.drain(["clicks", "other"])
    assert applications.drain(["clicks"]) == 0


def test_another_table_under_the_same_name_is_refused(applications: Applications) -> None:
    applications.publish("clicks", 100, "clicks")
    assert applications.drain(["clicks"]) == 100
    with pytest.raises(KclError, match="do accept"):
        applications.drain(["clicks"], table="elsewhere")
    assert not (applications.folder / "elsewhere").exists()


def test_a_stream_that_is_created_again_is_begun(applications: Applications) -> None:
    applications.publish("clicks", 100, "clicks")
    assert applications.drain(["clicks"]) == 100
    applications.kinesis.delete_stream(StreamName="clicks")
    applications.kinesis.create_stream(StreamName="clicks", ShardCount=3)
    applications.publish("clicks", 100, "new")
    assert applications.drain(["clicks"]) == 100
    assert applications.rows() == sorted(published(100, "clicks") + published(100, "new"))


def test_a_further_stream_joins_several(applications: Applications) -> None:
    applications.kinesis.create_stream(StreamName="third", ShardCount=1)
    for stream in ("clicks", "other", "third"):
        applications.publish(stream, 100, stream)
    assert applications.drain(["clicks", "other"]) == 200
    assert applications.drain(["clicks", "other", "third"]) == 100
    assert len(applications.rows()) == 300
