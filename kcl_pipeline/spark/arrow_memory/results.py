"""Read the result of a Spark function as Arrow columns in memory, evaluated in one job.

A partition of the result is a stream of Arrow's IPC format in a memory file, which later batches
use again (`pool`). When a record batch does not fit into the memory budget, its task continues in
a temporary file without a name, in Spark's temporary folder. The kernel frees both kinds when the
last process that uses them ends, also after `kill -9`.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.spark.arrow_memory.classes import (
    RESULT_CLASS,
    UnsuitableSessionError,
    java_class,
)
from kcl_pipeline.spark.arrow_memory.frames import ArrowMemory
from kcl_pipeline.spark.arrow_memory.pool import HEADER_BYTES, MemoryFile, header
from kcl_pipeline.spark.arrow_memory.samples import equals_sample, sample_result
from kcl_pipeline.spark.failures.job_errors import spark_line
from kcl_pipeline.spark.file_tasks import in_pieces
from kcl_pipeline.spark.schema import arrow_schema
from kcl_pipeline.threads import DaemonPool

_MOST_ROWS: Final = 16 * 1024
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Limits of a record batch, which a row may exceed."""
Pieces = Iterator[pa.Table]
T = TypeVar("T")


class ArrowResults:
    """Evaluate DataFrames into Arrow columns, if the session can do it.

    Args:
        session: The Spark session.
        memory: Decides whether tasks can use the memory of this process, and states why not.
    """

    def __init__(self, session: SparkSession, memory: ArrowMemory) -> None:
        self._session = session
        self._memory = memory
        self._java: Any = None
        self._is_tried = False
        self._most_files = 1
        # Kept for later batches: new threads would allocate their encoding memory again.
        self._pool: DaemonPool | None = None

    def prepare(self) -> bool:
        """Load the Java class and write a few rows with it, unless this was done before.

        Returns:
            Whether results can be read in this way.
        """
        if not self._is_tried:
            self._is_tried = True
            if self._memory.prepare():
                try:
                    self._load()
                except (UnsuitableSessionError, OSError, PySparkException, Py4JError) as error:
                    self._java = None
                    self._memory.skipped("result", error)
        return self._java is not None

    def each(
        self, frame: DataFrame, partitions: int | None, use: Callable[[int, Pieces], T]
    ) -> list[T] | None:
        """Evaluate the frame in one job, and call `use` for each partition that has rows.

        The calls are in several threads. The rows exist until `each` returns.

        Args:
            frame: A result.
            partitions: Most partitions; None for one per core.
            use: Gets the number of a partition and its rows in pieces.

        Returns:
            The results of the calls in the order of the partitions. None: use another way. An event
            states the reason.

        Raises:
            SinkError, TransformFailedError: `use` raised it.
            Exception: The job failed, and not in the Java class.
        """
        if not self.prepare():
            return None
        try:
            with self._opened(self._most_files if partitions is None else partitions) as files:
                found = self._used(self._evaluated(frame, files), use)
                files.is_ended = files.writing == 0
                return found
        except UnsuitableSessionError as error:
            self._memory.skipped("result", error)
        return None

    def _load(self) -> None:
        self._java = java_class(self._session, RESULT_CLASS)
        self._most_files = max(self._session.sparkContext.defaultParallelism, 1)
        with self._opened(2) as files:
            partitions = self._evaluated(sample_result(self._session), files)
            if not equals_sample([table for one in partitions for table in one.pieces()]):
                raise UnsuitableSessionError("Spark does not write the same rows")

    @contextmanager
    def _opened(self, partitions: int) -> Iterator[_Files]:
        token = uuid.uuid4().hex
        folder = str(self._session.sparkContext._temp_dir)  # noqa: SLF001
        with ExitStack() as opened:
            try:
                memory = self._memory.pool.take("result", [HEADER_BYTES] * partitions)
                files = _Files(token, memory)
                # After an error, a task may still write
                opened.callback(
                    lambda: self._memory.pool.give_back(files.memory, is_ended=files.is_ended)
                )
                for file in memory:
                    file.start(token)
                for _ in range(partitions):
                    disk = opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                    disk.write(header(token))
                    files.disk.append(disk.fileno())
            except OSError as error:
                raise UnsuitableSessionError(str(error)) from error
            yield files

    # Not a context manager: the frames of an error would not be those of the user's function.
    def _evaluated(self, frame: DataFrame, files: _Files) -> list[_Partition]:
        try:
            with self._memory.pool.growing() as room:
                told = self._java.run(
                    frame._jdf,  # noqa: SLF001 (the only way to the plan)
                    files.token,
                    ":".join(
                        [file.path for file in files.memory]
                        + [f"/proc/{os.getpid()}/fd/{file}" for file in files.disk]
                    ),
                    bytearray(arrow_schema(frame.schema).serialize()),
                    _MOST_ROWS,
                    _MOST_BYTES,
                    room,
                )
        except Exception as error:
            # Whether it began in the Java class, and not in the user's function
            java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
            if java is not None and self._java.caused(java):
                raise UnsuitableSessionError(spark_line(error)) from error
            raise
        writing, *partitions = str(told).split()
        files.writing = int(writing)
        counted = (map(int, one.split(":")) for one in partitions)
        return [
            _Partition(number, files.memory[number], files.disk[number], *counts)
            for number, *counts in counted
            if counts[0] or counts[2]
        ]

    def _used(self, partitions: Sequence[_Partition], use: Callable[[int, Pieces], T]) -> list[T]:
        call = partial(_call, use)
        if len(partitions) < 2:  # noqa: PLR2004 (a thread would only cost time)
            return [call(partition) for partition in partitions]
        self._pool = self._pool or DaemonPool(os.cpu_count() or 1, "write")
        calls = [self._pool.submit(call, partition) for partition in partitions]
        wait(calls)  # also after a failure, so that no thread writes after this call
        return [one.result() for one in calls]


@dataclass(slots=True)
class _Files:
    """The files of a result by partition. Those on the disk are descriptors."""

    token: str
    memory: Sequence[MemoryFile]
    disk: list[int] = field(default_factory=list)
    writing: int = 1
    """Tasks that may still write."""
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Partition:
    """The files of a partition, with their numbers of rows and the ends of their streams."""

    number: int
    memory: MemoryFile
    disk: int
    rows_in_memory: int
    end_in_memory: int
    rows_on_disk: int
    end_on_disk: int

    def pieces(self) -> Pieces:
        """The rows in order, without a copy.

        Raises:
            UnsuitableSessionError: The files do not have these rows.
        """
        if self.rows_in_memory:
            yield from _pieces(self.memory.buffer(self.end_in_memory), self.rows_in_memory)
        if self.rows_on_disk:
            with pa.memory_map(f"/proc/self/fd/{self.disk}") as mapped:
                yield from _pieces(mapped.read_buffer(self.end_on_disk), self.rows_on_disk)


def _pieces(file: pa.Buffer, rows: int) -> Pieces:
    found = 0
    for piece in in_pieces(pa.ipc.open_stream(file.slice(HEADER_BYTES))):
        found += piece.num_rows
        yield piece
    if found != rows:
        raise UnsuitableSessionError(f"a partition of the result has {found} of {rows} rows")


def _call(use: Callable[[int, Pieces], T], partition: _Partition) -> T:
    try:
        return use(partition.number, partition.pieces())
    except (SinkError, TransformFailedError, UnsuitableSessionError):
        raise
    except Exception as error:
        raise UnsuitableSessionError(
            f"the result cannot be written: {type(error).__name__}: {error}"
        ) from error
