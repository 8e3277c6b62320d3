"""State that all operations of the Kinesis model share: streams, clock, settings and tokens."""

from __future__ import annotations

import base64
import binascii
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kcl_pipeline.clock import Clock
from kcl_pipeline.testing.kinesis.errors import in_use, invalid_argument, not_found
from kcl_pipeline.testing.kinesis.stream import Stream

Params = Mapping[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KinesisSettings:
    """Settings of the model.

    Attributes:
        enforce_limits: Whether shards throttle like real ones.
        create_delay_seconds: How long a new stream is CREATING.
        reshard_delay_seconds: How long a stream is UPDATING during a reshard.
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
    """All streams of one account and region, protected by one lock.

    Timestamps in requests and responses are epoch milliseconds.
    """

    def __init__(self, clock: Clock, settings: KinesisSettings) -> None:
        self.clock = clock
        self.settings = settings
        self.streams: dict[str, Stream] = {}
        self.lock = threading.RLock()
        self.serial = 0
        self._created_seconds: dict[str, int] = {}

    def now_millis(self) -> int:
        """Epoch milliseconds of the model's clock."""
        return round(self.clock.wall() * 1000)

    def creation_millis(self, name: str) -> int:
        """The creation time of a stream that is created now.

        Lease keys and keys of positions have its whole seconds. The service needs seconds to delete
        a stream, so that two streams of a name never have the same second; here the second stream
        gets the next one.
        """
        millis = self.now_millis()
        before = self._created_seconds.get(name)
        if before is not None:
            millis = max(millis, (before + 1) * 1000)
        self._created_seconds[name] = millis // 1000
        return millis

    def arn(self, stream_name: str) -> str:
        """The ARN of a stream of this account."""
        return (
            f"arn:aws:kinesis:{self.settings.region}:{self.settings.account}:stream/{stream_name}"
        )

    def name_of(self, params: Params) -> str:
        """The name of the stream in a request, from StreamName or StreamARN.

        Raises InvalidArgumentException or ResourceNotFoundException.
        """
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
        """The stream with this name, with due changes applied; raises ResourceNotFoundException."""
        stream = self.streams.get(name)
        if stream is None:
            raise not_found(f"Stream {name} under account {self.settings.account} not found.")
        stream.settle(self.now_millis())
        return stream

    def find(self, params: Params) -> Stream:
        """The stream of a request, in any state."""
        return self.named(self.name_of(params))

    def usable(self, params: Params) -> Stream:
        """The stream of a request, if it can be written and read.

        Raises ResourceNotFoundException while the stream is CREATING.
        """
        stream = self.find(params)
        if stream.status == "CREATING":
            raise not_found(
                f"Stream {stream.name} under account {self.settings.account} not found."
            )
        return stream

    def active(self, params: Params) -> Stream:
        """The stream of a request, if it is ACTIVE; raises ResourceInUseException."""
        stream = self.find(params)
        if stream.status != "ACTIVE":
            raise in_use(
                f"Stream {stream.name} under account {self.settings.account} not ACTIVE, "
                f"instead in state {stream.status}"
            )
        return stream


def encode_token(kind: str, *fields: str | int | None) -> str:
    """An opaque token: the fields and a checksum in base64."""
    body = msgspec.json.encode([kind, *fields])
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode()


def decode_token(kind: str, token: str, count: int) -> list[Any] | None:
    """The parts of a token of this kind, or None for any other string."""
    try:
        raw = base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError):
        return None
    # 4 is the width of the checksum.
    if len(raw) <= 4 or zlib.crc32(raw[4:]).to_bytes(4, "big") != raw[:4]:  # noqa: PLR2004
        return None
    kind_found, *parts = msgspec.json.decode(raw[4:])
    return parts if kind_found == kind and len(parts) == count else None
