"""A record processor of kclpy that counts; several run at once (one per shard), each with a file of
its own: `python kclpy_processor.py FOLDER`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor


class Counter(processor.RecordProcessorBase):
    """Counts records whose data has been decoded; no checkpoints."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.file = folder / str(os.getpid())
        self.taken = self.size = 0

    def initialize(self, initialize_input: Any) -> None:
        """Nothing to prepare."""

    def process_records(self, process_records_input: Any) -> None:
        """Count."""
        for record in process_records_input.records:
            self.taken += 1
            self.size += len(record.binary_data)
        self.file.write_text(str(self.taken))

    def lease_lost(self, lease_lost_input: Any) -> None:
        """Nothing to give up."""

    def shard_ended(self, shard_ended_input: Any) -> None:
        """Never: the shards do not end."""

    def shutdown_requested(self, shutdown_requested_input: Any) -> None:
        """Nothing to save."""


if __name__ == "__main__":
    kcl.KCLProcess(Counter(Path(sys.argv[1]))).run()
