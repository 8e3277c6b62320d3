"""The summary of a worker after it stopped.

It is apart from `status`, because the command line uses it before it loads pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kcl_pipeline.text import counted, printable
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals

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


UNFINISHED_DRAINS: Final[Mapping[StopReason, str]] = {
    StopReason.STOPPED: "the worker was stopped before all records were read",
    StopReason.DRAIN_REQUESTED: "the worker was asked to end before all records were read",
    StopReason.APPLICATION_PAUSED: "the application was paused before all records were read",
}
"""Reasons that are a planned end of a continuous worker, but a failure of a drain, and why."""


def owners_text(shards: Mapping[str, int]) -> str:
    """Return workers with their numbers of shards as text: those with the most, at most five."""
    ordered = sorted(shards.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{printable(owner)} ({number})" for owner, number in ordered[:SHOWN_OWNERS])
    more = len(ordered) - SHOWN_OWNERS
    return f"{text} and {counted(more, 'more worker', 'more workers')}" if more > 0 else text


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """Why a worker stopped, and its last status.

    Attributes:
        worker_id: The worker.
        reason: Why it stopped.
        status: Its last status.
        error: Why it failed. None: it did not.
        elsewhere: How many unfinished shards each other worker held at the end of a drain, or had
            to finish the parents of. The drain did not wait for their records.

    Example:
        >>> summary = worker.run(stop, mode="drain")  # doctest: +SKIP
        >>> summary.total.records  # doctest: +SKIP
    """

    worker_id: str
    reason: StopReason
    status: WorkerStatus
    error: str | None = None
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> WorkerTotals:
        """What the worker did in its lifetime."""
        return self.status.totals

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
