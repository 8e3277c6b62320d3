"""Conditional writes of held leases, and recovery from lost responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import AwsError, LeaseLostError, ThrottledError
from kcl_pipeline.events import EventSink, HandoffStarted
from kcl_pipeline.leases.held.held_set import EXPIRED, HeldSet
from kcl_pipeline.leases.held.lease import Held
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.store import MapCallable, serial_map
from kcl_pipeline.leases.tables import LeaseTable
from kcl_pipeline.position import Position

_TAKEN: Final = "another worker has it, or its row is gone"


@dataclass(frozen=True, slots=True)
class CheckpointWrite:
    """What a write puts into the row. Equal values are the same write.

    Attributes:
        checkpoint: The checkpoint.
        pending: The pending checkpoint. None: it is removed.
        state: Application state of the pending checkpoint.
    """

    checkpoint: Position
    pending: Position | None = None
    state: bytes | None = None


class LeaseWrites(HeldSet):
    """Write the rows of held leases: renewal, checkpoint, children and parents.

    Every write of its row renews a lease. A write whose outcome is unknown is repeated before
    another one.
    """

    def __init__(
        self,
        table: LeaseTable,
        worker_id: str,
        settings: LeaseSettings,
        clock: Clock,
        events: EventSink,
        verify_run: Callable[[], bool],
    ) -> None:
        super().__init__(worker_id, settings.failover_time_millis / 1000, clock, events)
        self._table = table
        self._settings = settings
        self._verify_run = verify_run

    # `map` replaces the builtin.
    def renew_all(self, *, map: MapCallable = serial_map) -> int:  # noqa: A002
        """Renew every lease through `map`; return how many were renewed.

        A lease that expired locally is dropped without a write, because another worker may own it.
        A lease whose write is refused is lost. After an error the lease is kept until it expires;
        the error is reported as an event. A lease that another thread is writing is skipped.
        Renewals detect handoffs.
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
                position = self._due_checkpoint(held)
                if position is not None:
                    read = (throughput_kbps, held.read_up_to_millis)
                    self._checkpoint(held, CheckpointWrite(position), *read)
                elif held.unsure is None:
                    self._renew(held, throughput_kbps)
                else:
                    self._settle(held)
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
        interval = self._settings.renewal_interval_millis
        early = self._clock.monotonic() - held.checkpointed_at + interval / 2000
        if position is None or position < held.lease.checkpoint:
            return None
        if position == held.lease.checkpoint and held.mark in (None, held.lease.table_mark):
            return None
        return position if early * 1000 >= self._settings.checkpoint_lag else None

    def _flush_processed(self, held: Held) -> None:
        position = held.processed
        if position is not None and position > held.lease.checkpoint:
            self._checkpoint(held, CheckpointWrite(position))

    def renew(self, held: Held) -> Lease:
        """Renew a lease by one conditional write that changes nothing else.

        Raises:
            LeaseLostError: The row is not as this worker last read or wrote it, or it is gone.
            AwsError: The lease is still held. Call again.
        """
        with self._entered(held):
            self._settle(held)
            return self._renew(held)

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
            return self._checkpoint(held, CheckpointWrite(checkpoint))

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
            self._settle(held)
            return self._checkpoint(held, CheckpointWrite(held.lease.checkpoint, pending, state))

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
        what: CheckpointWrite,
        throughput_kbps: float | None = None,
        read_up_to_millis: int | None = None,
    ) -> Lease:
        if held.unsure != what:
            self._settle(held)
            # The repeated write may have moved the row past this checkpoint.
            if what.checkpoint < held.lease.checkpoint:
                return held.lease
        mark = held.mark
        if mark is not None and mark != what.checkpoint:
            mark = None  # of another checkpoint
        row = self._write(
            held,
            what,
            lambda lease: self._table.update_checkpoint(
                lease,
                checkpoint=what.checkpoint,
                pending=what.pending,
                pending_state=what.state,
                throughput_kbps=throughput_kbps,
                read_up_to_millis=read_up_to_millis,
                table_mark=mark,
                verify=self._verify_run,
            ),
        )
        held.checkpointed_at = held.renewed_at
        return row

    def _renew(self, held: Held, throughput_kbps: float | None = None) -> Lease:
        return self._write(
            held,
            "renewal",
            lambda lease: self._table.renew(
                lease, throughput_kbps, held.read_up_to_millis, verify=self._verify_run
            ),
        )

    def _settle(self, held: Held) -> None:
        """Repeat an earlier write whose response was lost.

        Either the repetition is applied, or the row shows that the first attempt was. In both
        cases the first attempt cannot be applied later.
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
        if row is None:
            raise self._lose(held)
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
        """Store a failed write in `unsure` unless it is certain that it was not applied."""
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

    def _lose(self, held: Held) -> LeaseLostError:
        """Stop holding a lease whose write was refused; return the error."""
        self.drop(held, _TAKEN)
        return LeaseLostError(f"the lease {held.lease_key} is lost: {_TAKEN}")
