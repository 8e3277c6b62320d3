"""`kcl-pipeline workers`: show the rows of the worker-metrics table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import refuse_options_before
from kcl_pipeline.cli.inspection.leases import group_of
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.leases.state.worker_status import WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.state import is_failing
from kcl_pipeline.text import counted

CPU = "C"
COLUMNS = (
    "worker",
    "group",
    "leases",
    "CPU %",
    "limit %",
    "lag",
    "dead letters",
    "last report",
    "state",
    "run",
)


def workers(
    ctx: typer.Context,
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    as_json: AsJson = False,
) -> None:
    """Show the workers: leases, CPU, lag, paused shards, dead letters and refused batches.

    The lag is that of committed data, as of the worker's last report.
    """
    refuse_options_before(ctx.invoked_subcommand, application, stream, pipeline, as_json)
    if ctx.invoked_subcommand is not None:
        return
    app = target(application, stream, pipeline)
    listing = app.tables.workers.scan_workers()
    rows = sorted(listing.workers, key=lambda row: row.worker_id)
    held = Counter(
        lease.actual_owner for lease in app.tables.lease.list_leases().leases if not lease.ended
    )
    now, separator = app.clock.wall(), app.settings.worker.worker_group_separator
    show.print_bad_rows(listing.bad_rows)
    if as_json:
        show.print_json([_as_dict(row, held[row.worker_id], now, separator) for row in rows])
        return
    show.print_table(
        f"Workers of {app.settings.application_name}",
        COLUMNS,
        [_row(row, held[row.worker_id], now, separator) for row in rows],
        numbers=["leases", "CPU %", "limit %", "lag", "dead letters"],
    )


def _row(row: WorkerMetrics, leases: int, now: float, separator: str) -> Sequence[str]:
    limit = row.operating_range.get(CPU)
    return [
        row.worker_id,
        group_of(row.worker_id, separator),
        str(leases),
        show.number(newest(row)),
        str(limit[0]) if limit else show.NONE,
        lag_of(row),
        show.NONE if row.status is None else f"{row.status.dead_letters:,}",
        f"{show.age(now - row.last_update_seconds)} ago",
        ", ".join(states(row)) or "working",
        row.run_id or show.NONE,
    ]


def newest(row: WorkerMetrics) -> float | None:
    """The last CPU average; intervals whose measurement failed are skipped."""
    return next((value for value in reversed(row.cpu) if value >= 0), None)


def lag_of(row: WorkerMetrics) -> str:
    """The lag of committed data as of the last report."""
    status = row.status
    if status is None or status.lag_millis is None:
        return show.NONE if status is None else "unknown"
    more = f" ({counted(status.unknown_lags, 'shard')} unknown)" if status.unknown_lags else ""
    return f"{status.lag_millis / 1000:.1f} s{more}"


def states(row: WorkerMetrics) -> list[str]:
    """The states of a worker that need attention; empty for a worker that works normally."""
    found = []
    if row.status is not None and row.status.hung is not None:
        hung = row.status.hung
        found.append(f"hung for {show.age(hung.seconds)} in step {hung.step}")
    if row.drain_requested:
        found.append("pausing" if row.drains_for_pause else "drain requested")
    if is_failing(row):
        found.append("metrics failing")
    if not row.stats and not row.own_cpu:
        found.append("no metrics")
    if row.status is not None and row.status.paused_leases:
        found.append(f"{counted(row.status.paused_leases, 'shard')} paused")
    if row.status is not None and row.status.failed_batches:
        found.append(f"the sink refused the last {row.status.failed_batches} batches")
    return found


def _as_dict(row: WorkerMetrics, leases: int, now: float, separator: str) -> dict[str, Any]:
    status = row.status or WorkerStatus()
    return {
        "worker_id": row.worker_id,
        "group": group_of(row.worker_id, separator),
        "leases": leases,
        "stats": {name: list(values) for name, values in row.stats.items()},
        "own_cpu": list(row.own_cpu),
        "operating_range": {name: list(values) for name, values in row.operating_range.items()},
        "last_update_seconds": row.last_update_seconds,
        "seconds_since_report": round(now - row.last_update_seconds, 1),
        "support_code": row.support_code,
        "drain_requested": row.drain_requested,
        "run_id": row.run_id,
        "lag_millis": status.lag_millis,
        "unknown_lags": status.unknown_lags,
        "paused": {one.lease_key: one.reason for one in status.paused},
        "dead_letters": status.dead_letters,
        "failed_batches": status.failed_batches,
        "failure": status.failure,
        "hung": None
        if status.hung is None
        else {
            "step": status.hung.step,
            "seconds": status.hung.seconds,
            "leases": status.hung.leases,
        },
    }
