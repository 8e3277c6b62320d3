"""Evaluate the checks of unread records: retention, and checkpoints that do not move."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.orchestration.assets.checks.health import Health
from kcl_pipeline.orchestration.assets.checks.living import LiveWorkers
from kcl_pipeline.orchestration.assets.runs.metadata import known, table_of
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.text import counted, duration_text, printable

RETENTION: Final = "data_within_retention"
CHECKPOINTS: Final = "checkpoints_advance"

RETENTION_ADVICE: Final = (
    "Raise the retention period of the stream now; it keeps the records that still exist. Then "
    "remove the cause of the lag: see the fleet. See docs/checks-and-events.md"
)
CHECKPOINTS_ADVICE: Final = (
    "Look at the state of the shard in the rows of the fleet, then at the log of its worker for "
    "shard_stalled, shard_paused or batch_refused. See docs/checks-and-events.md"
)
POLL_SECONDS: Final = 10.0


def unread_seconds(
    leases: Sequence[Lease],
    workers: Sequence[WorkerMetrics],
    wall_seconds: float,
    drained_at: float | None = None,
) -> dict[str, float]:
    """Return by lease key how old the oldest unread record can be, in seconds.

    It is the lag in the row of the lease's worker. Without one it is the time since all records of
    the shard were in the table, which workers of this package write to the lease row, and at most
    the smallest lag that the worker lists. Leases for which all are unknown, and finished ones, are
    left out.

    Args:
        leases: All leases.
        workers: The live workers. The row of a dead worker has a lag that does not grow.
        wall_seconds: Epoch seconds. They are compared with the clocks of the workers.
        drained_at: When a drain had all records in the table (epoch seconds). It holds for leases
            without a live owner. None: no drain is known.
    """
    listed = {
        (worker.worker_id, lag.lease_key): lag.millis / 1000
        for worker in workers
        if worker.status is not None
        for lag in worker.status.lags
    }
    # A worker of another implementation leaves the time in the lease row as it is.
    others = {worker.worker_id for worker in workers if worker.status is None}
    live = {worker.worker_id for worker in workers}
    largest = largest_unlisted_millis(workers)
    found: dict[str, float] = {}
    for lease in leases:
        if lease.ended or lease.actual_owner in others:
            continue
        owner = lease.actual_owner or ""
        lag = listed.get((owner, lease.lease_key))
        if lag is not None:
            found[lease.lease_key] = lag
            continue
        limits = [] if owner not in largest else [largest[owner] / 1000]
        if lease.read_up_to_millis is not None:
            limits.append(max(wall_seconds - lease.read_up_to_millis / 1000, 0.0))
        if drained_at is not None and owner not in live:
            limits.append(max(wall_seconds - drained_at, 0.0))
        if limits:
            found[lease.lease_key] = min(limits)
    return found


def largest_unlisted_millis(workers: Sequence[WorkerMetrics]) -> dict[str, int]:
    """Return by worker id how large a lag can be that its row does not list.

    A row lists the largest lags. Workers that list all of theirs are left out.
    """
    return {
        worker.worker_id: min(lag.millis for lag in worker.status.lags)
        for worker in workers
        if worker.status is not None and worker.status.lags and worker.status.more_lags
    }


def retention_by_stream(streams: Sequence[StreamId]) -> dict[str, float]:
    """Return the retention period by serialized stream, in seconds. Unknown ones are left out."""
    return {
        stream.serialized: stream.retention_hours * 3600.0
        for stream in streams
        if stream.retention_hours is not None
    }


def retention(
    leases: Sequence[Lease],
    unread: Mapping[str, float],
    retention_seconds: Mapping[str, float],
    limits: CheckLimits,
) -> Health:
    """Whether all unread records stay in the retention period of their stream for long enough.

    Args:
        leases: All leases.
        unread: See `unread_seconds`.
        retention_seconds: See `retention_by_stream`. Streams without an entry are left out.
        limits: `retention_warn_seconds` and `retention_error_seconds`.
    """
    rows = _streams_by_time_left(leases, unread, retention_seconds)
    left = rows[0]["left"] if rows else None
    passed = left is None or left >= limits.retention_warn_seconds
    is_error = left is not None and left < limits.retention_error_seconds
    unknown = sum(not lease.ended and lease.lease_key not in unread for lease in leases)
    metadata = {
        "leases_without_age": unknown,
        "streams": table_of(
            [
                {
                    "stream": row["stream"],
                    "retention": duration_text(row["retention"]),
                    "oldest unread": duration_text(row["age"]),
                    "time left": duration_text(max(row["left"], 0.0)),
                    "shard": row["shard"],
                }
                for row in rows
            ]
        ),
        "hours_left": None if left is None else round(left / 3600, 2),
    }
    return Health(
        RETENTION,
        passed,
        _retention_text(rows) + ("" if passed else f". {RETENTION_ADVICE}"),
        dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        known(metadata),
    )


def _streams_by_time_left(
    leases: Sequence[Lease], unread: Mapping[str, float], retention_seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One entry per stream with a known retention period and age, the most urgent first."""
    oldest: dict[str | None, tuple[float, str]] = {}
    for lease in leases:
        age = unread.get(lease.lease_key)
        if age is not None and age >= oldest.get(lease.stream, (-1.0, ""))[0]:
            oldest[lease.stream] = (age, lease.shard_id)
    rows = []
    for stream, (age, shard) in oldest.items():
        # Leases of a single stream do not name it.
        name = next(iter(retention_seconds), "") if stream is None else stream
        period = retention_seconds.get(name)
        if period is not None:
            short = name.split(":")[1] if name.count(":") > 1 else name
            rows.append(
                {
                    "stream": printable(short),
                    "retention": period,
                    "age": age,
                    "left": period - age,
                    "shard": printable(shard),
                }
            )
    return sorted(rows, key=lambda row: (row["left"], row["stream"]))


def _retention_text(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "the age of unread records is not known yet"
    first = rows[0]
    about = (
        f"its oldest unread record is {duration_text(first['age'])} old, of shard "
        f"{first['shard']}; the retention period is {duration_text(first['retention'])}"
    )
    if first["left"] <= 0:
        return f"{first['stream']}: unread records leave the retention period now; {about}"
    return f"{first['stream']}: {duration_text(first['left'])} until records are lost; {about}"


def checkpoints(
    leases: Sequence[Lease],
    unchanged: Mapping[str, float],
    unread: Mapping[str, float],
    limit_seconds: float,
) -> Health:
    """Whether the checkpoint of every shard with old unread records changes.

    The checkpoint of a shard without new records does not change. It passes.

    Args:
        leases: All leases.
        unchanged: By lease key, for how many seconds the checkpoint was observed not to change.
        unread: See `unread_seconds`.
        limit_seconds: Both times must be at most this.
    """
    late = sorted(
        (
            lease
            for lease in leases
            if not lease.ended
            and unchanged.get(lease.lease_key, 0.0) > limit_seconds
            and unread.get(lease.lease_key, 0.0) > limit_seconds
        ),
        key=lambda lease: (-unread[lease.lease_key], lease.lease_key),
    )
    first = late[0] if late else None
    return Health(
        CHECKPOINTS,
        not late,
        "the checkpoint of every shard with unread records changes"
        if first is None
        else f"the checkpoints of {counted(len(late), 'shard')} have not changed for more than "
        f"{duration_text(limit_seconds)} while records wait. The first, "
        f"{printable(first.lease_key)} of worker {printable(first.actual_owner or 'none')}: its "
        f"oldest unread record is {duration_text(unread[first.lease_key])} old. "
        f"{CHECKPOINTS_ADVICE}",
        dg.AssetCheckSeverity.ERROR,
        {
            "late": len(late),
            "shards": table_of(
                [
                    {
                        "lease": printable(lease.lease_key),
                        "worker": lease.actual_owner,
                        "oldest unread": duration_text(unread[lease.lease_key]),
                        "checkpoint age": duration_text(unchanged[lease.lease_key]),
                    }
                    for lease in late
                ]
            ),
        },
    )


def observe_checkpoints(
    table: LeaseTable,
    workers: WorkerMetricsTable,
    limit_seconds: float,
    clock: Clock,
    rejected: RejectedRows,
) -> Health:
    """Evaluate `checkpoints` by observing the leases and the workers for the limit.

    It returns as soon as no shard is left that has old unread records and its first checkpoint. A
    fleet without lag is therefore read once. The row of a worker counts only after it has changed:
    a dead worker leaves a small lag in it.
    """
    begin, living = clock.monotonic(), LiveWorkers(workers, rejected)
    living.observe()
    leases = table.list_leases().leases
    unread = _unread_if_alive_or_dead(leases, living, clock.wall())
    suspects = {
        lease.lease_key: lease.checkpoint
        for lease in leases
        if unread.get(lease.lease_key, 0.0) > limit_seconds
    }
    while suspects and clock.monotonic() - begin <= limit_seconds:
        clock.sleep(POLL_SECONDS)
        living.observe()
        leases = table.list_leases().leases
        unread = _unread_if_alive_or_dead(leases, living, clock.wall())
        now = {lease.lease_key: lease.checkpoint for lease in leases}
        suspects = {
            key: position
            for key, position in suspects.items()
            if now.get(key) == position and unread.get(key, 0.0) > limit_seconds
        }
    unchanged = dict.fromkeys(suspects, clock.monotonic() - begin)
    return checkpoints(leases, unchanged, unread, limit_seconds)


def _unread_if_alive_or_dead(
    leases: Sequence[Lease], workers: LiveWorkers, wall_seconds: float
) -> dict[str, float]:
    """Return the larger age of two: as if silent workers were alive, and as if they were dead."""
    alive = unread_seconds(leases, workers.all_rows, wall_seconds)
    dead = unread_seconds(leases, workers.rows, wall_seconds)
    return {key: max(alive.get(key, 0.0), dead.get(key, 0.0)) for key in alive | dead}
