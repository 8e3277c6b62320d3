"""Evaluate the asset checks: pure functions from rows to a result.

The executable checks and the leader sensor use the same functions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData,
)

from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.state.worker_status import StalledLease, UnavailableStream
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.runs.metadata import MAX_ROWS, lag_text, table_of
from kcl_pipeline.planning.coverage import hole_in_leases
from kcl_pipeline.status.streams import is_lease_stream, stream_name
from kcl_pipeline.text import counted, duration_text, printable

COVERAGE: Final = "hash_ranges_covered"
STUCK: Final = "leases_renewed"
BALANCE: Final = "balanced"
LAG: Final = "lag_below_threshold"
ROWS: Final = "rows_usable"
PAUSED: Final = "no_shard_paused"
STREAMS: Final = "streams_available"

STREAM_ADVICE: Final = (
    "Create the stream, or allow the action in the IAM policy. Its leases are kept, and the leader "
    "tries again every 30 s. `kcl-pipeline doctor` checks every action"
)
COVERAGE_ADVICE: Final = (
    "The leader creates missing leases at its next audit. If the gap stays, a lease row was "
    "deleted or cannot be parsed: see rows_usable, and run `kcl-pipeline doctor`"
)
STUCK_ADVICE: Final = (
    "No worker took them: `kcl-pipeline status` shows whether somebody leads "
    "and a worker runs, and `kcl-pipeline plan` which worker would take them"
)
ROWS_ADVICE: Final = (
    "Their shards are not read. Another program wrote them: run `kcl-pipeline doctor`, which names "
    "each row and what to do"
)
BALANCE_ADVICE: Final = "`kcl-pipeline plan` shows the moves that would balance it, or why not"
LAG_ADVICE: Final = (
    "The fleet shows which shards lag. If all do, raise `workers.max` or make the transform "
    "faster; if one does, it is hot or paused. See docs/operations.md"
)
PAUSED_ADVICE: Final = (
    "If the transform fails, repair it and deploy it; the shards go on by themselves. See "
    "docs/dead-letters.md. If the table was replaced or restored, do what the reason says"
)
_SHOWN_STREAMS: Final = 3

CPU_NOISE_POINTS: Final = 5.0
"""CPU differences below this many percentage points are ignored."""


@dataclass(frozen=True, slots=True)
class Health:
    """The result of one check."""

    check: str
    passed: bool
    description: str
    severity: dg.AssetCheckSeverity
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> tuple[bool, dg.AssetCheckSeverity]:
        """What is reported at once when it changes."""
        return self.passed, self.severity

    def result(self) -> dg.AssetCheckResult:
        """The result as an executed check returns it."""
        return dg.AssetCheckResult(
            passed=self.passed,
            severity=self.severity,
            description=self.description,
            metadata=self.metadata,
        )

    def evaluation(
        self, key: dg.AssetKey, *, of: dg.EventLogRecord | None = None
    ) -> dg.AssetCheckEvaluation:
        """The result as an event without a run; `of` is the materialization that it evaluates."""
        return dg.AssetCheckEvaluation(
            asset_key=key,
            check_name=self.check,
            passed=self.passed,
            severity=self.severity,
            description=self.description,
            metadata=self.metadata,
            target_materialization_data=None
            if of is None
            else AssetCheckEvaluationTargetMaterializationData(
                storage_id=of.storage_id, run_id=of.run_id, timestamp=of.timestamp
            ),
        )


def lease_counts(leases: Iterable[Lease]) -> Counter[str]:
    """Number of unfinished leases per worker that processes them."""
    return Counter(
        lease.actual_owner for lease in leases if not lease.ended and lease.actual_owner is not None
    )


def kbps_by_owner(leases: Iterable[Lease]) -> Mapping[str | None, float]:
    """Throughput of the unfinished leases per worker that processes them; 0 for other workers."""
    found: defaultdict[str | None, float] = defaultdict(float)
    for lease in leases:
        if not lease.ended:
            found[lease.actual_owner] += lease.throughput_kbps or 0.0
    return found


def coverage(leases: Sequence[Lease], streams: Sequence[str]) -> Health:
    """Whether the unfinished leases of every stream cover all 2^128 hash keys.

    While a shard is split or merged, a gap exists for a short time.
    """
    groups: dict[str, list[Lease]] = {}
    for lease in leases:
        groups.setdefault(lease.stream or next(iter(streams), ""), []).append(lease)
    holes = {
        stream: str(hole)
        for stream, group in groups.items()
        if (hole := hole_in_leases(group)) is not None
    }
    missing = _without_lease(groups, streams)
    if missing:
        holes[f"{missing} of {len(streams)} streams"] = "no lease at all"
    rangeless = sum(1 for lease in leases if not lease.ended and lease.hash_key_range is None)
    text = "; ".join(f"{stream}: {gap}" for stream, gap in sorted(holes.items()))
    return Health(
        COVERAGE,
        not holes,
        f"{text}. {COVERAGE_ADVICE}"
        if holes
        else f"{counted(len(groups), 'stream')} {_are(len(groups))} covered by "
        f"{counted(sum(not le.ended for le in leases), 'lease')}",
        dg.AssetCheckSeverity.ERROR,
        {"leases": len(leases), "holes": len(holes), "leases_without_range": rangeless},
    )


def _without_lease(groups: Iterable[str], streams: Sequence[str]) -> int:
    """Number of streams that no lease belongs to."""
    if len(streams) <= 1 or any(":" not in group for group in groups):
        return max(len(streams) - len(set(groups)), 0)
    by_name: dict[str, list[str]] = {}
    for group in groups:
        by_name.setdefault(group.split(":")[1], []).append(group)
    return sum(
        not any(is_lease_stream(one, group, ()) for group in by_name.get(stream_name(one), ()))
        for one in streams
    )


def streams(unavailable: Sequence[UnavailableStream]) -> Health:
    """Whether every stream of the application exists and may be described and listed.

    The other streams are read on.
    """
    found = sorted(unavailable, key=lambda stream: stream.stream)[:MAX_ROWS]
    # Messages of AWS end with a full stop.
    text = "; ".join(f"{one.stream}: {one.reason.rstrip('.')}" for one in found[:_SHOWN_STREAMS])
    more = len(unavailable) - _SHOWN_STREAMS
    return Health(
        STREAMS,
        not unavailable,
        f"{counted(len(unavailable), 'stream')} {_are(len(unavailable))} not read: {text}"
        + (f"; and {more} more" if more > 0 else "")
        + f". {STREAM_ADVICE}"
        if unavailable
        else "every stream can be described and listed",
        dg.AssetCheckSeverity.ERROR,
        {
            "unavailable": len(unavailable),
            "streams": table_of([{"stream": one.stream, "reason": one.reason} for one in found]),
        },
    )


def stuck(waits: Mapping[str, float], limit_seconds: float) -> Health:
    """Whether an unfinished lease has had no live owner for longer than the limit.

    Args:
        waits: By lease key, for how many seconds the lease has had no live owner.
        limit_seconds: Longest time that passes.
    """
    late = sorted(
        (key for key, seconds in waits.items() if seconds > limit_seconds),
        key=lambda key: -waits[key],
    )
    return Health(
        STUCK,
        not late,
        f"{counted(len(late), 'lease')} without a live owner for more than {limit_seconds:.0f} s: "
        f"{', '.join(late[:5])}. {STUCK_ADVICE}"
        if late
        else "every lease is renewed",
        dg.AssetCheckSeverity.ERROR,
        {
            "stuck": len(late),
            "waiting": len(waits),
            "leases": table_of([{"lease": key, "seconds": round(waits[key])} for key in late]),
        },
    )


def rows(bad_rows: Sequence[BadRow]) -> Health:
    """Whether every row of the lease and worker-metrics tables can be parsed.

    Other rows are ignored: such a lease is neither held nor planned, such a worker gets no leases.
    """
    found = sorted(bad_rows, key=lambda row: (row.table, row.key))[:MAX_ROWS]
    return Health(
        ROWS,
        not bad_rows,
        f"{len(bad_rows)} rows cannot be parsed; the first: {found[0].reason}. {ROWS_ADVICE}"
        if found
        else "every row can be parsed",
        dg.AssetCheckSeverity.ERROR,
        {
            "bad_rows": len(bad_rows),
            "rows": table_of(
                [
                    {"table": row.table, "key": printable(row.key), "reason": row.reason}
                    for row in found
                ]
            ),
        },
    )


def cpu_percent(worker: WorkerMetrics) -> float | None:
    """The mean of the reported CPU averages; None without an average."""
    values = [v for v in worker.cpu if v >= 0]
    return sum(values) / len(values) if values else None


def _within(values: Sequence[float], threshold_percentage: float, least: float) -> bool:
    mean = sum(values) / len(values)
    return max(values) <= mean + max(mean * threshold_percentage / 100, least)


def balance(
    leases: Sequence[Lease], workers: Sequence[WorkerMetrics], threshold_percentage: float
) -> Health:
    """Whether work is spread evenly over the live workers.

    It passes if the CPU, the throughput, or the number of leases is even. It fails if one worker
    has no lease while another has two or more.
    """
    counts = lease_counts(leases)
    numbers = [counts.get(w.worker_id, 0) for w in workers]
    flow = kbps_by_owner(leases)
    cpus = [cpu for w in workers if (cpu := cpu_percent(w)) is not None]
    flows = [flow[w.worker_id] for w in workers]
    even = len(workers) < 2 or (  # noqa: PLR2004 (two make a comparison)
        max(numbers) - min(numbers) <= 1
        or (any(flows) and _within(flows, threshold_percentage, 1.0))
        or (len(cpus) == len(workers) and _within(cpus, threshold_percentage, CPU_NOISE_POINTS))
    )
    # The planner can move one of two leases to the idle worker.
    idle = bool(numbers) and min(numbers) == 0 and max(numbers) >= 2  # noqa: PLR2004
    rows = [
        {
            "worker": w.worker_id,
            "leases": counts.get(w.worker_id, 0),
            "kbps": round(flow[w.worker_id], 1),
            "cpu": "" if (cpu := cpu_percent(w)) is None else f"{cpu:.0f} %",
        }
        for w in workers
    ]
    passed = even and not idle
    return Health(
        BALANCE,
        passed,
        f"{counted(len(workers), 'worker')}, {min(numbers, default=0)} to "
        f"{max(numbers, default=0)} leases each"
        + (", one is idle" if idle else "")
        + ("" if passed else f". {BALANCE_ADVICE}"),
        dg.AssetCheckSeverity.WARN,
        {"workers": table_of(rows)},
    )


def lag(
    millis: int | None,
    threshold_seconds: float,
    stalled_shards: int = 0,
    *,
    unread_shards: int = 0,
    age_seconds: float | None = None,
    worst: str | None = None,
    error_seconds: float | None = None,
    unowned_shards: int = 0,
    idle: str | None = None,
    stalled: StalledLease | None = None,
) -> Health:
    """Whether the largest lag is below the threshold and no shard is stalled.

    Args:
        millis: The largest lag of committed data; None (not known) fails.
        threshold_seconds: Largest lag that passes.
        stalled_shards: Number of shards without progress.
        unread_shards: Number of shards whose lag is not known yet.
        age_seconds: How long ago the lag was reported.
        worst: Which shard lags most, since when and why; shown if the check fails.
        error_seconds: The severity is ERROR above this lag. None: always WARN.
        unowned_shards: Number of shards without a live worker whose lag is not known. They fail.
        idle: Since when nothing has arrived; shown if the check passes.
        stalled: One of the shards without progress.
    """
    is_known = millis is not None and not unowned_shards
    passed = is_known and (millis or 0) <= threshold_seconds * 1000 and not stalled_shards
    is_late = error_seconds is not None and (millis or 0) > error_seconds * 1000
    description = (
        "no running worker has reported its lag"
        if millis is None
        else f"{lag_text(millis)} behind the end of the stream"
    )
    if millis is not None and age_seconds is not None:
        description += f", reported {max(age_seconds, 0.0):.0f} s ago"
    if unread_shards:
        description += f"; not read yet: {counted(unread_shards, 'shard')}"
    if stalled_shards:
        description += (
            f"; stalled shards: {stalled_shards} (see shard_stalled in the workers' logs)"
        )
        if stalled is not None:
            error = "" if stalled.error is None else f": {printable(stalled.error)}"
            description += (
                f", such as {printable(stalled.lease_key)}, in the step {printable(stalled.step)} "
                f"for {duration_text(stalled.seconds)}{error}"
            )
    if unowned_shards:
        description += (
            f"; without a worker, so that the lag is not known: {counted(unowned_shards, 'shard')}"
        )
    if worst is not None and not passed:
        description += f". {worst}"
    if idle is not None and passed:
        description += f"; {idle}"
    return Health(
        LAG,
        passed,
        description if passed else f"{description}. {LAG_ADVICE}",
        dg.AssetCheckSeverity.ERROR if is_late else dg.AssetCheckSeverity.WARN,
        ({} if millis is None else {"lag_seconds": millis / 1000})
        | {"stalled_shards": stalled_shards},
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _paused_text(count: int, paused_rows: Sequence[Mapping[str, object]]) -> str:
    if not count:
        return "no shard is paused"
    first = (
        f"; the first, {paused_rows[0]['lease']}: {paused_rows[0]['reason']}" if paused_rows else ""
    )
    return f"{counted(count, 'shard')} {_are(count)} paused{first}. {PAUSED_ADVICE}"


def paused(workers: Sequence[WorkerMetrics]) -> Health:
    """Whether no shard of these workers is paused (see `events.ShardPaused`)."""
    found = [
        {
            "lease": one.lease_key,
            "worker": worker.worker_id,
            "seconds": round(one.seconds),
            "reason": one.reason,
        }
        for worker in workers
        if worker.status is not None
        for one in worker.status.paused
    ]
    count = sum(w.status.paused_leases for w in workers if w.status is not None)
    return Health(
        PAUSED,
        not count,
        _paused_text(count, found),
        dg.AssetCheckSeverity.ERROR,
        {"paused": count, "shards": table_of(found)},
    )
