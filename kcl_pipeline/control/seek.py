"""Set the positions of an application by time or position.

1. The wanted position is parsed (`SeekTarget`).
2. The changes of the leases of a stream are computed, without I/O.
3. The rows and the table are written (`Seeking`).

A seek writes only while the application is paused and nobody owns the leases. It writes the rows,
then the table, then the rows again. Every write of a row is conditional on the row as it was read
and on the pause. The table gets one commit with all shards, which is refused if a paused worker has
committed since the table was read; then everything is read again. Each commit increments the number
of its shard, so nothing that was read before the seek can be committed after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from kcl_pipeline.control.application import ApplicationControl, is_held
from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import ApplicationInUseError, SettingsError
from kcl_pipeline.kinesis.client import ShardFilterType, StreamLister
from kcl_pipeline.leases.application import ApplicationRecord, Control, streams_as_recorded
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.writes import MAX_SEEKS, LeaseSeek
from kcl_pipeline.planning.shard_sync import creation_order, new_lease
from kcl_pipeline.position import (
    AT_TIMESTAMP,
    LATEST,
    NOTHING_STORED,
    SHARD_END,
    TRIM_HORIZON,
    Position,
    StoredPosition,
)
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.sinks.sink import Positions, Sink, shard_key
from kcl_pipeline.text import counted, in_utc, printable

# -- 1. the wanted position

_AGO: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(s|min|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES: Final = "write a time such as 2026-11-23T09:00:00Z, or a time before now such as 10m"
_WRITE: Final = (
    "write one of --to TRIM_HORIZON, --to LATEST, --to 2026-11-23T09:00:00Z, --ago 10m, and "
    "--after SEQUENCE_NUMBER"
)


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """The wanted position.

    Attributes:
        kind: `AFTER` is a sequence number, which belongs to one shard.
        position: The checkpoint that means it.
        millis: The time of AT_TIMESTAMP, in epoch milliseconds.
    """

    kind: Literal["TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "AFTER"]
    position: Position
    millis: int | None = None

    @property
    def time(self) -> datetime | None:
        """The time of AT_TIMESTAMP."""
        return None if self.millis is None else datetime.fromtimestamp(self.millis / 1000, UTC)

    def __str__(self) -> str:
        if self.time is not None:
            return f"AT_TIMESTAMP {self.time.isoformat(timespec='milliseconds')}"
        return f"after {self.position}" if self.kind == "AFTER" else self.kind


def seek_target(
    to: str | None, ago: str | None, after: str | None, now_seconds: float
) -> SeekTarget:
    """Parse the wanted position.

    Args:
        to: TRIM_HORIZON, LATEST, or a time with an offset, as in ISO 8601.
        ago: A time before now, such as `10m`.
        after: A sequence number, or `number/sub-sequence number`. The next record is read first.
        now_seconds: Now, in epoch seconds.

    Raises:
        SettingsError: Not exactly one of the three is given, or its value is wrong.
    """
    if [to, ago, after].count(None) != 2:  # noqa: PLR2004 (one of three)
        raise SettingsError(f"the position is missing, or given twice; {_WRITE}")
    if after is not None:
        return SeekTarget("AFTER", _position(after))
    if ago is not None and duration_seconds(ago) is None:
        raise SettingsError(f"--ago '{printable(ago)}' is not a time; write 30s, 10m, 2h or 1d")
    if (to or "").strip().upper() == "TRIM_HORIZON":
        return SeekTarget("TRIM_HORIZON", TRIM_HORIZON)
    if (to or "").strip().upper() == "LATEST":
        return SeekTarget("LATEST", LATEST)
    option, text = ("--to", to) if to is not None else ("--ago", ago)
    millis = past_millis(option, text or "", now_seconds, _WRITE)
    return SeekTarget("AT_TIMESTAMP", AT_TIMESTAMP, millis)


def past_millis(option: str, text: str, now_seconds: float, forms: str = _TIMES) -> int:
    """Parse a time that has passed: with an offset as in ISO 8601, or before now, such as `10m`.

    Returns:
        The first whole epoch millisecond at or after it, because arrival times are whole.

    Raises:
        SettingsError: It is no such time.
    """
    ago = duration_seconds(text)
    if ago is not None:
        millis = int((now_seconds - ago) * 1000)
    else:
        try:
            time = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise SettingsError(f"{option} '{printable(text)}' is not a time; {forms}") from error
        if time.tzinfo is None:
            advice = in_utc(time)
            raise SettingsError(
                f"{option} {printable(text)} has no time zone; write {advice} for UTC"
            )
        millis = -((_EPOCH - time) // timedelta(milliseconds=1))
    if not 0 <= millis <= now_seconds * 1000:
        raise SettingsError(f"{option} {printable(text)} is in the future, or before 1970; {forms}")
    return millis


def duration_seconds(text: str) -> float | None:
    """Return the seconds of a duration such as `10m`. None: the text is no duration."""
    match = _AGO.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def _position(text: str) -> Position:
    number, _, sub = text.strip().partition("/")
    try:
        found = Position(number, int(sub or "0"))
    except ValueError as error:
        raise SettingsError(f"--after: {error}") from error
    if found.is_sentinel:
        raise SettingsError(f"--after {number} is not a sequence number; {_WRITE}")
    return found


# -- 2. the changes of a stream


@dataclass(frozen=True, slots=True)
class PositionChange:
    """The change of one lease.

    Attributes:
        seek: The write.
        note: What is repeated or skipped, as far as it is known.
    """

    seek: LeaseSeek
    note: str

    @property
    def lease_key(self) -> str:
        """The lease."""
        return self.seek.lease.lease_key


def changes_of_stream(
    stream: StreamId,
    leases: Sequence[Lease],
    listed: Sequence[Shard],
    begin: Iterable[Shard],
    target: SeekTarget,
    *,
    also_same: bool = False,
) -> tuple[PositionChange, ...]:
    """Return the changes of all leases of a stream, in the order of their shards.

    A shard that is open at the position gets it. Shards that follow it begin at TRIM_HORIZON, even
    if their rows are gone. Shards that ended before the position stay as they are, or end at once.

    Args:
        stream: The stream.
        leases: Its leases.
        listed: All its shards, also closed ones.
        begin: The shards that are open at the position.
        target: TRIM_HORIZON, LATEST or AT_TIMESTAMP.
        also_same: Whether rows that have the position already are changes, too: the table may have
            another one.
    """
    rows = {lease.shard_id: lease for lease in leases}
    first = {shard.shard_id for shard in begin}
    later = _descendants(first, listed)
    # Shards that have left retention are left out: their rest cannot be read.
    changes = (
        _change(stream, one, rows.get(one.shard_id), target, first, later, also_same=also_same)
        for one in creation_order(listed)
    )
    return tuple(change for change in changes if change is not None)


def _change(
    stream: StreamId,
    shard: Shard,
    row: Lease | None,
    target: SeekTarget,
    first: set[str],
    later: set[str],
    *,
    also_same: bool,
) -> PositionChange | None:
    position, millis = target.position, target.millis
    if target.kind == "LATEST":
        if row is None and shard.shard_id not in first:
            return None
        if row is not None and row.ended:
            return None
    elif shard.shard_id in later:
        position, millis = TRIM_HORIZON, None
    elif shard.shard_id not in first and (row is None or row.ended):
        return None
    if row is None:
        lease = new_lease(stream, shard, position)
        seek = LeaseSeek(lease, position, millis, exists=False)
        return PositionChange(seek, "its row was deleted; it is created again")
    if row.checkpoint == position and row.initial_millis == millis and not also_same:
        return None
    return PositionChange(LeaseSeek(row, position, millis), note_of(row, target))


def changes_of_shards(
    stream: StreamId,
    leases: Sequence[Lease],
    listed: Sequence[Shard],
    named: Iterable[Lease],
    target: SeekTarget,
    stored: Mapping[str, StoredPosition],
) -> tuple[PositionChange, ...]:
    """Return the changes of named leases, and of the shards that follow those that are read again.

    A descendant of a shard that is read again begins at TRIM_HORIZON, also if it has no row: else
    its rows would be in the table before those of the ancestor.

    Args:
        stream: The stream.
        leases: All its leases.
        listed: All its shards, also closed ones.
        named: The leases to change.
        target: The wanted position.
        stored: What the table has, by shard id. Empty: the sink stores no positions.

    Raises:
        SettingsError: The sequence number does not belong to the shard, or the shard is gone.
    """
    shards = {one.shard_id: one for one in listed}
    changes: dict[str, PositionChange] = {}
    again: set[str] = set()
    for lease in named:
        _check_target(lease, shards.get(lease.shard_id), target)
        if _reads_again(lease, target, stored.get(lease.shard_id, NOTHING_STORED)):
            again.add(lease.shard_id)
        seek = LeaseSeek(lease, target.position, target.millis)
        changes[lease.shard_id] = PositionChange(seek, note_of(lease, target))
    rows = {lease.shard_id: lease for lease in leases}
    later = _descendants(again, listed) - changes.keys()
    for shard in creation_order([shards[one] for one in later]):
        row = rows.get(shard.shard_id)
        seek = LeaseSeek(
            row or new_lease(stream, shard, TRIM_HORIZON), TRIM_HORIZON, exists=row is not None
        )
        note = "follows a shard that is read again; all its records in retention are repeated"
        changes[shard.shard_id] = PositionChange(seek, note)
    return tuple(changes.values())


def _check_target(lease: Lease, shard: Shard | None, target: SeekTarget) -> None:
    if shard is None:
        raise SettingsError(
            f"the stream does not list the shard {lease.shard_id} any more; nothing can be read"
        )
    if target.kind == "AFTER":
        number, end = int(target.position.sequence_number), shard.ending_sequence_number
        if number < int(shard.starting_sequence_number) or (end is not None and number > int(end)):
            raise SettingsError(
                f"{target.position} is not a sequence number of the shard {lease.shard_id}, which "
                f"begins at {shard.starting_sequence_number}"
                + (f" and ends at {end}" if end is not None else "")
            )


def _reads_again(lease: Lease, target: SeekTarget, stored: StoredPosition) -> bool:
    """Return whether records may be read again that were read before."""
    if target.kind == "LATEST":
        return False
    if target.kind != "AFTER" or lease.ended or stored.ended:
        return True
    return target.position < max(lease.checkpoint, stored.position or lease.checkpoint)


def note_of(lease: Lease, target: SeekTarget) -> str:
    """Say what is repeated or skipped, as far as the row says it."""
    before = lease.checkpoint
    if target.kind == "LATEST":
        return "unread records are skipped"
    if target.kind == "TRIM_HORIZON":
        return (
            "not begun yet" if before == TRIM_HORIZON else "all records in retention are repeated"
        )
    if target.kind == "AFTER":
        if before.is_sentinel and before != SHARD_END:
            return "records before the position are skipped" if before != LATEST else "may repeat"
        return "repeats" if target.position < before else "skips"
    if before == SHARD_END:
        return "records from this time on are repeated"
    if lease.read_up_to_millis is None or target.millis is None:
        return "records between the two positions are repeated or skipped"
    seconds = (lease.read_up_to_millis - target.millis) / 1000
    if seconds > 0:
        return f"records of about {seconds:,.0f} s are repeated"
    return f"records of up to {-seconds:,.0f} s and what has arrived since may be skipped"


def _descendants(first: set[str], listed: Sequence[Shard]) -> set[str]:
    children: Mapping[str, list[str]] = {shard.shard_id: [] for shard in listed}
    for shard in listed:
        for parent in shard.parents:
            if parent in children:
                children[parent].append(shard.shard_id)
    found: set[str] = set()
    waiting = list(first)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found and child not in first:
                found.add(child)
                waiting.append(child)
    return found


# -- 3. the writes

MAX_ATTEMPTS: Final = 10
"""Attempts of a seek. Each one reads rows and table again, which a paused worker has changed."""
_DELTA: Final = "delta:"
_FILTERS: Final[Mapping[str, ShardFilterType]] = {
    "TRIM_HORIZON": "AT_TRIM_HORIZON",
    "LATEST": "AT_LATEST",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
}


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """What a seek would change.

    Attributes:
        changes: The changes, stream by stream. They include the descendants of shards that are read
            again.
        held: Owners of the leases that would change, by lease key.
        stored: What the table has. None: the sink stores no positions.
        keys: The keys of the changed shards in the table, by lease key. Empty: the same.
    """

    changes: tuple[PositionChange, ...]
    held: Mapping[str, str]
    stored: Positions | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sought:
    """The result of a seek.

    Attributes:
        written: The changes that were written.
        refused: Keys of leases that changed meanwhile. Nothing was written to the table.
        is_paused: Whether the application is still paused.
    """

    written: tuple[PositionChange, ...]
    refused: tuple[str, ...]
    is_paused: bool


class Seeking:
    """Sets the positions of one application.

    Args:
        app: The application.
        kinesis: Lists the shards.
        target: The wanted position.
        stream: Name or ARN of the stream. None: all streams.
        shards: Lease keys or shard ids. Empty: all shards.
        sink: The sink of the application, if it stores positions. None: it stores none.
    """

    def __init__(
        self,
        app: ApplicationControl,
        kinesis: StreamLister,
        target: SeekTarget,
        *,
        stream: str | None = None,
        shards: Sequence[str] = (),
        sink: Sink | None = None,
    ) -> None:
        if target.kind == "AFTER" and len(shards) != 1:
            raise SettingsError("a sequence number belongs to one shard; write --shard once")
        self._app = app
        self._kinesis = kinesis
        self._target = target
        self._stream = stream
        self._shards = frozenset(shards)
        self._sink = sink
        self._reason = f"seek to {target}"

    def plan(self) -> SeekPlan:
        """Compute the changes. Writes nothing.

        Raises:
            SettingsError: A stream or shard is unknown, or the position does not fit.
            AwsError: The rows or the shards cannot be read.
        """
        record, listing = self._app.coordinator.read_application(), self._app.leases.list_leases()
        if listing.bad_rows:
            raise SettingsError(f"{listing.bad_rows[0].reason}; repair or delete the row first")
        is_stored = record is not None and (record.identity.sink or "").startswith(_DELTA)
        has_mark = any(one.table_mark is not None for one in listing.leases)
        if (is_stored or has_mark) and self._sink is None:
            raise SettingsError(
                f"the table of the sink stores the positions of {self._app.name!r}, and a worker "
                "continues after them; write --pipeline instead of --application"
            )
        changes: list[PositionChange] = []
        known: set[str] = set()
        keys: dict[str, str] = {}
        streams = self._streams(record)
        listings = {stream: self._kinesis.list_shards(stream) for stream in streams}
        stored = None if self._sink is None else self._stored(self._sink, listings)
        for stream in streams:
            leases = [one for one in listing.leases if _is_of(one, stream)]
            known |= {one.lease_key for one in leases} | {one.shard_id for one in leases}
            ids = {s.shard_id: shard_key(stream, s.shard_id) for s in listings[stream]}
            keys |= {stream.lease_key(shard_id): key for shard_id, key in ids.items()}
            known_to_table = {} if stored is None else {s: stored.shards[k] for s, k in ids.items()}
            changes += self._of_stream(stream, leases, listings[stream], known_to_table)
        unknown = sorted(self._shards - known)
        if unknown:
            raise SettingsError(f"there is no lease of the shard {printable(unknown[0])}")
        rows = [one.seek.lease for one in changes if one.seek.exists]
        held = {one.lease_key: one.actual_owner or "" for one in rows if is_held(one)}
        return SeekPlan(tuple(changes), held, stored, keys)

    def _stored(self, sink: Sink, listings: dict[StreamId, tuple[Shard, ...]]) -> Positions:
        """Read the table, then list the shards again until the list is newer than the table.

        A child whose first commit is in the table is then listed, so that the seek changes it.
        """
        while True:
            keys = [shard_key(one, s.shard_id) for one, listed in listings.items() for s in listed]
            found = sink.positions(keys)
            newer = {stream: self._kinesis.list_shards(stream) for stream in listings}
            if newer == listings:
                return found
            listings.update(newer)

    def write(
        self, token: str, *, pause: bool, wait_seconds: float, stay_paused: bool = False
    ) -> Sought:
        """Set the positions.

        Args:
            token: Unique text of this seek.
            pause: Pause the application if it is not paused, and resume it afterwards. False: no
                lease of the application may be held.
            wait_seconds: Longest wait for the workers.
            stay_paused: Leave the application paused.

        Raises:
            ApplicationInUseError: A lease is held.
        """
        control = self._app.coordinator.read_control()
        if control.pause is None and not pause:
            held = self._app.held_leases()
            self._require_free({one.lease_key: one.actual_owner or "" for one in held})
        pausing = Pausing(self._app)
        was_paused = control.pause is not None
        paused = pausing.pause(self._reason, wait_seconds=wait_seconds)
        try:
            self._require_free(self.plan().held)
            control = self._app.coordinator.read_control()
            if control.pause != paused.pause:
                raise ApplicationInUseError("another process ended the pause of this seek")
            return self._write(token, control, is_paused=was_paused or stay_paused)
        finally:
            if not (was_paused or stay_paused):
                pausing.resume()

    def _require_free(self, held: Mapping[str, str]) -> None:
        if held:
            key, owner = min(held.items())
            count = f"{counted(len(held), 'lease')} {'is' if len(held) == 1 else 'are'} held"
            raise ApplicationInUseError(
                f"{count}, such as {printable(key)} by {printable(owner)}; "
                "pause the application first, or use --pause. A worker of the Java KCL must be "
                "stopped"
            )

    def _write(self, token: str, control: Control, *, is_paused: bool) -> Sought:
        """Write rows, table and rows, until the table has the commit."""
        for attempt in range(MAX_ATTEMPTS):
            plan = self._fresh(self.plan())
            refused = self._write_rows(plan.changes, f"{token}/{attempt}", control)
            if refused or not plan.changes:
                written = tuple(one for one in plan.changes if one.lease_key not in refused)
                return Sought(written, tuple(refused), is_paused)
            if plan.stored is None or plan.stored.table_id is None or self._sink is None:
                return Sought(plan.changes, (), is_paused)
            positions = {plan.keys[one.lease_key]: one.seek.position for one in plan.changes}
            expected = {key: plan.stored.shards[key] for key in positions}
            # A shard continues after its position. Without one, the row decides.
            becomes = {
                key: expected[key].moved(None if position.is_sentinel else position)
                for key, position in positions.items()
            }
            done = self._sink.commit(plan.stored.table_id, (), expected, becomes)
            if done.version is None:
                continue
            again = tuple(self._read_again(one) for one in plan.changes)
            refused = self._write_rows(again, f"{token}/{attempt}/2", control)
            written = tuple(one for one in plan.changes if one.lease_key not in refused)
            return Sought(written, tuple(refused), is_paused)
        raise ApplicationInUseError(
            f"workers changed the table during {MAX_ATTEMPTS} attempts of the seek, although the "
            "application is paused; stop them, and run the command again"
        )

    def _fresh(self, plan: SeekPlan) -> SeekPlan:
        """Return the plan with rows that are read with strong consistency."""
        return replace(plan, changes=tuple(self._read_again(one) for one in plan.changes))

    def _read_again(self, change: PositionChange) -> PositionChange:
        row = self._app.leases.get(change.lease_key)
        if row is None:
            return change
        return replace(change, seek=replace(change.seek, lease=row, exists=True))

    def _write_rows(
        self, changes: Sequence[PositionChange], token: str, control: Control
    ) -> list[str]:
        """Write the rows; return the keys of those that do not fit."""
        proof = self._app.coordinator.proof_of_pause(control)
        refused: list[str] = []
        for begin in range(0, len(changes), MAX_SEEKS):
            group = [one.seek for one in changes[begin : begin + MAX_SEEKS]]
            found = self._app.leases.seek(group, token, proof)
            if found is None:
                raise ApplicationInUseError(
                    "the pause ended during the seek; run it again, it continues"
                )
            refused += found
        return refused

    def _of_stream(
        self,
        stream: StreamId,
        leases: Sequence[Lease],
        listed: Sequence[Shard],
        stored: Mapping[str, StoredPosition],
    ) -> Sequence[PositionChange]:
        if self._shards:
            named = [one for one in leases if {one.lease_key, one.shard_id} & self._shards]
            return changes_of_shards(stream, leases, listed, named, self._target, stored)
        begin = self._kinesis.list_shards(stream, _FILTERS[self._target.kind], self._target.time)
        same = self._sink is not None
        return changes_of_stream(stream, leases, listed, begin, self._target, also_same=same)

    def _streams(self, record: ApplicationRecord | None) -> tuple[StreamId, ...]:
        if record is None:
            raise SettingsError(
                f"no streams are recorded for the application {self._app.name!r}: it has never "
                "been started, or only by the Java KCL"
            )
        identity, resolve = record.identity, self._kinesis.resolve_stream
        multi_stream = identity.mode == "multi_stream"
        wanted = [one for one in identity.streams if self._stream in (None, one.name, one.arn)]
        if not wanted:
            raise SettingsError(
                f"the application {self._app.name!r} reads no stream "
                f"{printable(self._stream or '')}"
            )
        streams = tuple(resolve(one.arn, multi_stream=multi_stream) for one in wanted)
        return streams_as_recorded(replace(identity, streams=tuple(wanted)), streams)


def _is_of(lease: Lease, stream: StreamId) -> bool:
    if stream.creation_epoch is None:
        return lease.stream is None and lease.recreated_millis == stream.recreated_millis
    return lease.stream == stream.serialized


def position_sink(sink: object, application_name: str) -> Sink | None:
    """Return a sink that stores positions. None: the sink of the pipeline stores none."""
    return DeltaCommitter(sink, application_name) if isinstance(sink, DeltaSink) else None


# -- 4. what is said


def change_sentence(change: PositionChange) -> str:
    """One change of a position."""
    before = change.seek.lease.checkpoint if change.seek.exists else "no row"
    return f"{change.lease_key}: from {before} to {change.seek.position}; {change.note}"


def plan_sentences(plan: SeekPlan) -> list[str]:
    """What a seek would change, and what prevents it."""
    lines = [*map(change_sentence, plan.changes)]
    lines.append(f"dry run: {counted(len(plan.changes), 'position')} would change")
    if plan.held:
        owners = ", ".join(sorted(set(plan.held.values())))
        lines.append(f"{counted(len(plan.held), 'lease')} held by {owners}: a pause is needed")
    return lines


def sentences(done: Sought) -> list[str]:
    """What a seek has changed."""
    lines = [*map(change_sentence, done.written)]
    lines.append(f"{counted(len(done.written), 'position')} changed")
    if done.refused:
        lines.append(f"not changed, because their rows changed: {', '.join(done.refused)}")
    if done.is_paused:
        lines.append("the application is still paused")
    return lines


def changes_as_dicts(changes: Iterable[PositionChange]) -> list[dict[str, Any]]:
    """Changes for JSON output."""
    return [
        {
            "lease_key": change.lease_key,
            "before": str(change.seek.lease.checkpoint) if change.seek.exists else None,
            "after": str(change.seek.position),
            "timestamp_millis": change.seek.initial_millis,
            "note": change.note,
        }
        for change in changes
    ]
