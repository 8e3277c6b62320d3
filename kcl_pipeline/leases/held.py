"""The leases that this worker holds: gaining, renewing, writing through, handing over, giving back
(protocol §6.2 to §6.5, §6.8).

No threads: each method is one bounded tick, and may be called from any thread. A lease is written
by one thread at a time, under a lock of its own that may span the call; a renewal that finds the
lease busy leaves it, because every write is a renewal.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    AwsError,
    LeaseLostError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import (
    AwsTrouble,
    EventSink,
    HandoffCompleted,
    HandoffStarted,
    LeaseGained,
    LeaseReleased,
)
from kcl_pipeline.events import LeaseLost as LeaseLostEvent
from kcl_pipeline.leases.attributes import MAX_LONG
from kcl_pipeline.leases.lease import BadRow, Lease, other_form
from kcl_pipeline.leases.rejected import RejectedRows
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.leases.throughput import Throughput
from kcl_pipeline.position import Position

INCARNATION_BITS: Final = 26
COUNTER_BITS: Final = 32
"""Together 18 decimal digits, which every version of this package reads."""

_BATCH_NUMBER: Final = re.compile(rb"[1-9][0-9]{0,18}")

_TAKEN: Final = "another worker has it, or its row is gone"
_EXPIRED: Final = "it was not renewed in time"
_ENDED: Final = "its shard has been read to the end"


def pending_number(lease: Lease) -> int | None:
    """The number of the prepared batch in `pendingCheckpointState`: ASCII decimal, and what follows
    a slash does not matter.

    None when there is none, or another program wrote the state.
    """
    text = (lease.pending_checkpoint_state or b"").partition(b"/")[0]
    if lease.pending_checkpoint is None or not _BATCH_NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if number <= MAX_LONG else None


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """What a checkpoint write puts into the row; made again it is the same write."""

    checkpoint: Position
    pending: Position | None
    pending_state: bytes | None


class Held:
    """One incarnation of a held lease: gained anew, the same key is another object, and this one is
    refused from then on.

    `lease` is the row as this worker last wrote or read it; `handoff_deadline` (monotonic seconds)
    is set while it is to go to another worker. The other attributes are for `HeldLeases`, which
    alone makes and changes these objects: `unsure` names the last write whose answer was lost.
    """

    __slots__ = (
        "busy",
        "handoff_deadline",
        "handoff_since",
        "lease",
        "lock",
        "renewed_at",
        "throughput",
        "unsure",
    )

    def __init__(self, lease: Lease, read_at: float, lock: AbstractContextManager[object]) -> None:
        self.lease = lease
        self.handoff_since: float | None = None
        self.handoff_deadline: float | None = None
        self.renewed_at = read_at
        self.lock = lock
        self.busy = 0
        self.unsure: object = None
        self.throughput = Throughput(read_at, lease.throughput_kbps)

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.lease.lease_key


class HeldLeases:
    """The set of leases held by one worker; thread-safe.

    Events are emitted outside of the set's lock. With `multi_stream` set, a lease of the other form
    is not taken (protocol §1.3). `incarnation`, below `2**INCARNATION_BITS`, tells the batches of
    this process from those of others that hold, or held, a row with the same counters.
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
        incarnation: int = 0,
    ) -> None:
        self._table = table
        self._first_number = incarnation << COUNTER_BITS
        self._multi_stream = multi_stream
        self._rejected = RejectedRows(events)
        self._worker_id = worker_id
        self._settings = settings
        self._clock = clock
        self._events = events
        self._failover_seconds = settings.failover_time_millis / 1000
        self.shares_its_id = False
        """Whether another running process is known to use the same worker id."""
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}

    # -- gaining
    # ----------------------------------------------------------------------------

    # it stands for the builtin
    def recover(self, *, map: MapCallable = serial_map) -> tuple[Held, ...]:  # noqa: A002
        """Take back what already carries this worker's name, at its start: renewed even if expired;
        leases in a handoff are left (protocol §6.2).

        Throttling and lost answers are reported as events; discovery finds what was missed. Raises
        `AccessDeniedError` and `NotFound`.
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
            self._events(AwsTrouble(f"recovery of {scanned.lease_key}", str(error)))
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
        """Find leases newly assigned to this worker: by the index, or among `keys`, then row by row
        through `map` (protocol §6.3).

        Nothing is written. A row that cannot be read now is left for the next time. Raises
        `AwsError` when the index cannot be asked.
        """
        found = self._table.lease_keys_of(self._worker_id) if keys is None else keys
        with self._lock:
            unknown = [key for key in found if key not in self._held]
        return tuple(held for held in map(self._discover_one, unknown) if held is not None)

    def _discover_one(self, key: str) -> Held | None:
        began = self._clock.monotonic()
        try:
            row = self._table.get(key, consistent=self._settings.consistent_reads)
        except UnreadableRowError as error:
            self._rejected.note(BadRow(self._table.name, key, str(error)))
            return None
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble(f"discovery of {key}", str(error)))
            return None
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

    def _gain(self, lease: Lease, read_at: float) -> Held | None:
        held = Held(lease, read_at, self._clock.lock())
        with self._lock:
            if lease.lease_key in self._held:
                return None
            self._held[lease.lease_key] = held
        self._events(LeaseGained(self._worker_id, lease.lease_key, lease.counter))
        return held

    # -- looking
    # ----------------------------------------------------------------------------

    def held(self) -> tuple[Held, ...]:
        """The leases held and not locally expired, by key."""
        now = self._clock.monotonic()
        return tuple(held for held in self._all() if not self._expired(held, now))

    def get(self, lease_key: str) -> Held | None:
        """The lease if it is held and not locally expired."""
        now = self._clock.monotonic()
        with self._lock:
            held = self._held.get(lease_key)
            return None if held is None or self._expired(held, now) else held

    def handoffs(self) -> tuple[Held, ...]:
        """Held leases that are to go to another worker; each has `handoff_deadline` on the
        monotonic clock.
        """
        return tuple(held for held in self.held() if held.handoff_deadline is not None)

    def overdue_handoffs(self) -> tuple[Held, ...]:
        """The handoffs whose deadline has passed: they are to be completed whatever the processing
        does.
        """
        now = self._clock.monotonic()
        return tuple(
            held
            for held in self.handoffs()
            if held.handoff_deadline is not None and held.handoff_deadline <= now
        )

    def record_bytes(self, lease_key: str, count: int) -> None:
        """Note `count` processed bytes of a lease for its throughput; nothing when it is not
        held.
        """
        with self._lock:
            held = self._held.get(lease_key)
            if held is not None:
                held.throughput.record(count)

    @property
    def _taken(self) -> str:
        """Why a conditional write was refused, as far as this worker knows."""
        if self.shares_its_id:
            return f"another process uses the worker id {self._worker_id!r}"
        return _TAKEN

    def _all(self) -> list[Held]:
        with self._lock:
            return [held for _, held in sorted(self._held.items())]

    def _expired(self, held: Held, now: float) -> bool:
        return now - held.renewed_at >= self._failover_seconds

    # -- writing
    # ----------------------------------------------------------------------------

    # it stands for the builtin
    def renew_all(self, *, map: MapCallable = serial_map) -> int:  # noqa: A002
        """Renew every lease, each through `map`; returns how many were renewed.

        What expired locally is lost and not written: others may have it. A refused write is a lost
        lease; an error is an event, and the lease is kept until it expires. A lease that is being
        written is left out. Handoffs are noticed here.
        """
        return sum(map(self._renew_one, self._all()))

    def _renew_one(self, held: Held) -> bool:
        if self._expired(held, self._clock.monotonic()):
            self.drop(held, _EXPIRED)
            return False
        with self._entered(held, wait=False) as entered:
            if not entered:
                return False
            with self._lock:
                throughput_kbps = held.throughput.close_interval(self._clock.monotonic())
            try:
                if held.unsure is None:
                    self._renew(held, throughput_kbps)
                else:
                    self._settle(held)
            except LeaseLostError:
                return False
            except (AwsError, ValueError) as error:
                self._events(AwsTrouble(f"renewal of {held.lease_key}", str(error)))
                return False
            return True

    def drop_expired(self) -> None:
        """Stop holding what was not renewed in time, so that discovery finds it again if it still
        is this worker's.
        """
        now = self._clock.monotonic()
        for held in self._all():
            if self._expired(held, now):
                self.drop(held, _EXPIRED)

    def checkpoint(
        self,
        held: Held,
        *,
        checkpoint: Position,
        pending: Position | None = None,
        pending_state: bytes | None = None,
    ) -> Lease:
        """Write both positions in one conditional write, which also renews the lease; `pending`
        None removes the pending one.

        A row that turns out to be past `checkpoint`, by an earlier write whose answer was lost,
        keeps its own. Raises `LeaseLostError`, and `ThrottledError` or `UnavailableError`: the
        lease is still held, call again.
        """
        with self._entered(held):
            return self._checkpoint(held, CheckpointWrite(checkpoint, pending, pending_state))

    def prepare(
        self,
        held: Held,
        *,
        checkpoint: Position | None,
        end: Position,
        avoid_number: int | None,
        expects: str = "",
    ) -> int:
        """Announce a batch that ends at `end` (inclusive): pending checkpoint and its number in one
        conditional write (protocol §9.3).

        The number is made of the incarnation of this process and the lease counter that this write
        makes, so no other write has it: neither another one of the row, nor one of another process
        under the same worker id, nor one of an earlier row of the same key. It is never
        `avoid_number` (what the table has now). `expects` names what the table must have for the
        batch to land; it stands in the row behind the number. `checkpoint`, when given, moves along
        in the same write. Raises as `checkpoint` does.
        """
        with self._entered(held):
            place = checkpoint if checkpoint is not None else held.lease.checkpoint
            if held.unsure != CheckpointWrite(place, end, self._number_state(held, expects)):
                self._settle(held)
            if self._next_number(held) == avoid_number:
                self._renew(held)
            place = checkpoint if checkpoint is not None else held.lease.checkpoint
            number, state = self._next_number(held), self._number_state(held, expects)
            self._checkpoint(held, CheckpointWrite(place, end, state))
            return number

    def _next_number(self, held: Held) -> int:
        return self._first_number + held.lease.counter + 1

    def _number_state(self, held: Held, expects: str) -> bytes:
        number = str(self._next_number(held))
        return (f"{number}/{expects}" if expects else number).encode("ascii")

    def create_successors(self, held: Held, successors: Sequence[Lease]) -> None:
        """Create the leases of the shards that follow the one of a held lease (see `LeaseTable`).

        Renewals leave the row alone meanwhile: they would conflict. Raises `LeaseLostError` when
        the row is gone or at its end, and `AwsError`: call again.
        """
        with self._entered(held):
            self._require(held)
            if not self._table.create_successors(held.lease, successors):
                self.drop(held, self._taken)
                raise LeaseLostError(f"the lease {held.lease_key} is lost: {self._taken}")

    def restore_parents(self, held: Held, parents: Sequence[Lease]) -> tuple[str, ...]:
        """Create the rows of deleted parents of a held lease (see `LeaseTable`).

        Returns the keys that were created. Raises `LeaseLostError` when the row says that reading
        has begun, or is gone, and `AwsError`: call again.
        """
        with self._entered(held):
            self._require(held)
            created = self._table.restore_parents(held.lease, parents)
            if created is None:
                self.drop(held, _TAKEN)
                raise LeaseLostError(f"the lease {held.lease_key} is lost: {_TAKEN}")
            return created

    def _checkpoint(self, held: Held, what: CheckpointWrite) -> Lease:
        if held.unsure != what:
            self._settle(held)
            # The write that has just been settled may have moved the row past this checkpoint.
            if what.checkpoint < held.lease.checkpoint:
                what = replace(what, checkpoint=held.lease.checkpoint)
                if what.pending is None and held.lease.pending_checkpoint is None:
                    return held.lease
        if what.pending is not None and what.checkpoint.is_shard_end:
            self.drop(held, _ENDED)
            raise LeaseLostError(f"the lease {held.lease_key} takes no batch: {_ENDED}")
        return self._write(
            held,
            what,
            lambda lease: self._table.update_checkpoint(
                lease,
                checkpoint=what.checkpoint,
                pending=what.pending,
                pending_state=what.pending_state,
            ),
        )

    def _renew(self, held: Held, throughput_kbps: float | None = None) -> Lease:
        return self._write(held, "renewal", lambda lease: self._table.renew(lease, throughput_kbps))

    def _settle(self, held: Held) -> None:
        """Learn what became of an earlier write whose answer was lost, by making it again: it goes
        through, or finds itself (and can land no more).
        """
        match held.unsure:
            case None:
                return
            case CheckpointWrite():
                self._checkpoint(held, held.unsure)
            case _:
                self._renew(held)

    def _write(self, held: Held, what: object, write: Callable[[Lease], Lease | None]) -> Lease:
        self._require(held)
        began = self._clock.monotonic()
        with self._noting(held, what):
            row = write(held.lease)
        if row is None or row.actual_owner != self._worker_id:
            self.drop(held, self._taken)
            raise LeaseLostError(f"the lease {held.lease_key} is lost: {self._taken}")
        held.lease = row
        held.renewed_at = began
        self._note_handoff(held, row)
        if not self._is_current(held):
            raise LeaseLostError(
                f"the lease {held.lease_key} was given up while it was being written"
            )
        return row

    def _note_handoff(self, held: Held, row: Lease) -> None:
        if not row.in_handoff:
            held.handoff_since = held.handoff_deadline = None
        elif held.handoff_since is None:
            held.handoff_since = self._clock.monotonic()
            held.handoff_deadline = (
                held.handoff_since + self._settings.graceful_lease_handoff_timeout_millis / 1000
            )
            self._events(HandoffStarted(row.lease_key, self._worker_id, row.owner or ""))

    # -- giving away
    # ----------------------------------------------------------------------------

    def complete_handoff(self, held: Held, *, forced: bool = False) -> bool:
        """Give the lease to the worker that the leader chose, and hold it no longer. False when
        there was nothing to give, or another assignment was faster.

        Raises `AwsError`: the lease is still held, call again. `forced` says that the time-out does
        it.
        """
        with self._entered(held):
            return (
                self._is_current(held)
                and held.lease.in_handoff
                and self._transfer(held, forced=forced)
            )

    def _transfer(self, held: Held, *, forced: bool) -> bool:
        lease = held.lease
        target = lease.owner or ""
        with self._noting(held, "transfer"):
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

    def release(self, held: Held) -> bool:
        """Make the lease ownerless, so that any leader may assign it at once; one in a handoff goes
        to its new owner. False when it was not ours any more.

        Raises `AwsError`: the lease is still held, call again.
        """
        with self._entered(held):
            return self._is_current(held) and (
                self._transfer(held, forced=False) if held.lease.in_handoff else self._evict(held)
            )

    def delete(self, held: Held) -> None:
        """Delete the row of a shard that does not exist any more, and stop holding the lease.

        Raises `LeaseLostError` when the row has another checkpoint than this worker wrote, and
        `AwsError`: the lease is still held, call again.
        """
        with self._entered(held):
            self._settle(held)
            self._require(held)
            with self._noting(held, "deletion"):
                deleted = self._table.delete(held.lease)
            if not deleted:
                self.drop(held, self._taken)
                raise LeaseLostError(f"the lease {held.lease_key} is lost: {self._taken}")
            self._remove(held)

    def _evict(self, held: Held) -> bool:
        if held.unsure != "eviction":
            try:
                self._settle(held)
            except LeaseLostError:
                return False
        with self._noting(held, "eviction"):
            row = self._table.evict(held.lease)
        if row is None:
            found = self._table.get(held.lease_key)
            if found is not None and found.checkpoint_owner == self._worker_id:
                held.lease = found
                self._note_handoff(held, found)
                return self._transfer(held, forced=False)
            self.drop(held, self._taken)
            return False
        if self._remove(held):
            self._events(LeaseReleased(self._worker_id, held.lease_key))
        return True

    def drop(self, held: Held, reason: str) -> None:
        """Stop holding the lease without writing anything; nothing when this incarnation is not
        held any more.
        """
        if self._remove(held):
            self._events(LeaseLostEvent(self._worker_id, held.lease_key, reason))

    # -- guards
    # ----------------------------------------------------------------------------

    @contextmanager
    def _entered(self, held: Held, *, wait: bool = True) -> Iterator[bool]:
        """Be the one thread that writes this lease. With `wait` False: False when another one is
        writing it.
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

    @contextmanager
    def _noting(self, held: Held, what: object) -> Iterator[None]:
        """Remember a write that failed in a way that leaves open whether it was applied."""
        try:
            yield
        except ThrottledError:
            raise
        except Exception:
            held.unsure = what
            raise
        held.unsure = None

    def _require(self, held: Held) -> None:
        if not self._is_current(held):
            raise LeaseLostError(f"the lease {held.lease_key} is not held any more")
        if self._expired(held, self._clock.monotonic()):
            raise LeaseLostError(f"the lease {held.lease_key} is lost: {_EXPIRED}")

    def _is_current(self, held: Held) -> bool:
        with self._lock:
            return self._held.get(held.lease_key) is held

    def _remove(self, held: Held) -> bool:
        with self._lock:
            if self._held.get(held.lease_key) is not held:
                return False
            del self._held[held.lease_key]
            return True
