"""What a worker reports while it runs and when it has stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class StopReason(StrEnum):
    """Why a worker stopped."""

    STOPPED = "stopped"
    DRAINED = "drained"
    DRAIN_REQUESTED = "drain_requested"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Counters and gauges of one worker for one reporting period, or for its whole life in the
    final one. Counters add up over periods and workers.

    `bytes` is the payload read; `positions` (lease key to "sequence number" or "sequence/sub") are
    the newest per lease held; `seconds` is the length of the period. `millis_behind_latest` is the
    lag of committed data by lease (see `worker.monitoring.lag`), `lag_unknown` are the leases of
    which it is not known yet. `paused` says why a shard pauses, by lease. `stalled` has the leases
    that stand still and the step they wait in (`events.StallStep`).
    """

    worker_id: str
    seconds: float
    records: int = 0
    bytes: int = 0
    rows_written: int = 0
    batches: int = 0
    dead_letters: int = 0
    refused_batches: int = 0
    handoffs: int = 0
    leases: tuple[str, ...] = ()
    millis_behind_latest: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)
    stalled: Mapping[str, str] = field(default_factory=dict)
    table_version: int | None = None
    put_to_commit_millis_p50: float | None = None
    put_to_commit_millis_p99: float | None = None
    lag_unknown: tuple[str, ...] = ()
    paused: Mapping[str, str] = field(default_factory=dict)

    @property
    def lag_millis(self) -> int | None:
        """The largest `millis_behind_latest`; None when that of no lease is known."""
        return max(self.millis_behind_latest.values(), default=None)


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Why a worker stopped, and the counters of its whole life."""

    reason: StopReason
    total: WorkerProgress
    error: str | None = None
