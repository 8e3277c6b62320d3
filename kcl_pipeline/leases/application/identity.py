"""Compare the identity of an application (mode, streams, sink) with the recorded one.

The identity is stored in the attribute `kclpApplication` of the client-version row `Migration3.0`
in the coordinator-state table. Java readers of that row keep attributes that they do not know. A
separate row would become an invalid lease when a Java fleet moves the rows of this table into the
lease table (protocol §4.1, §4.5). This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from kcl_pipeline.config.shard_sync import ShardSyncSettings
from kcl_pipeline.errors import OtherApplicationError, SettingsError, UnreadableRowError
from kcl_pipeline.leases.application.control import NOTHING_WANTED, Control
from kcl_pipeline.leases.application.recorded_stream import (
    RecordedStream,
    StoredStream,
    StreamKind,
    account_and_name_of_arn,
    with_kinds,
    without_kinds,
)
from kcl_pipeline.leases.attributes import checked_name, record_of
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.shards import Shard, StreamId

Mode = Literal["single_stream", "multi_stream"]

MAX_TEXT: Final = 300_000
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
    text = msgspec.json.encode(stored, order="deterministic").decode()
    if len(text) > MAX_TEXT:
        raise SettingsError(
            f"the application has {len(identity.streams)} streams, and their record has "
            f"{len(text)} characters, more than {MAX_TEXT}. Write fewer streams, and another "
            "application for the rest"
        )
    return text


def application_from_text(text: str) -> ApplicationRecord:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not an identity.
    """
    advice = "check it and remove it: the next start records it again, if the leases fit"
    stored = record_of(text, _Stored, "kclpApplication", MAX_TEXT, advice)
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
        raise UnreadableRowError(
            f"the attribute kclpApplication of the row Migration3.0 cannot be read ({error}); "
            f"{advice}"
        ) from error
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
