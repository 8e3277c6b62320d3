"""One shard of a prefetcher: what reads it, its progress, and its records that wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.prefetch.pacing import Pace
from kcl_pipeline.kinesis.prefetch.pages import Page


@runtime_checkable
class Reader(Protocol):
    """The source of records of one shard, such as `reader.ShardReader`."""

    lease_key: str
    millis_behind_latest: int | None
    ended: bool
    last_bytes: int

    @property
    def read_up_to_millis(self) -> int | None:
        """See `retention.GapWatch`."""

    def read(self) -> Chunk | None:
        """Read once, in bounded time; return None if there is nothing new."""


@runtime_checkable
class PushedReader(Reader, Protocol):
    """A reader that Kinesis pushes records to (`fan_out.source.FanOutReader`).

    `read` makes no call for them. It may be called every `poll_seconds`.
    """

    poll_seconds: float

    def close(self) -> None:
        """End reading. Must not wait. May be called by another thread than `read`."""


@dataclass(frozen=True, slots=True)
class ReadState:
    """The progress of reading one shard since it was added.

    Attributes:
        read_at: Time of the last successful read in monotonic seconds. None: never.
        has_waiting: Whether records are buffered, or are in the last batch of an executor fetch.
        caught_up: Whether the shard was read to its latest record or its end, and no record is
            buffered.
        error: Error of the last read. None: it succeeded.
        read_up_to_millis: See `retention.GapWatch`.
        behind_millis: Lag of the last response. None: unknown.
    """

    read_at: float | None
    has_waiting: bool
    caught_up: bool
    error: str | None
    read_up_to_millis: int | None = None
    behind_millis: int | None = None


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
    held: bool = False
