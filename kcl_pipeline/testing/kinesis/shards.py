"""One shard of the Kinesis model: an append-only log whose oldest records are trimmed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.shards import ChildShard, HashKeyRange
from kcl_pipeline.testing.kinesis import sequence
from kcl_pipeline.testing.kinesis.limits import ShardLimits

MAX_PAGE_BYTES: Final = 10 * 1_048_576
_COMPACT_AFTER: Final = 1024


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of one read, as columns of equal length.

    `next_index` is the index after the last record. `size` is the number of bytes of all records.
    """

    sequence_numbers: list[str]
    partition_keys: list[str | None]
    data: list[bytes]
    arrival_millis: list[int]
    next_index: int
    size: int


class ShardLog:
    """A shard and its records.

    Indexes are absolute, from 0, so they stay valid when records are trimmed. Times are epoch
    milliseconds. The shard is open from `opened_millis` (inclusive) to `closed_millis` (exclusive;
    None while it is open). The cost of an append, a page or a search is constant or logarithmic in
    the number of stored records.
    """

    def __init__(
        self,
        index: int,
        hash_key_range: HashKeyRange,
        opened_millis: int,
        created_seconds: int,
        parents: tuple[str, ...] = (),
    ) -> None:
        self.index = index
        self.shard_id = f"shardId-{index:012d}"
        self.hash_key_range = hash_key_range
        self.opened_millis = opened_millis
        self.created_seconds = created_seconds
        self.parents = parents
        self.children: tuple[ChildShard, ...] = ()
        self.closed_millis: int | None = None
        self.starting_sequence_number = sequence.starting(created_seconds, index)
        self.ending_sequence_number: str | None = None
        self.limits = ShardLimits()
        self._base = sequence.base_of(created_seconds, index)
        self._dropped = 0
        self._trimmed = 0
        self._last_arrival = opened_millis
        self._sequence_numbers: list[str] = []
        self._partition_keys: list[str | None] = []
        self._data: list[bytes] = []
        self._arrivals: list[int] = []
        self._written_bytes: list[int] = []
        self._total_bytes = 0
        self._dropped_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether the shard accepts records."""
        return self.closed_millis is None

    @property
    def head(self) -> int:
        """The index of the oldest record in retention."""
        return self._trimmed

    @property
    def end(self) -> int:
        """The index after the newest record."""
        return self._dropped + len(self._data)

    def append(self, partition_key: str | None, data: bytes, size: int, now_millis: int) -> str:
        """Store a record and return its sequence number.

        `size` is the number of bytes that count against the page limit.
        """
        arrival = self._last_arrival = max(now_millis, self._last_arrival)
        number = sequence.number(self._base, self._dropped + len(self._data) + 1, arrival // 1000)
        self._sequence_numbers.append(number)
        self._partition_keys.append(partition_key)
        self._data.append(data)
        self._arrivals.append(arrival)
        self._total_bytes += size
        self._written_bytes.append(self._total_bytes)
        return number

    def page(self, index: int, limit: int, max_bytes: int = MAX_PAGE_BYTES) -> RecordColumns:
        """Read up to `limit` records from `index`: at most `max_bytes`, but at least one record.

        A trimmed index reads from the oldest record.
        """
        first = max(index, self._trimmed) - self._dropped
        before = self._written_bytes[first - 1] if first > 0 else self._dropped_bytes
        by_size = bisect_right(self._written_bytes, before + max_bytes, lo=first)
        last = min(max(by_size, first + 1), first + limit, len(self._data))
        size = self._written_bytes[last - 1] - before if last > first else 0
        return RecordColumns(
            self._sequence_numbers[first:last],
            self._partition_keys[first:last],
            self._data[first:last],
            self._arrivals[first:last],
            self._dropped + last,
            size,
        )

    def arrival_of(self, index: int) -> int:
        """Arrival time of the record at `index` (head ≤ index < end)."""
        return self._arrivals[index - self._dropped]

    def index_at(self, sequence_number: str) -> int:
        """Index of this record, or of the first one after it."""
        return max(
            self._trimmed, self._dropped + bisect_left(self._sequence_numbers, sequence_number)
        )

    def index_after(self, sequence_number: str) -> int:
        """Index of the first record after this one."""
        return max(
            self._trimmed, self._dropped + bisect_right(self._sequence_numbers, sequence_number)
        )

    def index_at_time(self, millis: int) -> int:
        """Index of the first record that arrived at `millis` or later."""
        return max(self._trimmed, self._dropped + bisect_left(self._arrivals, millis))

    def owns(self, number: sequence.SequenceParts) -> bool:
        """Whether the sequence number belongs to this shard."""
        return (
            number.shard_index == self.index
            and number.shard_created_seconds == self.created_seconds
        )

    def close(self, now_millis: int, children: tuple[ChildShard, ...]) -> None:
        """Close the shard: it accepts no more records, and readers at its end get the children."""
        self.closed_millis = now_millis
        self.children = children
        self.ending_sequence_number = sequence.ending(
            self.created_seconds, self.index, max(now_millis, self._last_arrival) // 1000
        )

    def trim(self, before_millis: int) -> None:
        """Drop records that arrived before `before_millis`.

        The cost depends on the number of dropped records, not on the number of kept ones.
        """
        first = self._trimmed - self._dropped
        while first < len(self._arrivals) and self._arrivals[first] < before_millis:
            first += 1
        self._trimmed = self._dropped + first
        if first > _COMPACT_AFTER and first * 2 > len(self._arrivals):
            self._dropped_bytes = self._written_bytes[first - 1]
            for column in (
                self._sequence_numbers,
                self._partition_keys,
                self._data,
                self._arrivals,
                self._written_bytes,
            ):
                del column[:first]
            self._dropped = self._trimmed

    def was_open_at(self, millis: int) -> bool:
        """Whether the shard accepted records at this time."""
        return self.opened_millis <= millis and (
            self.closed_millis is None or millis < self.closed_millis
        )
