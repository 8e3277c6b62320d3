"""Measure recent commits of a worker: their durations and the age of the last one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kcl_pipeline.clock import Clock

RECENT_SECONDS: Final = 300.0
"""Percentiles cover the batches of this time."""
_BATCHES: Final = 1_000
_SAMPLES: Final = 100


@dataclass(frozen=True, slots=True)
class _Batch:
    at: float
    commit_millis: float
    waits: tuple[float, ...]


class RecentBatches:
    """Durations of the newest committed batches. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._batches: deque[_Batch] = deque(maxlen=_BATCHES)

    def note(self, commit_millis: float, waits: Sequence[float]) -> None:
        """Add a batch.

        Args:
            commit_millis: Time to write and commit it.
            waits: Put-to-commit milliseconds of its sampled records. About 100 are kept.
        """
        kept = tuple(waits[:: len(waits) // _SAMPLES + 1])
        with self._lock:
            self._batches.append(_Batch(self._clock.monotonic(), commit_millis, kept))

    def last_age_seconds(self) -> float | None:
        """Return the age of the last batch; None without one."""
        with self._lock:
            last = self._batches[-1].at if self._batches else None
        return None if last is None else max(self._clock.monotonic() - last, 0.0)

    def percentiles_99(self) -> tuple[int | None, int | None]:
        """Return the p99 of the commit time and of put-to-commit, in milliseconds.

        None: no batch was committed in the last `RECENT_SECONDS`.
        """
        begin = self._clock.monotonic() - RECENT_SECONDS
        with self._lock:
            recent = [batch for batch in self._batches if batch.at >= begin]
        commits = [batch.commit_millis for batch in recent]
        return _p99(commits), _p99([wait for batch in recent for wait in batch.waits])


def _p99(values: Sequence[float]) -> int | None:
    return round(float(np.percentile(values, 99))) if values else None
