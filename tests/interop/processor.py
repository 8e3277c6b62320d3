"""Our side of the interop suite as a record processor: it prints the lines of `InteropWorker.java`.

Environment variables: those of `pipeline`, and INTEROP_CHECKPOINT, which is `each` or `prepare`.
"""

from __future__ import annotations

import itertools
import json
import os

from kcl_pipeline import (
    CheckpointError,
    InitializeInput,
    KinesisPipeline,
    LeaseLostInput,
    ProcessRecordsInput,
    RecordProcessor,
    ShardEndedInput,
    ShutdownRequestedInput,
)

PREPARES = os.environ.get("INTEROP_CHECKPOINT") == "prepare"
STATE = b"\x01\x02\x03"
_BATCHES = itertools.count(1)


def report(*words: object) -> None:
    """Print one line in one write, because the shards have threads."""
    os.write(1, ("@" + " ".join("-" if w is None else str(w) for w in words) + "\n").encode())


class Printer(RecordProcessor):
    """Prints one line per record, lease event and checkpoint."""

    def initialize(self, initialize_input: InitializeInput) -> None:
        """Print where the shard begins, and the prepared checkpoint."""
        self.shard = initialize_input.shard_id
        state = initialize_input.pending_checkpoint_state
        report(
            "initialize",
            self.shard,
            initialize_input.sequence_number,
            initialize_input.sub_sequence_number,
            initialize_input.pending_checkpoint_sequence_number,
            None if state is None else state.hex(),
        )

    def process_records(self, process_records_input: ProcessRecordsInput) -> None:
        """Print the records, and checkpoint or prepare a checkpoint."""
        batch, last = next(_BATCHES), process_records_input.records[-1]
        for record in process_records_input.records:
            report("record", self.shard, batch, record.binary_data.split(b" ")[0].decode())
        checkpointer = process_records_input.checkpointer
        try:
            if PREPARES:
                checkpointer.prepare_checkpoint(last, application_state=STATE)
                report("prepared", self.shard, batch, last.sequence_number)
            else:
                checkpointer.checkpoint(last)
                number = last.sub_sequence_number
                report("checkpoint", self.shard, batch, last.sequence_number, number)
        except CheckpointError as error:
            report("refused", self.shard, batch, error.value)

    def lease_lost(self, lease_lost_input: LeaseLostInput) -> None:
        """Print it."""
        report("lost", self.shard)

    def shard_ended(self, shard_ended_input: ShardEndedInput) -> None:
        """Checkpoint the end."""
        shard_ended_input.checkpointer.checkpoint()
        report("ended", self.shard)

    def shutdown_requested(self, shutdown_requested_input: ShutdownRequestedInput) -> None:
        """Print it."""
        report("requested", self.shard)


interop = KinesisPipeline(
    name=os.environ.get("INTEROP_NAME", "interop"),
    streams=os.environ.get("INTEROP_STREAMS", "interop").split(","),
    processor=Printer,
    settings_overrides=json.loads(os.environ.get("INTEROP_SETTINGS", "{}")),
)
