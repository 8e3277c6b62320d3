"""Transfer records from the driver to local Spark tasks as Parquet files in memory.

`createDataFrame` converts each value to a Java row. Spark's Parquet reader reads whole columns,
only those that the transform uses, with about half the CPU time. Its planning takes some
milliseconds, so `createDataFrame` is faster for small batches.

The bytes are in anonymous files (`memfd_create`), which the kernel frees when the process ends.
Spark reads them through links in the session's temporary folder, in a new folder for each batch. A
DataFrame that is used after its batch finds no files.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

_ON_THIS_MACHINE: Final = re.compile(r"local(\[[^\]]*\])?")
_REPEATED_COLUMNS: Final = ("stream", "shard_id", "encryption_type")
# A session may be configured to ignore missing files. Here this would lose records.
_STRICT_READING: Final = {
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "mergeSchema": "false",
    "datetimeRebaseMode": "CORRECTED",
}
_NEVER_NULL: Final = {
    "string": "''",
    "binary": "X''",
    "bigint": "0L",
    "timestamp": "timestamp_micros(0)",
}


def can_share_memory(session: SparkSession) -> bool:
    """Whether tasks can read this process's memory.

    This needs Linux, a master `local…`, and a session without encryption of temporary data.
    """
    context: Any = session.sparkContext
    return (
        hasattr(os, "memfd_create")
        and _ON_THIS_MACHINE.fullmatch(context.master) is not None
        and not context._encryption_enabled  # noqa: SLF001 (as pyspark)
    )


@contextmanager
def frame_in_memory(session: SparkSession, records: pa.Table, parts: int) -> Iterator[DataFrame]:
    """The records as a DataFrame that can be read while the context lasts.

    It has the schema of `createDataFrame`, including nullability.

    Args:
        session: A session on this machine.
        records: The records of a batch.
        parts: Number of files of about equal length, in order.

    Raises:
        OSError: There is not enough memory, or Spark does not find all bytes.
    """
    # Spark removes this folder with the JVM, also when this process is killed.
    temporary: Any = session.sparkContext._temp_dir  # noqa: SLF001
    folder = Path(tempfile.mkdtemp(prefix="records-", dir=temporary))
    try:
        with in_memory(records, parts, folder) as size:
            frame = (
                session.read.options(**_STRICT_READING)
                .schema(from_arrow_schema(records.schema))
                .parquet(folder.as_uri())
            )
            # If Spark found shorter or fewer files, rows would be missing without an error.
            if _bytes_found(frame) != size:
                raise OSError(f"Spark finds {_bytes_found(frame)} of {size} bytes in {folder}")
            yield frame.selectExpr(
                *[
                    _column(name, kind, records.schema.field(name).nullable)
                    for name, kind in frame.dtypes
                ]
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def in_memory(records: pa.Table, parts: int, folder: Path) -> Iterator[int]:
    """Write the records to Parquet files in memory, and link them into the folder.

    The links exist while the context lasts. Yields the size of the files in bytes.
    """
    size = 0
    with ExitStack() as open_files:
        for number in range(parts):
            file = os.memfd_create("records")
            open_files.callback(os.close, file)
            start, end = (records.num_rows * edge // parts for edge in (number, number + 1))
            with pa.OSFile(f"/proc/self/fd/{file}", "wb") as target:
                # Without compression, because the files exist for about a second
                pq.write_table(
                    records.slice(start, end - start),
                    target,
                    compression="none",
                    use_dictionary=[
                        one for one in _REPEATED_COLUMNS if one in records.schema.names
                    ],
                    write_statistics=False,
                    store_schema=False,
                    row_group_size=max(end - start, 1),
                )
            size += os.fstat(file).st_size
            (folder / f"part-{number:05d}.parquet").symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        yield size


def _bytes_found(frame: DataFrame) -> int:
    # The file listing that the tasks use.
    plan: Any = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    return int(plan.relation().location().sizeInBytes())


def _column(name: str, kind: str, nullable: bool) -> str:
    """Select a column with its nullability.

    Spark treats every column of a file as nullable. A table with non-nullable columns would reject
    them.
    """
    return f"`{name}`" if nullable else f"coalesce(`{name}`, {_NEVER_NULL[kind]}) AS `{name}`"
