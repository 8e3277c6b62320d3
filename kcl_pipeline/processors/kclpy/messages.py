"""The inputs of a processor, as `amazon_kclpy.messages` has them."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.processors.checkpointer import SHUTDOWN, Checkpointer, CheckpointError
from kcl_pipeline.processors.processor import (
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    ShardEndedInput,
    ShutdownRequestedInput,
)
from kcl_pipeline.processors.records import Record

__all__ = [
    "InitializeInput",
    "LeaseLostCheckpointer",
    "LeaseLostInput",
    "ProcessRecordsInput",
    "Record",
    "ShardEndedInput",
    "ShutdownInput",
    "ShutdownRequestedInput",
]


class LeaseLostCheckpointer:
    """What a processor of version 1 or 2 gets after its lease was lost."""

    def checkpoint(
        self,
        sequence_number: str | Record | None = None,  # noqa: ARG002 (as `Checkpointer`)
        sub_sequence_number: int | None = None,  # noqa: ARG002 (likewise)
    ) -> None:
        """Raise `CheckpointError`."""
        raise CheckpointError(SHUTDOWN, "the lease is lost")


@dataclass(frozen=True, slots=True)
class ShutdownInput:
    """Why a processor of version 2 ends.

    Attributes:
        reason: ZOMBIE: the lease is lost. TERMINATE: the shard has ended, and must be checkpointed.
        checkpointer: Writes the checkpoint.
    """

    reason: str
    checkpointer: Checkpointer | LeaseLostCheckpointer
    action: str = "shutdown"
