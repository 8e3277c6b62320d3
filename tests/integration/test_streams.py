"""Streams that come, go and return under workers with default settings, on the embedded AWS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.events import Event, Measurement
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from tests.support.fleet_processes import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


class Application:
    """Workers of one application as threads, each with the default settings."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
        self.aws = aws
        self.options = SessionOptions(
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.table = str(folder / "rows")
        self.kinesis = AwsClients(self.pipeline("a").settings, self.options).kinesis
        self.running: dict[str, tuple[threading.Event, threading.Thread]] = {}
        self.sent: list[bytes] = []
        self.events: list[Event] = []

    def pipeline(self, *streams: str) -> KinesisPipeline:
        return KinesisPipeline("application", list(streams), DeltaSink(self.table))

    def start(self, name: str, *streams: str) -> None:
        pipeline = self.pipeline(*streams)
        clients = AwsClients(pipeline.settings, self.options)
        worker = pipeline.build_worker(name, clients=clients, events=self.events.append)
        stop = threading.Event()
        thread = threading.Thread(target=worker.run, args=(stop,), daemon=True)
        self.running[name] = stop, thread
        thread.start()

    def stop(self, name: str) -> None:
        stop, thread = self.running.pop(name)
        stop.set()
        thread.join(60)
        assert not thread.is_alive()

    def put(self, stream: str, count: int, prefix: str) -> None:
        values = [f"{prefix}-{number}".encode() for number in range(count)]
        records = [{"Data": value, "PartitionKey": value.decode()} for value in values]
        assert not self.kinesis.put_records(StreamName=stream, Records=records)["FailedRecordCount"]
        self.sent += values

    def rows(self) -> list[bytes]:
        try:
            column = DeltaTable(self.table).to_pyarrow_table(columns=["data"])
        except TableNotFoundError:
            return []
        return sorted(column.column("data").to_pylist())

    def wait_for_all(self, seconds: float) -> None:
        try:
            wait_until(lambda: len(self.rows()) >= len(self.sent), seconds, "all rows")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        assert self.rows() == sorted(self.sent)

    def story(self) -> str:
        """What a test that waits in vain needs to be explained."""
        dynamodb = AwsClients(self.pipeline("a").settings, self.options).dynamodb
        tables = dynamodb.list_tables()["TableNames"]
        items = [item for table in tables for item in dynamodb.scan(TableName=table)["Items"]]
        told = [event for event in self.events if not isinstance(event, Measurement)]
        missing = len(self.sent) - len(self.rows())
        return "\n".join((f"{missing} rows are missing", *map(str, items), *map(str, told[-100:])))


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    with EmbeddedAws() as aws:
        made = Application(aws, tmp_path)
        try:
            yield made
        finally:
            for name in list(made.running):
                made.stop(name)


def test_a_stream_that_is_created_again_under_a_running_worker(application: Application) -> None:
    application.kinesis.create_stream(StreamName="a", ShardCount=3)
    application.put("a", 50, "old")
    application.start("w", "a")
    application.wait_for_all(90)
    application.kinesis.delete_stream(StreamName="a")
    wait_until(lambda: not application.kinesis.list_streams()["StreamNames"], 10, "the deletion")
    application.kinesis.create_stream(StreamName="a", ShardCount=2)
    application.put("a", 100, "new")
    application.wait_for_all(60)


def test_a_third_stream_of_a_new_worker(application: Application) -> None:
    for stream in ("a", "b", "c"):
        application.kinesis.create_stream(StreamName=stream, ShardCount=2)
    application.put("a", 30, "a")
    application.start("old", "a", "b")
    application.wait_for_all(90)
    for stream in ("a", "b", "c"):
        application.put(stream, 60, f"{stream}-more")
    application.start("new", "a", "b", "c")
    application.wait_for_all(90)


def test_one_of_two_streams_is_deleted_and_a_worker_starts(application: Application) -> None:
    for stream in ("a", "b"):
        application.kinesis.create_stream(StreamName=stream, ShardCount=2)
    application.put("a", 30, "a")
    application.put("b", 30, "b")
    application.start("old", "a", "b")
    application.wait_for_all(90)
    application.kinesis.delete_stream(StreamName="b")
    application.put("a", 30, "more")
    application.wait_for_all(30)
    application.stop("old")
    application.put("a", 30, "last")
    application.start("new", "a", "b")
    application.wait_for_all(90)


def test_one_of_two_streams_is_deleted_during_a_drain(application: Application) -> None:
    for stream in ("a", "b"):
        application.kinesis.create_stream(StreamName=stream, ShardCount=2)
    application.put("a", 30, "a")
    application.kinesis.put_record(StreamName="b", Data=b"never read", PartitionKey="b")
    unread = FaultRule(operation="GetShardIterator", kind="throttle", contains="stream/b")
    application.aws.fault_rules.replace([unread])
    pipeline = application.pipeline("a", "b")
    clients = AwsClients(pipeline.settings, application.options)
    worker = pipeline.build_worker("w", clients=clients)
    found: list[WorkerSummary] = []
    drain = threading.Thread(
        target=lambda: found.append(worker.run(threading.Event(), mode="drain")), daemon=True
    )
    drain.start()
    application.wait_for_all(90)
    wait_until(lambda: application.aws.fault_rules.rules[0].applied > 0, 60, "a throttled read")
    application.kinesis.delete_stream(StreamName="b")
    application.aws.fault_rules.replace([])
    drain.join(60)
    (summary,) = found
    assert summary.reason is StopReason.FAILED
    assert summary.error == "the stream b was deleted before the drain had read all of it"
    table, key = "application-CoordinatorState", {"key": {"S": "Migration3.0"}}

    def losses() -> str:
        row = clients.dynamodb.get_item(TableName=table, Key=key)["Item"]
        return row["kclpLosses"]["S"] if "kclpLosses" in row else ""

    wait_until(lambda: '"count":2' in losses(), 30, "the record of the losses")
    assert '"stream_deleted"' in losses()
