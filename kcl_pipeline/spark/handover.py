"""Records from the driver to the tasks of a session on this machine: as Parquet in memory, under
names in the session's temporary folder.

`createDataFrame` turns each value into a Java row on its way in. Spark's own Parquet reader takes
whole columns, only those that the transform uses, and spends about half the processor time on them;
planning the read costs some milliseconds, so small batches are better off the other way.

The bytes are in files without a name (`memfd_create`), which the kernel takes back with the
process, however that ends; Spark is given links to them, in a folder that is new for each batch.
Nothing is read twice by mistake: a frame that is kept beyond its batch finds nothing there.
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
# a session may have been told to pass over files that are gone: here those would be lost records
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


def can_hand_over(session: SparkSession) -> bool:
    """Whether tasks see this process's memory: Linux, master `local…`, and nobody asked Spark to
    encrypt what it puts down for itself.
    """
    context: Any = session.sparkContext
    return (
        hasattr(os, "memfd_create")
        and _ON_THIS_MACHINE.fullmatch(context.master) is not None
        and not context._encryption_enabled  # noqa: SLF001 (as pyspark)
    )


@contextmanager
def handed_over(session: SparkSession, records: pa.Table, parts: int) -> Iterator[DataFrame]:
    """The records, cut in order into so many files of about equal length, as a DataFrame that can
    be read while the context lasts.

    It has the schema that `createDataFrame` gives, also in what may be null. Raises `OSError` when
    there is no room, or when Spark does not see all of it.
    """
    # removed with the JVM, also when this process is killed
    temporary: Any = session.sparkContext._temp_dir  # noqa: SLF001
    folder = Path(tempfile.mkdtemp(prefix="records-", dir=temporary))
    try:
        with in_memory(records, parts, folder) as size:
            frame = (
                session.read.options(**_STRICT_READING)
                .schema(from_arrow_schema(records.schema))
                .parquet(folder.as_uri())
            )
            if (
                _bytes_seen(frame) != size
            ):  # a file that Spark takes for shorter, or for none, is silently fewer rows
                raise OSError(f"Spark sees {_bytes_seen(frame)} of {size} bytes in {folder}")
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
    """Parquet files of these records that take no room on any disk, linked into the folder while
    the context lasts; gives their size in bytes.
    """
    size = 0
    with ExitStack() as open_files:
        for number in range(parts):
            file = os.memfd_create("records")
            open_files.callback(os.close, file)
            start, end = (records.num_rows * edge // parts for edge in (number, number + 1))
            with pa.OSFile(f"/proc/self/fd/{file}", "wb") as target:
                _write(records.slice(start, end - start), target)
            size += os.fstat(file).st_size
            (folder / f"part-{number:05d}.parquet").symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        yield size


def _write(records: pa.Table, target: pa.NativeFile) -> None:
    """Fast to write and to read: what is gone in a second is not worth a compression."""
    pq.write_table(
        records,
        target,
        compression="none",
        use_dictionary=[name for name in _REPEATED_COLUMNS if name in records.schema.names],
        write_statistics=False,
        store_schema=False,
        row_group_size=max(records.num_rows, 1),
    )


def _bytes_seen(frame: DataFrame) -> int:
    # the list of files that the tasks will go by
    plan: Any = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    return int(plan.relation().location().sizeInBytes())


def _column(name: str, kind: str, nullable: bool) -> str:
    """Spark takes every column of a file for one that may be null; a table with columns that may
    not be would refuse those.
    """
    return f"`{name}`" if nullable else f"coalesce(`{name}`, {_NEVER_NULL[kind]}) AS `{name}`"
