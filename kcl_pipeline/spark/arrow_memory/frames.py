"""Open the records of a batch as a DataFrame over Arrow columns in memory.

The bytes are in memory files, which later batches use again (`pool`). Each file begins with the
batch's token. The Java class reads it, so a DataFrame that is used after its batch fails. It never
reads the records of the next batch. A file that a task still reads is not used again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, Final, Literal

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import ArrowMemorySkipped, EventSink, ignore_events
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory.classes import (
    SOURCE_CLASS,
    UnsuitableSessionError,
    java_class,
)
from kcl_pipeline.spark.arrow_memory.pool import HEADER_BYTES, MemoryFile, MemoryPool, header
from kcl_pipeline.spark.failures.job_errors import spark_line

_LOG: Final = logging.getLogger(__name__)
_END_BYTES: Final = 8
"""The end of a stream in Arrow's IPC format."""
_MAX_FILE_BYTES: Final = 2**31 - 1
"""A file that Java maps as one buffer."""
_SMALL_CHUNK_BYTES: Final = 32 * 1024
"""Chunks that are smaller on average are combined, because each one takes some time to open."""
_TYPES: Final = frozenset({pa.string(), pa.binary(), pa.int64(), pa.timestamp("us", tz="UTC")})


class ArrowMemory:
    """Open batches as DataFrames, if the session can read them.

    Whether it can is decided once. If it cannot, or if a batch cannot be passed in this way, an
    event states the reason. It is not repeated while the reason stays the same.

    Args:
        session: The Spark session.
        memory: Counts the memory files.
        events: Receives `ArrowMemorySkipped`.
    """

    def __init__(
        self, session: SparkSession, memory: MemoryBudget, events: EventSink = ignore_events
    ) -> None:
        self._session = session
        self._events = events
        self._reasons: dict[str, str] = {}
        self.pool = MemoryPool(memory)
        self._java: Any = None
        self._unsuitable = False

    def prepare(self) -> bool:
        """Load the Java classes and read a few rows with them, unless this was done before.

        Returns:
            Whether batches can be passed in this way.
        """
        if self._java is None and not self._unsuitable:
            try:
                self._java = java_class(self._session, SOURCE_CLASS)
                self._check()
            except (UnsuitableSessionError, OSError, PySparkException, Py4JError) as error:
                self._java, self._unsuitable = None, True
                self.skipped("records", error)
        return self._java is not None

    @contextmanager
    def frame(self, records: pa.Table, partitions: int) -> Iterator[DataFrame | None]:
        """The records as a DataFrame that can be read while the context lasts.

        It has the schema of `createDataFrame`, including nullability. None: use another way.

        Args:
            records: The records of a batch.
            partitions: Number of partitions of about equal length, in order.
        """
        with ExitStack() as stack:
            frame = None
            if self.prepare():
                try:
                    frame = stack.enter_context(self._opened(records, partitions))
                except (UnsuitableSessionError, OSError, PySparkException, Py4JError) as error:
                    self.skipped("records", error)
            yield frame

    def skipped(self, what: Literal["records", "result"], error: Exception) -> None:
        """State in an event the error that prevents this direction, once for each reason."""
        reason = str(error) if isinstance(error, KclError | OSError) else spark_line(error)
        if reason not in self._reasons.values():
            self._events(ArrowMemorySkipped(reason))
        self._reasons[what] = reason

    def caused(self, error: Exception) -> bool:
        """Whether the failure of a job began in the Java class, and not in the user's function.

        Then the event states it, and the batch must be passed in another way.
        """
        cause = error.__cause__
        java = getattr(cause, "java_exception", None) or getattr(cause, "_origin", None)
        if self._java is None or java is None or not self._java.caused(java):
            return False
        self.skipped("records", error)
        return True

    @contextmanager
    def _opened(self, records: pa.Table, partitions: int) -> Iterator[DataFrame]:
        if not _TYPES.issuperset(records.schema.types):
            raise UnsuitableSessionError(f"records with the types {records.schema.types}")
        edges = [records.num_rows * number // partitions for number in range(partitions + 1)]
        chunks = [_chunks(records.slice(begin, end - begin)) for begin, end in pairwise(edges)]
        sizes = [_file_bytes(records.schema, some) for some in chunks]
        if max(sizes) > _MAX_FILE_BYTES:
            raise UnsuitableSessionError("a partition of the batch has 2 GiB or more")
        token, is_ended = uuid.uuid4().hex, False
        files = self.pool.take("records", sizes)
        try:
            for file, some in zip(files, chunks, strict=True):
                _write(file, token, records.schema, some)
            self._java.open(token)
            try:
                yield (
                    self._session.read.format(SOURCE_CLASS)
                    .schema(from_arrow_schema(records.schema))
                    .options(
                        token=token,
                        files=":".join(file.path for file in files),
                        sizes=":".join(map(str, sizes)),
                        rows=records.num_rows,
                    )
                    .load()
                )
            finally:
                is_ended = self._release(token)
        finally:
            self.pool.give_back(files, is_ended=is_ended)

    def _release(self, token: str) -> bool:
        """End the batch in the JVM.

        Returns:
            Whether no task reads its files any more.
        """
        try:
            return int(self._java.release(token)) == 0
        except (Py4JError, OSError) as error:  # without a JVM there is nothing to unmap
            _LOG.info("cannot release the records of batch %s: %s", token, spark_line(error))
            return False

    def _check(self) -> None:
        """Read rows of every type through the tasks.

        Raises:
            UnsuitableSessionError: The rows or their types differ from those of Arrow.
        """
        with self._opened(_SAMPLE, 2) as frame:
            if not frame.toArrow().cast(_SAMPLE.schema).equals(_SAMPLE):
                raise UnsuitableSessionError("Spark does not read the same rows")


def _file_bytes(schema: pa.Schema, chunks: Sequence[pa.RecordBatch]) -> int:
    """Bytes of the header and a stream with these chunks."""
    streamed: int = sum(pa.ipc.get_record_batch_size(chunk) for chunk in chunks)
    return HEADER_BYTES + int(schema.serialize().size) + streamed + _END_BYTES


def _write(
    file: MemoryFile, token: str, schema: pa.Schema, chunks: Sequence[pa.RecordBatch]
) -> None:
    """Write the token and the chunks."""
    with file.target() as target:
        target.write(header(token))
        with pa.ipc.new_stream(target, schema) as stream:
            for chunk in chunks:
                stream.write_batch(chunk)


def _chunks(records: pa.Table) -> list[pa.RecordBatch]:
    chunks = [batch for batch in records.to_batches() if batch.num_rows]
    if len(chunks) > 1 and records.nbytes // len(chunks) < _SMALL_CHUNK_BYTES:
        return list(records.combine_chunks().to_batches())
    return chunks


def _sample() -> pa.Table:
    """Rows in two chunks, with and without nulls."""
    texts = ["", "a", "ü" * 40]
    values: dict[pa.DataType, list[Any]] = {
        pa.string(): texts,
        pa.binary(): [b"", b"\x00\xff", b"x" * 70],
        pa.int64(): [-(2**63), 0, 2**63 - 1],
        pa.timestamp("us", tz="UTC"): [-62_135_596_800_000_000, 0, 1_760_000_000_123_456],
    }
    columns = [
        pa.array([None, *texts[1:]] if field.nullable else values[field.type], field.type)
        for field in RECORD_SCHEMA
    ]
    table = pa.Table.from_arrays(columns, schema=RECORD_SCHEMA)
    return pa.concat_tables([table, table.slice(1)])


_SAMPLE: Final = _sample()
