"""Write a result in Spark tasks with pyarrow.

This takes less CPU time than Spark's writer, and needs no jars for object stores. One evaluation
gives the files and the rejected rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline.batch import REJECTED_SCHEMA, DataFile, split_rejected
from kcl_pipeline.delta.files import TableColumns, failed_result, write_table
from kcl_pipeline.errors import TransformFailedError
from kcl_pipeline.spark.task_process import settle, table_storage

_FILE_FIELDS: Final = (
    pa.field("path", pa.string()),
    pa.field("size", pa.int64()),
    pa.field("rows", pa.int64()),
    pa.field("partition_values", pa.string()),
    pa.field("statistics", pa.string()),
)
_REPORT: Final = pa.schema([*_FILE_FIELDS, *(f.with_nullable(True) for f in REJECTED_SCHEMA)])
"""A row of a task's report: a file, or a rejected row if `path` is null.

If `path` is empty, the task could not write, and `partition_values` states why.
"""
_PIECE_BYTES: Final = 128 * 1024 * 1024
"""A task with more rows writes several files, so that its memory is limited."""


class FileTask:
    """Write one task's rows into files; report the files and the rejected rows."""

    def __init__(
        self,
        root: str,
        options: dict[str, str],
        folder: str,
        columns: TableColumns,
        modified_millis: int,
    ) -> None:
        self._root, self._options, self._folder = root, options, folder
        self._columns, self._modified_millis = columns, modified_millis

    def run_on(self, frame: DataFrame) -> tuple[tuple[DataFile, ...], pa.Table | None]:
        """Run the job. Returns the files and the rejected rows (`REJECTED_SCHEMA`) or None.

        Raises:
            TransformFailedError: The table cannot hold a value. Files of other tasks may exist.
        """
        reports = frame.mapInArrow(self, from_arrow_schema(_REPORT)).collect()
        for row in reports:
            if row.path == "":
                raise failed_result(row.partition_values)
        millis = self._modified_millis
        files = [
            DataFile(
                one.path,
                one.size,
                one.rows,
                json.loads(one.partition_values),
                millis,
                one.statistics,
            )
            for one in reports
            if one.path is not None
        ]
        return tuple(files), _rejected(reports)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of one task."""
        from pyspark import TaskContext  # noqa: PLC0415 (only in the task)

        context = TaskContext.get()
        part = f"part-{context.partitionId():05d}-{context.taskAttemptId()}" if context else "part"
        for number, piece in enumerate(in_pieces(batches)):
            try:
                kept, rejected = split_rejected(piece)
                yield from _reported(self._write(kept, f"{part}-{number}"))
            except TransformFailedError as error:
                # Not raised, because Spark would repeat the task.
                for _ in batches:  # Spark does not use the process again if rows are left
                    pass
                yield from _reported(_file_rows([("", 0, 0, error.detail, "")]))
                return
            if rejected is not None:
                yield from _reported(rejected)
        settle("files")

    def _write(self, rows: pa.Table, part: str) -> pa.Table:
        return _file_rows(
            (
                file.path,
                file.size,
                file.rows,
                json.dumps(dict(file.partition_values)),
                file.statistics,
            )
            for file in write_table(
                table_storage(self._root, self._options),
                self._folder,
                self._columns.convert(rows),
                self._columns.partition_by,
                modified_millis=self._modified_millis,
                part=part,
            )
        )


def in_pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join the batches that have rows into tables of about `_PIECE_BYTES`."""
    piece: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        piece.append(batch)
        size += batch.nbytes
        if size >= _PIECE_BYTES:
            yield pa.Table.from_batches(piece)
            piece, size = [], 0
    if piece:
        yield pa.Table.from_batches(piece)


def _file_rows(files: Iterable[tuple[str, int, int, str, str]]) -> pa.Table:
    schema = pa.schema(_FILE_FIELDS)
    rows = [dict(zip(schema.names, file, strict=True)) for file in files]
    return pa.Table.from_pylist(rows, schema=schema)


def _reported(table: pa.Table) -> Iterable[pa.RecordBatch]:
    columns = [
        table.column(field.name)
        if field.name in table.schema.names
        else pa.nulls(table.num_rows, field.type)
        for field in _REPORT
    ]
    report = pa.Table.from_arrays(columns, schema=_REPORT)
    return [batch for batch in report.to_batches() if batch.num_rows]


def _rejected(reports: Sequence[Any]) -> pa.Table | None:
    rows = [
        {name: row[name] for name in REJECTED_SCHEMA.names} for row in reports if row.path is None
    ]
    return pa.Table.from_pylist(rows, schema=REJECTED_SCHEMA) if rows else None
