"""Faults to order, the clock, and the life of the embedded AWS."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError

from kcl_pipeline.local import EmbeddedAws, Fault
from kcl_pipeline.local.__main__ import main
from tests.support.local_aws import ZERO, client
from tests.support.local_calls import connect, json_call, post


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


def make_table(url: str) -> Any:
    dynamodb = client(url, "dynamodb")
    key = [{"AttributeName": "k", "KeyType": "HASH"}]
    dynamodb.create_table(
        TableName="t",
        KeySchema=key,
        AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    return dynamodb


def code_of(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, int]:
    return error.value.response["Error"]["Code"], error.value.response["ResponseMetadata"][
        "HTTPStatusCode"
    ]


@pytest.mark.parametrize(
    ("kind", "dynamodb_code", "kinesis_code", "s3_code"),
    [
        (
            "throttle",
            ("ProvisionedThroughputExceededException", 400),
            ("LimitExceededException", 400),
            ("SlowDown", 503),
        ),
        (
            "error500",
            ("InternalServerError", 500),
            ("InternalFailure", 500),
            ("InternalError", 500),
        ),
        (
            "deny",
            ("AccessDeniedException", 400),
            ("AccessDeniedException", 400),
            ("AccessDenied", 403),
        ),
    ],
)
def test_refusals(
    kind: str,
    dynamodb_code: tuple[str, int],
    kinesis_code: tuple[str, int],
    s3_code: tuple[str, int],
) -> None:
    calls: list[tuple[str, str]] = []

    def faults(service: str, operation: str, body: bytes) -> Fault | None:
        calls.append((service, operation))
        planned = b"Fault" in body or service == "s3"
        return Fault(kind) if planned else None  # type: ignore[arg-type]

    with EmbeddedAws(faults=faults) as aws:
        dynamodb = make_table(aws.endpoint_url)
        with pytest.raises(ClientError) as caught:
            dynamodb.put_item(TableName="t", Item={"k": {"S": "Fault"}})
        assert code_of(caught) == dynamodb_code
        assert dynamodb.scan(TableName="t")["Count"] == 0
        with pytest.raises(ClientError) as caught:
            client(aws.endpoint_url, "kinesis").create_stream(StreamName="Fault", ShardCount=1)
        assert code_of(caught) == kinesis_code
        assert aws.kinesis.call("ListStreams")["StreamNames"] == []
        with pytest.raises(ClientError) as caught:
            client(aws.endpoint_url, "s3").create_bucket(Bucket="bucket")
        assert code_of(caught) == s3_code
    assert ("dynamodb", "PutItem") in calls
    assert ("kinesis", "CreateStream") in calls
    assert ("s3", "PUT") in calls


def test_applied_but_never_answered() -> None:
    def faults(service: str, operation: str, body: bytes) -> Fault | None:
        if operation in {"PutItem", "PutRecord"} and (b"after" in body or b"before" in body):
            return Fault("drop_after" if b"after" in body else "drop_before")
        return None

    with EmbeddedAws(faults=faults) as aws:
        dynamodb = make_table(aws.endpoint_url)
        for key in ("after", "before"):
            with pytest.raises(ConnectionClosedError):
                dynamodb.put_item(TableName="t", Item={"k": {"S": key}})
        assert [i["k"]["S"] for i in dynamodb.scan(TableName="t")["Items"]] == ["after"]
        aws.kinesis.create_stream("s")
        kinesis = client(aws.endpoint_url, "kinesis")
        for key in ("after", "before"):
            with pytest.raises(ConnectionClosedError):
                kinesis.put_record(StreamName="s", Data=b"x", PartitionKey=key)
        token = kinesis.get_shard_iterator(
            StreamName="s", ShardId=ZERO, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        assert [r["PartitionKey"] for r in kinesis.get_records(ShardIterator=token)["Records"]] == [
            "after"
        ]


def test_fault_rules_over_http(aws: EmbeddedAws) -> None:
    dynamodb = make_table(aws.endpoint_url)
    rules = [
        {
            "service": "dynamodb",
            "operation": "PutItem",
            "kind": "throttle",
            "count": 2,
            "contains": '"a"',
        }
    ]
    assert post(aws.endpoint_url, "/_local/faults", rules)[0]["count"] == 2
    dynamodb.put_item(TableName="t", Item={"k": {"S": "b"}})
    for _ in range(2):
        with pytest.raises(ClientError, match="ProvisionedThroughputExceeded"):
            dynamodb.put_item(TableName="t", Item={"k": {"S": "a"}})
    dynamodb.put_item(TableName="t", Item={"k": {"S": "a"}})
    rule = json.loads(
        urllib.request.urlopen(aws.endpoint_url + "/_local/faults", timeout=10).read()
    )[0]
    assert (rule["count"], rule["applied"]) == (0, 2)
    post(
        aws.endpoint_url,
        "/_local/faults",
        [{"kind": "error500", "probability": 0.5, "code": "Odd"}],
    )
    outcomes = []
    for _ in range(60):
        try:
            dynamodb.scan(TableName="t")
            outcomes.append("ok")
        except ClientError as error:
            outcomes.append(error.response["Error"]["Code"])
    assert set(outcomes) == {"ok", "Odd"}
    assert 10 < outcomes.count("Odd") < 50
    assert post(aws.endpoint_url, "/_local/faults", None, "DELETE") == []
    dynamodb.scan(TableName="t")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(aws.endpoint_url, "/_local/faults", [{"kind": "explode"}])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        post(aws.endpoint_url, "/_local/nothing", None)


def test_clock_over_http(aws: EmbeddedAws) -> None:
    aws.kinesis.create_stream("s")
    kinesis = client(aws.endpoint_url, "kinesis")
    token = kinesis.get_shard_iterator(StreamName="s", ShardId=ZERO, ShardIteratorType="LATEST")[
        "ShardIterator"
    ]
    assert post(aws.endpoint_url, "/_local/clock", {"advance_seconds": 400}) == {
        "offset_seconds": 400.0
    }
    with pytest.raises(ClientError, match="ExpiredIteratorException"):
        kinesis.get_records(ShardIterator=token)
    assert post(aws.endpoint_url, "/_local/health", None) == {"status": "ok"}


def test_environment_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    aws = EmbeddedAws(region="eu-west-1")
    with pytest.raises(RuntimeError, match="not started"):
        _ = aws.endpoint_url
    before = set(threading.enumerate())
    with aws:
        for name, value in aws.environment().items():
            monkeypatch.setenv(name, value)
        session = boto3.session.Session()
        kinesis = session.client("kinesis")
        kinesis.create_stream(StreamName="s", ShardCount=1)
        assert (
            ":eu-west-1:"
            in kinesis.describe_stream_summary(StreamName="s")["StreamDescriptionSummary"][
                "StreamARN"
            ]
        )
        assert session.client("dynamodb").list_tables()["TableNames"] == []
        ours = set(threading.enumerate()) - before
    assert len(ours & set(threading.enumerate())) < len(ours)
    with aws:
        monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint_url)
        assert boto3.session.Session().client("kinesis").list_streams()["StreamNames"] == ["s"]


def test_stop_does_not_wait_for_idle_clients() -> None:
    aws = EmbeddedAws().start()
    connection = connect(aws)
    json_call(connection, "ListStreams", b"{}")
    began = time.monotonic()
    aws.stop()
    aws.stop()
    assert time.monotonic() - began < 4
    with pytest.raises((OSError, http.client.HTTPException)):
        json_call(connection, "ListStreams", b"{}")


def read_code(kinesis: Any, token: str) -> str:
    try:
        kinesis.get_records(ShardIterator=token)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return "ok"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_line(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kcl_pipeline.local", "--port", "0", "--enforce-limits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            kinesis = client(url, "kinesis")
            kinesis.create_stream(StreamName="s", ShardCount=1)
            token = kinesis.get_shard_iterator(
                StreamName="s", ShardId=ZERO, ShardIteratorType="LATEST"
            )["ShardIterator"]
            outcomes = [read_code(kinesis, token) for _ in range(20)]
            assert outcomes[:5] == ["ok"] * 5
            assert "ProvisionedThroughputExceededException" in outcomes
            process.send_signal(number)
            assert process.wait(15) == 0
        finally:
            if process.poll() is None:
                process.kill()


def test_command_line_with_a_taken_port(
    aws: EmbeddedAws, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert main(["--port", aws.endpoint_url.rpartition(":")[2]]) == 1
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert "choose another --port" in capsys.readouterr().err
