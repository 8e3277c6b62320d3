"""Pass batches as Spark DataFrames to the function of a `ForeachBatchSink` (see `foreach`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcl_pipeline.batch import (
    ERROR_COLUMN,
    Batch,
    PartFailure,
    RejectedColumns,
    rejected_columns,
    split_rejected,
)
from kcl_pipeline.foreach import ForeachBatchSink, FunctionCalls
from kcl_pipeline.spark.failures.job_errors import classified, spark_line
from kcl_pipeline.spark.failures.probes import SparkProbe
from kcl_pipeline.spark.schema import arrow_schema
from kcl_pipeline.spark.writer import SparkTransform, records_frame, transformed


class ForeachBatch(FunctionCalls[DataFrame]):
    """Both the `BatchWriter` and the `Sink` of a `ForeachBatchSink`."""

    def __init__(
        self,
        session: SparkSession,
        sink: ForeachBatchSink,
        transform: SparkTransform | None = None,
    ) -> None:
        super().__init__(sink, sink.function, spark_line)
        self._session = session
        self._transform = transform
        self._probe = SparkProbe(
            session, lambda frame, records: transformed(frame, transform, records)
        )

    def write(self, batch: Batch) -> Batch:
        """Transform, and keep the result for `commit` (see `BatchWriter.write`)."""
        records = batch.records.num_rows
        if not records:
            return replace(batch, files=())
        frame = transformed(records_frame(self._session, batch.records), self._transform, records)
        rejects = rejected_columns(arrow_schema(frame.schema))
        holds = ExitStack()
        holds.callback(frame.unpersist)
        try:
            rows = frame.persist().count()
            kept, rejected = (frame, None) if rejects is None else _split(frame, rejects)
            schema = arrow_schema(kept.schema)
        except Exception as error:
            holds.close()
            raise classified(error, records) from error
        rows -= 0 if rejected is None else rejected.num_rows
        if not rows:
            holds.close()
            return replace(batch, files=(), rejected=rejected)
        file = self.keep(batch, kept, rows, holds)
        return replace(batch, files=(file,), output_schema=schema, rejected=rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Evaluate the transform on each part (see `BatchWriter.probe`)."""
        return self._probe.failures(slices)


def _split(frame: DataFrame, rejects: RejectedColumns) -> tuple[DataFrame, pa.Table | None]:
    """The rows for the function, and the rejected ones (`batch.REJECTED_SCHEMA`)."""
    names = dict.fromkeys(rejects.columns)
    rejected_rows = frame.where(f"{ERROR_COLUMN} is not null").select(*names).toArrow()
    kept = frame.where(f"{ERROR_COLUMN} is null").drop(*rejects.dropped)
    return kept, split_rejected(rejected_rows)[1]
