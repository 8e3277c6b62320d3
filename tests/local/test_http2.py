"""The embedded AWS over HTTP/2: on the same port as HTTP/1.1, any operation, answers larger than a
window.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kcl_pipeline.kinesis.fan_out.http2_connections import Http2Connections
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from tests.support.fan_out_world import connections_of
from tests.support.local_aws import ZERO, client


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        running.kinesis.create_stream("s")
        yield running


@pytest.fixture
def http2() -> Iterator[Http2Connections]:
    connections = Http2Connections(5)
    yield connections
    connections.close()


def ask(
    aws: EmbeddedAws, http2: Http2Connections, target: str, **params: Any
) -> tuple[int, dict[str, Any]]:
    service = target.partition("_")[0].lower()
    scope = (
        f"AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/{service}/aws4_request, "
        "SignedHeaders=host, Signature=0"
    )
    headers = {
        "X-Amz-Target": target,
        "Content-Type": "application/x-amz-json-1.1",
        "Authorization": scope,
    }
    exchange = http2.request("POST", aws.endpoint_url, headers, json.dumps(params).encode())
    return exchange.head(10)[0], json.loads(exchange.whole_body(10))


def test_every_operation_of_every_service(aws: EmbeddedAws, http2: Http2Connections) -> None:
    kinesis = "Kinesis_20131202."
    status, put = ask(
        aws,
        http2,
        kinesis + "PutRecord",
        StreamName="s",
        Data=base64.b64encode(b"a").decode(),
        PartitionKey="k",
    )
    assert status == 200
    _, found = ask(
        aws,
        http2,
        kinesis + "GetShardIterator",
        StreamName="s",
        ShardId=ZERO,
        ShardIteratorType="TRIM_HORIZON",
    )
    _, page = ask(aws, http2, kinesis + "GetRecords", ShardIterator=found["ShardIterator"])
    assert [r["SequenceNumber"] for r in page["Records"]] == [put["SequenceNumber"]]
    status, refused = ask(aws, http2, kinesis + "DescribeStream", StreamName="absent")
    assert (status, refused["__type"]) == (400, "ResourceNotFoundException")
    assert ask(aws, http2, "DynamoDB_20120810.ListTables") == (200, {"TableNames": []})
    assert client(aws).list_streams()["StreamNames"] == ["s"]
    assert len(connections_of(http2)) == 1


def test_an_answer_larger_than_the_window_comes_as_it_is_taken(
    aws: EmbeddedAws, http2: Http2Connections
) -> None:
    consumer = aws.kinesis.call(
        "RegisterStreamConsumer", StreamARN=aws.kinesis.stream("s").arn, ConsumerName="c"
    )["Consumer"]["ConsumerARN"]
    aws.kinesis.put("s", [("k", b"x" * 900_000)])
    aws.kinesis.split("s", ZERO)
    headers = {
        "X-Amz-Target": "Kinesis_20131202.SubscribeToShard",
        "Content-Type": "application/x-amz-json-1.1",
    }
    ask_for = {
        "ConsumerARN": consumer,
        "ShardId": ZERO,
        "StartingPosition": {"Type": "TRIM_HORIZON"},
    }
    exchange = http2.request("POST", aws.endpoint_url, headers, json.dumps(ask_for).encode())
    assert exchange.head(10)[1]["content-type"] == "application/vnd.amazon.eventstream"
    first, last = exchange.messages(10)
    assert b"initial-response" in first
    assert len(last) > 1_200_000
    assert exchange.is_over


def test_a_dropped_request_resets_its_answer_only(
    aws: EmbeddedAws, http2: Http2Connections
) -> None:
    aws.fault_rules.replace(
        [FaultRule(service="kinesis", operation="ListStreams", kind="drop_before", count=1)]
    )
    with pytest.raises(Exception, match="reset the response"):
        ask(aws, http2, "Kinesis_20131202.ListStreams")
    assert ask(aws, http2, "Kinesis_20131202.ListStreams")[0] == 200
    assert len(connections_of(http2)) == 1


def test_without_the_extra_a_connection_is_closed(
    aws: EmbeddedAws, http2: Http2Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys  # noqa: PLC0415 (only here)

    monkeypatch.setitem(sys.modules, "kcl_pipeline.local.http.http2", None)
    with pytest.raises(Exception, match="Could not connect"):
        ask(aws, http2, "Kinesis_20131202.ListStreams")
    assert client(aws).list_streams()["StreamNames"] == ["s"]
