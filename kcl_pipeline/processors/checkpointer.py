"""Write the checkpoints of one shard for a record processor (protocol §9)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kcl_pipeline.errors import AwsError, KclError, LeaseLostError, NotFoundError, ThrottledError
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.processors.records import Record

SHUTDOWN: Final = "ShutdownException"
THROTTLED: Final = "ThrottlingException"
INVALID_STATE: Final = "InvalidStateException"
DEPENDENCY: Final = "KinesisClientLibDependencyException"
ILLEGAL_ARGUMENT: Final = "IllegalArgumentException"


class CheckpointError(KclError):
    """A checkpoint was not written, or it is unknown whether it was.

    Attributes:
        value: The name of the KCL's exception. ShutdownException: the lease is lost.
            ThrottlingException: nothing was written, call again later. InvalidStateException: the
            table does not exist. KinesisClientLibDependencyException: the outcome is unknown, call
            again. IllegalArgumentException: the position may not be checkpointed.

    Example:
        >>> from kcl_pipeline import Checkpointer, CheckpointError
        >>> def store(checkpointer: Checkpointer) -> bool:
        ...     try:
        ...         checkpointer.checkpoint()
        ...     except CheckpointError:
        ...         return False
        ...     return True
    """

    def __init__(self, value: str, message: str = "") -> None:
        super().__init__(f"{value}: {message}" if message else value)
        self.value = value


class PreparedCheckpoint:
    """A position that is stored as the pending checkpoint of the shard.

    The next owner of the lease gets the pending checkpoint and its state in `initialize`. Any
    checkpoint removes it.

    Example:
        >>> from kcl_pipeline import Checkpointer
        >>> def store(checkpointer: Checkpointer) -> None:
        ...     prepared = checkpointer.prepare_checkpoint()
        ...     prepared.checkpoint()
    """

    def __init__(self, position: Position, write: Callable[[], None]) -> None:
        self.sequence_number = position.sequence_number
        self.sub_sequence_number = position.sub_sequence_number
        self._write = write

    def checkpoint(self) -> None:
        """Checkpoint the position.

        Raises:
            CheckpointError: As `Checkpointer.checkpoint`.
        """
        self._write()


class Checkpointer:
    """Writes checkpoints of one shard, in any thread, while this worker holds its lease.

    Args:
        leases: Writes the row of the lease.
        held: The lease. Its checkpoint is where the shard is read from.

    Example:
        >>> from kcl_pipeline import Checkpointer, Record
        >>> def store(record: Record, checkpointer: Checkpointer) -> None:
        ...     checkpointer.checkpoint(record.sequence_number, record.sub_sequence_number)
    """

    def __init__(self, leases: HeldLeases, held: Held) -> None:
        self._leases = leases
        self._held = held
        # Calls of several threads follow each other: each is compared with the last checkpoint.
        self._lock = threading.Lock()
        self._last = self._largest = held.lease.checkpoint
        self._end: Position | None = None
        self._is_closed = False

    @property
    def is_at_end(self) -> bool:
        """Whether the end of the shard is checkpointed."""
        return self._last.is_shard_end

    @property
    def delivered(self) -> Position:
        """The last position that may be checkpointed."""
        return self._largest

    @property
    def is_complete(self) -> bool:
        """Whether all that was delivered is checkpointed."""
        return self._last == self._largest

    def checkpoint(
        self,
        sequence_number: str | Record | None = None,
        sub_sequence_number: int | None = None,
    ) -> None:
        """Store that all records up to and including a position are processed.

        A repeated call writes nothing. A pending checkpoint is removed.

        Args:
            sequence_number: Of a record that was delivered, and that is not before the last
                checkpoint; or the record. None: all that was delivered; in `shard_ended`, the end
                of the shard.
            sub_sequence_number: Index in a KPL aggregate. None: 0, or that of the record.

        Raises:
            CheckpointError: See its `value`.
        """
        with self._lock:
            self._checkpoint_at(self._checked(sequence_number, sub_sequence_number))

    def prepare_checkpoint(
        self,
        sequence_number: str | Record | None = None,
        sub_sequence_number: int | None = None,
        application_state: bytes | None = None,
    ) -> PreparedCheckpoint:
        """Store a position, and state of the application, as the pending checkpoint.

        Reading still begins after the last checkpoint, not after this position. At the last
        checkpoint itself nothing is written.

        Args:
            sequence_number: As in `checkpoint`.
            sub_sequence_number: As in `checkpoint`.
            application_state: Bytes for the next owner. A row has at most 400 KB. None and empty
                bytes: no state.

        Returns:
            What makes the checkpoint.

        Raises:
            CheckpointError: As `checkpoint`.
        """
        with self._lock:
            position = self._checked(sequence_number, sub_sequence_number)
            if position == self._last:
                return PreparedCheckpoint(position, lambda: None)
            self._written(
                lambda: self._leases.prepare(self._held, position, application_state or None)
            )
        return PreparedCheckpoint(position, lambda: self._make(position))

    def _make(self, position: Position) -> None:
        with self._lock:
            self._refuse_outside(position)
            self._checkpoint_at(position)

    def _checked(
        self, sequence_number: str | Record | None, sub_sequence_number: int | None
    ) -> Position:
        if sequence_number is None:
            # Unlike the Java KCL, whose prepareCheckpoint(state) drops the sub-sequence number.
            return self._largest
        if not isinstance(sequence_number, str):
            record = sequence_number
            sequence_number = record.sequence_number
            if sub_sequence_number is None:
                sub_sequence_number = record.sub_sequence_number
        try:
            position = Position(sequence_number, sub_sequence_number or 0)
        except ValueError as error:
            raise CheckpointError(ILLEGAL_ARGUMENT, str(error)) from error
        # Also if this number is checkpointed already. In the Java KCL that checkpoint writes
        # nothing, and the shard never ends.
        if position == self._end and not self._last.is_shard_end:
            return SHARD_END
        self._refuse_outside(position)
        return position

    def _refuse_outside(self, position: Position) -> None:
        if not self._last <= position <= self._largest:
            raise CheckpointError(
                ILLEGAL_ARGUMENT,
                f"{position} is not between the last checkpoint {self._last} and the last record "
                f"that was delivered, {self._largest}",
            )

    def _checkpoint_at(self, position: Position) -> None:
        if position == self._last:
            self._refuse_closed()
            return
        self._written(lambda: self._leases.checkpoint(self._held, checkpoint=position))
        self._last = position

    def _written(self, write: Callable[[], object]) -> None:
        self._refuse_closed()
        key = self._held.lease_key
        try:
            write()
        except LeaseLostError as error:
            raise CheckpointError(SHUTDOWN, str(error)) from error
        except ThrottledError as error:
            raise CheckpointError(THROTTLED, f"the row of {key}: {error}") from error
        except NotFoundError as error:
            raise CheckpointError(INVALID_STATE, f"the row of {key}: {error}") from error
        except AwsError as error:
            raise CheckpointError(DEPENDENCY, f"the row of {key}: {error}") from error

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise CheckpointError(SHUTDOWN, f"the lease {self._held.lease_key} is lost")

    # -- calls of the worker

    def deliver(self, position: Position) -> None:
        """Permit checkpoints up to this position."""
        self._largest = max(self._largest, position)

    def reach_end(self) -> None:
        """Permit the checkpoint of the end of the shard."""
        with self._lock:
            if self._end is None:
                self._end, self._largest = self._largest, SHARD_END

    def close(self) -> None:
        """Refuse all further checkpoints."""
        self._is_closed = True
