"""The conditional writes of a held lease, and what became of one whose answer was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import AwsError, LeaseLostError, ThrottledError
from kcl_pipeline.events import AwsTrouble, EventSink, HandoffStarted
from kcl_pipeline.leases.held.batch_number import COUNTER_BITS
from kcl_pipeline.leases.held.held_set import EXPIRED, HeldSet
from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.position import Position

_TAKEN: Final = "another worker has it, or its row is gone"
_ENDED: Final = "its shard has been read to the end"


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """What a checkpoint write puts into the row; made again it is the same write."""

    checkpoint: Position
    pending: Position | None
    pending_state: bytes | None


class LeaseWrites(HeldSet):
    """Writes the rows of held leases: renewal, checkpoint, prepare, and rows of relatives.

    Every write renews the lease. A write whose outcome is unknown is made again before another one.
    `incarnation`, below `2**INCARNATION_BITS`, tells the batches of this process from those of
    others that hold, or held, a row with the same counters.
    """

    def __init__(
        self,
        table: LeaseTable,
        worker_id: str,
        settings: LeaseSettings,
        clock: Clock,
        events: EventSink,
        *,
        incarnation: int = 0,
    ) -> None:
        super().__init__(worker_id, settings.failover_time_millis / 1000, clock, events)
        self._table = table
        self._settings = settings
        self._first_number = incarnation << COUNTER_BITS
        self.shares_its_id = False
        """Whether another running process is known to use the same worker id."""

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
            self.drop(held, EXPIRED)
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

    def _next_number(self, held: Held) -> int:
        return self._first_number + held.lease.counter + 1

    def _number_state(self, held: Held, expects: str) -> bytes:
        number = str(self._next_number(held))
        return (f"{number}/{expects}" if expects else number).encode("ascii")

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

    def _note_handoff(self, held: Held, row: Lease) -> None:
        if not row.in_handoff:
            held.handoff_since = held.handoff_deadline = None
        elif held.handoff_since is None:
            held.handoff_since = self._clock.monotonic()
            held.handoff_deadline = (
                held.handoff_since + self._settings.graceful_lease_handoff_timeout_millis / 1000
            )
            self._events(HandoffStarted(row.lease_key, self._worker_id, row.owner or ""))

    @property
    def _taken(self) -> str:
        """Why a conditional write was refused, as far as this worker knows."""
        if self.shares_its_id:
            return f"another process uses the worker id {self._worker_id!r}"
        return _TAKEN
