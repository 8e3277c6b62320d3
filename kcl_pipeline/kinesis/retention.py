"""Detect records of a shard that left retention before they were read.

A read at a position that has left retention silently continues at the oldest record. Two facts show
what happened:

- An iterator AT_SEQUENCE_NUMBER begins at the record of the position, as long as it exists. A later
  first record shows that the record has left retention.
- `GapWatch.read_up_to_millis`: all records that arrived by this time are at or before the position.
  A quiet shard whose last record has left retention has lost nothing if this time is in retention.

Times are those of the service (`RecordsPage.served_millis`). The clocks of the hosts may differ by
hours, and the next reader of the shard may run on another host.

A shard that nobody has begun has a time, too, if it is the child of a shard that was read to its
end: no record of a child arrived before the last one of its parent. The leases of other shards have
the time of their creation.

The steady state costs no call: an iterator is requested again only if this time is older than the
shortest retention period, at most once a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
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
        served_millis: When the gap was found, on the clock of the service (epoch milliseconds).
            None: unknown.
    """

    after: Position
    before: Position | None
    read_up_to_millis: int | None
    before_millis: int | None = None
    served_millis: int | None = None


class GapWatch:
    """Finds gaps in the reads of one shard. Not thread-safe.

    Args:
        clock: Measures the time since the last response.
        on_gap: Receives gaps. None: no gap is looked for.
        read_up_to_millis: Of an earlier reader of the position. None: unknown.
        anchor: Of an earlier reader.
        unbegun_since: Nothing of the shard is in the table, and no record that arrived by this time
            was to be read, or its lease was created then (epoch milliseconds on the clock of the
            service). None: the position is a number, or the time is unknown.

    Attributes:
        anchor: Sequence number at which the iterator was requested, until a response shows whether
            its record exists. None: there is nothing to find out.
        unbegun_since: As given, until a response shows whether records have left retention.
        read_up_to_millis: All records that arrived by this time are not after the position of the
            reader (epoch milliseconds on the clock of the service). None: unknown.
    """

    def __init__(
        self,
        clock: Clock,
        on_gap: Callable[[Gap], None] | None,
        read_up_to_millis: int | None,
        anchor: str | None,
        *,
        unbegun_since: int | None = None,
    ) -> None:
        self.anchor = anchor
        self.read_up_to_millis = read_up_to_millis
        self._clock = clock
        self._on_gap = on_gap
        self._checked = float("-inf")
        self.unbegun_since = unbegun_since
        self._overdue = unbegun_since is not None
        self._served: tuple[int, float] | None = None

    @property
    def needs_anchor(self) -> bool:
        """Whether the next iterator must begin at the last record that was read."""
        return self._overdue or self.anchor is not None

    def begin(self) -> bool:
        """Begin a read; return whether a new iterator must be requested for it."""
        now = self._clock.monotonic()
        if (
            self._on_gap is None
            or self.read_up_to_millis is None
            or now - self._checked < RECHECK_SECONDS
            or self._now_millis() - self.read_up_to_millis < MIN_RETENTION_MILLIS
        ):
            return False
        self._checked = now
        self._overdue = True
        return True

    def _now_millis(self) -> int:
        if self._served is None:
            return round(self._clock.wall() * 1000)
        millis, at = self._served
        return millis + round((self._clock.monotonic() - at) * 1000)

    def look(self, page: RecordsPage, after: Position) -> None:
        """Look at a response.

        Args:
            page: The response.
            after: Position before it.
        """
        behind = page.millis_behind_latest
        if page.served_millis is not None:
            self._served = page.served_millis, self._clock.monotonic()
        if self.needs_anchor:
            if not page.records.num_rows and behind != 0 and page.next_iterator is not None:
                return
            self._decide(page, after)
        read_up_to = None if behind is None else _read_up_to(page, behind)
        if read_up_to is not None:
            self.read_up_to_millis = max(self.read_up_to_millis or 0, read_up_to)

    def _decide(self, page: RecordsPage, after: Position) -> None:
        first = page.records.column("sequence_number")[0].as_py() if page.records.num_rows else None
        is_intact = first is not None and self.anchor is not None and int(first) <= int(self.anchor)
        since, self.unbegun_since = self.read_up_to_millis or self.unbegun_since, None
        self.anchor, self._overdue = None, False
        if is_intact or self._on_gap is None:
            return
        self._on_gap(
            Gap(
                after,
                None if first is None else Position(first),
                since,
                None if first is None else arrival_millis(page, 0),
                page.served_millis,
            )
        )


def _read_up_to(page: RecordsPage, behind_millis: int) -> int | None:
    if page.next_iterator is not None:
        return None if page.served_millis is None else page.served_millis - behind_millis
    # The end of a closed shard is not its tip: its children had records long before, perhaps.
    rows = page.records.num_rows
    return arrival_millis(page, rows - 1) if rows else None


def arrival_millis(page: RecordsPage, row: int) -> int:
    """Return when a record of a page arrived (epoch milliseconds)."""
    arrival: datetime = page.records.column("approximate_arrival_timestamp")[row].as_py()
    return round(arrival.timestamp() * 1000)


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
        self._gaps: list[FoundGap] = []

    def note(self, lease_key: str, stream: StreamId, gap: Gap) -> None:
        """Add a gap."""
        with self._lock:
            self._gaps.append(FoundGap(lease_key, stream, gap, self._clock.monotonic()))

    def take(self) -> list[FoundGap]:
        """Remove and return all gaps."""
        with self._lock:
            found, self._gaps = self._gaps, []
        return found
