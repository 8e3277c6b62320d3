"""kclpy record processor that counts records.

Each shard writes its count to its own file in the folder COUNTED_FOLDER of the environment. Under
the MultiLangDaemon a process runs per shard. `setup.ours_kclpy_command` runs the same file with its
imports changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class Counter(processor.RecordProcessorBase):
    """Processor that counts records with decoded data and writes no checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.taken = self.size = 0

    def initialize(self, initialize_input: Any) -> None:
        """Name the file."""
        self.file = self.folder / initialize_input.shard_id

    def process_records(self, process_records_input: Any) -> None:
        """Count the records and write the total to the file."""
        for record in process_records_input.records:
            self.taken += 1
            self.size += len(record.binary_data)
        self.file.write_text(str(self.taken))

    def lease_lost(self, lease_lost_input: Any) -> None:
        """Do nothing."""

    def shard_ended(self, shard_ended_input: Any) -> None:
        """Do nothing; the shards of the benchmark do not end."""

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        """Do nothing."""


if __name__ == "__main__":
    kcl.KCLProcess(Counter(Path(os.environ["COUNTED_FOLDER"]))).run()
