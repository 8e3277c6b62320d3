"""Write files in Spark tasks with pyarrow instead of Spark's Parquet writer.

For object stores Spark's writer needs jars that are not in its distribution. For an output with
rejected rows, one evaluation gives both the files and the rejected rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline.batch import REJECTED_SCHEMA, DataFile
from kcl_pipeline.delta.files import write_table
from kcl_pipeline.delta.schema import to_delta
from kcl_pipeline.delta.storage.storage import open_storage
from kcl_pipeline.transform.rejected import split_rejected

_FILE_FIELDS: Final = (
    pa.field("path", pa.string()),
    pa.field("size", pa.int64()),
    pa.field("rows", pa.int64()),
    pa.field("partition_values", pa.string()),
)
_REPORT: Final = pa.schema([*_FILE_FIELDS, *(f.with_nullable(True) for f in REJECTED_SCHEMA)])
"""A row of a task's report: a file, or a rejected row if `path` is null."""


class FileTask:
    """Write one task's rows into files; report the files and the rejected rows."""

    def __init__(
        self,
        root: str,
        options: dict[str, str],
        folder: str,
        partition_by: tuple[str, ...],
        modified_millis: int,
    ) -> None:
        self._root, self._options, self._folder = root, options, folder
        self._partition_by, self._modified_millis = partition_by, modified_millis

    def run_on(self, frame: DataFrame) -> tuple[tuple[DataFile, ...], pa.Table | None]:
        """Run the job. Returns the files and the rejected rows (`REJECTED_SCHEMA`) or None."""
        reports = frame.mapInArrow(self, from_arrow_schema(_REPORT)).collect()
        return self._files(reports), _rejected(reports)

    def _files(self, reports: Sequence[Any]) -> tuple[DataFile, ...]:
        return tuple(
            DataFile(
                row.path,
                row.size,
                row.rows,
                json.loads(row.partition_values),
                self._modified_millis,
            )
            for row in reports
            if row.path is not None
        )

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of one task."""
        from pyspark import TaskContext  # noqa: PLC0415 (only in the task)

        rows = [batch for batch in batches if batch.num_rows]
        if not rows:
            return
        context = TaskContext.get()
        part = f"part-{context.partitionId():05d}-{context.taskAttemptId()}" if context else "part"
        kept, rejected = split_rejected(pa.Table.from_batches(rows))
        written = write_table(
            open_storage(self._root, self._options),
            self._folder,
            to_delta(kept),
            self._partition_by,
            modified_millis=self._modified_millis,
            part=part,
        )
        yield from _reported(
            pa.table(
                {
                    "path": [file.path for file in written],
                    "size": [file.size for file in written],
                    "rows": [file.rows for file in written],
                    "partition_values": [
                        json.dumps(dict(file.partition_values)) for file in written
                    ],
                },
                schema=pa.schema(_FILE_FIELDS),
            )
        )
        if rejected is not None:
            yield from _reported(rejected)


def _reported(table: pa.Table) -> Iterable[pa.RecordBatch]:
    columns = [
        table.column(field.name)
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in _REPORT
    ]
    return [
        batch
        for batch in pa.Table.from_arrays(columns, schema=_REPORT).to_batches()
        if batch.num_rows
    ]


def _rejected(reports: Sequence[Any]) -> pa.Table | None:
    rows = [
        {name: row[name] for name in REJECTED_SCHEMA.names} for row in reports if row.path is None
    ]
    return pa.Table.from_pylist(rows, schema=REJECTED_SCHEMA) if rows else None
