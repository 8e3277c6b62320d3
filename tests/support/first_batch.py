"""The first batch of a table that does not exist yet, with the production sink of Delta."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, BatchWriter
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from tests.support import commit_world


class FirstBatch:
    """A worker whose shards have started, and that gets the first records.

    Attributes:
        writes: Number of times that the batch was written.
    """

    def __init__(self, folder: Path, writer: Callable[[str], BatchWriter]) -> None:
        self.folder, self.writes = folder, 0
        sink = DeltaCommitter(
            DeltaSink(str(folder)), "app", clock=SystemClock(), rng=random.Random(1)
        )
        self.world = commit_world.World(sink=sink)
        self._writer = writer(str(folder))
        self.world.writer = self
        self.steps = self.world.steps_of(self.world.committer)

    def write(self, batch: Batch) -> Batch:
        self.writes += 1
        return self._writer.write(batch)

    def commit(self, records: pa.Table, before: Callable[[], object] = lambda: None) -> None:
        written = self.write(Batch("b", self.world.batch(5).ranges, records))
        before()
        done = self.steps.run(written, self.world.consumers)
        assert done is not None
        assert done.output_rows == records.num_rows
        assert DeltaTable(str(self.folder)).to_pyarrow_table().num_rows == records.num_rows

    def remove(self) -> None:
        shutil.rmtree(self.folder)

    def files(self) -> tuple[int, int]:
        """Number of files in the folder, and in the table."""
        return (
            len(list(self.folder.glob("batches/**/*.parquet"))),
            len(DeltaTable(str(self.folder)).file_uris()),
        )
