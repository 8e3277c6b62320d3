"""Registration of enhanced fan-out consumers in the Kinesis model."""

from __future__ import annotations

import re
from typing import Final

from kcl_pipeline.testing.kinesis.errors import (
    constraint,
    in_use,
    invalid_argument,
    limit_exceeded,
    not_found,
)
from kcl_pipeline.testing.kinesis.state import Answer, Params, World, decode_token, encode_token
from kcl_pipeline.testing.kinesis.stream import FanOutConsumer, Stream

MAX_CONSUMERS: Final = 20
_DEFAULT_PAGE: Final = 100
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def _render(consumer: FanOutConsumer, status: str = "ACTIVE") -> Answer:
    return {
        "ConsumerName": consumer.name,
        "ConsumerARN": consumer.arn,
        "ConsumerStatus": status,
        "ConsumerCreationTimestamp": consumer.created_millis,
    }


def find_consumer(world: World, params: Params) -> tuple[Stream, FanOutConsumer]:
    """Find the consumer of a request, by ConsumerARN, or by StreamARN and ConsumerName.

    Raises InvalidArgumentException or ResourceNotFoundException.
    """
    arn, name = params.get("ConsumerARN"), params.get("ConsumerName")
    if arn is None and (name is None or params.get("StreamARN") is None):
        raise invalid_argument(
            "Either ConsumerARN, or both StreamARN and ConsumerName must be provided."
        )
    stream_arn = (
        str(arn).partition("/consumer/")[0] if arn is not None else str(params["StreamARN"])
    )
    stream = world.find({"StreamARN": stream_arn})
    for consumer in stream.consumers.values():
        if (arn is None or consumer.arn == arn) and (name is None or consumer.name == name):
            return stream, consumer
    raise not_found(
        f"Consumer {arn or name} of stream {stream.name} under account {stream.account} not found."
    )


def register(world: World, params: Params) -> Answer:
    """RegisterStreamConsumer.

    The response says CREATING, like the service's. From the next call on the consumer is ACTIVE.
    """
    stream, name = world.active({"StreamARN": params["StreamARN"]}), str(params["ConsumerName"])
    if _NAME.fullmatch(name) is None:
        raise constraint(
            "consumerName", name, "satisfy regular expression pattern: [a-zA-Z0-9_.-]+"
        )
    if name in stream.consumers:
        raise in_use(
            f"Consumer {name} of stream {stream.name} under account {stream.account} already "
            "exists."
        )
    if len(stream.consumers) >= MAX_CONSUMERS:
        raise limit_exceeded(
            f"Stream {stream.name} under account {stream.account} has {MAX_CONSUMERS} "
            "registered consumers already."
        )
    now_millis = world.now_millis()
    consumer = FanOutConsumer(
        name, f"{stream.arn}/consumer/{name}:{now_millis // 1000}", now_millis
    )
    stream.consumers[name] = consumer
    return {"Consumer": _render(consumer, "CREATING")}


def describe(world: World, params: Params) -> Answer:
    """DescribeStreamConsumer."""
    stream, consumer = find_consumer(world, params)
    return {"ConsumerDescription": _render(consumer) | {"StreamARN": stream.arn}}


def deregister(world: World, params: Params) -> Answer:
    """DeregisterStreamConsumer."""
    stream, consumer = find_consumer(world, params)
    del stream.consumers[consumer.name]
    return {}


def list_consumers(world: World, params: Params) -> Answer:
    """ListStreamConsumers, sorted by name; NextToken requests the next page."""
    stream = world.find({"StreamARN": params["StreamARN"]})
    after = ""
    if params.get("NextToken") is not None:
        parts = decode_token("consumers", str(params["NextToken"]), 2)
        if parts is None or parts[0] != stream.serial:
            raise invalid_argument("NextToken is invalid.")
        after = parts[1]
    names = sorted(n for n in stream.consumers if n > after)
    limit = params.get("MaxResults") or _DEFAULT_PAGE
    answer: Answer = {"Consumers": [_render(stream.consumers[n]) for n in names[:limit]]}
    return (
        answer
        if len(names) <= limit
        else answer | {"NextToken": encode_token("consumers", stream.serial, names[limit - 1])}
    )
