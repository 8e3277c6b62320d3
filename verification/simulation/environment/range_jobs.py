"""Range jobs without Spark: this process does the fetches of a batch one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter
from kcl_pipeline.errors import TransformFailedError
from kcl_pipeline.kinesis.ranges import RangeReader, RangesWritten, ShardFetch


class InlineRangeJobs:
    """`RangeJobs` that reads with `reader` and writes with `writer`, as one Spark task does.

    Args:
        reader: Fetches the ranges.
        writer: Transforms and writes the rows.
        fetch_seconds: See `RangeReader.fetch`.
    """

    def __init__(
        self, reader: RangeReader, writer: BatchWriter, fetch_seconds: float = 5.0
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._fetch_seconds = fetch_seconds
        self.closed = False

    def run(self, batch_id: str, fetches: Sequence[ShardFetch]) -> RangesWritten:
        """See `RangeJobs.run`."""
        read = self._reader.fetch(fetches, self._fetch_seconds)
        shards = tuple(shard for shard, _ in read)
        rows = pa.concat_tables([table for _, table in read])
        try:
            written = self._writer.write(Batch(batch_id, (), rows))
        except TransformFailedError as error:
            return RangesWritten(shards, failure=str(error))
        return RangesWritten(shards, written.files, written.output_schema, written.rejected)

    def close(self) -> None:
        """Set `closed`."""
        self.closed = True
