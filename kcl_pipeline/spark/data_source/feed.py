"""Prefetch all shards of a query in the process that plans its batches.

A permanent error of a shard is raised instead of retried without end.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Final

from kcl_pipeline.batch import Chunk
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.distribution import RecordDistribution
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.position import Position
from kcl_pipeline.spark.data_source.offsets import ShardOffset
from kcl_pipeline.spark.data_source.read import (
    ReadRange,
    ReadRules,
    StartWatch,
    log_event,
    open_reader,
    reached,
)
from kcl_pipeline.threads import Background

ShardKey = tuple[str, str]
"""Stream name and shard id."""

WAIT_SECONDS: Final = 0.02
JOIN_SECONDS: Final = 2.0


class ShardFeed:
    """One shard, as the `Prefetcher` reads it.

    The fetch thread writes its attributes, and the planner reads them.
    """

    def __init__(
        self,
        kinesis: KinesisClient,
        requested: ReadRange,
        rules: ReadRules,
        clock: Clock,
        tip_moment: float | None,
        distribution: RecordDistribution,
    ) -> None:
        self._watch = StartWatch(kinesis, requested, rules)
        self.lease_key = feed_key((requested.stream.name, requested.shard_id))
        self.millis_behind_latest: int | None = None
        self.ended = False
        self.last_bytes = 0
        self.asked_at: float | None = None
        self.failing_since: float | None = None
        self.failure: Exception | None = None
        self.fatal: KclError | None = None
        self.read_up_to: tuple[Position, int] | None = None
        self.tip_moment = tip_moment
        self._about = requested
        self._rules = rules
        self._clock = clock
        self._reader = open_reader(
            self._watch, requested, rules.retrieval, clock, self.lease_key, distribution
        )

    @property
    def read_up_to_millis(self) -> int | None:
        """See `reader.GapWatch`. None: no page was read."""
        return None if self.read_up_to is None else self.read_up_to[1]

    def read(self) -> Chunk | None:
        """Make one GetRecords call.

        Raises the errors of the reader. A permanent error is stored in `fatal` and ends the feed.
        """
        asked, wall = self._clock.monotonic(), self._clock.wall()
        try:
            chunk = self._read(asked, wall)
        except (ThrottledError, UnavailableError) as error:
            self.failure, self.asked_at = error, asked
            self.failing_since = asked if self.failing_since is None else self.failing_since
            raise
        except KclError as error:
            self.fatal, self.ended = error, True
            raise
        self.failure = self.failing_since = None
        self.asked_at = asked
        return chunk

    def _read(self, asked: float, wall: float) -> Chunk | None:
        reader = self._reader
        chunk = reader.read()
        if chunk is not None and chunk.shard_end == ():
            self._rules.lost(f"{self._about} cannot be read: the shard does not exist any more")
        behind = self.millis_behind_latest = reader.millis_behind_latest
        self.last_bytes = reader.last_bytes
        at_tip = reader.ended or reached(behind, 0.0, full=self._watch.full)
        self._watch.check(round(wall * 1000), at_tip=at_tip)
        if behind is not None:
            self.read_up_to = (reader.position, round(wall * 1000) - behind)
        done = self.tip_moment is not None and reached(
            behind, asked - self.tip_moment, full=self._watch.full
        )
        self.ended = reader.ended or done
        return chunk


class Feeds:
    """The feeds of a query with their fetch threads.

    Not thread-safe. Close it after use. With `threads` 0 all reads happen inside `wait`.
    """

    def __init__(
        self,
        kinesis: KinesisClient,
        rules: ReadRules,
        clock: Clock,
        rng: random.Random,
        *,
        threads: int,
    ) -> None:
        self._kinesis = kinesis
        self._rules = rules
        self._clock = clock
        self._prefetcher = Prefetcher(rules.retrieval, clock, rng, log_event)
        self._distribution = RecordDistribution(kinesis, clock, log_event)
        self._background = Background(clock)
        self._feeds: dict[ShardKey, ShardFeed] = {}
        self._threads = threads
        self._running = False
        self.tip_moment: float | None = None

    @property
    def keys(self) -> frozenset[ShardKey]:
        """The shards that are read."""
        return frozenset(self._feeds)

    def begin(self, key: ShardKey, requested: ReadRange) -> None:
        """Start to read a shard."""
        feed = ShardFeed(
            self._kinesis,
            requested,
            self._rules,
            self._clock,
            self.tip_moment,
            self._distribution,
        )
        self._feeds[key] = feed
        self._prefetcher.add(feed)
        if self._threads and not self._running:
            self._running = True
            for number in range(self._threads):
                self._background.start(f"kinesis-fetch-{number}", self._prefetcher.step)

    def end(self, keys: Iterable[ShardKey]) -> None:
        """Stop reading these shards and drop their buffered records."""
        for key in list(keys):
            if self._feeds.pop(key, None) is not None:
                self._prefetcher.remove(feed_key(key))

    def read_to_the_tip(self) -> None:
        """Let every shard end at its present end, or with the first response that reaches it."""
        self.tip_moment = self._clock.monotonic()
        for feed in self._feeds.values():
            feed.tip_moment = self.tip_moment

    def take(
        self, max_records: int, max_bytes: int, left: Mapping[ShardKey, int], turn: int
    ) -> list[Chunk]:
        """See `Prefetcher.take`. Raises the permanent error of a shard."""
        self._background.check()
        for feed in self._feeds.values():
            if feed.fatal is not None:
                raise feed.fatal
        return self._prefetcher.take(
            max_records,
            max_bytes,
            left={feed_key(key): number for key, number in left.items()},
            turn=turn,
        )

    def wait(self, seconds: float) -> None:
        """Wait until records may have arrived, at most `seconds`."""
        if self._threads:
            self._prefetcher.wait_for_data(self._background.stop, min(seconds, WAIT_SECONDS))
            return
        self._clock.sleep(min(self._prefetcher.step(), seconds))

    def asked_since(self, moment: float) -> bool:
        """Whether each shard has ended or completed a read that started at or after `moment`.

        `moment` is in monotonic seconds. The records of these reads can be taken.
        """
        asked = all(
            feed.ended or (feed.asked_at is not None and feed.asked_at >= moment)
            for feed in self._feeds.values()
        )
        return asked and self._idle(self._feeds.values())

    def drained(self) -> bool:
        """Whether each shard has ended and has no buffered records."""
        feeds = self._feeds.values()
        return (
            all(feed.ended for feed in feeds)
            and self._idle(feeds)
            and all(self._prefetcher.caught_up(feed.lease_key) for feed in feeds)
        )

    def raise_stuck(self) -> None:
        """Raise the error of a shard that has only failed for `retry_seconds`."""
        now = self._clock.monotonic()
        for feed in self._feeds.values():
            if (
                feed.failure is not None
                and feed.failing_since is not None
                and now - feed.failing_since >= self._rules.retry_seconds
            ):
                raise feed.failure

    def read_up_to(self, key: ShardKey, offset: ShardOffset) -> int | None:
        """The time (epoch milliseconds) up to which no record after `offset` arrived.

        None if the last read of the shard did not end at `offset`.
        """
        feed = self._feeds.get(key)
        known = None if feed is None else feed.read_up_to
        return known[1] if known is not None and known[0] == offset.position else None

    def _idle(self, feeds: Iterable[ShardFeed]) -> bool:
        return not any(self._prefetcher.busy(feed.lease_key) for feed in feeds)

    def close(self) -> None:
        """Stop the threads."""
        self._background.join(JOIN_SECONDS)


def feed_key(key: ShardKey) -> str:
    """The key of a feed's chunks. It contains the stream, because shard ids are not unique."""
    return f"{key[0]}/{key[1]}"
