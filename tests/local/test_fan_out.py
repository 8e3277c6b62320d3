"""Enhanced fan-out: SubscribeToShard through boto3, and its rules on the model."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import cbor2
import pytest
from botocore.eventstream import EventStreamBuffer
from botocore.exceptions import ClientError, EventStreamError, ResponseStreamingError
from urllib3.exceptions import ProtocolError, ReadTimeoutError

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.testing.clock import ShiftedClock, VirtualClock
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from tests.support.local_aws import ZERO, client


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws(clock=ShiftedClock()) as running:
        running.kinesis.create_stream("s")
        yield running


@pytest.fixture
def consumer(aws: EmbeddedAws) -> str:
    arn = aws.kinesis.stream("s").arn
    return str(
        aws.kinesis.call("RegisterStreamConsumer", StreamARN=arn, ConsumerName="c")["Consumer"][
            "ConsumerARN"
        ]
    )


def advance(aws: EmbeddedAws, seconds: float) -> None:
    assert isinstance(aws.clock, ShiftedClock)
    aws.clock.advance(seconds)


def events(answer: Any) -> Iterator[dict[str, Any]]:
    for event in answer["EventStream"]:
        yield event["SubscribeToShardEvent"]


def test_events_then_children_at_the_shards_end(aws: EmbeddedAws, consumer: str) -> None:
    kinesis = client(aws)
    aws.kinesis.put("s", [("k", b"a"), ("k", b"b")])
    answer = kinesis.subscribe_to_shard(
        ConsumerARN=consumer, ShardId=ZERO, StartingPosition={"Type": "TRIM_HORIZON"}
    )
    stream = events(answer)
    first = next(stream)
    assert [r["Data"] for r in first["Records"]] == [b"a", b"b"]
    assert first["ContinuationSequenceNumber"] == first["Records"][-1]["SequenceNumber"]
    assert (first["MillisBehindLatest"], first.get("ChildShards", [])) == (0, [])
    aws.kinesis.put("s", [("k", b"c")])
    assert [r["Data"] for r in next(stream)["Records"]] == [b"c"]
    aws.kinesis.split("s", ZERO)
    last = next(stream)
    assert last["Records"] == []
    assert "ContinuationSequenceNumber" not in last
    assert [(c["ShardId"][-1], c["ParentShards"]) for c in last["ChildShards"]] == [
        ("1", [ZERO]),
        ("2", [ZERO]),
    ]
    assert list(stream) == []


def test_a_subscription_ends_after_five_minutes_and_goes_on_where_it_was(
    aws: EmbeddedAws, consumer: str
) -> None:
    kinesis = client(aws)
    stream = events(
        kinesis.subscribe_to_shard(
            ConsumerARN=consumer, ShardId=ZERO, StartingPosition={"Type": "LATEST"}
        )
    )
    here = next(stream)
    assert here["Records"] == []
    advance(aws, 301)
    assert [e["Records"] for e in stream] in ([], [[]])
    aws.kinesis.put("s", [("k", b"between")])
    position = {
        "Type": "AFTER_SEQUENCE_NUMBER",
        "SequenceNumber": here["ContinuationSequenceNumber"],
    }
    stream = events(
        kinesis.subscribe_to_shard(ConsumerARN=consumer, ShardId=ZERO, StartingPosition=position)
    )
    assert [r["Data"] for r in next(stream)["Records"]] == [b"between"]


def test_one_active_subscription(aws: EmbeddedAws, consumer: str) -> None:
    kinesis = client(aws)
    ask = {"ConsumerARN": consumer, "ShardId": ZERO, "StartingPosition": {"Type": "LATEST"}}
    earlier = events(kinesis.subscribe_to_shard(**ask))
    next(earlier)
    with pytest.raises(ClientError, match="ResourceInUseException"):
        kinesis.subscribe_to_shard(**ask)
    advance(aws, 6)
    later = events(kinesis.subscribe_to_shard(**ask))
    next(later)
    with pytest.raises(EventStreamError, match="ResourceInUseException"):
        list(earlier)
    aws.kinesis.put("s", [("k", b"x")])
    assert [r["Data"] for r in next(later)["Records"]] == [b"x"]


def test_errors(aws: EmbeddedAws, consumer: str) -> None:
    kinesis = client(aws)
    position = {"Type": "LATEST"}
    for arn, shard, code in (
        (consumer.replace("consumer/c", "consumer/d"), ZERO, "ResourceNotFoundException"),
        (consumer, "shardId-000000000009", "ResourceNotFoundException"),
        ("arn:nonsense", ZERO, "InvalidArgumentException"),
    ):
        with pytest.raises(ClientError, match=code):
            kinesis.subscribe_to_shard(ConsumerARN=arn, ShardId=shard, StartingPosition=position)
    with pytest.raises(ClientError, match="InvalidArgumentException"):
        kinesis.subscribe_to_shard(
            ConsumerARN=consumer, ShardId=ZERO, StartingPosition={"Type": "AT_SEQUENCE_NUMBER"}
        )
    stream = events(
        kinesis.subscribe_to_shard(ConsumerARN=consumer, ShardId=ZERO, StartingPosition=position)
    )
    next(stream)
    aws.kinesis.call("DeregisterStreamConsumer", ConsumerARN=consumer)
    with pytest.raises(EventStreamError, match="ResourceNotFoundException"):
        list(stream)


def test_cbor_events(aws: EmbeddedAws, consumer: str) -> None:
    aws.kinesis.put("s", [("k", b"\xff")])
    connection = http.client.HTTPConnection(aws.endpoint_url.removeprefix("http://"), timeout=10)
    body = cbor2.dumps(
        {"ConsumerARN": consumer, "ShardId": ZERO, "StartingPosition": {"Type": "TRIM_HORIZON"}}
    )
    headers = {
        "X-Amz-Target": "Kinesis_20131202.SubscribeToShard",
        "Content-Type": "application/x-amz-cbor-1.1",
    }
    connection.request("POST", "/", body, headers)
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "application/vnd.amazon.eventstream"
    aws.kinesis.split("s", ZERO)
    buffer = EventStreamBuffer()
    buffer.add_data(response.read())
    messages = list(buffer)
    assert messages[0].headers[":event-type"] == "initial-response"
    payloads = [
        cbor2.loads(m.payload, semantic_decoders={1: lambda value, _: value}) for m in messages[1:]
    ]
    assert payloads[0]["Records"][0]["Data"] == b"\xff"
    assert len(payloads[-1]["ChildShards"]) == 2
    connection.close()


def test_stop_ends_subscriptions(aws: EmbeddedAws, consumer: str) -> None:
    port = aws.endpoint_url.rpartition(":")[2]
    kinesis = client(aws)
    stream = events(
        kinesis.subscribe_to_shard(
            ConsumerARN=consumer, ShardId=ZERO, StartingPosition={"Type": "LATEST"}
        )
    )
    next(stream)
    aws.stop()
    assert [t.name for t in threading.enumerate() if t.name.startswith(f"local-aws-{port}")] == []
    with suppress(ReadTimeoutError, ProtocolError, ResponseStreamingError):
        assert list(stream) == []


# -- the model's part
# ----------------------------------------------------------------------------


def subscribed(**settings: Any) -> tuple[KinesisModel, VirtualClock, str]:
    clock = VirtualClock()
    model = KinesisModel(clock, KinesisSettings(**settings))
    model.create_stream("s")
    arn = model.call("RegisterStreamConsumer", StreamARN=model.stream("s").arn, ConsumerName="c")[
        "Consumer"
    ]["ConsumerARN"]
    return model, clock, str(arn)


def test_idle_subscriptions_say_where_they_are() -> None:
    model, clock, arn = subscribed()
    subscription = model.subscribe(arn, ZERO, Type="LATEST")
    first = model.next_event(subscription)
    assert first is not None
    assert model.next_event(subscription) is None
    clock.advance(5)
    again = model.next_event(subscription)
    assert again is not None
    assert again.read.page.data == []
    assert int(again.continuation or 0) >= int(first.continuation or 0)


@pytest.mark.parametrize("kind", ["AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"])
def test_an_idle_continuation_neither_loses_nor_repeats(kind: str) -> None:
    model, clock, arn = subscribed()
    model.put("s", [("k", b"old")])
    clock.advance(25 * 3600)
    event = model.next_event(model.subscribe(arn, ZERO, Type="LATEST"))
    assert event is not None
    model.put("s", [("k", b"new")])
    clock.advance(6)
    after = model.next_event(
        model.subscribe(arn, ZERO, Type=kind, SequenceNumber=event.continuation)
    )
    assert after is not None
    assert after.read.page.data == [b"new"]


def test_two_mebibytes_a_second_for_each_consumer() -> None:
    model, clock, arn = subscribed(enforce_limits=True)
    for _ in range(6):
        model.put("s", [("k", b"x" * 1_000_000)])
        clock.advance(1)
    subscription = model.subscribe(arn, ZERO, Type="TRIM_HORIZON")
    delivered = 0
    for _ in range(10):
        event = model.next_event(subscription)
        delivered += event.read.page.size if event is not None else 0
    assert 2_000_000 <= delivered <= 3_100_000
    clock.advance(2)
    assert model.next_event(subscription) is not None


def test_a_deleted_stream_ends_it() -> None:
    model, _, arn = subscribed()
    subscription = model.subscribe(arn, ZERO, Type="LATEST")
    model.call("DeleteStream", StreamName="s", EnforceConsumerDeletion=True)
    model.create_stream("s")
    with pytest.raises(KinesisError, match="ResourceNotFound"):
        model.next_event(subscription)


def test_events_are_json_with_base64(aws: EmbeddedAws, consumer: str) -> None:
    connection = http.client.HTTPConnection(aws.endpoint_url.removeprefix("http://"), timeout=10)
    aws.kinesis.put("s", [("k", b"\xff")])
    aws.kinesis.split("s", ZERO)
    body = json.dumps(
        {"ConsumerARN": consumer, "ShardId": ZERO, "StartingPosition": {"Type": "TRIM_HORIZON"}}
    )
    connection.request(
        "POST",
        "/",
        body,
        {
            "X-Amz-Target": "Kinesis_20131202.SubscribeToShard",
            "Content-Type": "application/x-amz-json-1.1",
        },
    )
    buffer = EventStreamBuffer()
    buffer.add_data(connection.getresponse().read())
    first, last = list(buffer)
    assert first.payload == b"{}"
    assert json.loads(last.payload)["Records"][0]["Data"] == "/w=="
    connection.close()
