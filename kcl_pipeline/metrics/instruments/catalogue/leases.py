"""The metrics of a worker's leases, of its start and of its row."""

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.events import LeaseTask
from kcl_pipeline.metrics.instruments.instrument import (
    DETAILED,
    FORCED,
    OF_WORKER,
    SUMMARY,
    WORKER,
    FedBy,
    Measure,
    counter,
    gauge,
    histogram,
)

_RENEW: Final = "RenewAllLeases"
_DISCOVERY: Final = "LeaseDiscovery"
_REPORT: Final = "WorkerMetricStatsReporter"
_HANDOFF: Final = "LeaseHandoff"


def _task(task: LeaseTask, measure: Measure) -> FedBy:
    return {ev.TaskFinished: lambda e: measure(e) if e.task is task else None}


def _counted_elsewhere(_: ev.Event) -> None:
    """The value needs a memory: see `conversion.HeldLeaseCount`."""


CURRENT_LEASES: Final = gauge(
    "CurrentLeases",
    _RENEW,
    "leases that the worker holds",
    dict.fromkeys(
        (
            ev.WorkerStarted,
            ev.LeaseGained,
            ev.LeaseLost,
            ev.LeaseReleased,
            ev.HandoffCompleted,
            ev.WorkerStopped,
        ),
        _counted_elsewhere,
    ),
    dimensions=OF_WORKER,
)
INSTRUMENTS: Final = (
    counter("LostLeases", _RENEW, SUMMARY, "leases lost", ev.LeaseLost, dimensions=OF_WORKER),
    CURRENT_LEASES,
    counter(
        "Success",
        _RENEW,
        SUMMARY,
        "1 per completed renewal of all leases, 0 per failed one",
        _task(LeaseTask.RENEWAL, lambda e: int(e.succeeded)),
        dimensions=OF_WORKER,
    ),
    histogram(
        "Time",
        _RENEW,
        SUMMARY,
        "renewal of all leases",
        _task(LeaseTask.RENEWAL, lambda e: e.milliseconds),
        dimensions=OF_WORKER,
    ),
    counter(
        "RenewLease.Success",
        _RENEW,
        DETAILED,
        "leases renewed",
        _task(LeaseTask.RENEWAL, lambda e: e.leases),
        dimensions=OF_WORKER,
    ),
    counter(
        "Success",
        _DISCOVERY,
        SUMMARY,
        "1 per completed discovery, 0 per failed one",
        _task(LeaseTask.DISCOVERY, lambda e: int(e.succeeded)),
        dimensions=OF_WORKER,
    ),
    histogram(
        "Time",
        _DISCOVERY,
        SUMMARY,
        "one discovery",
        _task(LeaseTask.DISCOVERY, lambda e: e.milliseconds),
        dimensions=OF_WORKER,
    ),
    counter(
        "NewLeasesDiscovered",
        _DISCOVERY,
        DETAILED,
        "leases gained",
        ev.LeaseGained,
        dimensions=OF_WORKER,
    ),
    counter(
        "Success",
        _REPORT,
        SUMMARY,
        "1 per written worker metrics row, 0 per failed write",
        _task(LeaseTask.REPORT, lambda e: int(e.succeeded)),
        dimensions=OF_WORKER,
    ),
    histogram(
        "Time",
        _REPORT,
        SUMMARY,
        "write of the worker metrics row",
        _task(LeaseTask.REPORT, lambda e: e.milliseconds),
        dimensions=OF_WORKER,
    ),
    counter(
        "InMemoryMetricStatsReporterFailure",
        _REPORT,
        SUMMARY,
        "failed writes of the row",
        _task(LeaseTask.REPORT, lambda e: int(not e.succeeded)),
        dimensions=OF_WORKER,
    ),
    counter(
        "Initialize.Success",
        "Scheduler:Initialize",
        SUMMARY,
        "starts of a worker",
        ev.WorkerStarted,
    ),
    counter(
        "WorkerIdShared",
        _REPORT,
        SUMMARY,
        "reports of another process with this worker id",
        ev.WorkerIdShared,
        dimensions=OF_WORKER,
        in_kcl=False,
    ),
    counter(
        "Success",
        _HANDOFF,
        SUMMARY,
        "1 per handoff, 0 per forced one",
        {ev.HandoffCompleted: lambda e: int(not e.forced)},
        dimensions=(WORKER, FORCED),
        in_kcl=False,
    ),
    histogram(
        "Time",
        _HANDOFF,
        SUMMARY,
        "handoff of a lease by its old owner",
        {ev.HandoffCompleted: lambda e: e.seconds * 1000},
        dimensions=(WORKER, FORCED),
        in_kcl=False,
    ),
)
