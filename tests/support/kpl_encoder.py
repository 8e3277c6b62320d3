"""An encoder of KPL aggregates that shares nothing with the decoder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

MAGIC = b"\xf3\x89\x9a\xc2"


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def delimited(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


@dataclass
class Aggregate:
    """A tiny encoder; every user record gets its own table entries, and `noise` is put between the
    fields of records.
    """

    keys: list[str] = field(default_factory=list)
    hash_keys: list[str] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)
    noise: bytes = b""

    def add(self, key: str, hash_key: str | None, data: bytes) -> Aggregate:
        self.keys.append(key)
        body = varint(1 << 3) + varint(len(self.keys) - 1) + self.noise
        if hash_key is not None:
            self.hash_keys.append(hash_key)
            body += varint(2 << 3) + varint(len(self.hash_keys) - 1)
        self.records.append(body + delimited(3, data) + self.noise)
        return self

    def message(self) -> bytes:
        table = b"".join(delimited(1, k.encode()) for k in self.keys) + b"".join(
            delimited(2, k.encode()) for k in self.hash_keys
        )
        return table + b"".join(delimited(3, r) for r in self.records)

    def encode(self) -> bytes:
        return seal(self.message())


def seal(message: bytes) -> bytes:
    return MAGIC + message + hashlib.md5(message).digest()


def aggregate_of(members) -> bytes:
    aggregate = Aggregate()
    for member in members:
        aggregate.add(*member)
    return aggregate.encode()
