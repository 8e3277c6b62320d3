"""The embedded AWS as a server: wire forms, faults to order, control paths, start and stop."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import cbor2
import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_calls import connect, json_call

AMZ_CBOR = "application/x-amz-cbor-1.1"


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


def cbor_call(aws: EmbeddedAws, operation: str, params: dict[str, Any]) -> tuple[int, Any]:
    connection = connect(aws)
    headers = {"X-Amz-Target": f"Kinesis_20131202.{operation}", "Content-Type": AMZ_CBOR}
    connection.request("POST", "/", cbor2.dumps(params), headers)
    response = connection.getresponse()
    assert response.getheader("Content-Type") == AMZ_CBOR
    assert response.getheader("x-amzn-RequestId")
    body = response.read()
    connection.close()
    # Tag 1 holds milliseconds here; keep it visible instead of letting it become a date.
    return response.status, cbor2.loads(
        body, semantic_decoders={1: lambda value, _: ("millis", value)}
    ) if body else None


def test_cbor_round_trip(aws: EmbeddedAws) -> None:
    now = aws.clock.wall()
    assert cbor_call(aws, "CreateStream", {"StreamName": "s", "ShardCount": 2}) == (200, None)
    status, answer = cbor_call(aws, "DescribeStreamSummary", {"StreamName": "s"})
    kind, millis = answer["StreamDescriptionSummary"]["StreamCreationTimestamp"]
    assert (status, kind) == (200, "millis")
    assert abs(millis / 1000 - now) < 5
    data = bytes(range(256))
    records = [
        {"Data": data, "PartitionKey": "ü"},
        {"Data": b"", "PartitionKey": "k", "ExplicitHashKey": "0"},
    ]
    status, answer = cbor_call(aws, "PutRecords", {"StreamName": "s", "Records": records})
    assert (status, answer["FailedRecordCount"], len(answer["Records"])) == (200, 0, 2)
    shard = answer["Records"][0]["ShardId"]
    status, one = cbor_call(
        aws, "PutRecord", {"StreamName": "s", "Data": b"\xff\x00", "PartitionKey": "ü"}
    )
    assert (status, one["ShardId"]) == (200, shard)
    at = cbor2.CBORTag(1, millis)
    asked = {
        "StreamName": "s",
        "ShardId": shard,
        "ShardIteratorType": "AT_TIMESTAMP",
        "Timestamp": at,
    }
    status, answer = cbor_call(aws, "GetShardIterator", asked)
    assert status == 200, answer
    status, answer = cbor_call(
        aws, "GetRecords", {"ShardIterator": answer["ShardIterator"], "Limit": 100}
    )
    found = [r for r in answer["Records"] if r["PartitionKey"] == "ü"]
    assert [r["Data"] for r in found] == [data, b"\xff\x00"]
    assert all(isinstance(r["Data"], bytes) for r in found)
    kind, arrival = found[0]["ApproximateArrivalTimestamp"]
    assert kind == "millis"
    assert abs(arrival - millis) < 5000
    assert isinstance(answer["MillisBehindLatest"], int)
    status, answer = cbor_call(
        aws,
        "ListShards",
        {"StreamName": "s", "ShardFilter": {"Type": "AT_TIMESTAMP", "Timestamp": at}},
    )
    assert (status, len(answer["Shards"])) == (200, 2)


def test_cbor_errors(aws: EmbeddedAws) -> None:
    status, answer = cbor_call(aws, "DescribeStream", {"StreamName": "nobody"})
    assert (status, answer["__type"]) == (400, "ResourceNotFoundException")
    status, answer = cbor_call(aws, "GetRecords", {"ShardIterator": "x", "Limit": 20000})
    assert (status, answer["__type"]) == (400, "ValidationException")
    status, answer = cbor_call(
        aws, "PutRecords", {"StreamName": "s", "Records": [{"Data": "text", "PartitionKey": "k"}]}
    )
    assert (status, answer["__type"]) == (400, "SerializationException")
    connection = connect(aws)
    connection.request(
        "POST",
        "/",
        b"\xff\xff",
        {"X-Amz-Target": "Kinesis_20131202.ListStreams", "Content-Type": AMZ_CBOR},
    )
    response = connection.getresponse()
    assert (response.status, cbor2.loads(response.read())["__type"]) == (
        400,
        "SerializationException",
    )
    connection.close()


@pytest.mark.parametrize(
    ("operation", "body", "code"),
    [
        ("ListStreams", b"{", "SerializationException"),
        ("ListStreams", b"[]", "SerializationException"),
        ("ListStreams", b'{"Limit": "ten"}', "SerializationException"),
        ("CreateStream", b'{"StreamName": "s", "ShardCount": [1]}', "SerializationException"),
        (
            "PutRecord",
            b'{"StreamName": "s", "PartitionKey": "k", "Data": "###"}',
            "SerializationException",
        ),
        (
            "PutRecords",
            b'{"StreamName": "s", "Records": [{"PartitionKey": "k", "Data": "###"}]}',
            "SerializationException",
        ),
        ("PutRecords", b'{"StreamName": "s", "Records": "no"}', "SerializationException"),
        (
            "PutRecords",
            b'{"StreamName": "s", "Records": [{"PartitionKey": "k"}]}',
            "ValidationException",
        ),
        ("MakeCoffee", b"{}", "UnknownOperationException"),
        ("GetRecords", b"{}", "ValidationException"),
        ("ListShards", b"[" * 200_000, "SerializationException"),
        ("PutRecords", b'{"Records":' + b"[" * 200_000, "SerializationException"),
    ],
)
def test_malformed_requests(aws: EmbeddedAws, operation: str, body: bytes, code: str) -> None:
    status, answer = json_call(connect(aws), operation, body)
    assert (status, answer["__type"]) == (400, code)
    assert answer["message"]


def test_one_connection_serves_many_requests(aws: EmbeddedAws) -> None:
    connection = connect(aws)
    json_call(connection, "CreateStream", b'{"StreamName": "s", "ShardCount": 1}')
    first = connection.sock
    for _ in range(20):
        assert json_call(connection, "ListStreams", b"{}")[1]["StreamNames"] == ["s"]
    assert connection.sock is first
    connection.request(
        "POST",
        "/",
        iter([b'{"Stream', b'Name": "s"}']),
        {"X-Amz-Target": "Kinesis_20131202.ListShards"},
        encode_chunked=True,
    )
    assert len(json.loads(connection.getresponse().read())["Shards"]) == 1
    connection.close()


def test_garbage_ends_the_connection_and_nothing_else(aws: EmbeddedAws) -> None:
    port = int(aws.endpoint_url.rpartition(":")[2])
    for garbage in (
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nnocolon\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
            raw.sendall(garbage)
            assert raw.recv(100) == b""
    assert json_call(connect(aws), "ListStreams", b"{}")[0] == 200


def test_listens_on_loopback_only(aws: EmbeddedAws) -> None:
    host, port = aws.endpoint_url.removeprefix("http://").split(":")
    assert host == "127.0.0.1"
    with pytest.raises(OSError, match="use"), EmbeddedAws(port=int(port)):
        pass
