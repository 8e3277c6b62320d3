"""Serve stored dead letters as the records of a stream, so that a worker can read them again.

The streams that the records came from are not needed. A shard has no end: it is read to its tip, as
an open shard that nobody writes to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from kcl_pipeline.delta.dead_letters.records import DeadLetterRecords, DeadLetterShard
from kcl_pipeline.errors import ExpiredIteratorError, NotFoundError, SinkError, UnavailableError
from kcl_pipeline.kinesis.client import (
    NO_RECORDS,
    IteratorType,
    LatestIterator,
    RecordsPage,
    ShardFilterType,
)
from kcl_pipeline.kinesis.sizes import payload_bytes
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, Shard, StreamId

STREAM: Final = "dead-letters"
"""Name of the stream. The records keep the names of their own streams."""
_AT, _AFTER = "@", ">"


class DeadLetterKinesis:
    """A `KinesisClient` in memory for the records of a dead-letter table. Thread-safe.

    An iterator is the number of a page. `@` or `>` and a sequence number may follow: then reading
    begins at this number, or after it.
    """

    def __init__(self, records: DeadLetterRecords) -> None:
        self._records = records
        self._shards: dict[str, DeadLetterShard | None] = {
            f"{STREAM}-{number:04d}": shard for number, shard in enumerate(records.shards)
        } or {f"{STREAM}-0000": None}

    def resolve_stream(
        self,
        name_or_arn: str,  # noqa: ARG002 (there is one stream)
        *,
        multi_stream: bool,  # noqa: ARG002
    ) -> StreamId:
        """See `KinesisClient`. The stream has no creation time, so its identity is not checked."""
        return StreamId(STREAM)

    def list_shards(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,  # noqa: ARG002 (there is one stream)
        shard_filter: ShardFilterType | None = None,  # noqa: ARG002 (all shards are open)
        timestamp: datetime | None = None,  # noqa: ARG002
    ) -> tuple[Shard, ...]:
        width = (MAX_HASH_KEY + 1) // len(self._shards)
        starts = [number * width for number in range(len(self._shards))]
        ends = [*(start - 1 for start in starts[1:]), MAX_HASH_KEY]
        return tuple(
            Shard(shard_id, HashKeyRange(start, end), "0")
            for shard_id, start, end in zip(self._shards, starts, ends, strict=True)
        )

    def service_time(self, stream: StreamId) -> datetime | None:  # noqa: ARG002
        """See `KinesisClient`. There is no service."""
        return None

    def get_shard_iterator(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,  # noqa: ARG002
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,  # noqa: ARG002 (AT_TIMESTAMP is the begin)
    ) -> str:
        shard = self._shard(shard_id, "GetShardIterator")
        pages = () if shard is None else shard.pages
        if sequence_number is not None:
            is_at = iterator_type == "AT_SEQUENCE_NUMBER"
            bisect = bisect_left if is_at else bisect_right
            page = bisect(pages, _key(sequence_number), key=lambda page: _key(page.last))
            return f"{page}{_AT if is_at else _AFTER}{sequence_number}"
        return str(len(pages) if iterator_type == "LATEST" else 0)

    # documented by the protocol
    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:  # noqa: D102
        return LatestIterator(self.get_shard_iterator(stream, shard_id, "LATEST"), None)

    def get_records(
        self,
        stream: StreamId,  # noqa: ARG002
        shard_id: str,
        iterator: str,
        limit: int,  # noqa: ARG002 (the pages are cut by `DeadLetterRecords`)
    ) -> RecordsPage:
        """See `KinesisClient`. The lag of the last page is 0, that of the others 1 ms."""
        shard = self._shard(shard_id, "GetRecords")
        number, sign, position = _parsed(iterator)
        if shard is None or number >= len(shard.pages):
            return RecordsPage(NO_RECORDS, iterator, 0)
        try:
            records = self._records.read(shard, shard.pages[number])
        except SinkError as error:
            raise UnavailableError(
                str(error), code="DeadLetters", operation="GetRecords"
            ) from error
        if position:
            numbers: Sequence[str] = records["sequence_number"].to_pylist()
            bisect: Callable[..., int] = bisect_left if sign == _AT else bisect_right
            records = records.slice(bisect(numbers, _key(position), key=_key))
        is_last = number == len(shard.pages) - 1
        return RecordsPage(
            records, str(number + 1), 0 if is_last else 1, bytes=payload_bytes(records)
        )

    def _shard(self, shard_id: str, operation: str) -> DeadLetterShard | None:
        if shard_id not in self._shards:
            raise NotFoundError(
                f"there is no shard {shard_id} of dead letters",
                code="ResourceNotFoundException",
                operation=operation,
            )
        return self._shards[shard_id]


def _parsed(iterator: str) -> tuple[int, str, str]:
    """Return the number of the page, the sign, and the sequence number, or two empty texts."""
    sign = _AFTER if _AFTER in iterator else _AT
    page, found, number = iterator.partition(sign)
    if not page.isdigit():
        raise ExpiredIteratorError(
            "the iterator is not of these dead letters",
            code="ExpiredIteratorException",
            operation="GetRecords",
        )
    return int(page), found, number


def _key(sequence_number: str) -> tuple[int, str]:
    """Order numbers without leading zeros."""
    return len(sequence_number), sequence_number
