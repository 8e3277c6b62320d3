"""Writers of Spark results through memory and by Python tasks, and what is in their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import KclError
from kcl_pipeline.spark.arrow_memory.pool import MemoryPool
from kcl_pipeline.spark.writer import SparkBatchWriter


def writers(spark, folder: Path, transform, by=(), events=None) -> list[SparkBatchWriter]:
    told = (events if events is not None else []).append
    arrow, own = (
        SparkBatchWriter(spark, transform, str(folder / name), by, events=told)
        for name in ("arrow", "own")
    )
    own._arrow.prepare = lambda: False  # type: ignore[method-assign]
    return [arrow, own]


def kept_bytes(pool: MemoryPool) -> int:
    """Bytes of the files that wait for the next batch."""
    return sum(file.size for file in pool._free)


def contents(writer: SparkBatchWriter, given: Batch) -> Any:
    """The table that these files are, and what is told about it; or the error."""
    try:
        written = writer.write(given)
    except KclError as error:
        return type(error), str(error)
    return written.output_schema, written.output_rows, schema_and_rows(writer, written)


def schema_and_rows(writer: SparkBatchWriter, written: Batch) -> Any:
    rows, schemas = [], set()
    for file in written.written_files:
        table = pq.read_table(f"{writer._root}/{file.path}", partitioning=None)
        assert table.num_rows == file.rows
        assert Path(writer._root, file.path).stat().st_size == file.size
        schemas.add(str(table.schema.remove_metadata()))
        rows += [(repr(row), sorted(file.partition_values.items())) for row in table.to_pylist()]
    return schemas, sorted(rows, key=str)
