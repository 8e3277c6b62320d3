"""What the operations of the Kinesis model share: the streams, the clock, the settings, and how a
request names a stream.
"""

from __future__ import annotations

import base64
import binascii
import json
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcl_pipeline.clock import Clock
from kcl_pipeline.testing.kinesis.errors import in_use, invalid_argument, not_found
from kcl_pipeline.testing.kinesis.stream import Stream

Params = Mapping[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KinesisSettings:
    """How the model behaves. `enforce_limits`: shards throttle as real ones do. Delays: how long a
    stream is CREATING, or UPDATING by a reshard.
    """

    account: str = "123456789012"
    region: str = "us-east-1"
    enforce_limits: bool = False
    create_delay_seconds: float = 0.0
    reshard_delay_seconds: float = 0.0
    shard_limit: int = 1000
    iterator_lifetime_millis: int = 300_000
    subscription_lifetime_millis: int = 300_000


class World:
    """All streams of one account and region, behind one lock.

    Timestamps in requests and answers are epoch milliseconds.
    """

    def __init__(self, clock: Clock, settings: KinesisSettings) -> None:
        self.clock = clock
        self.settings = settings
        self.streams: dict[str, Stream] = {}
        self.lock = threading.RLock()
        self.serial = 0

    def now_millis(self) -> int:
        """Epoch milliseconds by the model's clock."""
        return round(self.clock.wall() * 1000)

    def arn(self, stream_name: str) -> str:
        """The ARN of a stream of this account."""
        return (
            f"arn:aws:kinesis:{self.settings.region}:{self.settings.account}:stream/{stream_name}"
        )

    def name_of(self, params: Params) -> str:
        """The name of the stream that a request is about, by StreamName or StreamARN."""
        name, arn = params.get("StreamName"), params.get("StreamARN")
        if arn is None:
            if name is None:
                raise invalid_argument("Either StreamName or StreamARN must be provided.")
            return str(name)
        prefix, _, arn_name = str(arn).partition("/")
        if not arn_name or prefix.split(":")[:3] != ["arn", "aws", "kinesis"]:
            raise invalid_argument(f"StreamARN {arn} is not the ARN of a stream.")
        if prefix != self.arn("").rstrip("/"):
            raise not_found(f"Stream {arn} under account {self.settings.account} not found.")
        if name is not None and name != arn_name:
            raise invalid_argument(
                f"StreamName {name} and StreamARN {arn} do not name the same stream."
            )
        return arn_name

    def named(self, name: str) -> Stream:
        """The stream with this name, settled. Raises ResourceNotFoundException."""
        stream = self.streams.get(name)
        if stream is None:
            raise not_found(f"Stream {name} under account {self.settings.account} not found.")
        stream.settle(self.now_millis())
        return stream

    def find(self, params: Params) -> Stream:
        """The stream that a request is about, in whatever state."""
        return self.named(self.name_of(params))

    def usable(self, params: Params) -> Stream:
        """The stream, if it takes and gives records: one that is being created is not found yet."""
        stream = self.find(params)
        if stream.status == "CREATING":
            raise not_found(
                f"Stream {stream.name} under account {self.settings.account} not found."
            )
        return stream

    def active(self, params: Params) -> Stream:
        """The stream, if it is ACTIVE. Raises ResourceInUseException."""
        stream = self.find(params)
        if stream.status != "ACTIVE":
            raise in_use(
                f"Stream {stream.name} under account {self.settings.account} not ACTIVE, "
                f"instead in state {stream.status}"
            )
        return stream


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def encode_token(kind: str, *parts: str | int | None) -> str:
    """An opaque token: base64 text of the parts with a checksum."""
    body = _ENCODER.encode([kind, *parts]).encode()
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode()


def decode_token(kind: str, token: str, count: int) -> list[Any] | None:
    """The parts of a token of this kind, or None when it is not one."""
    try:
        raw = base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError):
        return None
    # the checksum's width
    if len(raw) <= 4 or zlib.crc32(raw[4:]).to_bytes(4, "big") != raw[:4]:  # noqa: PLR2004
        return None
    kind_found, *parts = json.loads(raw[4:])
    return parts if kind_found == kind and len(parts) == count else None
