"""Convert events to metrics with the names of the Java KCL (protocol §12.2).

Dashboards for the Java KCL therefore work. Metrics that KCL does not have (handoffs, refused
batches, dead letters) have names of the same form. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kcl_pipeline import events as ev
from kcl_pipeline.events import Event


class Kind(StrEnum):
    """Type of a metric: counters add up, gauges replace, histograms are distributions."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Observation:
    """One value of a metric.

    Attributes:
        name: Metric name in KCL.
        kind: Type of the metric.
        value: The value in `unit`.
        unit: UCUM unit (ms, By, 1).
        attributes: Values by KCL's dimension names.
    """

    name: str
    kind: Kind
    value: float
    unit: str = "1"
    attributes: dict[str, str] = field(default_factory=dict)


OPERATION: Final = "Operation"
WORKER: Final = "WorkerIdentifier"
SHARD: Final = "ShardId"
STREAM: Final = "StreamId"


def observations(event: Event) -> tuple[Observation, ...]:
    """The metrics of one event; empty for an event without metrics."""
    convert = _CONVERTERS.get(type(event))
    return convert(event) if convert else ()


def lag(lease_key: str, millis_behind_latest: int, worker_id: str) -> Observation:
    """The lag of one lease behind the end of its shard."""
    return Observation(
        "MillisBehindLatest",
        Kind.HISTOGRAM,
        millis_behind_latest,
        "ms",
        _of_lease("ProcessTask", lease_key, worker_id),
    )


def current_leases(worker_id: str, leases: int) -> Observation:
    """The number of leases that a worker holds."""
    return Observation(
        "CurrentLeases", Kind.GAUGE, leases, "1", {OPERATION: "RenewAllLeases", WORKER: worker_id}
    )


def _of_lease(operation: str, lease_key: str, worker_id: str | None = None) -> dict[str, str]:
    stream, _, shard = lease_key.rpartition(":")
    found = {OPERATION: operation, SHARD: shard}
    if stream:
        found[STREAM] = stream
    if worker_id is not None:
        found[WORKER] = worker_id
    return found


def _count(name: str, value: float, attributes: dict[str, str]) -> Observation:
    return Observation(name, Kind.COUNTER, value, "1", attributes)


def _millis(name: str, value: float, attributes: dict[str, str]) -> Observation:
    return Observation(name, Kind.HISTOGRAM, value, "ms", attributes)


def _batch(e: ev.BatchCommitted) -> tuple[Observation, ...]:
    where = {OPERATION: "ProcessTask", WORKER: e.worker_id}
    phases = tuple(
        _millis(f"{_PHASES.get(phase, phase)}.Time", value, where)
        for phase, value in sorted(e.milliseconds.items())
    )
    return (
        _count("RecordsProcessed", e.records, where),
        Observation("DataBytesProcessed", Kind.HISTOGRAM, e.bytes, "By", where),
        _count("Success", 1, where),
        _millis("Time", sum(e.milliseconds.values()), where),
        *phases,
    )


_PHASES: Final = {
    "write": "RecordProcessor.processRecords",
    "prepare": "UpdateLease",
    "commit": "SinkCommit",
}


def _plan(e: ev.PlanMade) -> tuple[Observation, ...]:
    where = {OPERATION: "LeaseAssignmentManager"}
    return (
        _count("NumOfLeasesReassignment", e.moves, where),
        Observation("ExpiredLeases", Kind.GAUGE, e.unassigned, "1", where),
        _count("LeaseSpillover", e.spilled, where),
        _count("Success", 1, where),
        _millis("Time", e.milliseconds, where),
    )


def _handoff(e: ev.HandoffCompleted) -> tuple[Observation, ...]:
    where = {
        **_of_lease("LeaseHandoff", e.lease_key, e.from_worker),
        "Forced": str(e.forced).lower(),
    }
    return (
        _count("Success", 0 if e.forced else 1, where),
        _millis("Time", e.seconds * 1000, where),
    )


def _aggregates(e: ev.AggregatesRejected) -> tuple[Observation, ...]:
    where = _of_lease("ProcessTask", e.lease_key)
    return (
        _count("AggregatesOverLimit", e.over_limit, where),
        _count("AggregatesMisplaced", e.misplaced, where),
        _count("UserRecordsWithoutKey", e.unknown_keys, where),
    )


def _dead_letters(e: ev.RecordsDeadLettered) -> tuple[Observation, ...]:
    return (
        _count(
            "RecordsSkipped" if e.skipped else "RecordsDeadLettered",
            e.records,
            _of_lease("ProcessTask", e.lease_key, e.worker_id),
        ),
    )


def _assignment(name: str, value: float) -> tuple[Observation, ...]:
    return (_count(name, value, {OPERATION: "LeaseAssignmentManager"}),)


_CONVERTERS: Final[dict[type[Event], Callable[[Any], tuple[Observation, ...]]]] = {
    ev.WorkerStarted: lambda e: (
        _count("Initialize.Success", 1, {OPERATION: "Scheduler:Initialize", WORKER: e.worker_id}),
    ),
    ev.LeaseGained: lambda e: (
        _count("NewLeasesDiscovered", 1, {OPERATION: "LeaseDiscovery", WORKER: e.worker_id}),
    ),
    ev.LeaseLost: lambda e: (
        _count("LostLeases", 1, {OPERATION: "RenewAllLeases", WORKER: e.worker_id}),
    ),
    ev.HandoffCompleted: _handoff,
    ev.ShardEnded: lambda e: (
        _count("Success", 1, _of_lease("ShutdownTask", e.lease_key, e.worker_id)),
    ),
    ev.BatchCommitted: _batch,
    ev.BatchRefused: lambda e: (
        _count("Success", 0, {OPERATION: "ProcessTask", WORKER: e.worker_id}),
        _count("BatchesRefused", 1, {WORKER: e.worker_id}),
    ),
    ev.RecordsDeadLettered: _dead_letters,
    ev.AggregatesRejected: _aggregates,
    ev.ShardPaused: lambda e: (
        _count("ShardPaused", 1, _of_lease("ProcessTask", e.lease_key, e.worker_id)),
    ),
    ev.RecordsLost: lambda e: (
        _count(
            "RecordsLost",
            1,
            {**_of_lease("LeaseCleanup", e.lease_key), "Reason": str(e.reason)},
        ),
    ),
    ev.AnnouncementRejected: lambda _: (
        _count("AnnouncementsRejected", 1, {OPERATION: "SinkCommit"}),
    ),
    ev.AwsTrouble: lambda e: (_count("Fault", 1, {OPERATION: e.operation.partition(" ")[0]}),),
    ev.ShardStalled: lambda e: (
        _count(
            "ShardStalled",
            1,
            {**_of_lease("ProcessTask", e.lease_key, e.worker_id), "Step": str(e.step)},
        ),
    ),
    ev.StreamUnavailable: lambda e: (
        _count("StreamUnavailable", 1, {OPERATION: "ShardSyncTask", STREAM: e.stream}),
    ),
    ev.WorkerHung: lambda e: (
        _count("WorkerHung", 1, {OPERATION: "ProcessTask", WORKER: e.worker_id}),
    ),
    ev.WorkerIdShared: lambda e: (_count("WorkerIdShared", 1, {WORKER: e.worker_id}),),
    ev.LeaderElected: lambda _: (
        _count("LeaderDecider:IsLeader", 1, {OPERATION: "LeaderDecider"}),
    ),
    ev.LeasesCreated: lambda e: (
        _count(
            "CreateLease.Success", len(e.lease_keys), {OPERATION: "ShardSyncTask", STREAM: e.stream}
        ),
    ),
    ev.LeaseDeleted: lambda e: (
        _count("DeleteLease.Success", 1, _of_lease("LeaseCleanup", e.lease_key)),
    ),
    ev.HoleFound: lambda e: (
        _count(
            "NumStreamsWithPartialLeases",
            1,
            {OPERATION: "PeriodicShardSyncManager", STREAM: e.stream},
        ),
    ),
    ev.CpuSourceSkipped: lambda _: (_count("CpuSourcesSkipped", 1, {OPERATION: "WorkerMetrics"}),),
    ev.RowRejected: lambda _: (_count("RowsRejected", 1, {OPERATION: "Table"}),),
    ev.PlanMade: _plan,
    ev.MoveRefused: lambda _: _assignment("FailedAssignmentCount", 1),
    ev.CycleFailed: lambda _: _assignment("Success", 0),
}


class HeldLeaseCount:
    """Count the leases that each worker of this process holds, from its events."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def after(self, event: Event) -> tuple[Observation, ...]:
        """The new count after an event that changes it; otherwise empty."""
        match event:
            case ev.LeaseGained(worker_id=worker, lease_key=key):
                self._held.setdefault(worker, set()).add(key)
            case (
                ev.LeaseLost(worker_id=worker, lease_key=key)
                | ev.LeaseReleased(worker_id=worker, lease_key=key)
            ):
                self._held.setdefault(worker, set()).discard(key)
            case ev.HandoffCompleted(from_worker=worker, lease_key=key):
                self._held.setdefault(worker, set()).discard(key)
            case ev.WorkerStopped(worker_id=worker):
                self._held[worker] = set()
            case _:
                return ()
        return (current_leases(worker, len(self._held[worker])),)
