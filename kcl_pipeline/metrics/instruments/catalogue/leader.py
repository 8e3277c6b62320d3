"""The metrics of the leader: cycles, plans, streams."""

from __future__ import annotations

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.instruments.catalogue.builders import (
    DETAILED,
    SUMMARY,
    counter,
    gauge,
    histogram,
)
from kcl_pipeline.metrics.instruments.instrument import STREAM, Kind

_ASSIGN: Final = "LeaseAssignmentManager"
ASSIGN_SUCCESS: Final = counter(
    *("Success", _ASSIGN, SUMMARY, "1 per leader cycle without an error, 0 with one"),
    ev.CycleFinished,
)
ASSIGN_TIME: Final = histogram("Time", _ASSIGN, SUMMARY, "one leader cycle", ev.CycleFinished)
TOTAL_LEASES: Final = gauge("TotalLeases", _ASSIGN, "lease rows", ev.CycleFinished)
NUM_WORKERS: Final = gauge("NumWorkers", _ASSIGN, "living workers", ev.CycleFinished)
EXPIRED_LEASES: Final = gauge(
    "ExpiredLeases", _ASSIGN, "leases whose owner has stopped renewing", ev.CycleFinished
)
UNOWNED_LEASES: Final = gauge(
    "UnownedLeases", _ASSIGN, "leases without an owner", ev.CycleFinished, in_kcl=False
)
FAILING_WORKERS: Final = gauge(
    "NumWorkersWithFailingWorkerMetric",
    _ASSIGN,
    "living workers without a CPU measurement",
    ev.CycleFinished,
)
INVALID_WORKERS: Final = gauge(
    "NumWorkersWithInvalidEntry",
    _ASSIGN,
    "living workers whose row has no operating range",
    ev.CycleFinished,
)
UNREADABLE_LEASES: Final = counter(
    "LeaseDeserializationFailureCount",
    _ASSIGN,
    SUMMARY,
    "lease rows that cannot be used, per cycle",
    ev.CycleFinished,
)
SPILLOVER: Final = counter(
    "LeaseSpillover", _ASSIGN, SUMMARY, "leases that no worker has capacity for", ev.PlanMade
)
REASSIGNMENTS: Final = counter(
    "NumOfLeasesReassignment", _ASSIGN, SUMMARY, "moves of the plans", ev.PlanMade
)
PLAN_TIME: Final = histogram(
    "Plan.Time", _ASSIGN, DETAILED, "computation of a plan with moves", ev.PlanMade, in_kcl=False
)
FAILED_ASSIGNMENTS: Final = counter(
    "FailedAssignmentCount", _ASSIGN, DETAILED, "moves that were refused", ev.MoveRefused
)
FORCED_RELEASES: Final = counter(
    "ForceLeaderRelease",
    _ASSIGN,
    SUMMARY,
    "releases of the lock after failed cycles",
    ev.LeadershipLost,
)
IS_LEADER: Final = counter(
    "LeaderDecider:IsLeader",
    "LeaderDecider",
    DETAILED,
    "1 per cycle that led, otherwise 0",
    ev.CycleFinished,
    prometheus=Kind.GAUGE,
)
ELECTIONS: Final = counter(
    "LeaderElected",
    "LeaderDecider",
    SUMMARY,
    "acquisitions of the leader lock",
    ev.LeaderElected,
    in_kcl=False,
)
ACTIVE_STREAMS: Final = gauge(
    "ActiveStreams.Count", "MultiStreamTracker", "streams of the leader", ev.CycleFinished
)
_SYNC: Final = "PeriodicShardSyncManager"
PARTIAL_STREAMS: Final = counter(
    *("NumStreamsWithPartialLeases", _SYNC, SUMMARY, "audits that found a gap", ev.HoleFound)
)
INCOMPLETE_STREAMS: Final = gauge(
    "IncompleteStreams",
    _SYNC,
    "streams whose leases have a gap",
    ev.CycleFinished,
    in_kcl=False,
)
UNAVAILABLE_STREAMS: Final = gauge(
    "UnavailableStreams",
    _SYNC,
    "streams whose last attempt failed",
    ev.CycleFinished,
    in_kcl=False,
)
LEASES_CREATED: Final = counter(
    "CreateLease.Success",
    "ShardSyncTask",
    DETAILED,
    "leases created",
    ev.LeasesCreated,
    dimensions=(STREAM,),
)
STREAM_UNAVAILABLE: Final = counter(
    "StreamUnavailable",
    "ShardSyncTask",
    SUMMARY,
    "reports of a stream that cannot be read",
    ev.StreamUnavailable,
    dimensions=(STREAM,),
    in_kcl=False,
)
LEASES_DELETED: Final = counter(
    *("DeleteLease.Success", "LeaseCleanup", DETAILED, "leases deleted", ev.LeaseDeleted),
    in_kcl=False,
)
