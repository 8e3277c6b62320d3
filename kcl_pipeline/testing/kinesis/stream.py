"""One stream of the Kinesis model: its shards, record routing and resharding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.shards import MAX_HASH_KEY, USER_PARTITION_KEY, ChildShard, HashKeyRange
from kcl_pipeline.testing.kinesis.errors import invalid_argument, not_found
from kcl_pipeline.testing.kinesis.limits import TokenBucket
from kcl_pipeline.testing.kinesis.shards import ShardLog

HOUR_MILLIS: Final = 3_600_000
_ROUNDING: Final = 100_000


@dataclass(slots=True)
class FanOutConsumer:
    """A registered enhanced fan-out consumer. Times are epoch milliseconds."""

    name: str
    arn: str
    created_millis: int


@dataclass(slots=True)
class Subscription:
    """A fan-out subscription of one consumer to one shard.

    `index` is the next record to deliver. Times are epoch milliseconds.
    """

    stream_name: str
    stream_serial: int
    shard_id: str
    consumer_arn: str
    index: int
    started_millis: int
    ends_millis: int
    last_event_millis: int | None = None
    superseded: bool = False
    bucket: TokenBucket | None = None


def even_boundaries(count: int) -> list[int]:
    """The starting hash keys of `count` equally wide shards."""
    width = (MAX_HASH_KEY + 1) // count
    return [i * width for i in range(count)]


class Stream:
    """A stream with its shards, consumers and subscriptions.

    `serial` distinguishes two streams of the same name. Times are epoch milliseconds.
    """

    def __init__(
        self, name: str, arn: str, account: str, serial: int, created_millis: int, mode: str
    ) -> None:
        self.name = name
        self.arn = arn
        self.account = account
        self.serial = serial
        self.created_millis = created_millis
        self.mode = mode
        self.record_distribution = USER_PARTITION_KEY
        self.status = "CREATING"
        self.retention_hours = 24
        self._removed_millis = created_millis  # the oldest time that all removed shards had left
        self.max_record_bytes = 1_048_576
        self.tags: dict[str, str] = {}
        self.consumers: dict[str, FanOutConsumer] = {}
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.reshard_millis: list[int] = []
        self._shards: dict[str, ShardLog] = {}
        self._next_index = 0
        self._open: list[ShardLog] = []
        self._open_ends: list[int] = []
        self._spread = 0
        self._pending: tuple[int, Callable[[int], None]] | None = None

    # -- state
    # ----------------------------------------------------------------------------

    def begin(
        self, status: str, ready_millis: int, now_millis: int, change: Callable[[int], None]
    ) -> None:
        """Enter `status` until `ready_millis`; then apply `change` and become ACTIVE.

        The change is applied at once if it is due at `now_millis`.
        """
        self.status = status
        self._pending = (ready_millis, change)
        self.settle(now_millis)

    def settle(self, now_millis: int) -> None:
        """Apply what is due: a pending change, and the removal of shards that left retention."""
        if self._pending is not None and now_millis >= self._pending[0]:
            ready_millis, change = self._pending
            self._pending = None
            self.status = "ACTIVE"
            change(ready_millis)
        horizon = now_millis - self.retention_hours * HOUR_MILLIS
        if horizon > self.created_millis:
            for shard in [
                s
                for s in self._shards.values()
                if s.closed_millis is not None and s.closed_millis <= horizon
            ]:
                del self._shards[shard.shard_id]
                self._removed_millis = max(self._removed_millis, horizon)

    def horizon_millis(self, now_millis: int) -> int:
        """The oldest time that the stream still retains.

        A longer retention period does not bring removed shards back, so the horizon stays behind
        them: the shards that were open at the horizon cover all hash keys at every time.
        """
        return max(self._removed_millis, now_millis - self.retention_hours * HOUR_MILLIS)

    def trim(self, shard: ShardLog, now_millis: int) -> None:
        """Drop the shard's records that are older than the retention period."""
        shard.trim(now_millis - self.retention_hours * HOUR_MILLIS)

    # -- shards
    # ----------------------------------------------------------------------------

    @property
    def shards(self) -> list[ShardLog]:
        """All shards in retention, in the order of their ids."""
        return list(self._shards.values())

    @property
    def open_shards(self) -> list[ShardLog]:
        """The shards that accept records, in the order of their hash keys."""
        return self._open

    def shard(self, shard_id: str) -> ShardLog | None:
        """The shard with this id, or None if it does not exist or has left retention."""
        return self._shards.get(shard_id)

    def require_shard(self, shard_id: str) -> ShardLog:
        """The shard with this id; raises ResourceNotFoundException."""
        shard = self._shards.get(shard_id)
        if shard is None:
            raise not_found(
                f"Could not find shard {shard_id} in stream {self.name} under account "
                f"{self.account}."
            )
        return shard

    def route(self, hash_key: int) -> ShardLog:
        """The open shard whose range contains this hash key (0 ≤ key < 2^128)."""
        return self._open[bisect_left(self._open_ends, hash_key)]

    def next_shard(self) -> ShardLog:
        """The open shard for the next record of a stream that distributes records itself."""
        self._spread += 1
        return self._open[self._spread % len(self._open)]

    def create_shards(self, count: int, now_millis: int) -> None:
        """Create the first shards, equally wide."""
        starts = even_boundaries(count)
        ends = [start - 1 for start in starts[1:]] + [MAX_HASH_KEY]
        for start, end in zip(starts, ends, strict=True):
            self._add(HashKeyRange(start, end), now_millis, now_millis // 1000, ())

    def _add(
        self,
        hash_key_range: HashKeyRange,
        opened_millis: int,
        created_seconds: int,
        parents: tuple[str, ...],
    ) -> ShardLog:
        shard = ShardLog(self._next_index, hash_key_range, opened_millis, created_seconds, parents)
        self._next_index += 1
        self._shards[shard.shard_id] = shard
        at = bisect_left(self._open_ends, hash_key_range.end)
        self._open.insert(at, shard)
        self._open_ends.insert(at, hash_key_range.end)
        return shard

    def _replace(
        self, parents: list[ShardLog], ranges: list[HashKeyRange], now_millis: int
    ) -> None:
        # A child opens later than its parents, even if the clock stands still or is set back.
        # Later in milliseconds: every shard is open at some time. Later in seconds: the child's
        # sequence numbers are above those of its parents.
        opened = max(now_millis, *(p.opened_millis + 1 for p in parents))
        created = max(now_millis // 1000, *(p.created_seconds + 1 for p in parents))
        for parent in parents:
            at = self._open.index(parent)
            del self._open[at], self._open_ends[at]
        ids = tuple(p.shard_id for p in parents)
        children = [self._add(r, opened, created, ids) for r in ranges]
        reported = tuple(ChildShard(c.shard_id, ids, c.hash_key_range) for c in children)
        for parent in parents:
            parent.close(opened, reported)

    # -- resharding
    # ----------------------------------------------------------------------------

    def check_open(self, shard: ShardLog) -> None:
        """Raise InvalidArgumentException for a closed shard."""
        if not shard.is_open:
            raise invalid_argument(
                f"Shard {shard.shard_id} in stream {self.name} under account {self.account} "
                "has already been merged or split, "
                "and thus is not eligible for merging or splitting."
            )

    def check_split(self, shard: ShardLog, new_start: int) -> None:
        """Check that a shard can be split at `new_start`.

        Raises InvalidArgumentException if it is closed, or if a half would have fewer than two
        keys.
        """
        self.check_open(shard)
        keys = shard.hash_key_range
        if not keys.start + 1 < new_start < keys.end:
            raise invalid_argument(
                f"NewStartingHashKey {new_start} used in SplitShard() on shard "
                f"{shard.shard_id} in stream {self.name} under account {self.account} "
                f"is not both greater than one plus the shard's StartingHashKey {keys.start} "
                f"and less than the shard's EndingHashKey {keys.end}."
            )

    def split(self, shard: ShardLog, new_start: int, now_millis: int) -> None:
        """Close the shard and open two: below `new_start`, and from `new_start` on."""
        keys = shard.hash_key_range
        self._replace(
            [shard],
            [HashKeyRange(keys.start, new_start - 1), HashKeyRange(new_start, keys.end)],
            now_millis,
        )

    def check_merge(self, shard: ShardLog, adjacent: ShardLog) -> None:
        """Raise InvalidArgumentException unless both shards are open and adjacent."""
        self.check_open(shard)
        self.check_open(adjacent)
        one, two = shard.hash_key_range, adjacent.hash_key_range
        if one.end + 1 != two.start and two.end + 1 != one.start:
            raise invalid_argument(
                f"Shards {shard.shard_id} and {adjacent.shard_id} in stream {self.name} "
                f"under account {self.account} "
                "are not an adjacent pair of shards eligible for merging"
            )

    def merge(self, shard: ShardLog, adjacent: ShardLog, now_millis: int) -> None:
        """Close both shards and open one with the union of their hash keys."""
        one, two = shard.hash_key_range, adjacent.hash_key_range
        self._replace(
            [shard, adjacent],
            [HashKeyRange(min(one.start, two.start), max(one.end, two.end))],
            now_millis,
        )

    def rescale(self, count: int, now_millis: int) -> None:
        """Split and merge until there are `count` equally wide shards.

        Like the service, this can create intermediate shards that are closed at once.
        """
        starts = [self._near_boundary(start) for start in even_boundaries(count)]
        for start in starts[1:]:
            shard = self.route(start)
            if shard.hash_key_range.start != start:
                self.split(shard, start, now_millis)
        for i, start in enumerate(starts):
            end = starts[i + 1] - 1 if i + 1 < count else MAX_HASH_KEY
            while (shard := self.route(start)).hash_key_range.end != end:
                self.merge(shard, self.route(shard.hash_key_range.end + 1), now_millis)

    def _near_boundary(self, start: int) -> int:
        # Rounding makes boundaries differ slightly (1/3 and 2/6 of all keys). Such a boundary is
        # kept, because a split there would create a tiny shard.
        keys = self.route(start).hash_key_range
        if start - keys.start <= _ROUNDING:
            return keys.start
        return keys.end + 1 if keys.end - start <= _ROUNDING and keys.end < MAX_HASH_KEY else start

    def shards_after(self, shard_id: str | None) -> list[ShardLog]:
        """Shards in retention whose id follows `shard_id`."""
        everything = self.shards
        return (
            everything
            if shard_id is None
            else everything[bisect_right([s.shard_id for s in everything], shard_id) :]
        )
