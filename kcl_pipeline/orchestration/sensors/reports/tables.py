"""Build the tables of leases, moves and workers that the Dagster UI shows.

In a window of 1,600 points a table has 550 points: about 65 characters in six columns. What is
wider is cut off at the right. Cells are wrapped, names of columns are not.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.checks import health
from kcl_pipeline.orchestration.assets.checks.unread import largest_unlisted_millis
from kcl_pipeline.orchestration.assets.runs.metadata import lag_text
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.planning.model import Move, Plan
from kcl_pipeline.position import Position
from kcl_pipeline.text import duration_text

MAX_TABLE_ROWS: Final = 200
"""Largest number of leases and workers in a table."""
MAX_MOVES: Final = 20
_NO_DECIMALS_FROM: Final = 100.0
_SHARD_PREFIX: Final = "shardId-"
_RUN_STATES: Final = {
    "QUEUED": "queued",
    "CANCELING": "stopping",
    **dict.fromkeys(("NOT_STARTED", "MANAGED", "STARTING"), "starting"),
}


def shard_text(shard_id: str) -> str:
    """Return the number of a shard: `12` for `shardId-000000000012`. Other ids are kept."""
    number = shard_id.removeprefix(_SHARD_PREFIX)
    return str(int(number)) if number != shard_id and number.isdecimal() else shard_id


def lease_text(lease_key: str) -> str:
    """Return a lease key as short text: `12`, or `orders:12` with several streams."""
    parts = lease_key.split(":")
    return ":".join([*parts[1:2], shard_text(parts[-1])])


@dataclass(slots=True)
class CheckpointAges:
    """Since when each lease has had its checkpoint, by observation.

    Attributes:
        since: By lease key: the checkpoint, when it was first observed (monotonic seconds), and
            whether it was observed to change. Otherwise it may be older.
    """

    since: dict[str, tuple[Position, float, bool]] = field(default_factory=dict)

    def observe(self, leases: Sequence[Lease], now: float) -> dict[str, str]:
        """Add one observation and return the ages as text by lease key."""
        found: dict[str, tuple[Position, float, bool]] = {}
        for lease in leases:
            known = self.since.get(lease.lease_key)
            if known is None or known[0] != lease.checkpoint:
                known = (lease.checkpoint, now, known is not None)
            found[lease.lease_key] = known
        self.since = found
        return {
            key: ("" if changed else "> ") + duration_text(now - since)
            for key, (_, since, changed) in found.items()
        }

    def seconds(self, now: float) -> dict[str, float]:
        """Return by lease key for how long the checkpoint was observed not to change."""
        return {key: now - since for key, (_, since, _) in self.since.items()}


@dataclass(slots=True)
class _Moved:
    at: float
    move: Move
    outcome: str = "requested"
    is_final: bool = False


@dataclass(slots=True)
class MoveLog:
    """The last moves that this sensor's leader planned, and what became of them."""

    moves: deque[_Moved] = field(default_factory=lambda: deque(maxlen=MAX_MOVES))

    def observe(self, plan: Plan | None, leases: Sequence[Lease], now: float) -> None:
        """Add the moves of a plan, and update the outcomes from the lease table."""
        if plan is not None:
            self.moves.extend(_Moved(now, move) for move in plan.moves)
        by_key = {lease.lease_key: lease for lease in leases}
        for moved in self.moves:
            if not moved.is_final:
                lease = by_key.get(moved.move.lease_key)
                moved.outcome, moved.is_final = _outcome(moved, lease, now)

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return the moves as rows, newest first."""
        return [
            {
                "ago": duration_text(now - one.at),
                "shard": lease_text(one.move.lease_key),
                "workers": move_text(one.move.from_worker, one.move.to_worker),
                "outcome": one.outcome,
                # The longest text is last: a narrow page cuts the right side off.
                "reason": one.move.reason,
            }
            for one in reversed(self.moves)
        ]


def move_text(from_worker: str | None, to_worker: str) -> str:
    """Return the former and the new owner as one text, which a narrow column wraps."""
    return f"{from_worker or 'nobody'} → {to_worker}"


def _outcome(moved: _Moved, lease: Lease | None, now: float) -> tuple[str, bool]:
    if lease is None:
        return "the lease was deleted", True
    if lease.actual_owner == moved.move.to_worker:
        return f"done after {duration_text(now - moved.at)}", True
    if lease.owner == moved.move.to_worker:
        return f"handoff from {lease.checkpoint_owner}", False
    # The leader writes moves within its cycle: another owner afterwards is the result.
    return f"not done: the owner is {lease.owner or 'nobody'}", True


def _lags(workers: Sequence[WorkerMetrics]) -> dict[str, tuple[int, str]]:
    """Lag by lease key, for sorting and as text."""
    found: dict[str, tuple[int, str]] = {}
    for worker in workers:
        for lag in () if worker.status is None else worker.status.lags:
            found[lag.lease_key] = (lag.millis, lag_text(lag.millis))
    return found


def _state_of(
    lease: Lease, waits: Mapping[str, float], paused: Mapping[str, str], hung: Container[str]
) -> str:
    if lease.ended:
        return "finished"
    if lease.lease_key in waits:
        waited = duration_text(waits[lease.lease_key])
        return f"{'no owner' if lease.actual_owner is None else 'owner is gone'} for {waited}"
    if lease.in_handoff:
        return f"handoff to {lease.owner}"
    if lease.lease_key in paused:
        return "paused"
    return "worker is hung" if lease.actual_owner in hung else "held"


def lease_rows(
    leases: Sequence[Lease],
    workers: Sequence[WorkerMetrics],
    waits: Mapping[str, float],
    ages: Mapping[str, str],
    unread: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the leases as rows, at most `MAX_TABLE_ROWS`.

    Leases without a live owner come first, then those with the largest lag.

    A lease that its worker does not list has at most the smallest lag that the worker lists. One
    without a live worker has at most the time since all its records were in the table (`unread`).
    """
    known, listed = _lags(workers), largest_unlisted_millis(workers)
    paused = {
        one.lease_key: one.reason
        for w in workers
        if w.status is not None
        for one in w.status.paused
    }
    reported = {w.worker_id for w in workers if w.status is not None}
    hung = {w.worker_id for w in workers if w.status is not None and w.status.hung is not None}
    several = len({lease.stream for lease in leases}) > 1

    def lag_of(lease: Lease) -> tuple[int, str]:
        if lease.ended:
            return -1, ""
        if lease.lease_key in known:
            return known[lease.lease_key]
        most = listed.get(lease.actual_owner or "")
        if most is not None:
            return most, f"≤ {lag_text(most)}"
        if unread and lease.lease_key in waits and lease.lease_key in unread:
            age = round(1000 * unread[lease.lease_key])
            return age, f"≤ {lag_text(age)}"
        return 0, "not read yet" if lease.actual_owner in reported else "unknown"

    def importance(lease: Lease) -> tuple[float, int, str]:
        return -waits.get(lease.lease_key, 0.0), -lag_of(lease)[0], lease.lease_key

    ordered = sorted(leases, key=importance)
    return [
        {
            "shard": lease_text(lease.lease_key) if several else shard_text(lease.shard_id),
            "worker": lease.actual_owner,
            "state": _state_of(lease, waits, paused, hung),
            "lag": lag_of(lease)[1],
            "checkpoint": "" if lease.ended else ages.get(lease.lease_key, ""),
            "KB/s": None if lease.throughput_kbps is None else _rate_text(lease.throughput_kbps),
        }
        for lease in ordered[:MAX_TABLE_ROWS]
    ]


def _rate_text(kbps: float) -> str:
    return f"{kbps:.1f}" if kbps < _NO_DECIMALS_FROM else f"{kbps:,.0f}"


def rows_not_shown(rows: Sequence[object], count: int) -> dg.TextMetadataValue | None:
    """How many of `count` leases have no row. None: all of them have one."""
    if count <= len(rows):
        return None
    return dg.MetadataValue.text(
        f"{count - len(rows)} leases with a smaller lag; run `kcl-pipeline status`"
    )


def worker_state(worker: WorkerMetrics) -> str:
    """What a live worker does: hung, draining or running."""
    if worker.status is not None and worker.status.hung is not None:
        hung = worker.status.hung
        return f"hung in {hung.step} for {duration_text(hung.seconds)}"
    return "draining" if worker.drain_requested else "running"


def problems_text(worker: WorkerMetrics) -> str | None:
    """Paused leases, refused batches and dead letters of a worker; None if unknown."""
    if worker.status is None:
        return None
    status = worker.status
    counts = (
        (status.paused_leases, "paused"),
        (status.failed_batches, "refused batches"),
        (status.dead_letters, "dead letters"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count) or "none"


def worker_rows(
    workers: Sequence[WorkerMetrics], leases: Sequence[Lease], runs: Sequence[RunView]
) -> list[dict[str, Any]]:
    """Return the live workers as rows, then the runs that have no worker yet.

    The state has the version of the package in the worker, if not all workers have the same.
    """
    counts = health.lease_counts(leases)
    flow = health.kbps_by_owner(leases)
    rows: list[dict[str, Any]] = []
    versions = {w.worker_id: w.status.version for w in workers if w.status is not None}
    differ = len(set(versions.values())) > 1
    for w in workers:
        version = versions.get(w.worker_id)
        totals = None if w.status is None else w.status.totals
        age = None if totals is None else totals.last_batch_seconds
        rows.append(
            {
                "worker": w.worker_id,
                "state": worker_state(w) + (f", version {version}" if differ and version else ""),
                "leases": counts.get(w.worker_id, 0),
                "cpu": None if (cpu := health.cpu_percent(w)) is None else f"{cpu:.0f}%",
                "KB/s": _rate_text(flow[w.worker_id]),
                "lag": None if w.status is None else lag_text(w.status.lag_millis),
                "batch": None if age is None else f"{duration_text(age)} ago",
                "problems": problems_text(w),
            }
        )
    alive = {w.worker_id for w in workers}
    empty = dict.fromkeys(list(rows[0])[2:]) if rows else {}
    rows += [
        {"worker": run.worker_id, "state": run_state(run)} | empty
        for run in runs
        if run.worker_id not in alive
    ]
    return rows


def run_state(run: RunView) -> str:
    """The state of a run without a live worker."""
    return _RUN_STATES.get(run.status.value, "started, no report yet")


def run_links(runs: Sequence[RunView]) -> dg.MarkdownMetadataValue:
    """Links to the active runs."""
    links = [
        f"- [{run.worker_id}](/runs/{run.run_id})"
        for run in sorted(runs, key=lambda run: run.worker_id)[:MAX_TABLE_ROWS]
    ]
    return dg.MetadataValue.md("\n".join(links))
