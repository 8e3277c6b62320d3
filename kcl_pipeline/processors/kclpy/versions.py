"""The base classes of record processors of the three versions of kclpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kcl_pipeline.processors.checkpointer import Checkpointer
from kcl_pipeline.processors.kclpy.messages import LeaseLostCheckpointer, ShutdownInput
from kcl_pipeline.processors.processor import (
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    RecordProcessor,
    ShardEndedInput,
    ShutdownRequestedInput,
)
from kcl_pipeline.processors.records import Record

ZOMBIE, TERMINATE = "ZOMBIE", "TERMINATE"


class ThirdVersion(RecordProcessor):
    """Version 3, `amazon_kclpy.v3.processor.RecordProcessorBase`."""

    skips_failures = True

    def shard_ended(self, shard_ended_input: ShardEndedInput) -> None:
        """Checkpoint the end of the shard."""
        raise NotImplementedError


class SecondVersion(RecordProcessor):
    """Version 2, `amazon_kclpy.v2.processor.RecordProcessorBase`."""

    skips_failures = True
    version = 2

    def shutdown(self, shutdown_input: ShutdownInput) -> None:
        """End the processor. Checkpoint, if the shard has ended."""
        raise NotImplementedError

    def lease_lost(self, lease_lost_input: LeaseLostInput) -> None:  # noqa: ARG002, D102
        self.shutdown(ShutdownInput(ZOMBIE, LeaseLostCheckpointer()))

    def shard_ended(self, shard_ended_input: ShardEndedInput) -> None:  # noqa: D102
        self.shutdown(ShutdownInput(TERMINATE, shard_ended_input.checkpointer))


class FirstVersion:
    """Version 1, `amazon_kclpy.kcl.RecordProcessorBase`. Its methods have other arguments."""

    version = 1

    def initialize(self, shard_id: str) -> None:
        """Prepare for the records of a shard."""
        raise NotImplementedError

    def process_records(self, records: Sequence[Record], checkpointer: Checkpointer) -> None:
        """Process records."""
        raise NotImplementedError

    def shutdown(self, checkpointer: Checkpointer | LeaseLostCheckpointer, reason: str) -> None:
        """End the processor, because of ZOMBIE or TERMINATE."""
        raise NotImplementedError

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """Checkpoint, before the lease leaves this worker."""

    def as_record_processor(self) -> RecordProcessor:
        """Return a processor that calls this one."""
        return _OfFirstVersion(self)


class _OfFirstVersion(SecondVersion):
    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def initialize(self, initialize_input: InitializeInput) -> None:
        self._processor.initialize(initialize_input.shard_id)

    def process_records(self, process_records_input: ProcessRecordsInput) -> None:
        given = process_records_input
        self._processor.process_records(given.records, given.checkpointer)

    def shutdown(self, shutdown_input: ShutdownInput) -> None:
        self._processor.shutdown(shutdown_input.checkpointer, shutdown_input.reason)

    def shutdown_requested(self, shutdown_requested_input: ShutdownRequestedInput) -> None:
        self._processor.shutdown_requested(shutdown_requested_input.checkpointer)
