"""Show leases, workers and moves as tables in the Dagster UI.

In a window of 1,600 points a table has 550 points: about 65 characters in six columns. What is
wider is cut off at the right. Cells are wrapped, names of columns are not.
"""

from collections.abc import Sequence
from typing import Any, Final

import dagster as dg

from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.status.rows import OwnerChange, lease_rows, worker_rows
from kcl_pipeline.status.snapshot import Snapshot
from kcl_pipeline.text import duration_text

MAX_TABLE_ROWS: Final = 200
"""Largest number of leases and workers in a table."""
_NO_DECIMALS_FROM: Final = 100.0
_SHARD_PREFIX: Final = "shardId-"
_RUN_STATES: Final = {
    "QUEUED": "queued",
    "CANCELING": "stopping",
    **dict.fromkeys(("NOT_STARTED", "MANAGED", "STARTING"), "starting"),
}


def lease_text(lease_key: str) -> str:
    """Return a lease key as short text: `12`, or `orders:12` with several streams."""
    parts = lease_key.split(":")
    number = parts[-1].removeprefix(_SHARD_PREFIX)
    is_number = number != parts[-1] and number.isdecimal()
    return ":".join([*parts[1:2], str(int(number)) if is_number else parts[-1]])


def move_text(from_worker: str | None, to_worker: str | None) -> str:
    """Return the former and the new owner as one text, which a narrow column wraps."""
    return f"{from_worker or 'nobody'} → {to_worker or 'nobody'}"


def lease_table(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The leases, at most `MAX_TABLE_ROWS`: those without a live owner first, then by lag."""
    return [
        {
            "shard": lease_text(row.lease_key),
            "worker": row.worker,
            "state": row.state,
            "lag": row.lag_text,
            "checkpoint": ""
            if row.checkpoint_age is None or row.state == "ended"
            else f"{duration_text(row.checkpoint_age)} old",
            "KB/s": None if row.kbps is None else _rate_text(row.kbps),
        }
        for row in lease_rows(snapshot)[:MAX_TABLE_ROWS]
    ]


def _rate_text(kbps: float) -> str:
    return f"{kbps:.1f}" if kbps < _NO_DECIMALS_FROM else f"{kbps:,.0f}"


def rows_not_shown(snapshot: Snapshot) -> dg.TextMetadataValue | None:
    """How many leases have no row. None: all of them have one."""
    if (more := len(snapshot.leases) - MAX_TABLE_ROWS) <= 0:
        return None
    return dg.MetadataValue.text(f"{more} leases with a smaller lag; run `kcl-pipeline status`")


def worker_table(
    snapshot: Snapshot, separator: str, runs: Sequence[RunView]
) -> list[dict[str, Any]]:
    """The workers, then the runs that have no worker yet.

    The state has the version of the package, if not all workers have the same.
    """
    workers = worker_rows(snapshot, separator)
    differ = len({row.version for row in workers}) > 1
    rows: list[dict[str, Any]] = []
    for row in workers:
        version = f", version {row.version}" if differ and row.version else ""
        age = row.last_batch_seconds
        rows.append(
            {
                "worker": row.worker_id,
                "state": row.state_text + version,
                "leases": row.leases,
                "cpu": None if row.cpu_percent is None else f"{row.cpu_percent:.0f}%",
                "KB/s": _rate_text(row.kbps),
                "lag": row.lag_text,
                "batch": None if age is None else f"{duration_text(age)} ago",
                "dead letters": row.dead_letters,
            }
        )
    alive = {row.worker_id for row in workers}
    empty = dict.fromkeys(list(rows[0])[2:]) if rows else {}
    return rows + [
        {"worker": run.worker_id, "state": run_state(run)} | empty
        for run in runs
        if run.worker_id not in alive
    ]


def move_table(moves: Sequence[OwnerChange], now: float) -> list[dict[str, Any]]:
    """The last moves, newest first. `now` is in epoch seconds."""
    return [
        {
            "ago": duration_text(now - move.at),
            "shard": lease_text(move.lease_key),
            "workers": move_text(move.from_worker, move.to_worker),
            # The longest text is last: a narrow page cuts the right side off.
            "reason": move.reason,
        }
        for move in moves
    ]


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
