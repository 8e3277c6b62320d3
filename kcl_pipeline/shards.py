"""Values for streams, shards and hash-key ranges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

MAX_HASH_KEY: Final = 2**128 - 1

AUTO: Final = "AUTO"
USER_PARTITION_KEY: Final = "USER_PARTITION_KEY"
"""The record distribution strategies of a stream: the service chooses the shard of a record, or the
partition key of its producer does.
"""
_SERIALIZED = re.compile(r"^(?P<account>[0-9]+):(?P<name>[^:]+):(?P<epoch>[0-9]+)$")


@dataclass(frozen=True, slots=True, order=True)
class HashKeyRange:
    """A range of 128-bit hash keys (protocol §1.2).

    Attributes:
        start: First key (inclusive).
        end: Last key (inclusive).

    Raises:
        ValueError: Not 0 ≤ start < end ≤ 2^128 − 1.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= MAX_HASH_KEY:
            raise ValueError(
                f"hash key range {self.start}..{self.end} is not inside 0..2^128-1 with "
                "start below end"
            )

    def contains(self, hash_key: int) -> bool:
        """Return whether the key is in the range."""
        return self.start <= hash_key <= self.end

    def overlaps(self, other: HashKeyRange) -> bool:
        """Return whether the two ranges have a common key."""
        return self.start <= other.end and other.start <= self.end


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """A stream, in one of KCL's two forms (protocol §1.3).

    Attributes:
        name: Name of the stream. The only part in the single-stream form.
        account: AWS account. Only in the multi-stream form, whose lease keys contain it.
        creation_epoch: Creation time in epoch seconds, 1 or more. Only in the multi-stream form.
        arn: Sent with every request if it is known.
        created_millis: Creation time in epoch milliseconds when the stream was resolved, in both
            forms. It shows later whether the name still belongs to the same stream. Not a part of
            the identifier. None: unknown.
        recreated_millis: Creation time in epoch milliseconds in the leases of a single stream that
            was deleted and created again. None: all other streams.
        label: Value of the column `stream` if the name is not unique in the application, because
            two accounts have a stream of this name: the ARN. None: the name.
        retention_hours: Retention period when the stream was resolved. None: unknown.
        record_distribution: `AUTO` or `USER_PARTITION_KEY` when the stream was resolved. None:
            unknown.
    """

    name: str
    account: str | None = None
    creation_epoch: int | None = None
    arn: str | None = None
    created_millis: int | None = field(default=None, compare=False)
    recreated_millis: int | None = None
    label: str | None = field(default=None, compare=False)
    retention_hours: int | None = field(default=None, compare=False)
    record_distribution: str | None = field(default=None, compare=False)

    @property
    def column(self) -> str:
        """Value of the column `stream` of the records."""
        return self.label or self.name

    @property
    def serialized(self) -> str:
        """`account:name:epoch` in the multi-stream form, else the name."""
        if self.account is None or self.creation_epoch is None:
            return self.name
        return f"{self.account}:{self.name}:{self.creation_epoch}"

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Parse a serialized identifier.

        Raises:
            ValueError: The text is empty, or has colons and is not `account:name:epoch` with an
                epoch of 1 or more.
        """
        match = _SERIALIZED.match(text)
        if match and int(match["epoch"]) > 0:
            return cls(match["name"], match["account"], int(match["epoch"]))
        if ":" in text or not text:
            raise ValueError(
                f"{text!r} is not a stream name and not account:name:creationEpochSeconds"
            )
        return cls(text)

    def lease_key(self, shard_id: str) -> str:
        """Return the lease key of a shard of this stream.

        The shard id, or `account:name:epoch:shardId` in the multi-stream form.
        """
        return shard_id if self.creation_epoch is None else f"{self.serialized}:{shard_id}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as ListShards returns it. `ending_sequence_number` is None while it is open."""

    shard_id: str
    hash_key_range: HashKeyRange
    starting_sequence_number: str
    ending_sequence_number: str | None = None
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether producers can write to the shard."""
        return self.ending_sequence_number is None

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the parents: 0, 1 (split) or 2 (merge). They may have left retention."""
        return tuple(
            p for p in (self.parent_shard_id, self.adjacent_parent_shard_id) if p is not None
        )


@dataclass(frozen=True, slots=True)
class ChildShard:
    """A child shard as GetRecords returns it at the end of its parent."""

    shard_id: str
    parents: tuple[str, ...]
    hash_key_range: HashKeyRange
