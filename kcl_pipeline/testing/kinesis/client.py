"""`KinesisClient` on the in-memory Kinesis, without a network.

Pages become Arrow tables directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

import pyarrow as pa

from kcl_pipeline import errors
from kcl_pipeline.batch import NO_RECORDS, RECORD_SCHEMA
from kcl_pipeline.error_codes import class_of
from kcl_pipeline.kinesis.client import IteratorType, LatestIterator, RecordsPage, ShardFilterType
from kcl_pipeline.kinesis.decode import shard_of
from kcl_pipeline.shards import USER_PARTITION_KEY, Shard, StreamId
from kcl_pipeline.testing.kinesis import data as data_plane
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.shards import RecordColumns
from kcl_pipeline.testing.kinesis.state import Params


@contextmanager
def _translated(operation: str) -> Iterator[None]:
    try:
        yield
    except KinesisError as error:
        raise _error(error, operation) from error


def _error(error: KinesisError, operation: str) -> errors.AwsError:
    kind = class_of(error.code)
    if error.code == "ExpiredIteratorException" or (
        operation == "GetRecords" and error.code == "InvalidArgumentException"
    ):
        kind = errors.ExpiredIteratorError
    return kind(error.message, code=error.code, operation=operation)


_STORED: Final = pa.struct(
    [
        RECORD_SCHEMA.field(name)
        for name in (
            "sequence_number",
            "partition_key",
            "data",
            "approximate_arrival_timestamp",
        )
    ]
)
"""The columns of a page that differ between records."""


@lru_cache(maxsize=1_000)
def _repeated(name: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(name, pa.string()), rows)


@lru_cache(maxsize=100)
def _constants(rows: int) -> tuple[pa.Array, pa.Array]:
    """Return a column of zeros and a column of nulls with `rows` rows.

    The columns are cached, because arrays are immutable and expensive to create.
    """
    return pa.repeat(pa.scalar(0, pa.int64()), rows), pa.nulls(rows, pa.string())


def _millis(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def records_table(stream_name: str, shard_id: str, page: RecordColumns) -> pa.Table:
    """Convert a page to an Arrow table of `RECORD_SCHEMA`."""
    rows = len(page.data)
    if not rows:
        return NO_RECORDS
    zeros, absent = _constants(rows)
    micros = [millis * 1000 for millis in page.arrival_millis]
    stored = zip(page.sequence_numbers, page.partition_keys, page.data, micros, strict=True)
    # One call for four columns, and a batch before the table: most pages have few records
    numbers, keys, data, arrivals = pa.array(list(stored), _STORED).flatten()
    columns = {
        "stream": _repeated(stream_name, rows),
        "shard_id": _repeated(shard_id, rows),
        "sequence_number": numbers,
        "sub_sequence_number": zeros,
        "partition_key": keys,
        "explicit_hash_key": absent,
        "data": data,
        "approximate_arrival_timestamp": arrivals,
        "encryption_type": absent,
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=RECORD_SCHEMA)
    return pa.Table.from_batches([batch])


class InMemoryKinesis:
    """`KinesisClient` on a `KinesisModel`.

    Raises the errors of `kcl_pipeline.errors`, as the boto3 client does.
    """

    def __init__(self, model: KinesisModel) -> None:
        self.model = model

    # documented by the protocol
    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:  # noqa: D102
        named = (
            {"StreamARN": name_or_arn}
            if name_or_arn.startswith("arn:")
            else {"StreamName": name_or_arn}
        )
        with _translated("DescribeStreamSummary"):
            summary = self.model.call("DescribeStreamSummary", **named)["StreamDescriptionSummary"]
        arn, name = str(summary["StreamARN"]), str(summary["StreamName"])
        millis = int(summary["StreamCreationTimestamp"])
        stream = StreamId(
            name,
            arn=arn,
            created_millis=millis,
            retention_hours=int(summary["RetentionPeriodHours"]),
            record_distribution=summary.get("RecordDistributionStrategy", USER_PARTITION_KEY),
        )
        if not multi_stream:
            return stream
        return replace(stream, account=arn.split(":")[4], creation_epoch=millis // 1000)

    def list_shards(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        params: dict[str, object] = {"StreamName": stream.name}
        if shard_filter is not None:
            params["ShardFilter"] = {"Type": shard_filter} | (
                {} if timestamp is None else {"Timestamp": _millis(timestamp)}
            )
        shards: list[Shard] = []
        with _translated("ListShards"):
            while True:
                answer = self.model.call("ListShards", **params)
                shards += [shard_of(s) for s in answer["Shards"]]
                if "NextToken" not in answer:
                    return tuple(shards)
                params = {"NextToken": answer["NextToken"]}

    # documented by the protocol; whole seconds, like the Date header of a real response
    def service_time(self, stream: StreamId) -> datetime | None:  # noqa: D102
        with _translated("ListShards"):
            self.model.call("ListShards", StreamName=stream.name, MaxResults=1)
        return datetime.fromtimestamp(int(self.model.world.now_millis()) // 1000, UTC)

    def get_shard_iterator(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        params: Params = {
            "StreamName": stream.name,
            "ShardId": shard_id,
            "ShardIteratorType": iterator_type,
            "StartingSequenceNumber": sequence_number,
            "Timestamp": _millis(timestamp),
        }
        with _translated("GetShardIterator"):
            return str(self.model.call("GetShardIterator", **params)["ShardIterator"])

    # documented by the protocol; whole seconds, like the Date header of a real response
    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:  # noqa: D102
        since = datetime.fromtimestamp(int(self.model.world.now_millis()) // 1000, UTC)
        return LatestIterator(self.get_shard_iterator(stream, shard_id, "LATEST"), since)

    def get_records(  # noqa: D102 (documented by the protocol)
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        try:
            read = data_plane.get_records(
                self.model.world, {"ShardIterator": iterator, "Limit": limit}
            )
        except KinesisError as error:
            raise _error(error, "GetRecords") from error
        table = records_table(stream.column, shard_id, read.page)
        return RecordsPage(
            table,
            read.next_iterator,
            read.millis_behind_latest,
            read.child_shards,
            read.page.size,
            self.model.world.now_millis(),
        )
