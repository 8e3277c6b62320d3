"""AWS event-stream framing of SubscribeToShard responses.

The content type is `application/vnd.amazon.eventstream`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final

CONTENT_TYPE: Final = "application/vnd.amazon.eventstream"
_STRING: Final = 7


def frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return one message.

    A message consists of the lengths and their checksum, the headers, the payload, and a checksum
    of everything before it.
    """
    encoded = b"".join(
        struct.pack("!B", len(name))
        + name.encode()
        + struct.pack("!BH", _STRING, len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(encoded) + len(payload), len(encoded))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + encoded + payload
    return message + struct.pack("!I", zlib.crc32(message))


def event(kind: str, content_type: str, payload: bytes) -> bytes:
    """Return the message of an event."""
    return frame(
        {":message-type": "event", ":event-type": kind, ":content-type": content_type}, payload
    )


def exception(code: str, content_type: str, payload: bytes) -> bytes:
    """Return the message of an error that ends the stream."""
    return frame(
        {":message-type": "exception", ":exception-type": code, ":content-type": content_type},
        payload,
    )
