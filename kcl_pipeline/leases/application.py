"""What is recorded of an application: identity, streams, losses, a replay, and a pause.

Each is one attribute of the client-version row `Migration3.0` in the coordinator-state table, with
a JSON document. Java readers of that row keep attributes that they do not know. A separate row
would become an invalid lease when a Java fleet moves the rows of this table into the lease table
(protocol §4.1, §4.5). This module does no I/O: `coordinator` reads and writes the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, reduce
from typing import Annotated, Final, Literal

import msgspec

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.config.shard_sync import InitialPosition, ShardSyncSettings
from kcl_pipeline.errors import OtherApplicationError, SettingsError, UnreadableRowError
from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.row import (
    MAX_COUNTER,
    MAX_KEY_BYTES,
    MAX_LONG,
    MAX_MILLIS,
    Document,
    Lease,
    checked_name,
    string,
)
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.text import counted, printable

PAUSE: Final = "kclpPause"
MAX_REQUEST: Final = 10_000
"""Largest number of characters of an attribute."""
MAX_WORDS: Final = 500
"""Largest number of characters of a name or a reason."""

_Words = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST)]
_Millis = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIS)]


@dataclass(frozen=True, slots=True)
class Pause:
    """The application is paused: workers release their leases and end, and none is assigned.

    Attributes:
        by: Who paused it.
        at_millis: When, in epoch milliseconds of the operator's clock. None: unknown.
        reason: Why; may be empty.
    """

    by: _Words
    at_millis: _Millis | None = None
    reason: _Words = ""

    @property
    def sentence(self) -> str:
        """Since when it is paused, by whom and why."""
        why = f": {printable(self.reason)}" if self.reason else ""
        return f"paused{_since(self.at_millis)} by {printable(self.by)}{why}"

    @property
    def value(self) -> AttributeValue:
        """The attribute."""
        return string(_PAUSE.text(self))


_PAUSE: Final = Document(PAUSE, Pause, MAX_REQUEST, "resume the application")
UNREADABLE: Final = "an unknown operator (the attribute cannot be read)"


@dataclass(frozen=True, slots=True)
class Control:
    """The request of an operator, as it was read.

    Attributes:
        pause: The pause. None: not paused.
        pause_value: Its attribute. A conditional write compares it.
    """

    pause: Pause | None = None
    pause_value: AttributeValue | None = None


NOTHING_WANTED: Final = Control()


def control_of(item: Item) -> Control:
    """Return the request in a client-version row."""
    value = item.get(PAUSE)
    return NOTHING_WANTED if value is None else Control(_pause_of(value), value)


def words(text: str) -> str:
    """Return a name or a reason as it is stored: printable, and not too long."""
    return printable(text, MAX_WORDS)


def _pause_of(value: AttributeValue) -> Pause:
    try:
        return _PAUSE.parsed(str(value["S"]))
    except (KeyError, UnreadableRowError):
        return Pause(UNREADABLE)


def _since(millis: int | None) -> str:
    if millis is None:
        return ""
    try:
        return f" since {datetime.fromtimestamp(millis / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # outside the calendar
        return ""


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


Mode = Literal["single_stream", "multi_stream"]

APPLICATION: Final = "kclpApplication"
MAX_IDENTITY: Final = 300_000
"""Largest number of characters of the record. Its row also has the losses, a replay and requests of
an operator, together 60,000 characters, and a DynamoDB row has at most 400 KB.
"""

MAX_SINK: Final = 4_096
"""Largest number of bytes of the address of a sink (our own limit)."""

ACCEPT_STREAMS: Final = "kcl-pipeline do accept --pipeline module:attribute --streams"
ACCEPT_SINK: Final = "kcl-pipeline do accept --pipeline module:attribute --sink"


@dataclass(frozen=True, slots=True)
class ApplicationIdentity:
    """The identity of an application.

    Attributes:
        mode: Whether lease keys contain the stream.
        streams: The streams; exactly one in the mode single_stream.
        sink: Address of the sink. None: not recorded, or unknown to the writer of the record.
        changing: Leases of former streams are being deleted, and no worker may start.
        whole_aggregates: Whether KPL aggregates are left as they are
            (`retrieval.skip_kpl_deaggregation`). None: no, in a record; unknown, in a start.

    Raises:
        ValueError: The values are inconsistent, or outside their limits.
    """

    mode: Mode
    streams: tuple[RecordedStream, ...]
    sink: str | None = None
    changing: bool = False
    whole_aggregates: bool | None = None

    def __post_init__(self) -> None:
        if self.mode == "single_stream" and len(self.streams) != 1:
            raise ValueError(
                f"the mode is single_stream, but there are {len(self.streams)} streams"
            )
        if self.sink is not None:
            checked_name(self.sink, "sink", MAX_SINK)

    @classmethod
    def of(
        cls,
        streams: Iterable[StreamId],
        *,
        is_multi_stream: bool,
        sink: str | None = None,
        shard_sync_of: Callable[[StreamId], ShardSyncSettings] | None = None,
        whole_aggregates: bool | None = None,
    ) -> ApplicationIdentity:
        """Return the identity of a start with these resolved streams.

        Args:
            streams: The streams.
            is_multi_stream: Whether lease keys contain the stream.
            sink: Address of the sink.
            shard_sync_of: Returns the initial position of one of several streams. It is recorded
                with the stream. None: it is not recorded.
            whole_aggregates: Whether KPL aggregates are left as they are. None: unknown.
        """
        position_of = shard_sync_of if is_multi_stream else None
        recorded = tuple(
            RecordedStream.of(one, None if position_of is None else position_of(one))
            for one in streams
        )
        mode: Mode = "multi_stream" if is_multi_stream else "single_stream"
        return cls(mode, recorded, sink, whole_aggregates=whole_aggregates)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The document of the attribute."""

    mode: Mode
    kinds: tuple[StreamKind, ...]
    streams: tuple[StoredStream, ...]
    sink: str | None = None
    changing: bool = False
    whole_aggregates: bool | None = None


_APPLICATION: Final = Document(
    APPLICATION,
    _Stored,
    MAX_IDENTITY,
    "check it and remove it: the next start records it again, if the leases fit",
)


@dataclass(frozen=True, slots=True)
class ApplicationRecord:
    """An identity that was read. A conditional write compares `text`, the attribute's value.

    `control` has the requests of an operator, which are in the same row.
    """

    identity: ApplicationIdentity
    text: str
    control: Control = NOTHING_WANTED


def application_text(identity: ApplicationIdentity) -> str:
    """Return the value of the attribute.

    Raises:
        SettingsError: It has more characters than a reader accepts.
    """
    stored = _Stored(
        identity.mode,
        *with_kinds(identity.streams),
        identity.sink,
        identity.changing,
        whole_aggregates=identity.whole_aggregates or None,
    )
    text = _APPLICATION.text(stored)
    if len(text) > MAX_IDENTITY:
        raise SettingsError(
            f"the application has {len(identity.streams)} streams, and their record has "
            f"{len(text)} characters, more than {MAX_IDENTITY}. Write fewer streams, and another "
            "application for the rest"
        )
    return text


@lru_cache(maxsize=4)  # a leader reads it in every cycle, and it rarely changes
def application_from_text(text: str) -> ApplicationRecord:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not an identity.
    """
    stored = _APPLICATION.parsed(text)
    try:
        streams = without_kinds(stored.kinds, stored.streams)
        found = ApplicationIdentity(
            stored.mode,
            streams,
            stored.sink,
            stored.changing,
            whole_aggregates=stored.whole_aggregates,
        )
    except ValueError as error:
        raise _APPLICATION.unreadable(error) from error
    return ApplicationRecord(found, text)


def successor(
    name: str, recorded: ApplicationIdentity, configured: ApplicationIdentity
) -> ApplicationIdentity:
    """Return the record after a start with `configured`, or refuse the start.

    A multi-stream application may add streams, because its lease keys contain the stream. Streams
    that a start does not name stay in the record, because workers with another version of the code
    may read them. A single stream that was deleted and created again is recorded as renewed; the
    leader then replaces its leases.

    Returns:
        The new record; equal to `recorded` if nothing changes.

    Raises:
        OtherApplicationError: The start does not fit. The message says how to make the change.
    """
    if recorded.changing:
        raise OtherApplicationError(
            f"a change of the streams of the application {name!r} has begun and is not finished; "
            f"run {ACCEPT_STREAMS} again"
        )
    if recorded.mode != configured.mode:
        raise OtherApplicationError(_other_mode(name, recorded, configured))
    if (
        configured.sink is not None
        and recorded.sink is not None
        and configured.sink != recorded.sink
    ):
        raise OtherApplicationError(
            f"the application {name!r} writes to {recorded.sink}, but sink={configured.sink!r}; "
            f"write the former sink or another name, or stop its workers and run {ACCEPT_SINK}"
        )
    _require_same_aggregates(name, recorded, configured)
    streams = (
        _merged(name, recorded, configured)
        if configured.mode == "multi_stream"
        else _same(name, recorded, configured)
    )
    return replace(recorded, streams=streams, sink=recorded.sink or configured.sink)


def _require_same_aggregates(
    name: str, recorded: ApplicationIdentity, configured: ApplicationIdentity
) -> None:
    """Refuse a change of `skip_kpl_deaggregation`, because positions may be inside of aggregates.

    The position of the first user record is also that of the whole aggregate. A worker with the
    other setting would skip the rest of the aggregate, or read it twice.
    """
    now, before = configured.whole_aggregates, bool(recorded.whole_aggregates)
    if now is not None and now != before:
        raise OtherApplicationError(
            f"retrieval.skip_kpl_deaggregation={now}, but the application {name!r} has read with "
            f"skip_kpl_deaggregation={before}, and its positions may be inside of KPL aggregates; "
            f"write skip_kpl_deaggregation={before}, or another application name"
        )


def _other_mode(name: str, recorded: ApplicationIdentity, configured: ApplicationIdentity) -> str:
    if recorded.mode == "single_stream":
        return (
            f"the application {name!r} reads the one stream {recorded.streams[0]}, and its lease "
            f"keys are shard ids, but streams={_names(configured)} names several; write "
            f"streams={_names(recorded)} or another name, or stop its workers and run "
            f"{ACCEPT_STREAMS}, which starts all streams at the initial position"
        )
    return (
        f"the application {name!r} reads several streams, and its lease keys contain their names, "
        f"but streams={_names(configured)} names one; write streams={_names(recorded)} or another "
        f"name, or stop its workers and run {ACCEPT_STREAMS}, which starts the stream at the "
        "initial position"
    )


def _same(
    name: str, recorded: ApplicationIdentity, configured: ApplicationIdentity
) -> tuple[RecordedStream, ...]:
    (before,), (now,) = recorded.streams, configured.streams
    if before.arn != now.arn:
        raise OtherApplicationError(
            f"the application {name!r} reads the stream {before}, but streams={_names(configured)} "
            f"is {now}, and the two streams have the same lease keys; write streams="
            f"{_names(recorded)} or another name, or stop its workers and run {ACCEPT_STREAMS}, "
            "which starts the new stream at the initial position"
        )
    if not before.is_same(now):
        # Creation times only grow: an older one is an old response.
        is_later = (now.created_millis or 0) > (before.created_millis or 0)
        return (replace(now, renewed=True),) if is_later else recorded.streams
    return (now,) if before.created_millis is None else recorded.streams


def _merged(
    name: str, recorded: ApplicationIdentity, configured: ApplicationIdentity
) -> tuple[RecordedStream, ...]:
    known = {stream.arn: stream for stream in recorded.streams}
    if (
        known
        and configured.streams
        and not any(stream.arn in known for stream in configured.streams)
    ):
        raise OtherApplicationError(
            f"the application {name!r} reads {_names(recorded)}, and none of them is in "
            f"streams={_names(configured)}; write another name, or stop its workers and run "
            f"{ACCEPT_STREAMS}"
        )
    for stream in configured.streams:
        before = known.get(stream.arn)
        if before is None or (stream.created_millis or 0) > (before.created_millis or 0):
            known[stream.arn] = stream
    return tuple(known[arn] for arn in sorted(known))


def _names(identity: ApplicationIdentity) -> list[str]:
    return [stream.name for stream in identity.streams]


def with_recorded(
    identity: ApplicationIdentity,
    record: ApplicationRecord | None,
    unavailable: Iterable[str],
    *,
    keep_all: bool = False,
) -> ApplicationIdentity:
    """Add recorded streams that cannot be described now.

    Args:
        identity: The identity of a start, with the streams that can be described.
        record: The record. None: there is none.
        unavailable: Names or ARNs of the other streams of the start.
        keep_all: Add all recorded streams.
    """
    recorded = () if record is None else record.identity.streams
    known, missing = {stream.arn for stream in identity.streams}, set(unavailable)
    added = [
        one
        for one in recorded
        if one.arn not in known and (keep_all or {one.arn, one.name} & missing)
    ]
    return replace(identity, streams=(*identity.streams, *added))


def streams_as_recorded(
    identity: ApplicationIdentity, streams: Sequence[StreamId]
) -> tuple[StreamId, ...]:
    """Return the streams of a start with `recreated_millis`."""
    if identity.mode == "multi_stream":
        return tuple(streams)
    return tuple(identity.streams[0].as_recorded(stream) or stream for stream in streams)


def contradiction(
    leases: Sequence[Lease], configured: ApplicationIdentity, shards: Iterable[Shard]
) -> str | None:
    """Return why existing leases cannot belong to `configured`; None if they may.

    For an application without a record, created by the Java KCL. Single-stream lease keys
    are only shard ids, but a shard of another stream mostly has another hash range or
    other sequence numbers. If only some of the leases have the other form, they are ignored here
    and reported as bad rows elsewhere.

    Args:
        leases: The existing leases.
        configured: The identity of the start.
        shards: All shards of the stream of a single-stream application.
    """
    if configured.mode == "multi_stream":
        return _other_streams(leases, configured)
    several = next((lease for lease in leases if lease.stream is not None), None)
    if several is not None and all(lease.stream is not None for lease in leases):
        return (
            f"the lease {several.lease_key} has a stream in its key: the application reads "
            f"several streams, but streams={_names(configured)} names one"
        )
    listed = {shard.shard_id: shard for shard in shards}
    for lease in sorted(leases, key=lambda lease: lease.lease_key):
        # a lease of the other form has no shard id as its key
        shard = listed.get(lease.lease_key)
        reason = None if shard is None else _not_of_shard(lease, shard)
        if reason is not None:
            return reason
    return None


def _other_streams(leases: Sequence[Lease], configured: ApplicationIdentity) -> str | None:
    single = next((lease for lease in leases if lease.stream is None), None)
    if single is not None and all(lease.stream is None for lease in leases):
        return (
            f"the lease {single.lease_key} has no stream in its key: the application reads one "
            f"stream, but streams={_names(configured)} names several"
        )
    streams = (StreamId.parse(lease.stream) for lease in leases if lease.stream)
    named = {(one.account, one.name) for one in streams}
    if (
        not named
        or not configured.streams
        or named & {account_and_name_of_arn(s.arn) for s in configured.streams}
    ):
        return None
    return (
        f"its leases are those of {sorted(name for _, name in named)}, and none of these is in "
        f"streams={_names(configured)}"
    )


def _not_of_shard(lease: Lease, shard: Shard) -> str | None:
    keys, known = lease.hash_key_range, shard.hash_key_range
    if keys is not None and keys != known:
        return (
            f"the lease {lease.lease_key} covers the hash keys {keys.start} to {keys.end}, its "
            f"shard {known.start} to {known.end}"
        )
    position = lease.checkpoint
    if position.is_sentinel:
        return None
    number = int(position.sequence_number)
    end = shard.ending_sequence_number
    if number < int(shard.starting_sequence_number) or (end is not None and number > int(end)):
        return (
            f"the checkpoint {position} of the lease {lease.lease_key} is not a sequence number of "
            f"its shard, which begins at {shard.starting_sequence_number}"
            + (f" and ends at {end}" if end is not None else "")
        )
    return None


MAX_LOSSES: Final = 20_000
"""Largest number of characters of the record. The longest names and positions fit."""

_MAX_NAME: Final = 2048
_MAX_SHORT: Final = 300
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Short = Annotated[str, msgspec.Meta(max_length=_MAX_SHORT)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]
_TableVersion = tuple[_Short, Annotated[int, msgspec.Meta(ge=0, le=MAX_LONG)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A `RecordsLost` or a `TableRestored` as it is recorded.

    Positions are texts, because they are only shown.

    Attributes:
        shard: The lease key, with the stream in front unless the key contains it. After a RESTORE:
            the version that it made.
        after: Start of the loss (exclusive). After a RESTORE: the version that was restored.
        end: End of the loss: `until` a position (inclusive), `before` one (exclusive).
        recorded_millis: When it was reported, epoch milliseconds.
        restored: Id of the table, and the version that a RESTORE made. None: another reason.
    """

    shard: _Name
    reason: LossReason
    reporter: _Name
    recorded_millis: _Millis
    after: _Short | None = None
    end: _Short | None = None
    first_arrival_millis: _Millis | None = None
    last_arrival_millis: _Millis | None = None
    restored: _TableVersion | None = None

    @classmethod
    def of(cls, event: RecordsLost | TableRestored, now_millis: int) -> Loss:
        """Return the record of an event."""
        if isinstance(event, TableRestored):
            return cls(
                shard=_cut(f"version {event.version} of the table {event.table_id}"),
                reason=LossReason.TABLE_RESTORED,
                reporter="a reader of its log",
                recorded_millis=now_millis,
                after=_cut(event.restored_to, _MAX_SHORT),
                restored=(_cut(event.table_id, _MAX_SHORT), event.version),
            )
        is_in_key = event.stream is None or ":" in event.lease_key
        ends = {"until": event.until, "before": event.before}
        return cls(
            shard=_cut(event.lease_key if is_in_key else f"{event.stream} {event.lease_key}"),
            reason=event.reason,
            reporter=_cut(event.reporter),
            recorded_millis=now_millis,
            after=None if event.after is None else str(event.after),
            end=" ".join(f"{name} {end}" for name, end in ends.items() if end is not None) or None,
            first_arrival_millis=_millis(event.first_arrival_millis),
            last_arrival_millis=_millis(event.last_arrival_millis),
        )

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """Shard, reason and start. A repeated report has the same, but may have another end."""
        return (self.shard, self.reason, self.after)

    @property
    def sentence(self) -> str:
        """What was lost, when it was recorded, and who reported it."""
        shard, at = printable(self.shard), f"recorded {_time_text(self.recorded_millis)}"
        if self.restored is not None:
            return (
                f"RESTORE in {shard} to {printable(self.after or 'an earlier one')}, {at}: rows "
                "after it are gone and are not read again; `kcl-pipeline do seek -p PIPELINE --to "
                "TIME --pause --yes` reads the records since TIME again"
            )
        facts = [
            *(() if self.after is None else (f"after {printable(self.after)}",)),
            *(() if self.end is None else (printable(self.end),)),
        ]
        for name in ("first", "last"):
            millis = getattr(self, f"{name}_arrival_millis")
            if millis is not None:
                facts.append(f"{name} arrival {_time_text(millis)}")
        return f"{shard} ({', '.join([self.reason, *facts])}), {at} by {printable(self.reporter)}"


def _cut(text: str, most: int = _MAX_NAME) -> str:
    return printable(text, most)[:most]


def _millis(millis: int | None) -> int | None:
    return None if millis is None else min(max(millis, 0), MAX_MILLIS)


def _time_text(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of an application.

    The number may be too high, never too low: a loss counts again if it is reported again after
    another one.

    Attributes:
        count: Number of losses.
        acknowledged: The number that a person has acknowledged; at most `count`.
        acknowledged_millis: Time of the last acknowledgement, epoch milliseconds.
        last: The last loss. None: `count` is 0.
        restored: Id of the table and its highest version of a RESTORE that was counted. Every
            reader of its log may report the RESTORE again, also after it was acknowledged.
    """

    count: _Count = 0
    acknowledged: _Count = 0
    acknowledged_millis: _Millis | None = None
    last: Loss | None = None
    restored: _TableVersion | None = None

    def __post_init__(self) -> None:
        if self.acknowledged > self.count or (self.count == 0) != (self.last is None):
            raise ValueError("count, acknowledged and last contradict each other")

    @property
    def unacknowledged(self) -> int:
        """Number of losses that are not acknowledged."""
        return self.count - self.acknowledged

    @property
    def sentence(self) -> str:
        """The numbers and the last loss."""
        if self.last is None:
            return "no loss of records is recorded"
        millis = self.acknowledged_millis
        at = "" if millis is None else f" at {_time_text(millis)}"
        return (
            f"{counted(self.count, 'loss', 'losses')} of records, {self.acknowledged} "
            f"acknowledged{at}; the last: {self.last.sentence}"
        )

    def with_losses(self, losses: Iterable[Loss]) -> Losses:
        """Count losses, oldest first. A repeated report of the last one changes nothing."""
        return reduce(Losses._with, losses, self)

    def _with(self, loss: Loss) -> Losses:
        if loss.restored is not None and self.restored is not None:
            (table_id, version), (counted_id, highest) = loss.restored, self.restored
            if table_id == counted_id and version <= highest:
                return self
        count = self.count + 1
        if self.last is not None and self.last.identity == loss.identity:
            if self.last.end == loss.end:
                return self
            # More of a loss that nobody has acknowledged is not one more loss.
            count -= self.unacknowledged > 0
        return replace(self, count=count, last=loss, restored=loss.restored or self.restored)

    def with_acknowledged(self, shown: Losses, now_millis: int) -> Losses:
        """Acknowledge the number of losses in `shown`. Later ones are not acknowledged.

        Args:
            shown: An earlier state of this record, which a person has seen.
            now_millis: The time, epoch milliseconds.
        """
        number = min(shown.count, self.count)
        # More of the last loss may have been recorded since then, without a further count.
        if number == self.count and self.last != shown.last:
            number -= 1
        if number <= self.acknowledged:
            return self
        return replace(self, acknowledged=number, acknowledged_millis=now_millis)


LOSSES: Final = Document(
    "kclpLosses",
    Losses,
    MAX_LOSSES,
    "check it and remove it: the workers' logs have the losses as records_lost",
)


MAX_REPLAY: Final = 20_000
"""Largest number of characters of the attribute."""

_Text = Annotated[str, msgspec.Meta(max_length=4_096)]


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """A replay of a time range of the streams, or which dead letters one replays.

    The times are those at which the records arrived; of dead letters, at which they failed.

    Attributes:
        from_millis: First time (inclusive), epoch milliseconds.
        to_millis: Last time (exclusive), epoch milliseconds. `MAX_MILLIS`: there is no end.
        into: Address of the side table. None: the table of the pipeline.
        only_stream: Name or ARN of the only stream. None: all streams.
        complete: Whether all records of the range are in the table.
    """

    from_millis: _Millis
    to_millis: _Millis
    into: _Text | None = None
    only_stream: _Text | None = None
    complete: bool = False

    @property
    def begin(self) -> datetime:
        """First time (inclusive)."""
        return datetime.fromtimestamp(self.from_millis / 1000, UTC)

    @property
    def end(self) -> datetime:
        """Last time (exclusive)."""
        return datetime.fromtimestamp(self.to_millis / 1000, UTC)


REPLAY: Final = Document(
    "kclpReplay", ReplayRecord, MAX_REPLAY, "begin another replay with another id"
)
