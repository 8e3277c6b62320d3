"""Append failed records to the dead-letter table.

A batch that cannot be committed is read, transformed and written again, by this worker or another
one, and often with another end. Its dead letters are then appended again: readers take one row of
each record (docs/dead-letters.md).
"""

from __future__ import annotations

import random
from typing import Final

import pyarrow as pa

from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.files import BATCH_FOLDER, unique_name, write_table
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.schema import delta_schema
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.table_check import MAX_ATTEMPTS, TABLE_PROPERTIES, TableCheck
from kcl_pipeline.errors import SinkError

_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4


class DeadLetterTable:
    """A separate Delta table, created when it is first needed. Not thread-safe.

    Args:
        sink: Settings of the table: its address and storage options.
        clock: For waiting.
        rng: For waiting.
    """

    def __init__(self, sink: DeltaSink, clock: Clock, rng: random.Random) -> None:
        self._sink = sink
        self._clock = clock
        self._rng = rng
        self._log = DeltaLog(sink.uri, sink.storage_options, clock)

    def append(self, records: pa.Table) -> None:
        """Append the records. A row is written once per call, whatever is lost on the way.

        Raises:
            SinkError: The table cannot be written, or the outcome is not known. Call again.
        """
        if not records.num_rows:
            return
        check = self._open(records.schema)
        check.fit(records.schema)
        files = write_table(
            self._log.storage,
            f"{BATCH_FOLDER}/dead-letters-{unique_name()}",
            TableColumns().convert(records),
            self._log.partition_columns(),
            modified_millis=int(self._clock.wall() * 1000),
        )
        for attempt in range(MAX_ATTEMPTS):
            version = self._log.version
            try:
                self._log.append(files, {})
            except SinkError:
                self._log.refresh()
                if self._log.version == version:
                    raise
                # Another writer was faster, or this commit has landed and its answer was lost. A
                # table has a file once, however often it is added.
                self._back_off(attempt)
                check.fit(records.schema)
            else:
                self._log.maintain(version + 1)
                return
        raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts lost to other writers")

    def _open(self, schema: pa.Schema) -> TableCheck:
        """Read the newest version of the table, or create it."""
        if not self._log.refresh():
            self._log.create(delta_schema(schema), (), TABLE_PROPERTIES)
            self._log.refresh()
        # A user may have created the table with partition columns.
        columns, options = self._log.partition_columns(), self._sink.storage_options
        sink = DeltaSink(self._sink.uri, columns, options, schema_evolution=True)
        return TableCheck(sink, self._log, self._back_off)

    def _back_off(self, attempt: int) -> None:
        longest = min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2 ** min(attempt, 10))
        self._clock.sleep(self._rng.uniform(0, longest))
        self._log.refresh()
