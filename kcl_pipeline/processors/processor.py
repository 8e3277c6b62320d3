"""The interface of a record processor, and what its methods get.

Methods, inputs and their names are those of version 3 of kclpy, the KCL for Python. A prepared
checkpoint and its application state, which kclpy does not have, are named as in the Java KCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kcl_pipeline.processors.checkpointer import Checkpointer
from kcl_pipeline.processors.records import Record


@dataclass(frozen=True, slots=True)
class InitializeInput:
    """Where a processor begins.

    Attributes:
        shard_id: The shard.
        stream: Name or ARN of its stream, as the application names it.
        sequence_number: Sequence number of the checkpoint, or the name of a sentinel such as
            TRIM_HORIZON. Records after it are delivered.
        sub_sequence_number: Sub-sequence number of the checkpoint.
        pending_checkpoint_sequence_number: Sequence number of a checkpoint that was prepared and
            not made. None: there is none.
        pending_checkpoint_sub_sequence_number: Its sub-sequence number.
        pending_checkpoint_state: Its application state. None: it has none.

    Example:
        >>> from kcl_pipeline import InitializeInput, RecordProcessor
        >>> class Mine(RecordProcessor):
        ...     def initialize(self, given: InitializeInput) -> None:
        ...         print(given.shard_id, given.sequence_number)
    """

    shard_id: str
    stream: str
    sequence_number: str
    sub_sequence_number: int
    pending_checkpoint_sequence_number: str | None = None
    pending_checkpoint_sub_sequence_number: int | None = None
    pending_checkpoint_state: bytes | None = None
    action: str = "initialize"


@dataclass(frozen=True, slots=True)
class ProcessRecordsInput:
    """Records of one shard, in their order.

    Attributes:
        records: The records, at least one, unless
            `worker.call_process_records_even_for_empty_record_list` is set.
        millis_behind_latest: Time between the next record and the end of the shard. None: unknown.
        checkpointer: Writes checkpoints of the shard, also later and from other threads.

    Example:
        >>> from kcl_pipeline import ProcessRecordsInput, RecordProcessor
        >>> class Count(RecordProcessor):
        ...     def process_records(self, given: ProcessRecordsInput) -> None:
        ...         print(len(given.records), given.millis_behind_latest)
        ...         given.checkpointer.checkpoint()
    """

    records: Sequence[Record]
    millis_behind_latest: int | None
    checkpointer: Checkpointer
    action: str = "processRecords"


@dataclass(frozen=True, slots=True)
class LeaseLostInput:
    """The lease belongs to another worker, or to none. No checkpoint is possible.

    Example:
        >>> from kcl_pipeline import LeaseLostInput, RecordProcessor
        >>> class Mine(RecordProcessor):
        ...     def lease_lost(self, given: LeaseLostInput) -> None:
        ...         print(given.action)
    """

    action: str = "leaseLost"


@dataclass(frozen=True, slots=True)
class ShardEndedInput:
    """All records of the shard were delivered. The processor must checkpoint its end.

    Example:
        >>> from kcl_pipeline import RecordProcessor, ShardEndedInput
        >>> class Mine(RecordProcessor):
        ...     def shard_ended(self, given: ShardEndedInput) -> None:
        ...         given.checkpointer.checkpoint()
    """

    checkpointer: Checkpointer
    action: str = "shardEnded"


@dataclass(frozen=True, slots=True)
class ShutdownRequestedInput:
    """The lease will be handed over or released. This is the last chance to checkpoint.

    Example:
        >>> from kcl_pipeline import RecordProcessor, ShutdownRequestedInput
        >>> class Mine(RecordProcessor):
        ...     def shutdown_requested(self, given: ShutdownRequestedInput) -> None:
        ...         given.checkpointer.checkpoint()
    """

    checkpointer: Checkpointer
    action: str = "shutdownRequested"


class RecordProcessor:
    """Processes the records of one shard, at least once. The worker creates one for each shard.

    The methods of one processor are not called at the same time. Those of several shards are, in
    threads of one process. docs/processors.md has the order of the calls, and what an error of
    each of them does.

    Attributes:
        skips_failures: What an error of `process_records` does. False: the shard pauses, and the
            records are delivered again. True: the next records are delivered, as in the KCL. An
            application also chooses this by `batch.failed_records="skip"`.

    Example:
        >>> from kcl_pipeline import ProcessRecordsInput, RecordProcessor
        >>> class Count(RecordProcessor):
        ...     def process_records(self, given: ProcessRecordsInput) -> None:
        ...         print(len(given.records), given.millis_behind_latest)
        ...         given.checkpointer.checkpoint()
    """

    skips_failures: bool = False
    version = 3

    def initialize(self, initialize_input: InitializeInput) -> None:
        """Prepare for the records. Called once, before all others."""

    def process_records(self, process_records_input: ProcessRecordsInput) -> None:
        """Process records. Nothing is checkpointed unless the processor does it."""
        raise NotImplementedError

    def lease_lost(self, lease_lost_input: LeaseLostInput) -> None:
        """Clean up. No other call follows."""

    def shard_ended(self, shard_ended_input: ShardEndedInput) -> None:
        """Finish the shard. Without a checkpoint of its end, the call is repeated.

        The default is this checkpoint.
        """
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input: ShutdownRequestedInput) -> None:
        """Checkpoint what is processed, before the lease leaves this worker."""
