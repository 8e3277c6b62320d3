"""Reports of a worker: progress while it runs, and a summary after it stopped.

They are apart from `status`, because the command line uses them before it loads pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kcl_pipeline.text import counted, printable

SHOWN_OWNERS: Final = 5


class StopReason(StrEnum):
    """Why a worker stopped.

    Example:
        >>> from kcl_pipeline import StopReason
        >>> StopReason.DRAINED.value
        'drained'
    """

    STOPPED = "stopped"
    DRAINED = "drained"
    DRAIN_REQUESTED = "drain_requested"
    APPLICATION_PAUSED = "application_paused"
    FAILED = "failed"
    HUNG = "hung"
    USELESS = "useless"
    ID_TAKEN = "id_taken"


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Counters and gauges of one worker for one reporting period.

    The final report covers the lifetime of the worker. Counters can be added over periods and
    workers.

    Attributes:
        seconds: Length of the period.
        bytes: Payload that was read.
        millis_behind_latest: Lag of committed data by lease (see `worker.status.Lag`).
        positions: Newest position per held lease, as "sequence number" or "sequence/sub".
        stalled: Stalled leases, and the step that each waits in (`events.StallStep`).
        lag_unknown: Leases whose lag is not known yet.
        paused: Reasons of paused shards by lease.

    Example:
        >>> from kcl_pipeline import WorkerProgress
        >>> def show(progress: WorkerProgress) -> None:
        ...     print(progress.records, progress.lag_millis)
        >>> worker.run(stop, on_progress=show)  # doctest: +SKIP
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
        """The largest `millis_behind_latest`. None: no lag is known."""
        return max(self.millis_behind_latest.values(), default=None)


def owners_text(shards: Mapping[str, int]) -> str:
    """Return workers with their numbers of shards as text: those with the most, at most five."""
    ordered = sorted(shards.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{printable(owner)} ({number})" for owner, number in ordered[:SHOWN_OWNERS])
    more = len(ordered) - SHOWN_OWNERS
    return f"{text} and {counted(more, 'more worker', 'more workers')}" if more > 0 else text


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Why a worker stopped, and the counters of its lifetime.

    Attributes:
        reason: Why it stopped.
        total: The counters.
        error: Why it failed. None: it did not.
        elsewhere: How many unfinished shards each other worker held at the end of a drain. The
            drain did not wait for their records.

    Example:
        >>> summary = worker.run(stop, mode="drain")  # doctest: +SKIP
        >>> summary.total.records  # doctest: +SKIP
    """

    reason: StopReason
    total: WorkerProgress
    error: str | None = None
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def elsewhere_sentence(self) -> str | None:
        """What a drain left to other workers; None: nothing."""
        if not self.elsewhere:
            return None
        number = sum(self.elsewhere.values())
        verb, whose = ("is", "its") if number == 1 else ("are", "their")
        return (
            f"{counted(number, 'shard')} {verb} held by other workers, which read {whose} records: "
            f"{owners_text(self.elsewhere)}"
        )
