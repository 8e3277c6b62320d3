"""Report streams, fleet and checks to Dagster: on change, and seldom while nothing changes."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.changes import LastChanges
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.orchestration.assets.checks import CheckVerdict, asset_of, verdicts
from kcl_pipeline.orchestration.assets.contract import DagsterOptions
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.runs.metadata import known, table_of
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.orchestration.sensors.reports.streams import (
    STREAMS_PER_HOUR,
    StreamView,
    stream_events,
    stream_views,
    worst_streams,
)
from kcl_pipeline.orchestration.sensors.reports.tables import (
    MAX_TABLE_ROWS,
    lease_table,
    lease_text,
    move_table,
    move_text,
    rows_not_shown,
    run_links,
    worker_table,
)
from kcl_pipeline.planning.explain import LoadRow, explain
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.status.findings import CheckName, Finding, findings_of, idle_text
from kcl_pipeline.status.rows import cpu_of
from kcl_pipeline.status.snapshot import Snapshot

AssetEvent = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation

QUIET_SECONDS: Final = 3_600.0
"""What does not change is reported once per this time, because events stay in Dagster's log."""
FAILING_SECONDS: Final = 600.0
"""A check that fails is reported again after this time, with the numbers of then."""
SHORTEST_GAP_SECONDS: Final = 9.0
"""Shortest time between two reports of one subject.

An event permanently uses 9 kB of Dagster's event log. With ticks every 5 seconds, a fleet that
changes at every tick is reported at every second tick.
"""
HOLE_GRACE_SECONDS: Final = 30.0
_WHILE_LEASES_ARE_CREATED: Final = frozenset({"hash_keys_uncovered", "no_leases"})


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
        self, subject: str, content: Hashable, now: float, *, longest: float = QUIET_SECONDS
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

    since: LastChanges[str] = field(default_factory=LastChanges)

    def observe(self, leases: Sequence[Lease], ownerless: set[str], now: float) -> dict[str, float]:
        """Add one observation and return, by lease key, the seconds without a live owner."""
        waiting = {
            le.lease_key
            for le in leases
            if not le.ended and (le.actual_owner is None or le.lease_key in ownerless)
        }
        self.since.observe(dict.fromkeys(waiting, True), now)
        return self.since.seconds(now)


def fleet_metadata(view: FleetView, separator: str) -> dict[str, Any]:
    """Leader, leases, workers, the last moves and the plan. Dagster plots what are numbers."""
    snapshot = view.snapshot
    cpus = [cpu for w in snapshot.live if (cpu := cpu_of(w)) is not None]
    counts = [row["leases"] for row in worker_table(snapshot, separator, ())]
    metadata: dict[str, Any] = {
        "state": dg.MetadataValue.text(
            "working" if snapshot.pause is None else snapshot.pause.sentence
        ),
        "leader": dg.MetadataValue.text(view.lock_owner or "none"),
        "this_sensor_leads": view.leads,
        "lease_rows": table_of(lease_table(snapshot), MAX_TABLE_ROWS),
        "lease_rows_not_shown": rows_not_shown(snapshot),
        "worker_rows": table_of(worker_table(snapshot, separator, view.runs), MAX_TABLE_ROWS),
        "runs": run_links(view.runs) if view.runs else None,
        "last_moves": table_of(move_table(view.moves, snapshot.at)),
        "leases": len(snapshot.leases),
        "unfinished": len(snapshot.unfinished),
        "without_owner": sum(1 for le in snapshot.unfinished if le.actual_owner is None),
        "in_handoff": sum(1 for le in snapshot.leases if le.in_handoff),
        "workers": len(snapshot.live),
        "lease_spread": max(counts) - min(counts) if counts else None,
        "cpu_spread": round(max(cpus) - min(cpus), 1) if cpus else None,
        "cycle_seconds": view.cycle_seconds,
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
    """The streams that are due: on change and once an hour; with many streams, less often."""
    many = len(streams) > STREAMS_PER_HOUR
    longest = QUIET_SECONDS * max(len(streams) / STREAMS_PER_HOUR, 1.0)
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
    *,
    after_output: bool = False,
) -> list[AssetEvent]:
    """The events that are due at `now` (monotonic seconds).

    The fleet is observed, not materialized: nothing is downstream of it, and the Dagster UI ignores
    evaluations of checks that are older than the last materialization. So the checks of the output
    follow each materialization of it (`after_output`).
    """
    events: list[AssetEvent] = []
    snapshot = view.snapshot
    streams = stream_views(snapshot)
    owners = tuple(
        (le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in snapshot.leases
    )
    states = tuple((w.worker_id, w.drain_requested) for w in snapshot.live)
    runs = tuple((run.run_id, run.status) for run in view.runs)
    if cadence.due("fleet", (owners, states, runs, view.lock_owner, snapshot.pause), now):
        metadata = fleet_metadata(view, settings.worker.worker_group_separator)
        if settings.is_multi_stream:
            metadata["streams"] = table_of(worst_streams(streams))
        events.append(dg.AssetObservation(names.fleet, metadata=metadata))
    for stream in _due_streams(streams, cadence, now):
        events += stream_events(stream, names)
    for verdict in fleet_verdicts(view, options, cadence, now):
        asset = asset_of(verdict.check, names)
        longest = QUIET_SECONDS if verdict.passed else FAILING_SECONDS
        if after_output and asset == names.output:
            longest = 0.0
        content: Hashable = verdict.content
        if verdict.check is CheckName.LAG:
            # A fleet to which nothing arrives is said once, with the time of the last batch
            content = (content, idle_text(snapshot) is not None)
        if cadence.due(verdict.check.value, content, now, longest=longest):
            events.append(verdict.evaluation(asset))
    return events


def outage_events(
    snapshot: Snapshot, names: Names, options: DagsterOptions, cadence: Cadence, now: float
) -> list[AssetEvent]:
    """The checks that need no table, while the tables cannot be read."""
    findings = findings_of(snapshot, options.check_limits, options.lag_threshold_seconds)
    return [
        verdict.evaluation(names.fleet)
        for verdict in verdicts(findings)
        if verdict.check in (CheckName.LEADER, CheckName.WORKERS)
        and cadence.due(verdict.check.value, verdict.content, now, longest=FAILING_SECONDS)
    ]


def fleet_verdicts(
    view: FleetView, options: DagsterOptions, cadence: Cadence, now: float
) -> list[CheckVerdict]:
    """The verdicts of what the sensor has observed. What is not known is left out."""
    findings = findings_of(view.snapshot, options.check_limits, options.lag_threshold_seconds)
    hole = any(one.name in _WHILE_LEASES_ARE_CREATED for one in findings)
    hole_lasts = cadence.hole_lasts(hole, now)

    def counts(finding: Finding) -> bool:
        return hole_lasts or finding.name not in _WHILE_LEASES_ARE_CREATED

    return [one for one in verdicts([*filter(counts, findings)]) if one.is_known]


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
