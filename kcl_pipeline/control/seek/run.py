"""Set positions: compute the changes, pause, and write rows and table.

A seek writes only while the application is paused and nobody owns the leases. It writes the rows,
then the table, then the rows again. Every write of a row is conditional on the row as it was read
and on the pause. The table gets one commit with all shards, which is refused if a paused worker has
committed since the table was read; then everything is read again. Each entry increments the number
of its shard, so nothing that was read before the seek can be committed after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kcl_pipeline.batch import NOTHING_WRITTEN
from kcl_pipeline.control.application import ApplicationControl, is_held
from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.seek.plan import PositionChange, changes_of_shards, changes_of_stream
from kcl_pipeline.control.seek.target import SeekTarget
from kcl_pipeline.errors import ApplicationInUseError, SettingsError
from kcl_pipeline.kinesis.client import ShardFilterType, StreamLister
from kcl_pipeline.leases.application.control import Control
from kcl_pipeline.leases.application.identity import ApplicationRecord, streams_as_recorded
from kcl_pipeline.leases.lease.seek import MAX_SEEKS
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.sinks.sink import Entry, Positions, Sink, shard_key
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition
from kcl_pipeline.text import counted, printable

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
            entries = [_entry(one, plan) for one in plan.changes]
            done = self._sink.commit(plan.stored.table_id, NOTHING_WRITTEN, entries)
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


def _entry(change: PositionChange, plan: SeekPlan) -> Entry:
    """Return the entry of a shard: it continues after the position, or the row decides."""
    key, wanted = plan.keys[change.lease_key], change.seek.position
    known = NOTHING_STORED if plan.stored is None else plan.stored.shards[key]
    return Entry(key, known, None if wanted.is_sentinel else wanted)


def _is_of(lease: Lease, stream: StreamId) -> bool:
    if stream.creation_epoch is None:
        return lease.stream is None and lease.recreated_millis == stream.recreated_millis
    return lease.stream == stream.serialized
