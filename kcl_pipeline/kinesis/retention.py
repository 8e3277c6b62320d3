"""Detect records of a shard that left retention before they were read.

A read at a position that has left retention silently continues at the oldest record. Two facts show
what happened:

- An iterator AT_SEQUENCE_NUMBER begins at the record of the position, as long as it exists. A later
  first record shows that the record has left retention.
- `GapWatch.read_up_to_millis`: all records that arrived by this time are at or before the position.
  A quiet shard whose last record has left retention has lost nothing if this time is in retention.

The steady state costs no call: an iterator is requested again only if this time is older than the
shortest retention period, at most once a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId

MIN_RETENTION_MILLIS: Final = 24 * 3600 * 1000
"""Shortest retention period of a stream. Records that arrived within it still exist."""

RECHECK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Records may have left retention between two positions of a shard.

    Attributes:
        after: Last position that was read (inclusive). Its record does not exist any more.
        before: The next position that was read. None: nothing is left in the shard.
        read_up_to_millis: All records that arrived by this time are not after `after`. None:
            unknown.
        before_millis: Arrival time of the record at `before`, in epoch milliseconds.
    """

    after: Position
    before: Position | None
    read_up_to_millis: int | None
    before_millis: int | None = None


class GapWatch:
    """Finds gaps in the reads of one shard. Not thread-safe.

    Args:
        clock: Its wall clock is compared with the times of earlier readers.
        on_gap: Receives gaps. None: no gap is looked for.
        read_up_to_millis: Of an earlier reader of the position. None: unknown.
        anchor: Of an earlier reader.

    Attributes:
        anchor: Sequence number at which the iterator was requested, until a response shows whether
            its record exists. None: there is nothing to find out.
        read_up_to_millis: All records that arrived by this time are not after the position of the
            reader (epoch milliseconds on the clock of this host). None: unknown.
    """

    def __init__(
        self,
        clock: Clock,
        on_gap: Callable[[Gap], None] | None,
        read_up_to_millis: int | None,
        anchor: str | None,
    ) -> None:
        self.anchor = anchor
        self.read_up_to_millis = read_up_to_millis
        self._clock = clock
        self._on_gap = on_gap
        self._checked = float("-inf")
        self._overdue = False

    @property
    def needs_anchor(self) -> bool:
        """Whether the next iterator must begin at the last record that was read."""
        return self._overdue or self.anchor is not None

    def begin(self) -> bool:
        """Begin a read; return whether a new iterator must be requested for it."""
        now = self._clock.wall()
        if (
            self._on_gap is None
            or self.read_up_to_millis is None
            or now * 1000 - self.read_up_to_millis < MIN_RETENTION_MILLIS
            or now - self._checked < RECHECK_SECONDS
        ):
            return False
        self._checked = now
        self._overdue = True
        return True

    def look(self, page: RecordsPage, after: Position, asked_millis: int) -> None:
        """Look at a response.

        Args:
            page: The response.
            after: Position before it.
            asked_millis: Time of the request on the wall clock.
        """
        behind = page.millis_behind_latest
        if self.needs_anchor:
            if not page.records.num_rows and behind != 0 and page.next_iterator is not None:
                return
            self._decide(page, after)
        if behind is not None:
            self.read_up_to_millis = max(self.read_up_to_millis or 0, asked_millis - behind)

    def _decide(self, page: RecordsPage, after: Position) -> None:
        first = page.records.column("sequence_number")[0].as_py() if page.records.num_rows else None
        is_intact = first is not None and self.anchor is not None and int(first) <= int(self.anchor)
        self.anchor, self._overdue = None, False
        if is_intact or self._on_gap is None:
            return
        arrival = (
            None
            if first is None
            else page.records.column("approximate_arrival_timestamp")[0].as_py()
        )
        self._on_gap(
            Gap(
                after,
                None if first is None else Position(first),
                self.read_up_to_millis,
                None if arrival is None else round(arrival.timestamp() * 1000),
            )
        )


@dataclass(frozen=True, slots=True)
class FoundGap:
    """A gap in the reads of a lease's shard, and when it was found (monotonic seconds)."""

    lease_key: str
    stream: StreamId
    gap: Gap
    found_at: float


class FoundGaps:
    """Gaps that readers have found and that nobody has judged yet. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found: list[FoundGap] = []

    def note(self, lease_key: str, stream: StreamId, gap: Gap) -> None:
        """Add a gap."""
        with self._lock:
            self._found.append(FoundGap(lease_key, stream, gap, self._clock.monotonic()))

    def take(self) -> list[FoundGap]:
        """Remove and return all gaps."""
        with self._lock:
            found, self._found = self._found, []
        return found
