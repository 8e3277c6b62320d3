"""The leases that a worker holds: gain, renew, checkpoint, hand off and release.

See protocol §6.2 to §6.5 and §6.8. This module starts no threads. Each method is one bounded step,
and any thread may call it. A renewal skips a lease that another thread is writing, because every
write is a renewal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    AwsError,
    KclError,
    LeaseLostError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    DefectFound,
    EventSink,
    HandoffCompleted,
    HandoffStarted,
    LeaseGained,
    LeaseReleased,
)
from kcl_pipeline.events import LeaseLost as LeaseLostEvent
from kcl_pipeline.leases.row import BadRow, Lease, RejectedRows, other_form
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.position import Position
from kcl_pipeline.threads import MapCallable, serial_map
from kcl_pipeline.unexpected import described


@dataclass(frozen=True, slots=True)
class Progress:
    """What a row says of the progress of its shard. Only owners and operators change it.

    Attributes:
        checkpoint: The checkpoint.
        pending: The pending checkpoint of a record processor. None: there is none.
        state: Application state of the pending checkpoint.
        mark: The mark of the table.
    """

    checkpoint: Position
    pending: Position | None = None
    state: bytes | None = None
    mark: Position | None = None

    @classmethod
    def of(cls, lease: Lease) -> Progress:
        """Return the progress in a row."""
        return cls(
            lease.checkpoint,
            lease.pending_checkpoint,
            lease.pending_checkpoint_state,
            lease.table_mark,
        )


class Held:
    """One incarnation of a held lease.

    When a lease is gained again, it gets a new object, and writes through this one are refused.
    Only `HeldLeases` creates and changes these objects. It alone uses the attributes that are not
    listed.

    Attributes:
        lease: The row as this worker last wrote or read it.
        handoff_deadline: Time-out of the handoff (monotonic seconds). None: no handoff.
        renewed_at: When the last successful read or write of the row began (monotonic seconds).
        sent: What the row can have besides `lease`: the progress after each write since `lease` was
            read or written. The answer of a write can be lost.
        read_up_to_millis: See `Lease`. The next renewal writes it.
        processed: Last processed position (inclusive). A renewal writes it as the checkpoint. None:
            only `HeldLeases.checkpoint` moves the checkpoint.
        mark: `processed`, if a table has it. It is written together with that checkpoint.
        checkpointed_at: When the checkpoint was last written (monotonic seconds).
    """

    __slots__ = (
        "busy",
        "checkpointed_at",
        "handoff_deadline",
        "handoff_since",
        "lease",
        "lock",
        "mark",
        "processed",
        "read_up_to_millis",
        "renewed_at",
        "sent",
        "throughput",
    )

    def __init__(self, lease: Lease, read_at: float, lock: AbstractContextManager[object]) -> None:
        self.lease = lease
        self.handoff_since: float | None = None
        self.handoff_deadline: float | None = None
        self.renewed_at = read_at
        self.lock = lock
        self.busy = 0
        self.sent: set[Progress] = set()
        self.read_up_to_millis = lease.read_up_to_millis
        self.processed: Position | None = None
        self.mark: Position | None = None
        self.checkpointed_at = read_at
        self.throughput = Throughput(read_at, lease.throughput_kbps)

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.lease.lease_key


ALPHA: Final = 0.5
BYTES_PER_KILOBYTE: Final = 1024
SHORTEST_SECONDS: Final = 0.1
SEED_KEPT_SECONDS: Final = 30.0


class Throughput:
    """The average throughput of one lease in KiB/s. Not thread-safe.

    The newest interval has a weight of one half. Unlike KCL, the average starts at the value of the
    previous owner, which is kept until this owner has processed records, at most 30 s. And unlike
    KCL, bytes are divided by the measured time.

    Args:
        now: Time in monotonic seconds.
        seed_kbps: Value of the previous owner. None: it has none.
    """

    def __init__(self, now: float, seed_kbps: float | None) -> None:
        self._since = now
        self._seed_ends = now + SEED_KEPT_SECONDS
        self._average = seed_kbps
        self._seeded = seed_kbps is not None
        self._bytes: int | None = None

    def record(self, count: int) -> None:
        """Add processed bytes."""
        self._bytes = (self._bytes or 0) + count

    def close_interval(self, now: float) -> float | None:
        """Update the average with the bytes since the last call.

        Args:
            now: Time in monotonic seconds.

        Returns:
            The average. None: there is neither a sample nor a value of the previous owner.
        """
        elapsed = now - self._since
        if elapsed < SHORTEST_SECONDS:
            return self._average
        waiting = self._bytes is None and (
            self._average is None or (self._seeded and now < self._seed_ends)
        )
        if not waiting:
            sample = (self._bytes or 0) / BYTES_PER_KILOBYTE / elapsed
            self._average = (
                sample if self._average is None else ALPHA * sample + (1 - ALPHA) * self._average
            )
            self._seeded = False
        self._bytes = None
        self._since = now
        return self._average


EXPIRED: Final = "it was not renewed in time"
_TAKEN: Final = "another worker has it, or its row is gone"


class HeldLeases:
    """Gain, renew, checkpoint, hand off and release the leases of one worker.

    Thread-safe. A lease that is gained again gets a new `Held`; writes through the older one are
    refused. One thread at a time writes a lease; it holds the lock of the lease during the call.
    Every write of its row renews a lease. A write that is refused because of an earlier one, whose
    answer was lost, adopts the counter of the row and is repeated (`_adopts`). Events are emitted
    without the lock of the set.

    Args:
        table: The lease table.
        worker_id: The worker that holds the leases.
        settings: Failover time, handoff time-out and consistency of reads.
        clock: Measures the time since the last renewal.
        events: Receives gained, lost and released leases, handoffs and errors.
        multi_stream: Leases of the other form are not taken (protocol §1.3). None: both forms are.
        verify_run: Returns whether this process still has its worker id. Called before a refused
            write counts as applied, and before a discovery after a lease was lost: the row may be
            that of another process of the same id.
    """

    def __init__(
        self,
        table: LeaseTable,
        worker_id: str,
        settings: LeaseSettings,
        clock: Clock,
        events: EventSink,
        *,
        multi_stream: bool | None = None,
        verify_run: Callable[[], bool] = lambda: True,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._settings = settings
        self._failover_seconds = settings.failover_time_millis / 1000
        self._renewal_seconds = settings.renewal_interval_millis / 1000
        self._checkpoint_lag_seconds = settings.checkpoint_lag / 1000
        self._clock = clock
        self._events = events
        self._multi_stream = multi_stream
        self._verify_run = verify_run
        self._rejected = RejectedRows(events)
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._is_sorted = True
        """Whether `_held` is sorted by key. Each tick asks for it, and few gain a lease."""
        self._has_lost = False
        """Whether a lease was lost since this process last verified that it has its worker id."""
        self.changed_at = clock.monotonic()
        """Monotonic second at which a lease was gained, lost or expected last; at first, now."""
        self._coming: set[str] = set()

    def held(self) -> tuple[Held, ...]:
        """Return the leases that are held and not locally expired, sorted by key."""
        now, seconds = self._clock.monotonic(), self._failover_seconds
        # `_expired`, without a call for each lease: several are asked for in each tick
        return tuple([held for held in self._all() if now - held.renewed_at < seconds])

    @property
    def coming(self) -> int:
        """Number of leases that other workers hand over to this one, as of the last discovery."""
        with self._lock:
            return len(self._coming)

    def get(self, lease_key: str) -> Held | None:
        """Return the lease if it is held and not locally expired."""
        now = self._clock.monotonic()
        with self._lock:
            held = self._held.get(lease_key)
            return None if held is None or self._expired(held, now) else held

    def handoffs(self) -> tuple[Held, ...]:
        """Return the held leases that are in a handoff.

        Each of them has `handoff_deadline` (monotonic seconds).
        """
        return tuple(held for held in self.held() if held.handoff_deadline is not None)

    def overdue_handoffs(self) -> tuple[Held, ...]:
        """Return the handoffs whose deadline has passed.

        They are completed even if a batch of the shard is still being processed.
        """
        now = self._clock.monotonic()
        return tuple(
            held
            for held in self.handoffs()
            if held.handoff_deadline is not None and held.handoff_deadline <= now
        )

    def record_bytes(self, lease_key: str, count: int) -> None:
        """Add `count` processed bytes to the throughput of a lease, if it is held."""
        with self._lock:
            held = self._held.get(lease_key)
            if held is not None:
                held.throughput.record(count)

    def note_read_up_to(self, lease_key: str, millis: int) -> None:
        """Note that all records of a shard that arrived by this time are in the table."""
        with self._lock:
            held = self._held.get(lease_key)
            if held is not None:
                held.read_up_to_millis = max(millis, held.read_up_to_millis or 0)

    def note_processed(self, held: Held, position: Position, *, in_table: bool) -> None:
        """Note a processed position (inclusive). A renewal writes it as the checkpoint.

        Args:
            held: The lease.
            position: The position.
            in_table: Whether a table has it. Then it is the mark of the row, too.
        """
        # Without the lock: a renewal that sees only one of the two writes no mark.
        held.processed, held.mark = position, position if in_table else None

    def drop(self, held: Held, reason: str) -> None:
        """Stop holding the lease without a write.

        Do nothing when this incarnation is not held any more. A finished lease is not reported as
        lost: a leader deletes its row.
        """
        if self._remove(held) and not held.lease.ended:
            self._has_lost = True
            self._events(LeaseLostEvent(self._worker_id, held.lease_key, reason))

    def expect_changes(self) -> None:
        """Note that leases may be gained soon. Discovery then runs as often as after a change."""
        with self._lock:
            self.changed_at = self._clock.monotonic()

    def drop_expired(self) -> None:
        """Stop holding the leases that were not renewed in time.

        Discovery finds those that still belong to this worker.
        """
        now = self._clock.monotonic()
        for held in self._all():
            if self._expired(held, now):
                self.drop(held, EXPIRED)

    # `map` replaces the builtin.
    def recover(self, *, map: MapCallable = serial_map) -> tuple[Held, ...]:  # noqa: A002
        """Renew and hold the leases that name this worker as owner at its start (protocol §6.2).

        Expired leases are renewed too. Leases in a handoff are skipped. Throttling and lost
        responses are reported as events; discovery finds the leases that were missed.

        Raises:
            AccessDeniedError: A permission is missing.
            NotFoundError: The table does not exist.
        """
        try:
            listing = self._table.list_leases()
        except (ThrottledError, UnavailableError) as error:
            self._events(AwsTrouble("recovery of leases", str(error)))
            return ()
        mine = [
            lease
            for lease in listing.leases
            if self._acceptable(lease) and self.get(lease.lease_key) is None
        ]
        return tuple(held for held in map(self._recover_one, mine) if held is not None)

    def _recover_one(self, scanned: Lease) -> Held | None:
        began = self._clock.monotonic()
        try:
            row = self._table.get(scanned.lease_key)
            renewed = self._table.renew(row) if row is not None and self._acceptable(row) else None
        except (AwsError, ValueError) as error:
            self._report(f"recovery of {scanned.lease_key}", error)
            return None
        return (
            self._gain(renewed, began)
            if renewed is not None and self._acceptable(renewed)
            else None
        )

    def discover(
        self,
        keys: Iterable[str] | None = None,
        *,
        map: MapCallable = serial_map,  # noqa: A002
    ) -> tuple[Held, ...]:
        """Find leases that were newly assigned to this worker (protocol §6.3).

        Nothing is written. A row that cannot be read now is left for the next call.

        Args:
            keys: Candidates. None: the index supplies them.
            map: Runs the reads of the rows.

        Raises:
            AwsError: The index cannot be queried, or the row of the worker cannot be read.
        """
        unknown, leaving = self.look_up(keys)
        self.note_handoffs(leaving, map=map)
        return tuple(held for held in map(self.discover_one, unknown) if held is not None)

    def look_up(self, keys: Iterable[str] | None = None) -> tuple[list[str], list[str]]:
        """Compare the leases that are held with those that name this worker.

        Args:
            keys: Leases that name this worker, perhaps not all. None: the index supplies them.

        Returns:
            The keys that are not held (see `discover_one`). And the held ones that the index does
            not have: a handoff has begun, or the lease is lost (see `note_handoffs`).

        Raises:
            AwsError: The index cannot be queried, or the row of the worker cannot be read.
        """
        if self._has_lost:
            self._has_lost = False
            if not self._is_verified():
                return [], []
        assigned = set(self._table.lease_keys_of(self._worker_id) if keys is None else keys)
        with self._lock:
            unknown = sorted(key for key in assigned if key not in self._held)
            missing = [key for key in self._held if key not in assigned]
            if keys is None:
                self._coming &= assigned
        return unknown, missing if keys is None else []

    def _is_verified(self) -> bool:
        try:
            return self._verify_run()
        except AwsError:
            self._has_lost = True
            raise

    def note_handoffs(
        self,
        keys: Iterable[str],
        *,
        map: MapCallable = serial_map,  # noqa: A002
    ) -> None:
        """Renew held leases that may be in a handoff, unless the handoff is known.

        Args:
            keys: The leases. Those that are not held are ignored.
            map: Runs the renewals.
        """
        list(map(self.renew_one, self.unknown_handoffs(keys)))

    def unknown_handoffs(self, keys: Iterable[str]) -> list[Held]:
        """Return those of these leases that are held, and whose handoff is not known."""
        all_held = (self.get(key) for key in keys)
        return [held for held in all_held if held is not None and held.handoff_deadline is None]

    def discover_one(self, key: str) -> Held | None:
        """Read a row, and hold the lease if it is this worker's. Errors are reported as events."""
        began = self._clock.monotonic()
        try:
            row = self._table.get(key, consistent=self._settings.consistent_reads)
        except UnreadableRowError as error:
            self._rejected.note(BadRow(self._table.name, key, str(error)))
            return None
        except (AwsError, ValueError) as error:
            self._report(f"discovery of {key}", error)
            return None
        is_coming = row is not None and row.owner == self._worker_id and row.in_handoff
        with self._lock:
            (self._coming.add if is_coming else self._coming.discard)(key)
        return self._gain(row, began) if row is not None and self._acceptable(row) else None

    def _acceptable(self, lease: Lease) -> bool:
        if lease.owner != self._worker_id or lease.in_handoff:
            return False
        if self._multi_stream is not None:
            reason = other_form(lease, multi_stream=self._multi_stream)
            if reason is not None:
                self._rejected.note(BadRow(self._table.name, lease.lease_key, reason))
                return False
        self._rejected.forget(self._table.name, lease.lease_key)
        return True

    def renew_all(self, *, start: Callable[[Held], bool] | None = None) -> int:
        """Renew every lease; return how many were renewed, or whose renewal has started.

        Args:
            start: Starts `renew_one` of a lease in another thread, and returns whether it did.
                None: the renewals are made here, one after the other.
        """
        return sum(map(start or self.renew_one, self._all()))

    def renew_one(self, held: Held) -> bool:
        """Renew a lease, with its checkpoint if one is due; return whether it was renewed.

        A lease that expired locally is dropped without a write, because another worker may own it.
        A lease whose write is refused is lost. After an error the lease is kept until it expires;
        the error is reported as an event. A lease that another thread is writing is skipped.
        Renewals detect handoffs.
        """
        if self._expired(held, self._clock.monotonic()):
            self.drop(held, EXPIRED)
            return False
        with self._entered(held, wait=False) as entered:
            if not entered:
                return False
            with self._lock:
                throughput_kbps = held.throughput.close_interval(self._clock.monotonic())
            try:
                position = self._due_checkpoint(held)
                if position is not None:
                    read = (throughput_kbps, held.read_up_to_millis)
                    self._checkpoint(held, position, None, None, *read)
                else:
                    self._renew(held, throughput_kbps)
            except LeaseLostError:
                return False
            except (AwsError, ValueError) as error:
                self._report(f"renewal of {held.lease_key}", error)
                return False
            return True

    def _due_checkpoint(self, held: Held) -> Position | None:
        """Return the checkpoint that this renewal writes, if there is one.

        Half a renewal interval early: a renewal that is a little early would otherwise leave the
        checkpoint to the next one.
        """
        position = held.processed
        early = self._clock.monotonic() - held.checkpointed_at + self._renewal_seconds / 2
        if position is None or position < held.lease.checkpoint:
            return None
        if position == held.lease.checkpoint and held.mark in (None, held.lease.table_mark):
            return None
        return position if early >= self._checkpoint_lag_seconds else None

    def _flush_processed(self, held: Held) -> None:
        position = held.processed
        if position is not None and position > held.lease.checkpoint:
            self._checkpoint(held, position)

    def renew(self, held: Held) -> Lease:
        """Renew a lease by one conditional write that changes nothing else, and adopts nothing.

        It shows that nobody has written the row since this worker read or wrote it.

        Raises:
            LeaseLostError: The row is not as this worker last read or wrote it, or it is gone.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            return self._renew(held, adopts=False)

    def checkpoint(self, held: Held, *, checkpoint: Position) -> Lease:
        """Write the checkpoint in one conditional write, which also renews the lease.

        A pending checkpoint of a record processor is removed. An earlier write whose response was
        lost may have moved the row past `checkpoint`. Then the row keeps its checkpoint.

        Args:
            held: The lease.
            checkpoint: Last processed position (inclusive).

        Raises:
            LeaseLostError: Another worker has the lease, or its row is gone.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            return self._checkpoint(held, checkpoint)

    def prepare(self, held: Held, pending: Position, state: bytes | None) -> Lease:
        """Write a pending checkpoint, and leave the checkpoint as it is (protocol §9.3).

        Args:
            held: The lease.
            pending: The position (inclusive).
            state: Application state for the next owner.

        Raises:
            LeaseLostError: Another worker has the lease, or its row is gone.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            return self._checkpoint(held, None, pending, state)

    def create_successors(self, held: Held, successors: Sequence[Lease]) -> None:
        """Create the leases of the shards that follow the shard of a held lease.

        See `LeaseTable.create_successors`. Renewals skip the row meanwhile, because they would
        conflict.

        Raises:
            LeaseLostError: The row is gone or at SHARD_END.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            self._require(held)
            if not self._table.create_successors(held.lease, successors):
                raise self._lose(held)

    def restore_parents(self, held: Held, parents: Sequence[Lease]) -> tuple[str, ...]:
        """Create the rows of deleted parents of a held lease.

        See `LeaseTable.restore_parents`.

        Returns:
            The keys that were created.

        Raises:
            LeaseLostError: The row is gone, or its checkpoint shows that reading has begun.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            self._require(held)
            created = self._table.restore_parents(held.lease, parents)
            if created is None:
                raise self._lose(held)
            return created

    def _checkpoint(
        self,
        held: Held,
        checkpoint: Position | None,
        pending: Position | None = None,
        state: bytes | None = None,
        throughput_kbps: float | None = None,
        read_up_to_millis: int | None = None,
    ) -> Lease:
        """Write a checkpoint (None: that of the row) and a pending one, with the mark."""
        state = (state or None) if pending is not None else None
        # A mark of another checkpoint stays in memory.
        mark = held.mark if held.mark == checkpoint else None

        def after(lease: Lease) -> Progress:
            if _is_past(lease, checkpoint):
                return Progress.of(lease)
            return Progress(
                checkpoint or lease.checkpoint, pending, state, mark or lease.table_mark
            )

        def write(lease: Lease) -> Lease | None:
            if _is_past(lease, checkpoint):
                return self._table.renew(lease, throughput_kbps, read_up_to_millis)
            return self._table.update_checkpoint(
                lease,
                checkpoint=checkpoint or lease.checkpoint,
                pending=pending,
                pending_state=state,
                throughput_kbps=throughput_kbps,
                read_up_to_millis=read_up_to_millis,
                table_mark=mark,
            )

        row = self._write(held, write, after)
        held.checkpointed_at = held.renewed_at
        return row

    def _renew(
        self, held: Held, throughput_kbps: float | None = None, *, adopts: bool = True
    ) -> Lease:
        return self._write(
            held,
            lambda lease: self._table.renew(lease, throughput_kbps, held.read_up_to_millis),
            adopts=adopts,
        )

    def _write(
        self,
        held: Held,
        write: Callable[[Lease], Lease | None],
        after: Callable[[Lease], Progress] = Progress.of,
        *,
        adopts: bool = True,
    ) -> Lease:
        """Write the row on condition of the lease as this worker knows it.

        Args:
            held: The lease. One that has expired is not written.
            write: Writes the row. None: it was refused.
            after: Returns the progress that the row has after the write.
            adopts: Repeat a refused write if `_adopts` says so.
        """
        while True:
            self._require(held)
            began = self._clock.monotonic()
            held.sent.add(after(held.lease))
            row = write(held.lease)
            if row is not None:
                break
            if not (adopts and self._adopts(held, self._table.get(held.lease_key))):
                raise self._lose(held)
            # No earlier write can be applied any more. If somebody else writes the row, too, then
            # row and table are read again.
            adopts = False
        held.lease = row
        held.sent.clear()
        held.renewed_at = began
        self._note_handoff(held, row)
        if not self._is_current(held):
            raise LeaseLostError(
                f"the lease {held.lease_key} was given up while it was being written"
            )
        return row

    def _adopts(self, held: Held, row: Lease | None) -> bool:
        """Adopt the row if a write of this worker, whose answer was lost, has made it.

        All writes since this worker knew the row have its counter as a condition, so at most one of
        them was applied: the counter is one higher, the same worker processes the shard, and the
        progress is that of before, or of one of these writes. Only a leader that calls a handoff
        off, or assigns the lease to this worker again, makes the same row; nobody else has read the
        shard then. Everything else is not adopted: an assignment to another worker and back raises
        the counter by two or more, so does a seek, and the acceptance of another sink removes the
        mark. Then the lease is lost; if discovery finds it again, the shard is resolved again: row,
        then table.
        """
        lease = held.lease
        if row is None or lease.actual_owner is None or row.counter != lease.counter + 1:
            return False
        # Equal workers in a handoff: a Java leader gives the lease back to its owner (#1718).
        if row.actual_owner != lease.actual_owner or row.checkpoint_owner == row.owner:
            return False
        if Progress.of(row) not in {Progress.of(lease), *held.sent}:
            return False
        if row.recreated_millis != lease.recreated_millis:  # it is of a later stream
            return False
        # Another process of this worker id writes the same.
        if not self._verify_run():
            return False
        held.lease = row
        held.sent.clear()
        self._note_handoff(held, row)
        return True

    def _note_handoff(self, held: Held, row: Lease) -> None:
        if not row.in_handoff:
            held.handoff_since = held.handoff_deadline = None
        elif held.handoff_since is None:
            held.handoff_since = self._clock.monotonic()
            held.handoff_deadline = (
                held.handoff_since + self._settings.graceful_lease_handoff_timeout_millis / 1000
            )
            self._events(HandoffStarted(row.lease_key, self._worker_id, row.owner or ""))

    def _lose(self, held: Held) -> LeaseLostError:
        """Stop holding a lease whose write was refused; return the error."""
        self.drop(held, _TAKEN)
        return LeaseLostError(f"the lease {held.lease_key} is lost: {_TAKEN}")

    def complete_handoff(self, held: Held, *, forced: bool = False) -> bool:
        """Assign the lease to the worker that the leader chose, and stop holding it.

        Args:
            held: The lease.
            forced: Whether the time-out of the handoff is the reason. Then the call does not wait
                for another thread that writes the row: its call may hang.

        Returns:
            False: the lease is not in a handoff or not held, another assignment came first, or
                `forced` is set and another thread writes the row. In the last case, call again.

        Raises:
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held, wait=not forced) as entered:
            if not (entered and self._is_current(held) and held.lease.in_handoff):
                return False
            if not forced:
                # The next owner reads after the checkpoint, if the sink stores no positions or its
                # worker is Java's. The worker need not know the shard any more: the lease may have
                # expired on its clock before the answer of a slow renewal came.
                self._flush_processed(held)
            return self._is_current(held) and self._transfer(held, forced=forced)

    def _transfer(self, held: Held, *, forced: bool) -> bool:
        lease = held.lease
        target = lease.owner or ""
        row = self._table.assign(lease, target)
        if row is None:
            self.drop(held, "another assignment overtook its handoff")
            return False
        if self._remove(held):
            seconds = self._clock.monotonic() - (
                held.handoff_since if held.handoff_since is not None else self._clock.monotonic()
            )
            self._events(
                HandoffCompleted(lease.lease_key, self._worker_id, target, seconds, forced)
            )
        return True

    def release(self, held: Held, *, wait: bool = True, flushes: bool = False) -> bool:
        """Remove the owner of the lease, so that a leader can assign it at once.

        A lease in a handoff goes to its new owner.

        Args:
            held: The lease.
            wait: False: the call does not wait for another thread that writes the row.
            flushes: Write the checkpoint that the next renewal would write, before.

        Returns:
            False: this worker did not own the lease any more, or another thread writes its row and
                `wait` is False.

        Raises:
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held, wait=wait) as entered:
            if flushes and entered and self._is_current(held):
                self._flush_processed(held)
            return (entered and self._is_current(held)) and (
                self._transfer(held, forced=False) if held.lease.in_handoff else self._evict(held)
            )

    def delete(self, held: Held) -> None:
        """Delete the row of a shard that is not needed any more, and stop holding the lease.

        Raises:
            LeaseLostError: The row has another checkpoint than this worker wrote.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            self._require(held)
            if not (
                self._table.delete(held.lease)
                or (
                    self._adopts(held, self._table.get(held.lease_key))
                    and self._table.delete(held.lease)
                )
            ):
                raise self._lose(held)
            self._remove(held)

    def _evict(self, held: Held) -> bool:
        row = self._table.evict(held.lease)
        if row is None:
            found = self._table.get(held.lease_key)
            if found is not None and found.checkpoint_owner == self._worker_id:
                held.lease = found
                self._note_handoff(held, found)
                return self._transfer(held, forced=False)
            if self._adopts(held, found):
                row = self._table.evict(held.lease)
        if row is None:
            self._lose(held)
            return False
        if self._remove(held):
            self._events(LeaseReleased(self._worker_id, held.lease_key))
        return True

    def _report(self, what: str, error: Exception) -> None:
        """Report a step that failed. An error that nobody expects is no trouble with AWS."""
        kind = AwsTrouble if isinstance(error, KclError) else DefectFound
        self._events(kind(what, described(error, what)))

    def _gain(self, lease: Lease, read_at: float) -> Held | None:
        held = Held(lease, read_at, self._clock.lock())
        with self._lock:
            if lease.lease_key in self._held:
                return None
            self._held[lease.lease_key] = held
            self._is_sorted = False
            self.changed_at = self._clock.monotonic()
        self._events(LeaseGained(self._worker_id, lease.lease_key, lease.counter))
        return held

    def _all(self) -> list[Held]:
        with self._lock:
            if not self._is_sorted:
                self._held = dict(sorted(self._held.items()))
                self._is_sorted = True
            return list(self._held.values())

    def _expired(self, held: Held, now: float) -> bool:
        return now - held.renewed_at >= self._failover_seconds

    @contextmanager
    def _entered(self, held: Held, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock for writing this lease.

        Yields:
            True: this thread holds the lock. False: `wait` is False and another thread holds it
                or waits for it.
        """
        with self._lock:
            entered = wait or not held.busy
            held.busy += entered
        if not entered:
            yield False
            return
        try:
            with held.lock:
                yield True
        finally:
            with self._lock:
                held.busy -= 1

    def _require(self, held: Held) -> None:
        if not self._is_current(held):
            raise LeaseLostError(f"the lease {held.lease_key} is not held any more")
        if self._expired(held, self._clock.monotonic()):
            raise LeaseLostError(f"the lease {held.lease_key} is lost: {EXPIRED}")

    def _is_current(self, held: Held) -> bool:
        with self._lock:
            return self._held.get(held.lease_key) is held

    def _remove(self, held: Held) -> bool:
        with self._lock:
            if self._held.get(held.lease_key) is not held:
                return False
            del self._held[held.lease_key]
            self.changed_at = self._clock.monotonic()
            return True


def _is_past(lease: Lease, checkpoint: Position | None) -> bool:
    """Whether a row is past a checkpoint: a write whose answer was lost has moved it."""
    return checkpoint is not None and checkpoint < lease.checkpoint
