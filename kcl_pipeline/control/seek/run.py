"""Set positions: compute the changes, pause, settle prepared batches, and write.

A seek writes only while the application is paused and nobody owns the leases. Every write is
conditional on the row as it was read and on the pause. A prepared batch is settled first, as the
next owner of its lease would do it: if it landed, its records are in the table; if not, a fence
makes its commit impossible. So after a seek back each record of the range lands exactly once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.batch import ShortNames
from kcl_pipeline.control.application import ApplicationControl, is_held
from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.seek.log import BatchLog, position_store
from kcl_pipeline.control.seek.plan import PositionChange, change_of_shard, changes_of_stream
from kcl_pipeline.control.seek.stored import StoredPositions
from kcl_pipeline.control.seek.target import SeekTarget
from kcl_pipeline.errors import ApplicationInUseError, SettingsError
from kcl_pipeline.kinesis.client import ShardFilterType, StreamLister
from kcl_pipeline.leases.application.control import Control
from kcl_pipeline.leases.application.identity import ApplicationRecord, marked_streams
from kcl_pipeline.leases.held import pending_number
from kcl_pipeline.leases.lease.seek import MAX_SEEKS
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.stored_shards import position_key
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.text import counted, printable

_FILTERS: Final[Mapping[str, ShardFilterType]] = {
    "TRIM_HORIZON": "AT_TRIM_HORIZON",
    "LATEST": "AT_LATEST",
    "AT_TIMESTAMP": "AT_TIMESTAMP",
}


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """What a seek would change.

    Attributes:
        changes: The changes, stream by stream.
        held: Owners of the leases that would change, by lease key.
        pending: Keys of those with a prepared batch.
    """

    changes: tuple[PositionChange, ...]
    held: Mapping[str, str]
    pending: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sought:
    """The result of a seek.

    Attributes:
        written: The changes that were written.
        refused: Keys of leases that changed meanwhile. They keep their positions.
        landed: Keys of leases whose prepared batch had landed.
        fenced: Keys of leases whose prepared batch was made impossible.
        is_paused: Whether the application is still paused.
    """

    written: tuple[PositionChange, ...]
    refused: tuple[str, ...]
    landed: tuple[str, ...]
    fenced: tuple[str, ...]
    is_paused: bool


class Seeking:
    """Sets the positions of one application.

    Args:
        app: The application.
        kinesis: Lists the shards.
        target: The wanted position.
        stream: Name or ARN of the stream. None: all streams.
        shards: Lease keys or shard ids. Empty: all shards.
        sink: The sink of the application. None: leases with a prepared batch are refused.
    """

    def __init__(
        self,
        app: ApplicationControl,
        kinesis: StreamLister,
        target: SeekTarget,
        *,
        stream: str | None = None,
        shards: Sequence[str] = (),
        sink: BatchLog | None = None,
    ) -> None:
        if target.kind == "AFTER" and len(shards) != 1:
            raise SettingsError("a sequence number belongs to one shard; write --shard once")
        self._stored: StoredPositions | None = None
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
        marked = [one.lease_key for one in listing.leases if one.table_mark is not None]
        if marked and self._sink is None:
            raise SettingsError(
                f"the table of the sink stores the position of {printable(marked[0])}, and a "
                "worker continues after the later one; write --pipeline instead of --application"
            )
        self._stored = self._stored or self._positions_of(record, is_marked=bool(marked))
        changes: list[PositionChange] = []
        known: set[str] = set()
        for stream in self._streams(record):
            leases = [one for one in listing.leases if _is_of(one, stream)]
            known |= {one.lease_key for one in leases} | {one.shard_id for one in leases}
            changes += [
                replace(one, key=position_key(stream, one.seek.lease))
                for one in self._of_stream(stream, leases)
            ]
        unknown = sorted(self._shards - known)
        if unknown:
            raise SettingsError(f"there is no lease of the shard {printable(unknown[0])}")
        rows = [one.seek.lease for one in changes if one.seek.exists]
        return SeekPlan(
            tuple(changes),
            {one.lease_key: one.actual_owner or "" for one in rows if is_held(one)},
            tuple(one.lease_key for one in rows if one.pending_checkpoint is not None),
        )

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
            plan = self._fresh(self.plan())
            return self._write(plan, token, control, is_paused=was_paused or stay_paused)
        finally:
            if not (was_paused or stay_paused):
                pausing.resume()

    def _fresh(self, plan: SeekPlan) -> SeekPlan:
        """Return the plan with rows that are read with strong consistency."""
        changes = tuple(self._read_again(one) for one in plan.changes)
        pending = (
            one.lease_key
            for one in changes
            if one.seek.exists and one.seek.lease.pending_checkpoint is not None
        )
        return replace(plan, changes=changes, pending=tuple(pending))

    def _read_again(self, change: PositionChange) -> PositionChange:
        row = self._app.leases.get(change.lease_key) if change.seek.exists else None
        return change if row is None else replace(change, seek=replace(change.seek, lease=row))

    def _require_free(self, held: Mapping[str, str]) -> None:
        if held:
            key, owner = min(held.items())
            count = f"{counted(len(held), 'lease')} {'is' if len(held) == 1 else 'are'} held"
            raise ApplicationInUseError(
                f"{count}, such as {printable(key)} by {printable(owner)}; "
                "pause the application first, or use --pause. A worker of the Java KCL must be "
                "stopped"
            )

    def _write(self, plan: SeekPlan, token: str, control: Control, *, is_paused: bool) -> Sought:
        if plan.pending and self._sink is None:
            raise ApplicationInUseError(
                f"the lease {plan.pending[0]} has a prepared batch, and only its table says "
                "whether it landed; write --pipeline instead of --application"
            )
        landed: list[str] = []
        fenced: list[str] = []
        for change in plan.changes:
            if change.seek.exists and change.seek.lease.pending_checkpoint is not None:
                (landed if self._has_landed(change.seek.lease) else fenced).append(change.lease_key)
        changes = plan.changes if self._stored is None else self._stored.begun(plan.changes)
        refused = self._write_rows(changes, token, control)
        written = tuple(one for one in changes if one.lease_key not in refused)
        if self._stored is not None:
            rows = {one.lease_key: self._app.leases.get(one.lease_key) for one in written}
            last = [
                self._stored.moved(one, row)
                for one in written
                if (row := rows[one.lease_key]) is not None
            ]
            refused += self._write_rows(last, f"{token}/2", control)
            written = tuple(one for one in written if one.lease_key not in refused)
        return Sought(written, tuple(refused), tuple(landed), tuple(fenced), is_paused)

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

    def _has_landed(self, lease: Lease) -> bool:
        """Settle the prepared batch of a lease that nobody owns (as `CommitProtocol.resolve`)."""
        sink, key = self._sink, lease.transaction_key
        if sink is None:
            raise ApplicationInUseError(f"the lease {lease.lease_key} has a prepared batch")
        number = pending_number(lease)
        versions = sink.txn_versions([key])[key]
        while number is None or versions.data != number:
            if sink.fence(key, versions) is not None:
                return False
            versions = sink.txn_versions([key])[key]
        return True

    def _positions_of(
        self, record: ApplicationRecord | None, *, is_marked: bool
    ) -> StoredPositions | None:
        """Return the positions in the table; None if the workers store none."""
        store = position_store(self._sink)
        is_recorded = record is not None and bool(record.identity.positions)
        is_set = self._app.settings.batch.commit_protocol == "positions"
        if self._sink is None or store is None or not (is_recorded or is_set or is_marked):
            return None
        if record is not None and isinstance(self._sink, ShortNames):
            self._sink.name_positions(short=record.identity.short_names)
        return StoredPositions(self._sink, store)

    def _of_stream(self, stream: StreamId, leases: Sequence[Lease]) -> list[PositionChange]:
        listed = self._kinesis.list_shards(stream)
        if self._shards:
            return self._of_shards(leases, {one.shard_id: one for one in listed})
        begin = self._kinesis.list_shards(
            stream,
            _FILTERS[self._target.kind],
            self._target.time,
        )
        same = self._stored is not None
        return list(changes_of_stream(stream, leases, listed, begin, self._target, also_same=same))

    def _of_shards(
        self, leases: Sequence[Lease], listed: Mapping[str, Shard]
    ) -> list[PositionChange]:
        named = [one for one in leases if {one.lease_key, one.shard_id} & self._shards]
        same = self._stored is not None
        found = (
            change_of_shard(one, listed.get(one.shard_id), self._target, also_same=same)
            for one in named
        )
        return [one for one in found if one is not None]

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
        return marked_streams(replace(identity, streams=tuple(wanted)), streams)


def _is_of(lease: Lease, stream: StreamId) -> bool:
    if stream.creation_epoch is None:
        return lease.stream is None and lease.stream_mark == stream.lease_mark
    return lease.stream == stream.serialized
