"""One limit for the memory of records and results in a worker.

Counted are pages of records that wait (`prefetch`), reads under way (`READ_BYTES` each), the
records of the batch in processing (`batch`), memory files that Spark reads or writes and those that
are kept for the next batch (`files`), and results in this process (`result`).

Nothing waits for memory but reading. A batch always goes on: the part of its result that does not
fit is written to the disk. So a batch ends at any limit, and what it held is free for reading. See
docs/deployment.md, "Memory".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from kcl_pipeline.config import ConsumerSettings

MIB: Final = 1024 * 1024
READ_BYTES: Final = 12 * MIB
"""Counted for a read under way: the largest response (10 MiB), and 10,000 rows of other columns."""
_SHARES: Final = 4
"""Records that wait, the batch, its copy for Spark, and its result may each have this part."""

Kind = Literal["prefetch", "batch", "files", "result"]
Reclaim = Callable[[int], None]


class MemoryBudget:
    """Count bytes against one limit. Thread-safe; never waits.

    Args:
        max_bytes: The limit.
        reading_bytes: Part of the limit for records that wait and reads under way. Results leave
            it to them.
    """

    def __init__(self, max_bytes: int, reading_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._reading_bytes = reading_bytes
        self._lock = threading.Lock()
        self._counts: dict[Kind, int] = {"prefetch": 0, "batch": 0, "files": 0, "result": 0}
        self._peak = 0
        self._reclaims: list[weakref.WeakMethod[Reclaim]] = []

    @classmethod
    def of(cls, settings: ConsumerSettings) -> MemoryBudget:
        """Return the budget of a worker with these settings."""
        limit, retrieval = settings.record_memory_bytes, settings.retrieval
        waiting = min(retrieval.prefetch_max_bytes, limit // _SHARES)
        reading = waiting + retrieval.fetch_threads * READ_BYTES
        return cls(limit, min(reading, limit // 2))

    @property
    def share_bytes(self) -> int:
        """Most bytes of the records that wait, and of those of a batch."""
        return self.max_bytes // _SHARES

    @property
    def used_bytes(self) -> int:
        """Bytes that are counted now."""
        with self._lock:
            return sum(self._counts.values())

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were counted at the same time."""
        return self._peak

    def counts(self) -> dict[Kind, int]:
        """Return the bytes that are counted now, by kind."""
        with self._lock:
            return dict(self._counts)

    def change(self, changes: Mapping[Kind, int]) -> None:
        """Add these bytes, or subtract negative ones, in one step."""
        with self._lock:
            for kind, more in changes.items():
                self._counts[kind] += more
            self._peak = max(self._peak, sum(self._counts.values()))

    @contextmanager
    def counting(self, kind: Kind, size: int) -> Iterator[None]:
        """Count bytes while the context lasts."""
        self.change({kind: size})
        try:
            yield
        finally:
            self.change({kind: -size})

    def may_read(self) -> bool:
        """Return whether another read may begin. Files that are only kept are freed for it."""
        with self._lock:
            if self._counts["prefetch"] + READ_BYTES > self._reading_bytes:
                return False
        return self.has_room(READ_BYTES)

    def has_room(self, more: int) -> bool:
        """Return whether this many bytes fit. Files that are only kept are freed for them."""
        missing = self._missing(more)
        if missing <= 0:
            return True
        for reference in self._reclaims:
            reclaim = reference()
            if reclaim is not None:
                reclaim(missing)
        return self._missing(more) <= 0

    def on_need(self, reclaim: Reclaim) -> None:
        """Call this method when bytes are missing, with their number. It must not wait.

        The object of the method is not kept alive.
        """
        self._reclaims.append(weakref.WeakMethod(reclaim))

    def reserve_result(self) -> int:
        """Count what is free for a result, except for the part of reading, and return it.

        The caller subtracts it again.
        """
        with self._lock:
            room = self._room()
            self._counts["result"] += room
            self._peak = max(self._peak, sum(self._counts.values()))
            return room

    # The methods below need the lock, or get it.

    def _room(self) -> int:
        reading = max(self._reading_bytes - self._counts["prefetch"], 0)
        return max(self.max_bytes - sum(self._counts.values()) - reading, 0)

    def _missing(self, more: int) -> int:
        with self._lock:
            return sum(self._counts.values()) + more - self.max_bytes
