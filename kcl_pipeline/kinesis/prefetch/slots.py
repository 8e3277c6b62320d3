"""One shard of a prefetcher: its reader, its pace, and its records that wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.prefetch.pacing import Pace
from kcl_pipeline.kinesis.prefetch.pages import Page
from kcl_pipeline.kinesis.prefetch.readers import Reader


@dataclass(slots=True)
class Buffered:
    """Records that wait, and the page that they belong to."""

    serial: int
    chunk: Chunk
    page: Page
    fetched: float


@dataclass(slots=True, eq=False)
class Slot:
    """One reader and its buffer. All attributes but `reader` need the lock of the prefetcher."""

    reader: Reader
    pace: Pace
    succeeded: float
    pushed: bool
    buffer: deque[Buffered] = field(default_factory=deque)
    busy: bool = False
    reached_tip: bool = False
    last_cost: int = 0
    read_at: float | None = None
    error: str | None = None
    behind: int | None = None
