"""Implement Spark's protocol for Python stream readers: `spark.readStream.format("kinesis")`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.spark.data_source.offsets import Offset, offset_from_json, offset_to_json
from kcl_pipeline.spark.data_source.options import SourceOptions
from kcl_pipeline.spark.data_source.plan import Limit, StreamPlanner
from kcl_pipeline.spark.data_source.tasks import (
    open_reading,
    partitions_of,
    read_partition,
)


class KinesisStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader for `spark.readStream`.

    One object is in the process that plans the query's batches and prefetches records. Each task
    has a copy, which reads its partition.
    """

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._opened: tuple[ExitStack, StreamPlanner] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 (Spark's name)
        """The first offset of a query without a checkpoint."""
        return offset_to_json(self._planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """The limit of the options.

        Spark has no combined limit of records and bytes. With both, the planner applies the bytes.
        """
        rows = self._options.max_records_per_trigger
        return (
            ReadMaxRows(rows)
            if rows is not None
            else ReadMaxBytes(self._options.max_bytes_per_trigger)
        )

    # Spark's name
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch, or `start` itself."""
        end = self._planner.plan(_logged(start), _limit(limit))
        return start if end is None else offset_to_json(end)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """Let the query end at the present end of every shard."""
        self._planner.read_to_the_tip()

    def partitions(
        self, start: dict[str, Any] | None, end: dict[str, Any]
    ) -> Sequence[InputPartition]:
        """The tasks of the batch between two offsets."""
        planner = self._planner
        return partitions_of(
            planner.pieces(_logged(start) if start is not None else planner.initial(), _logged(end))
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        return read_partition(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the next plan drops the batch, and Kinesis stores no positions."""

    def stop(self) -> None:
        """Release the planner after the query has ended."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()
        if isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
            # Spark closed the connection while a plan waited for records. Its runner would now
            # print three tracebacks.
            os._exit(0)

    @property
    def _planner(self) -> StreamPlanner:
        if self._opened is None:
            opened, clock, threads = ExitStack(), SystemClock(), self._options.fetch_threads
            kinesis = opened.enter_context(open_reading(self._options, clock))
            planner = StreamPlanner(kinesis, self._options, clock, random.Random(), threads=threads)
            opened.callback(planner.close)
            self._opened = (opened, planner)
        return self._opened[1]


def _logged(offset: dict[str, Any]) -> Offset:
    try:
        return offset_from_json(offset)
    except ValueError as error:
        raise SettingsError(
            f"the checkpoint's offset is not one of format('kinesis'): {error}; write another "
            "checkpointLocation"
        ) from None


def _limit(limit: ReadLimit) -> Limit:
    if isinstance(limit, ReadMaxRows):
        return Limit(max_records=limit.max_rows)
    if isinstance(limit, ReadMaxBytes):
        return Limit(max_bytes=limit.max_bytes)
    return Limit(everything=isinstance(limit, ReadAllAvailable))
