"""The consumer's view of the in-memory Kinesis: `records.kinesis.KinesisClient` without a network, pages straight to Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pyarrow as pa

from kcl_pipeline import errors
from kcl_pipeline.records.kinesis import RECORD_SCHEMA, IteratorType, RecordsPage, ShardFilterType
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId
from kcl_pipeline.testing import kinesis_data as data_plane
from kcl_pipeline.testing.kinesis_errors import KinesisError
from kcl_pipeline.testing.kinesis_model import KinesisModel
from kcl_pipeline.testing.kinesis_shards import Page
from kcl_pipeline.testing.kinesis_state import Answer, Params

_ERRORS = {
    "ResourceNotFoundException": errors.NotFound,
    "ExpiredIteratorException": errors.ExpiredIterator,
    "ProvisionedThroughputExceededException": errors.Throttled,
    "LimitExceededException": errors.Throttled,
    "AccessDeniedException": errors.AccessDenied,
    "InternalFailure": errors.Unavailable,
}


@contextmanager
def _translated(operation: str) -> Iterator[None]:
    try:
        yield
    except KinesisError as error:
        kind = _ERRORS.get(error.code, errors.InvalidRequest)
        if operation == "GetRecords" and error.code == "InvalidArgumentException":
            kind = errors.ExpiredIterator
        raise kind(error.message, code=error.code, operation=operation) from error


def _millis(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def records_table(stream_name: str, shard_id: str, page: Page) -> pa.Table:
    """A page as an Arrow table of `RECORD_SCHEMA`."""
    rows = len(page.data)
    columns = {
        "stream": pa.repeat(pa.scalar(stream_name, pa.string()), rows),
        "shard_id": pa.repeat(pa.scalar(shard_id, pa.string()), rows),
        "sequence_number": pa.array(page.sequence_numbers, pa.string()),
        "sub_sequence_number": pa.repeat(pa.scalar(0, pa.int64()), rows),
        "partition_key": pa.array(page.partition_keys, pa.string()),
        "explicit_hash_key": pa.nulls(rows, pa.string()),
        "data": pa.array(page.data, pa.binary()),
        "approximate_arrival_timestamp": pa.array(page.arrival_millis, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
        "encryption_type": pa.nulls(rows, pa.string()),
    }
    return pa.table(list(columns.values()), schema=RECORD_SCHEMA)


def _shard(answer: Answer) -> Shard:
    keys, numbers = answer["HashKeyRange"], answer["SequenceNumberRange"]
    return Shard(
        answer["ShardId"],
        HashKeyRange(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        numbers["StartingSequenceNumber"],
        numbers.get("EndingSequenceNumber"),
        answer.get("ParentShardId"),
        answer.get("AdjacentParentShardId"),
    )


class InMemoryKinesis:
    """`KinesisClient` on a `KinesisModel`. Raises the errors of `kcl_pipeline.errors`, as the boto3 twin does."""

    def __init__(self, model: KinesisModel) -> None:
        self.model = model

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:  # noqa: D102 (documented by the protocol)
        named = {"StreamARN": name_or_arn} if name_or_arn.startswith("arn:") else {"StreamName": name_or_arn}
        with _translated("DescribeStreamSummary"):
            summary = self.model.call("DescribeStreamSummary", **named)["StreamDescriptionSummary"]
        arn, name = str(summary["StreamARN"]), str(summary["StreamName"])
        if not multi_stream:
            return StreamId(name, arn=arn)
        return StreamId(name, arn.split(":")[4], int(summary["StreamCreationTimestamp"]) // 1000, arn)

    def list_shards(  # noqa: D102 (documented by the protocol)
        self, stream: StreamId, shard_filter: ShardFilterType | None = None, timestamp: datetime | None = None
    ) -> tuple[Shard, ...]:
        params: dict[str, object] = {"StreamName": stream.name}
        if shard_filter is not None:
            params["ShardFilter"] = {"Type": shard_filter} | ({} if timestamp is None else {"Timestamp": _millis(timestamp)})
        shards: list[Shard] = []
        with _translated("ListShards"):
            while True:
                answer = self.model.call("ListShards", **params)
                shards += [_shard(s) for s in answer["Shards"]]
                if "NextToken" not in answer:
                    return tuple(shards)
                params = {"NextToken": answer["NextToken"]}

    def get_shard_iterator(  # noqa: D102 (documented by the protocol)
        self, stream: StreamId, shard_id: str, iterator_type: IteratorType, *, sequence_number: str | None = None, timestamp: datetime | None = None
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

    def get_records(self, stream: StreamId, shard_id: str, iterator: str, limit: int) -> RecordsPage:  # noqa: D102 (documented by the protocol)
        with _translated("GetRecords"):
            read = data_plane.get_records(self.model.world, {"ShardIterator": iterator, "Limit": limit})
        table = records_table(stream.name, shard_id, read.page)
        return RecordsPage(table, read.next_iterator, read.millis_behind_latest, read.child_shards, read.page.size)
