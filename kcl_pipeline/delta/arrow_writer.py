"""Write batches on the Arrow path: an Arrow function and pyarrow, without a JVM.

pyarrow writes the same table with about a fifth of the CPU time that Spark's writer takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import NOTHING_WRITTEN, Batch, DataFile, Written
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.address import table_root
from kcl_pipeline.delta.files import batch_folder, write_table
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.schema import untyped
from kcl_pipeline.delta.storage import Storage, open_storage
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.threads import DaemonPool
from kcl_pipeline.transform import (
    ArrowTransform,
    apply_arrow_transform,
    probe_arrow_transform,
    split_rejected,
)

_BYTES_OF_A_FILE: Final = 32 * 1024 * 1024


class ArrowBatchWriter:
    """A `BatchWriter` without Spark.

    Rows with a string in the column `_error` are not written: see `transform.rejected`. A batch
    becomes one file per 32 MiB, at most one per thread (and combination of partition values).

    Args:
        transform_arrow: Gets the batch's records (`RECORD_SCHEMA`, at least one row) and returns a
            table; None writes the records unchanged. Its result must depend on its input alone,
            because a range that is read again must yield the same rows.
        table_uri: Address of the table.
        partition_by: Partition columns of the table.
        storage_options: Options of delta-rs for the table's store.
        storage: The table's storage. None: it is opened with `storage_options`.
        threads: Threads that write files. None: one per core.
        memory: Counts the result. None: it is not counted.
        columns: Returns the columns that a result must fit. None: it fits any table.
    """

    def __init__(
        self,
        transform_arrow: ArrowTransform | None,
        table_uri: str,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
        *,
        storage: Storage | None = None,
        threads: int | None = None,
        memory: MemoryBudget | None = None,
        columns: Callable[[], TableColumns] | None = None,
    ) -> None:
        self._transform = transform_arrow
        self._partition_by = tuple(partition_by)
        self._columns = columns or (lambda: TableColumns(partition_by=tuple(partition_by)))
        self._storage = storage or open_storage(table_root(table_uri), storage_options)
        self._threads = threads or os.cpu_count() or 1
        self._clock = SystemClock()
        self._pool: DaemonPool | None = None
        self._memory = memory
        self.before_files: Callable[[], None] = lambda: None
        """Called after the transform, before the first file of a batch."""

    def write(self, batch: Batch) -> Written:
        """Transform and write a batch (see `BatchWriter.write`)."""
        return self.write_into(batch, batch_folder(batch.batch_id))

    def write_into(self, batch: Batch, folder: str) -> Written:
        """Like `write`, into a folder that no other call uses."""
        if self._transform is not None and not batch.records.num_rows:
            return NOTHING_WRITTEN
        output, rejected = split_rejected(apply_arrow_transform(self._transform, batch.records))
        if not output.num_rows:
            return Written((), None, 0, rejected)
        table = self._columns().convert(output)
        counting: AbstractContextManager[None] = nullcontext()
        # The records themselves are counted already. A result may share their buffers.
        if self._memory is not None and self._transform is not None:
            counting = self._memory.counting("result", table.nbytes)
        self.before_files()
        with counting:
            files = self._files(table, folder, int(self._clock.wall() * 1000))
        typed = [
            field.with_nullable(table.column(field.name).null_count > 0) for field in table.schema
        ]
        schema = pa.schema([*typed, *untyped(output.schema, table.schema)])
        return Written(files, schema, table.num_rows, rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[str | None]:
        """Call the transform on each part in turn (see `BatchWriter.probe`)."""
        columns = self._columns()
        return probe_arrow_transform(
            self._transform,
            slices,
            lambda output: columns.convert(split_rejected(output)[0], alone=True),
        )

    def _files(self, table: pa.Table, folder: str, millis: int) -> tuple[DataFile, ...]:
        """Write a large table in parts of equal length, in parallel.

        One part is encoded while another waits for the disk or the object store.
        """
        parts = min(1 + table.nbytes // _BYTES_OF_A_FILE, self._threads, max(table.num_rows, 1))
        edges = [table.num_rows * number // parts for number in range(parts + 1)]

        def write(number: int) -> tuple[DataFile, ...]:
            rows = table.slice(edges[number], edges[number + 1] - edges[number])
            return write_table(
                self._storage,
                folder,
                rows,
                self._partition_by,
                modified_millis=millis,
                part=f"part-{number}",
            )

        if parts == 1:
            return write(0)
        # Kept for later batches: new threads would allocate their encoding memory again, which
        # takes a tenth of the time.
        self._pool = self._pool or DaemonPool(self._threads, "write")
        written = [self._pool.submit(write, number) for number in range(parts)]
        wait(written)  # also after a failure, so that no thread writes after this call
        return tuple(file for files in written for file in files.result())
