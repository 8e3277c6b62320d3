"""The metrics of the leader: cycles, plans, streams."""

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.events.leader import TOO_MANY_FAILURES
from kcl_pipeline.metrics.instruments.instrument import (
    DETAILED,
    STREAM,
    SUMMARY,
    FedBy,
    Kind,
    Measure,
    counter,
    gauge,
    histogram,
)

_ASSIGN: Final = "LeaseAssignmentManager"
_SYNC: Final = "PeriodicShardSyncManager"


def _led(measure: Measure) -> FedBy:
    """A value of the cycles that led."""
    return {ev.CycleFinished: lambda e: measure(e) if e.led else None}


INSTRUMENTS: Final = (
    counter(
        "Success",
        _ASSIGN,
        SUMMARY,
        "1 per leader cycle without an error, 0 with one",
        _led(lambda e: int(e.succeeded)),
    ),
    histogram("Time", _ASSIGN, SUMMARY, "one leader cycle", _led(lambda e: e.milliseconds)),
    gauge("TotalLeases", _ASSIGN, "lease rows", _led(lambda e: e.leases)),
    gauge("NumWorkers", _ASSIGN, "living workers", _led(lambda e: e.workers)),
    gauge(
        "ExpiredLeases",
        _ASSIGN,
        "leases whose owner has stopped renewing",
        _led(lambda e: e.expired),
    ),
    gauge(
        "UnownedLeases", _ASSIGN, "leases without an owner", _led(lambda e: e.unowned), in_kcl=False
    ),
    gauge(
        "NumWorkersWithFailingWorkerMetric",
        _ASSIGN,
        "living workers without a CPU measurement",
        _led(lambda e: e.failing_workers),
    ),
    gauge(
        "NumWorkersWithInvalidEntry",
        _ASSIGN,
        "living workers whose row has no operating range",
        _led(lambda e: e.invalid_workers),
    ),
    counter(
        "LeaseDeserializationFailureCount",
        _ASSIGN,
        SUMMARY,
        "lease rows that cannot be used, per cycle",
        _led(lambda e: e.unreadable),
    ),
    counter(
        "LeaseSpillover",
        _ASSIGN,
        SUMMARY,
        "leases that no worker has capacity for",
        {ev.PlanMade: lambda e: e.spilled},
    ),
    counter(
        "NumOfLeasesReassignment",
        _ASSIGN,
        SUMMARY,
        "moves of the plans",
        {ev.PlanMade: lambda e: e.moves},
    ),
    histogram(
        "Plan.Time",
        _ASSIGN,
        DETAILED,
        "computation of a plan with moves",
        {ev.PlanMade: lambda e: e.milliseconds},
        in_kcl=False,
    ),
    counter("FailedAssignmentCount", _ASSIGN, DETAILED, "moves that were refused", ev.MoveRefused),
    counter(
        "ForceLeaderRelease",
        _ASSIGN,
        SUMMARY,
        "releases of the lock after failed cycles",
        {ev.LeadershipLost: lambda e: 1 if e.reason == TOO_MANY_FAILURES else None},
    ),
    counter(
        "LeaderDecider:IsLeader",
        "LeaderDecider",
        DETAILED,
        "1 per cycle that led, otherwise 0",
        {ev.CycleFinished: lambda e: int(e.led)},
        prometheus=Kind.GAUGE,
    ),
    counter(
        "LeaderElected",
        "LeaderDecider",
        SUMMARY,
        "acquisitions of the leader lock",
        ev.LeaderElected,
        in_kcl=False,
    ),
    gauge(
        "ActiveStreams.Count",
        "MultiStreamTracker",
        "streams of the leader",
        _led(lambda e: e.streams),
    ),
    counter("NumStreamsWithPartialLeases", _SYNC, SUMMARY, "audits that found a gap", ev.HoleFound),
    gauge(
        "NumStreamsToSync",
        _SYNC,
        "streams whose leases have a gap, or which could not be listed",
        _led(lambda e: e.incomplete_streams + e.unavailable_streams),
    ),
    counter(
        "NumSkippedShardSyncTask",
        _SYNC,
        SUMMARY,
        "shard syncs that were due while the former one was running",
        _led(lambda e: int(e.sync_skipped)),
    ),
    gauge(
        "IncompleteStreams",
        _SYNC,
        "streams whose leases have a gap",
        _led(lambda e: e.incomplete_streams),
        in_kcl=False,
    ),
    gauge(
        "UnavailableStreams",
        _SYNC,
        "streams whose last attempt failed",
        _led(lambda e: e.unavailable_streams),
        in_kcl=False,
    ),
    counter(
        "CreateLease.Success",
        "ShardSyncTask",
        DETAILED,
        "leases created",
        {ev.LeasesCreated: lambda e: len(e.lease_keys)},
        dimensions=(STREAM,),
    ),
    counter(
        "StreamUnavailable",
        "ShardSyncTask",
        SUMMARY,
        "reports of a stream that cannot be read",
        ev.StreamUnavailable,
        dimensions=(STREAM,),
        in_kcl=False,
    ),
    counter(
        "DeleteLease.Success",
        "LeaseCleanup",
        DETAILED,
        "leases deleted",
        ev.LeaseDeleted,
        in_kcl=False,
    ),
)
