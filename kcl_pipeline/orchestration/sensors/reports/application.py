"""Report streams, fleet and checks to Dagster, on change and at least once a minute."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.orchestration.assets.checks import health, history, unread
from kcl_pipeline.orchestration.assets.checks.hangs import hung
from kcl_pipeline.orchestration.assets.checks.lag import lag
from kcl_pipeline.orchestration.assets.checks.losses import records_lost
from kcl_pipeline.orchestration.assets.contract import DagsterOptions
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.metadata import known, table_of
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.orchestration.sensors.reports.streams import (
    STREAMS_PER_MINUTE,
    StreamView,
    stream_events,
    stream_views,
    worst_streams,
)
from kcl_pipeline.orchestration.sensors.reports.tables import (
    MAX_TABLE_ROWS,
    lease_rows,
    lease_text,
    move_text,
    rows_not_shown,
    run_links,
    worker_rows,
)
from kcl_pipeline.planning.explain import LoadRow, explain
from kcl_pipeline.planning.model import Plan, PlanInput

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation

LONGEST_GAP_SECONDS: Final = 60.0
SHORTEST_GAP_SECONDS: Final = 9.0
"""Shortest time between two reports of one subject.

An event permanently uses 9 kB of Dagster's event log. With ticks every 5 seconds, a fleet that
changes at every tick is reported at every second tick.
"""

HOLE_GRACE_SECONDS: Final = 30.0


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


def fleet_metadata(view: FleetView) -> dict[str, Any]:
    """Leader, leases, workers, the last moves and the plan. Dagster plots what are numbers."""
    unfinished = [le for le in view.leases if not le.ended]
    counts = health.lease_counts(view.leases)
    rows = lease_rows(view.leases, view.workers, view.waits, view.checkpoint_ages, view.ages)
    cpus = [cpu for w in view.workers if (cpu := health.cpu_percent(w)) is not None]
    metadata: dict[str, Any] = {
        "state": dg.MetadataValue.text("working" if view.pause is None else view.pause.sentence),
        "leader": dg.MetadataValue.text(view.lock_owner or "none"),
        "this_sensor_leads": view.leads,
        "lease_rows": table_of(rows, MAX_TABLE_ROWS),
        "lease_rows_not_shown": rows_not_shown(rows, len(view.leases)),
        "worker_rows": table_of(worker_rows(view.workers, view.leases, view.runs), MAX_TABLE_ROWS),
        "runs": run_links(view.runs) if view.runs else None,
        "last_moves": table_of(list(view.moves)),
        "leases": len(view.leases),
        "unfinished": len(unfinished),
        "without_owner": sum(1 for le in unfinished if le.actual_owner is None),
        "in_handoff": sum(1 for le in view.leases if le.in_handoff),
        "workers": len(view.workers),
        "cpu_spread": round(max(cpus) - min(cpus), 1) if cpus else None,
        "cycle_seconds": view.cycle_seconds,
        "per_worker": table_of(
            [{"worker": worker, "leases": count} for worker, count in sorted(counts.items())]
        ),
    }
    if view.plan is not None and view.plan_input is not None:
        metadata |= plan_metadata(view.plan, view.plan_input)
    return known(metadata)


def plan_metadata(plan: Plan, plan_input: PlanInput) -> dict[str, Any]:
    """The moves with their reasons, and the load of each worker and group before and after."""
    table = explain(plan_input, plan)
    return {
        "plan": table_of(
            [
                {
                    "lease": lease_text(move.lease_key),
                    "workers": move_text(move.from_worker, move.to_worker),
                    "KB/s": None if move.kbps is None else f"{move.kbps:.1f}",
                    "reason": move.reason,
                }
                for move in table.moves
            ]
        ),
        "plan_summary": dg.MetadataValue.text(table.summary),
        "plan_workers": table_of(load_rows(table.workers, "worker")),
        "plan_groups": table_of(load_rows(table.groups, "group")),
        "plan_notes": dg.MetadataValue.text(
            "; ".join(
                (
                    f"strategy {plan.strategy}",
                    *plan.notes,
                    *(f"no worker can take {key}" for key in plan.spilled),
                )
            )
        ),
    }


def load_rows(rows: Sequence[LoadRow], kind: str) -> list[dict[str, Any]]:
    """Workers or groups with what they have before and after a plan."""
    return [
        {
            kind: row.name,
            "leases": f"{row.leases_before} → {row.leases_after}",
            "KB/s": f"{row.kbps_before:.1f} → {row.kbps_after:.1f}",
            "utilization": f"{row.utilization_before:.2f} → {row.utilization_after:.2f}",
        }
        for row in rows
    ]


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
    """The events that are due at `now` (monotonic seconds).

    The fleet is observed, not materialized: nothing is downstream of it, and the Dagster UI ignores
    evaluations of checks that are older than the last materialization.
    """
    events: list[AssetEvent] = []
    streams = stream_views(
        view.streams or settings.streams, view.leases, view.workers, view.lag_millis, view.ages
    )
    owners = tuple((le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in view.leases)
    states = tuple((w.worker_id, w.drain_requested) for w in view.workers)
    runs = tuple((run.run_id, run.status) for run in view.runs)
    if cadence.due("fleet", (owners, states, runs, view.lock_owner, view.pause), now):
        metadata = fleet_metadata(view)
        if settings.is_multi_stream:
            metadata["streams"] = table_of(worst_streams(streams))
        events.append(dg.AssetObservation(names.fleet, metadata=metadata))
    for stream in _due_streams(streams, cadence, now):
        events += stream_events(stream, names, view.lag_age_seconds)
    checks = fleet_checks(view, names, settings, options)
    hole = any(check.check == health.COVERAGE and not check.passed for _, check in checks)
    hole_lasts = cadence.hole_lasts(hole, now)
    return events + [
        check.evaluation(key)
        for key, check in checks
        if (check.check != health.COVERAGE or hole_lasts or not hole)
        and cadence.due(check.check, check.content, now)
    ]


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


def fleet_checks(
    view: FleetView, names: Names, settings: ConsumerSettings, options: DagsterOptions
) -> list[tuple[dg.AssetKey, health.Health]]:
    """Return the checks whose input is known, with the assets that they belong to."""
    return [
        *((names.output, check) for check in _data_checks(view, options)),
        *((names.fleet, check) for check in _lease_checks(view, settings, options)),
        (names.fleet, hung(view.workers)),
        (
            names.fleet,
            health.balance(
                view.leases, view.workers, settings.assignment.re_balance_threshold_percentage
            ),
        ),
    ]


def _data_checks(view: FleetView, options: DagsterOptions) -> list[health.Health]:
    limits = options.check_limits
    checks = [health.paused(view.workers)]
    behind = lag(view, limits.lag_error_seconds)
    if behind is not None:
        checks.append(behind)
    if view.retention_seconds:
        checks.append(unread.retention(view.leases, view.unread, view.retention_seconds, limits))
    if view.points is not None:
        checks += [
            history.trend(view.points, limits, options.lag_threshold_seconds),
            history.dead_letters(view.points, limits, view.wall_seconds),
        ]
    return checks


def _lease_checks(
    view: FleetView, settings: ConsumerSettings, options: DagsterOptions
) -> list[health.Health]:
    checks = [
        health.coverage(view.leases, view.streams or settings.streams),
        health.stuck(view.waits, stuck_limit_seconds(settings)),
        unread.checkpoints(
            view.leases,
            view.unchanged,
            view.unread,
            options.check_limits.checkpoint_age_seconds,
        ),
        health.rows(view.bad_rows),
        records_lost(view.losses),
    ]
    if view.unavailable is not None:
        checks.append(health.streams(view.unavailable))
    return checks


def check_events(
    check: health.Health, key: dg.AssetKey, cadence: Cadence, now: float
) -> list[AssetEvent]:
    """The evaluation of a check of the asset `key`, if it is due. It needs no table."""
    return [check.evaluation(key)] if cadence.due(check.check, check.content, now) else []
