"""Streams, shards and their hash-key ranges: plain values, no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

MAX_HASH_KEY: Final = 2**128 - 1
_SERIALIZED = re.compile(r"^(?P<account>[0-9]+):(?P<name>[^:]+):(?P<epoch>[0-9]+)$")


@dataclass(frozen=True, slots=True, order=True)
class HashKeyRange:
    """An inclusive range of 128-bit partition hash keys.

    Raises `ValueError` unless 0 ≤ start < end ≤ 2^128 − 1 (protocol §1.2).
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= MAX_HASH_KEY:
            msg = (
                f"hash key range {self.start}..{self.end} is not inside 0..2^128-1 with "
                "start below end"
            )
            raise ValueError(msg)

    def contains(self, hash_key: int) -> bool:
        """Whether the key lies in the range; both ends are inside."""
        return self.start <= hash_key <= self.end

    def overlaps(self, other: HashKeyRange) -> bool:
        """Whether the two ranges have a key in common."""
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """A stream, in one of KCL's two forms (protocol §1.3).

    Single-stream applications know only `name`; multi-stream ones need `account` and
    `creation_epoch` (seconds, > 0), because lease keys carry them. `arn`, when known, is sent with
    every request.

    `created_millis` is the creation time (epoch milliseconds) that the service reported when the
    stream was resolved, in single-stream applications too. It is not a part of the identifier; it
    shows later whether the name still belongs to the same stream. None: unknown.
    """

    name: str
    account: str | None = None
    creation_epoch: int | None = None
    arn: str | None = None
    created_millis: int | None = field(default=None, compare=False)

    @property
    def serialized(self) -> str:
        """`account:name:epoch` when both are known, else the bare name."""
        if self.account is None or self.creation_epoch is None:
            return self.name
        return f"{self.account}:{self.name}:{self.creation_epoch}"

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read a serialized identifier.

        Raises `ValueError` for text with colons that is not `account:name:epoch` with epoch > 0.
        """
        match = _SERIALIZED.match(text)
        if match and int(match["epoch"]) > 0:
            return cls(match["name"], match["account"], int(match["epoch"]))
        if ":" in text or not text:
            msg = f"{text!r} is not a stream name and not account:name:creationEpochSeconds"
            raise ValueError(msg)
        return cls(text)

    def lease_key(self, shard_id: str) -> str:
        """The primary key of this shard's lease row: the bare shard id, or
        `account:name:epoch:shardId` in multi-stream form.
        """
        return shard_id if self.creation_epoch is None else f"{self.serialized}:{shard_id}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One row of ListShards. `ending_sequence_number` is None while the shard is open."""

    shard_id: str
    hash_key_range: HashKeyRange
    starting_sequence_number: str
    ending_sequence_number: str | None = None
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the shard still takes records."""
        return self.ending_sequence_number is None

    @property
    def parents(self) -> tuple[str, ...]:
        """Parent shard ids as reported, also when the parents have left retention; 0, 1 (split) or
        2 (merge) of them.
        """
        return tuple(
            p for p in (self.parent_shard_id, self.adjacent_parent_shard_id) if p is not None
        )


@dataclass(frozen=True, slots=True)
class ChildShard:
    """A child as reported by GetRecords at the end of its parent."""

    shard_id: str
    parents: tuple[str, ...]
    hash_key_range: HashKeyRange
