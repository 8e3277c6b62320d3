"""Report streams, tables and checks to Dagster, on change and at least once a minute."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.assets import health
from kcl_pipeline.assets.contract import DagsterOptions
from kcl_pipeline.assets.hangs import hung
from kcl_pipeline.assets.losses import records_lost
from kcl_pipeline.assets.names import Names
from kcl_pipeline.assets.run_metadata import table_of
from kcl_pipeline.assets.runs import RunView
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.lease import BadRow, Lease
from kcl_pipeline.leases.losses import LossLog
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.leases.worker_status import UnavailableStream
from kcl_pipeline.planning.explain import explain
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.sensors.stream_report import (
    STREAMS_PER_MINUTE,
    StreamView,
    stream_events,
    stream_views,
    worst_streams,
)
from kcl_pipeline.sensors.tables import (
    MAX_TABLE_ROWS,
    lease_rows,
    lease_table,
    lease_text,
    run_links,
    worker_rows,
)

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation

LONGEST_GAP_SECONDS: Final = 60.0
SHORTEST_GAP_SECONDS: Final = 9.0
"""Shortest time between two reports of one subject.

An event permanently uses 9 kB of Dagster's event log. With ticks every 5 seconds, a fleet that
changes at every tick is reported at every second tick.
"""

HOLE_GRACE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """One observation of the application.

    Attributes:
        leases: All usable rows of the lease table.
        workers: Rows of the live workers.
        lock_owner: The leader; None without one.
        leads: Whether this sensor is the leader.
        waits: By lease key, for how many seconds the lease has had no live owner.
        lag_millis: The largest lag that a running worker reported.
        lag_age_seconds: How long ago that lag was reported.
        stalled_shards: Number of shards without progress.
        unread_shards: Number of shards whose lag is not known yet.
        plan: The last plan, if this sensor leads.
        plan_input: What the plan was computed from.
        cycle_seconds: Duration of the leader cycle.
        bad_rows: Rows that cannot be parsed.
        unavailable: Streams that are missing or forbidden, of this sensor's cycle or of the
            worker that leads. None: unknown.
        losses: The recorded losses, or why they cannot be read.
        streams: Names or ARNs of all streams: those of the settings, and the other recorded ones.
            Empty: those of the settings.
        checkpoint_ages: By lease key, for how long its checkpoint has not changed, as text.
        moves: Rows of the last moves, newest first.
        runs: The active runs.
    """

    leases: tuple[Lease, ...]
    workers: tuple[WorkerMetrics, ...]
    lock_owner: str | None
    leads: bool
    waits: dict[str, float]
    lag_millis: int | None = None
    lag_age_seconds: float | None = None
    stalled_shards: int = 0
    unread_shards: int = 0
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    cycle_seconds: float = 0.0
    bad_rows: tuple[BadRow, ...] = ()
    unavailable: tuple[UnavailableStream, ...] | None = ()
    losses: LossLog | UnreadableRowError = field(default_factory=LossLog)
    streams: tuple[str, ...] = ()
    checkpoint_ages: Mapping[str, str] = field(default_factory=dict)
    moves: tuple[dict[str, Any], ...] = ()
    runs: tuple[RunView, ...] = ()


@dataclass(slots=True)
class Cadence:
    """Decide which reports are due. Can be built again at any time.

    Attributes:
        reported: By subject, the content reported last and when (monotonic seconds).
        hole_since: Since when some hash keys are not covered by a lease.
    """

    reported: dict[str, tuple[Hashable, float]] = field(default_factory=dict)
    hole_since: float | None = None

    def hole_lasts(self, hole: bool, now: float) -> bool:
        """Whether hash keys have been uncovered for `HOLE_GRACE_SECONDS`.

        A new application, and a reshard, need less time than this to create their leases.
        """
        self.hole_since = (now if self.hole_since is None else self.hole_since) if hole else None
        return self.hole_since is not None and now - self.hole_since >= HOLE_GRACE_SECONDS

    def due(
        self, subject: str, content: Hashable, now: float, *, longest: float = LONGEST_GAP_SECONDS
    ) -> bool:
        """Whether `content` is due. If so it is recorded as reported; the caller reports it.

        Content that has not changed is due `longest` seconds after the last report.
        """
        last = self.reported.get(subject)
        if last is not None:
            gap = now - last[1]
            if gap < SHORTEST_GAP_SECONDS or (last[0] == content and gap < longest):
                return False
        self.reported[subject] = (content, now)
        return True


@dataclass(slots=True)
class LeaseWaits:
    """Since when each unfinished lease has had no live owner (monotonic seconds).

    Can be built again at any time.
    """

    since: dict[str, float] = field(default_factory=dict)

    def observe(self, leases: Sequence[Lease], ownerless: set[str], now: float) -> dict[str, float]:
        """Add one observation and return, by lease key, the seconds without a live owner."""
        waiting = {
            le.lease_key
            for le in leases
            if not le.ended and (le.actual_owner is None or le.lease_key in ownerless)
        }
        self.since = {key: self.since.get(key, now) for key in waiting}
        return {key: now - since for key, since in self.since.items()}


def stuck_limit_seconds(settings: ConsumerSettings) -> float:
    """After how long a lease without a live owner is stuck.

    Twice the sum of the failover time, the assignment interval and the discovery interval.
    """
    millis = (
        settings.lease.failover_time_millis
        + settings.lease_assignment_interval_millis
        + settings.lease_discovery_interval_millis
    )
    return 2 * millis / 1000


def lease_table_metadata(view: FleetView) -> dict[str, Any]:
    """Gauges of the application, the leases, the last moves, leases per worker, and the plan.

    Dagster plots the values that are numbers.
    """
    unfinished = [le for le in view.leases if not le.ended]
    counts = health.lease_counts(view.leases)
    rows = lease_rows(view.leases, view.workers, view.waits, view.checkpoint_ages)
    metadata: dict[str, Any] = lease_table(rows, len(view.leases))
    metadata |= {
        "last_moves": table_of(list(view.moves)),
        "leases": len(view.leases),
        "unfinished": len(unfinished),
        "without_owner": sum(1 for le in unfinished if le.actual_owner is None),
        "in_handoff": sum(1 for le in view.leases if le.in_handoff),
        "leader": dg.MetadataValue.text(view.lock_owner or "none"),
        "per_worker": table_of(
            [{"worker": worker, "leases": count} for worker, count in sorted(counts.items())]
        ),
    }
    if view.plan is not None:
        metadata |= plan_metadata(view.plan, view.plan_input)
        metadata["plan_notes"] = dg.MetadataValue.text(
            "; ".join(
                (
                    f"strategy {view.plan.strategy}",
                    *view.plan.notes,
                    *(f"no worker can take {k}" for k in view.plan.spilled),
                )
            )
        )
    return metadata


def plan_metadata(plan: Plan, plan_input: PlanInput | None) -> dict[str, Any]:
    """The moves with their reasons.

    With `plan_input` also the load of each worker and group before and after.
    """
    if plan_input is None:
        return {
            "plan": table_of(
                [
                    {
                        "lease": lease_text(m.lease_key),
                        "from": m.from_worker,
                        "to": m.to_worker,
                        "reason": m.reason,
                    }
                    for m in plan.moves
                ]
            )
        }
    table = explain(plan_input, plan)
    return {
        "plan": table_of([row | {"lease": lease_text(str(row["lease"]))} for row in table.rows()]),
        "plan_summary": dg.MetadataValue.text(table.summary),
        "plan_workers": table_of(table.worker_rows()),
        "plan_groups": table_of(table.group_rows()),
    }


def worker_table_metadata(view: FleetView) -> dict[str, Any]:
    """The live workers with their state, CPU, leases, throughput and batches, and their runs."""
    rows = worker_rows(view.workers, view.leases, view.runs)
    cpus = [cpu for w in view.workers if (cpu := health.cpu_percent(w)) is not None]
    metadata: dict[str, Any] = {
        "workers": len(view.workers),
        "rows": table_of(rows, MAX_TABLE_ROWS),
    }
    if view.runs:
        metadata["runs"] = run_links(view.runs)
    return metadata | ({"cpu_spread": max(cpus) - min(cpus)} if cpus else {})


def _due_streams(
    streams: Sequence[StreamView], cadence: Cadence, now: float
) -> Iterator[StreamView]:
    """The streams that are due: on change and once a minute; with many streams, less often."""
    many = len(streams) > STREAMS_PER_MINUTE
    longest = LONGEST_GAP_SECONDS * max(len(streams) / STREAMS_PER_MINUTE, 1.0)
    for stream in streams:
        subject = f"stream {'/'.join(stream.key.path)}"
        if cadence.due(subject, None if many else stream.content, now, longest=longest):
            yield stream


def asset_events(
    view: FleetView,
    names: Names,
    settings: ConsumerSettings,
    options: DagsterOptions,
    cadence: Cadence,
    now: float,
) -> list[AssetEvent]:
    """The events that are due at `now` (monotonic seconds)."""
    events: list[AssetEvent] = []
    owners = tuple((le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in view.leases)
    streams = stream_views(
        view.streams or settings.streams, view.leases, view.workers, view.lag_millis
    )
    if cadence.due("leases", owners, now):
        metadata = lease_table_metadata(view)
        if settings.is_multi_stream:
            metadata["streams"] = table_of(worst_streams(streams))
        events.append(dg.AssetMaterialization(names.lease_table, metadata=metadata))
    for stream in _due_streams(streams, cadence, now):
        events += stream_events(stream, names, view.lag_age_seconds)
    states = tuple((w.worker_id, w.drain_requested) for w in view.workers)
    runs = tuple((run.run_id, run.status) for run in view.runs)
    if cadence.due("workers", (states, runs), now):
        events.append(
            dg.AssetMaterialization(
                names.worker_metrics_table, metadata=worker_table_metadata(view)
            )
        )
    if cadence.due("leader", view.lock_owner, now):
        metadata = {
            "leader": view.lock_owner or "none",
            "this_sensor_leads": view.leads,
            "cycle_seconds": view.cycle_seconds,
        }
        events.append(dg.AssetObservation(names.coordinator_state_table, metadata=metadata))
    covered = health.coverage(view.leases, view.streams or settings.streams)
    checks = [
        (names.output, health.paused(view.workers)),
        (names.lease_table, health.stuck(view.waits, stuck_limit_seconds(settings))),
        (names.lease_table, health.rows(view.bad_rows)),
        (names.lease_table, records_lost(view.losses)),
        (names.worker_metrics_table, hung(view.workers)),
        (
            names.worker_metrics_table,
            health.balance(
                view.leases, view.workers, settings.assignment.re_balance_threshold_percentage
            ),
        ),
    ]
    if cadence.hole_lasts(not covered.passed, now) or covered.passed:
        checks.append((names.lease_table, covered))
    if view.unavailable is not None:
        checks.append((names.lease_table, health.streams(view.unavailable)))
    if view.lag_millis is not None or view.stalled_shards:
        lag = health.lag(
            view.lag_millis,
            options.lag_threshold_seconds,
            view.stalled_shards,
            unread_shards=view.unread_shards,
            age_seconds=view.lag_age_seconds,
        )
        checks.append((names.output, lag))
    events += [
        check.evaluation(key)
        for key, check in checks
        if cadence.due(check.check, check.passed, now)
    ]
    return events
