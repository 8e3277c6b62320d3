"""Read a bounded range of a stream by `spark.read.format("kinesis")`, one task per shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.position import AT_TIMESTAMP, TRIM_HORIZON
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.spark.data_source.lineage import family
from kcl_pipeline.spark.data_source.offsets import ShardOffset
from kcl_pipeline.spark.data_source.options import SourceOptions
from kcl_pipeline.spark.data_source.plan import Piece, read_rules
from kcl_pipeline.spark.data_source.read import ReadRange, ReadRules
from kcl_pipeline.spark.data_source.streams import resolve_streams
from kcl_pipeline.spark.data_source.tasks import (
    open_reading,
    partitions_of,
    read_partition,
)


class KinesisBatchReader(DataSourceReader):
    """The reader for `spark.read`. It plans in one process and reads in the tasks."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """One task per shard that may have something to read."""
        with open_reading(self._options, SystemClock()) as kinesis:
            pieces = [
                Piece((), 0, wanted)
                for stream in resolve_streams(kinesis, self._options.streams).values()
                for wanted in plan_ranges(kinesis, stream, self._options)
            ]
        return partitions_of(pieces)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        return read_partition(partition, self._options, self._schema)


def plan_ranges(
    kinesis: KinesisClient, stream: StreamId, options: SourceOptions
) -> list[ReadRange]:
    """The ranges of one stream, sorted by shard id.

    With offsets as the start, ancestors of the named shards count as read, and their descendants
    as unread.
    """
    shards = kinesis.list_shards(stream)
    start, end = options.starting_position, options.ending_position
    position = TRIM_HORIZON if start.millis is None else AT_TIMESTAMP
    first = ShardOffset(position, timestamp_millis=start.millis)
    ranges = [
        ReadRange(
            stream,
            shard.shard_id,
            shard.hash_key_range,
            first,
            from_millis=start.millis,
            before_millis=end.millis,
        )
        for shard in sorted(shards, key=lambda s: s.shard_id)
    ]
    if start.kind == "OFFSETS":
        written = start.offsets_of(stream.name, "startingPosition")
        ranges = _after(ranges, written, shards, read_rules(options))
    if end.kind == "OFFSETS":
        return _through(ranges, end.offsets_of(stream.name, "endingPosition"), shards)
    return ranges


def _after(
    ranges: list[ReadRange],
    written: dict[str, ShardOffset],
    shards: Sequence[Shard],
    rules: ReadRules,
) -> list[ReadRange]:
    listed = {shard.shard_id for shard in shards}
    gone = sorted(
        shard_id
        for shard_id, offset in written.items()
        if shard_id not in listed and not offset.ended
    )
    if gone:
        rules.lost(f"shards of option startingPosition do not exist (any more): {', '.join(gone)}")
    unread = family(written, shards, ancestors=False)
    return [
        replace(wanted, start=start)
        for wanted in ranges
        if wanted.shard_id in unread
        and not (start := written.get(wanted.shard_id, wanted.start)).ended
    ]


def _through(
    ranges: list[ReadRange], written: dict[str, ShardOffset], shards: Sequence[Shard]
) -> list[ReadRange]:
    before = family(written, shards, ancestors=True)
    ended = []
    for wanted in ranges:
        offset = written.get(wanted.shard_id)
        if offset is None:
            if wanted.shard_id in before:
                ended.append(wanted)
        elif not offset.position.is_sentinel and (
            wanted.start.position.is_sentinel or wanted.start.position < offset.position
        ):
            first = offset.first_sequence_number if wanted.start.position.is_sentinel else None
            ended.append(replace(wanted, through=offset.position, first_sequence_number=first))
    return ended
