"""Kinesis over HTTP: refusals, repeated calls, and responses that cannot be used."""

from __future__ import annotations

import random
import socketserver
import threading

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from kcl_pipeline import errors
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.kinesis.boto import MAX_ATTEMPTS, BotoKinesis, from_client_error
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.kinesis_over_http import (  # noqa: F401 (fixtures)
    SHARD,
    Side,
    aws_fixture,
    iterator_of,
    side_fixture,
)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [("throttle", 3 * 1.5), ("error500", 0.5 + 1 + 2), ("drop_before", 0.5 + 1 + 2)],
)
def test_calls_about_a_stream_are_repeated_with_waits(side: Side, kind: str, waits: float) -> None:
    stream = side.stream("orders")
    side.fault("ListShards", kind, count=3)
    assert len(side.kinesis.list_shards(stream)) == 1
    assert side.clock.monotonic() == pytest.approx(waits)


def test_repeating_ends(side: Side) -> None:
    stream = side.stream("orders")
    side.fault("*", "throttle")
    with pytest.raises(errors.ThrottledError):
        side.kinesis.list_shards(stream)
    assert len(side.calls) == 4
    side.calls.clear()
    with pytest.raises(errors.ThrottledError):
        side.adapter(rng=random.Random(3)).resolve_stream("orders", multi_stream=False)
    assert len(side.calls) == MAX_ATTEMPTS


@pytest.mark.parametrize("body_format", ["json", "cbor"])
@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("throttle", "", errors.ThrottledError),
        ("throttle", "KMSThrottlingException", errors.ThrottledError),
        ("throttle", "LimitExceededException", errors.ThrottledError),
        ("error500", "", errors.UnavailableError),
        ("deny", "", errors.AccessDeniedError),
        ("deny", "ExpiredTokenException", errors.AccessDeniedError),
        ("throttle", "ExpiredIteratorException", errors.ExpiredIteratorError),
        ("throttle", "InvalidArgumentException", errors.ExpiredIteratorError),
        ("throttle", "ResourceNotFoundException", errors.NotFoundError),
        ("throttle", "KMSDisabledException", errors.InvalidRequestError),
        ("drop_before", "", errors.UnavailableError),
        ("drop_after", "", errors.UnavailableError),
    ],
)
def test_a_failed_read_is_one_call_and_one_error(
    side: Side, body_format: str, kind: str, code: str, expected: type[errors.AwsError]
) -> None:
    stream = side.stream("orders", records=1)
    iterator = iterator_of(side, stream)
    side.calls.clear()
    side.fault("GetRecords", kind, code=code)
    with pytest.raises(expected) as caught:
        side.adapter(body_format=body_format).get_records(stream, SHARD, iterator, 5)
    assert type(caught.value) is expected
    assert caught.value.operation == "GetRecords"
    assert f"GetRecords on {SHARD} of orders" in str(caught.value)
    if kind in {"throttle", "deny"} and code:
        assert caught.value.code == code
    assert (len(side.calls), side.clock.monotonic()) == (1, 0.0)


def test_denied_calls_name_the_permission(side: Side) -> None:
    stream = side.stream("orders")
    side.fault("ListShards", "deny")
    with pytest.raises(errors.AccessDeniedError, match="kinesis:ListShards"):
        side.kinesis.list_shards(stream)


def test_refusals_of_the_service_itself(side: Side) -> None:
    stream = side.stream("orders", records=1)
    with pytest.raises(errors.ExpiredIteratorError):
        side.kinesis.get_records(stream, SHARD, "no iterator at all", 5)
    with pytest.raises(errors.NotFoundError):
        side.kinesis.get_shard_iterator(stream, "shardId-000000000099", "LATEST")
    with pytest.raises(errors.InvalidRequestError):
        side.kinesis.get_shard_iterator(stream, SHARD, "AT_SEQUENCE_NUMBER", sequence_number="1")
    with pytest.raises(errors.InvalidRequestError):
        side.kinesis.get_records(stream, SHARD, iterator_of(side, stream), 10_001)
    iterator = iterator_of(side, stream)
    side.aws.clock.advance(301)  # type: ignore[attr-defined]
    with pytest.raises(errors.ExpiredIteratorError):
        side.kinesis.get_records(stream, SHARD, iterator, 5)


def test_a_body_that_cannot_be_read_is_unavailable(side: Side) -> None:
    stream = side.stream("orders", records=1)
    iterator = iterator_of(side, stream)
    side.client.meta.events.register_first(
        "before-parse.kinesis.GetRecords",
        lambda response_dict, **_: response_dict.update(body=response_dict["body"][:-2]),
    )
    with pytest.raises(errors.UnavailableError, match="cannot be read"):
        side.kinesis.get_records(stream, SHARD, iterator, 5)


def test_http_status_decides_where_there_is_no_code() -> None:
    def error(code: str, status: int) -> errors.AwsError:
        return from_client_error(
            ClientError(
                {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
                "GetRecords",
            ),
            "GetRecords",
            "x",
        )

    assert type(error("503", 503)) is errors.UnavailableError
    assert type(error("429", 429)) is errors.ThrottledError
    assert type(error("", 400)) is errors.InvalidRequestError


def test_missing_credentials_are_denied_access(monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = boto3.Session().client(
        "kinesis", region_name="us-east-1", endpoint_url="http://127.0.0.1:1"
    )
    kinesis = BotoKinesis(client, RetrievalSettings(), ShardSyncSettings(), VirtualClock())
    with pytest.raises(errors.AccessDeniedError, match="credentials"):
        kinesis.get_records(StreamId("orders"), SHARD, "iterator", 5)


class Halting(socketserver.BaseRequestHandler):
    """Announce a thousand bytes, send a few, then stop sending or close the connection."""

    def handle(self) -> None:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.request.recv(65536)
        self.request.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\nContent-Length: "
            b'1000\r\n\r\n{"Records": ['
        )
        if self.server.silent:  # type: ignore[attr-defined]
            self.server.over.wait(20)  # type: ignore[attr-defined]


@pytest.mark.parametrize("silent", [True, False])
def test_a_response_that_stops_in_the_middle_is_unavailable(silent: bool) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Halting) as server:
        server.silent, server.over = silent, threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            client = boto3.client(
                "kinesis",
                endpoint_url=f"http://127.0.0.1:{server.server_address[1]}",
                region_name="us-east-1",
                aws_access_key_id="local",
                aws_secret_access_key="local",
                config=Config(retries={"total_max_attempts": 1}, read_timeout=0.3),
            )
            kinesis = BotoKinesis(client, RetrievalSettings(), ShardSyncSettings(), VirtualClock())
            with pytest.raises(errors.UnavailableError):
                kinesis.get_records(StreamId("orders"), SHARD, "iterator", 5)
            client.close()
        finally:
            server.over.set()  # type: ignore[attr-defined]
            server.shutdown()
            thread.join(10)
