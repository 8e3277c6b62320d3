"""An application for kclpy with the shape of its sample. Only its imports differ from kclpy's."""

import os
import sys
import time

from kcl_pipeline.processors.kclpy import kcl
from kcl_pipeline.processors.kclpy.v3 import processor

RETRIES, PAUSE_SECONDS = 5, 0.1
CHECKPOINT_SECONDS = float(os.environ.get("SAMPLE_CHECKPOINT_SECONDS", "60"))


class RecordProcessor(processor.RecordProcessorBase):
    """Writes a line per record, and checkpoints from time to time."""

    def __init__(self):
        self._largest = (None, None)
        self._checkpointed_at = None

    def log(self, message):
        with open(os.environ["SAMPLE_LOG"], "a") as file:  # noqa: PTH123
            file.write(message + "\n")

    def initialize(self, initialize_input):
        self._checkpointed_at = time.time()
        self.log(f"initialize {initialize_input.shard_id} {initialize_input.sequence_number}")

    def checkpoint(self, checkpointer, sequence_number=None, sub_sequence_number=None):
        for attempt in range(RETRIES):
            try:
                checkpointer.checkpoint(sequence_number, sub_sequence_number)
                return
            except kcl.CheckpointError as error:
                if error.value == "ShutdownException":
                    print("the lease is lost, no checkpoint")
                    return
                if error.value == "ThrottlingException" and attempt == RETRIES - 1:
                    sys.stderr.write("no checkpoint after several attempts\n")
                    return
                if error.value == "InvalidStateException":
                    sys.stderr.write("the table does not exist\n")
            time.sleep(PAUSE_SECONDS)

    def process_records(self, process_records_input):
        for record in process_records_input.records:
            number, sub_number = int(record.sequence_number), record.sub_sequence_number
            self.log(f"record {record.partition_key} {record.binary_data.decode()}")
            if self._largest == (None, None) or (number, sub_number) > self._largest:
                self._largest = (number, sub_number)
        if time.time() - self._checkpointed_at > CHECKPOINT_SECONDS:
            checkpointer = process_records_input.checkpointer
            self.checkpoint(checkpointer, str(self._largest[0]), self._largest[1])
            self._checkpointed_at = time.time()

    def lease_lost(self, lease_lost_input):
        self.log("lease_lost")

    def shard_ended(self, shard_ended_input):
        self.log("shard_ended")
        shard_ended_input.checkpointer.checkpoint()

    def shutdown_requested(self, shutdown_requested_input):
        self.log("shutdown_requested")
        shutdown_requested_input.checkpointer.checkpoint()


if __name__ == "__main__":
    kcl.KCLProcess(RecordProcessor()).run()
