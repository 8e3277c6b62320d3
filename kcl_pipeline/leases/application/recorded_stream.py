"""A stream in the record of the application, and the initial positions of recorded streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.config.shard_sync import InitialPosition, ShardSyncSettings
from kcl_pipeline.leases.attributes import MAX_KEY_BYTES, MAX_MILLIS, checked_name
from kcl_pipeline.shards import StreamId

AccountAndName = tuple[str | None, str]
"""Identifies a stream, apart from its creation. The account is None if it is unknown."""


@dataclass(frozen=True, slots=True)
class RecordedStream:
    """A stream in the record.

    Attributes:
        arn: ARN of the stream, or its name if the service does not return an ARN.
        created_millis: Creation time in epoch milliseconds. None: unknown.
        renewed: Whether the application read a former stream with this name before. Then the leases
            of this stream have its creation time (`StreamId.recreated_millis`), and all others are
            deleted.
        initial_position: Where the leases of one of several streams begin. Processes that do not
            name the stream use it. None: unknown.
        initial_millis: The time of AT_TIMESTAMP, epoch milliseconds.

    Raises:
        ValueError: A value is outside its limits.
    """

    arn: str
    created_millis: int | None = None
    renewed: bool = False
    initial_position: InitialPosition | None = None
    initial_millis: int | None = None

    def __post_init__(self) -> None:
        checked_name(self.arn, "arn", MAX_KEY_BYTES)
        if not 0 <= (self.created_millis or 0) <= MAX_MILLIS:
            raise ValueError(f"created_millis is {self.created_millis}, not 0 to {MAX_MILLIS}")
        if not 0 <= (self.initial_millis or 0) <= MAX_MILLIS:
            raise ValueError(f"initial_millis is {self.initial_millis}, not 0 to {MAX_MILLIS}")
        if (self.initial_position == "AT_TIMESTAMP") != (self.initial_millis is not None):
            raise ValueError(
                f"initial_millis={self.initial_millis} does not fit initial_position="
                f"{self.initial_position!r}"
            )

    @classmethod
    def of(cls, stream: StreamId, position: ShardSyncSettings | None = None) -> RecordedStream:
        """Return the record of a resolved stream, with its initial position."""
        name = stream.arn or stream.name
        if position is None:
            return cls(name, stream.created_millis)
        return cls(
            name,
            stream.created_millis,
            initial_position=position.initial_position_in_stream,
            initial_millis=position.initial_millis,
        )

    @property
    def name(self) -> str:
        """Name of the stream."""
        return self.arn.rpartition("/")[2]

    @property
    def account_and_name(self) -> AccountAndName:
        """Account and name of the stream."""
        return account_and_name_of_arn(self.arn)

    def is_same(self, other: RecordedStream) -> bool:
        """Return whether both are the same stream. An unknown creation time equals any other."""
        known = self.created_millis is not None and other.created_millis is not None
        return self.arn == other.arn and not (known and self.created_millis != other.created_millis)

    def as_recorded(self, stream: StreamId) -> StreamId | None:
        """Return this stream, as it was resolved, with `recreated_millis`.

        Returns:
            None if another stream has the name now.
        """
        if not self.is_same(RecordedStream.of(stream)):
            return None
        return replace(stream, recreated_millis=self.created_millis if self.renewed else None)

    def __str__(self) -> str:
        if self.created_millis is None:
            return self.arn
        created = datetime.fromtimestamp(self.created_millis / 1000, UTC)
        return f"{self.arn} (created {created.isoformat(timespec='seconds')})"


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What the stored record has once for all streams that share it.

    A stream with its whole ARN and its initial position has 144 characters, so that 2,090 streams
    would fill the record. With a kind it has about 40.

    Attributes:
        prefix: What the ARN has before the name.
        renewed: As in `RecordedStream`, as are the others.
    """

    prefix: str
    renewed: bool = False
    initial_position: InitialPosition | None = None
    initial_millis: int | None = None


StoredStream = tuple[Annotated[int, msgspec.Meta(ge=0)], str, int | None]
"""Index of the kind, name, and creation time in epoch milliseconds."""


def with_kinds(
    streams: Iterable[RecordedStream],
) -> tuple[tuple[StreamKind, ...], tuple[StoredStream, ...]]:
    """Return the kinds of the streams, and the streams in their order."""
    kinds: dict[StreamKind, int] = {}
    stored = []
    for one in streams:
        prefix = one.arn.removesuffix(one.name)
        kind = StreamKind(prefix, one.renewed, one.initial_position, one.initial_millis)
        stored.append((kinds.setdefault(kind, len(kinds)), one.name, one.created_millis))
    return tuple(kinds), tuple(stored)


def without_kinds(
    kinds: Sequence[StreamKind], streams: Iterable[StoredStream]
) -> tuple[RecordedStream, ...]:
    """Return the streams in their order.

    Raises:
        ValueError: A value is outside its limits.
    """
    found = []
    for index, name, created_millis in streams:
        if index >= len(kinds):
            raise ValueError(f"the stream {name!r:.200} has the kind {index} of {len(kinds)}")
        one = kinds[index]
        found.append(
            RecordedStream(
                f"{one.prefix}{name}",
                created_millis,
                one.renewed,
                one.initial_position,
                one.initial_millis,
            )
        )
    return tuple(found)


class InitialPositions:
    """Where new leases of a stream begin: as this process's settings say, or as recorded.

    During a deploy, processes with the former list create leases of streams that only the record
    names.
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings = settings
        self._unnamed: dict[str, RecordedStream] = {}

    def note_record(self, streams: Iterable[RecordedStream]) -> None:
        """Note the recorded streams."""
        self._unnamed = {one.arn: one for one in unnamed(streams, self._settings.streams)}

    def of(self, stream: StreamId) -> ShardSyncSettings:
        """Return the settings of shard sync with the initial position of this stream."""
        recorded = self._unnamed.get(stream.arn or stream.name)
        if recorded is None or recorded.initial_position is None:
            return self._settings.shard_sync_of(stream)
        return self._settings.shard_sync.beginning_at(
            recorded.initial_position, recorded.initial_millis
        )


def unnamed(recorded: Iterable[RecordedStream], names: Iterable[str]) -> list[RecordedStream]:
    """Return the recorded streams that `names` (stream names or ARNs) lacks.

    A name stands for one stream. If several recorded streams of that name are left, it is unknown
    for which, and all of them are returned.
    """
    named = set(names)
    others = [one for one in recorded if one.arn not in named]
    counts = Counter(one.name for one in others)
    return [one for one in others if one.name not in named or counts[one.name] > 1]


def unnamed_labels(recorded: Sequence[RecordedStream], names: Iterable[str]) -> tuple[str, ...]:
    """Return the labels of the recorded streams that are not in `names` (stream names or ARNs).

    Returns:
        Their names; the ARN if two accounts have a stream of that name.
    """
    counts = Counter(one.name for one in recorded)
    found = unnamed(recorded, names)
    return tuple(one.name if counts[one.name] == 1 else one.arn for one in found)


def streams_to_read(
    names: Sequence[str], recorded: Sequence[RecordedStream], *, is_multi_stream: bool
) -> tuple[str, ...]:
    """Return names or ARNs: those of the settings, then the recorded streams that these lack."""
    if not is_multi_stream:
        return tuple(names)
    return (*names, *(one.arn for one in unnamed(recorded, names)))


def account_and_name_of_arn(arn: str) -> AccountAndName:
    """Return account and name of the stream with this ARN."""
    parts = arn.split(":")
    return (parts[4] if len(parts) > 4 else None), arn.rpartition("/")[2]  # noqa: PLR2004 (an ARN)
