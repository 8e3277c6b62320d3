"""The metrics of a worker's leases, of its start and of its row."""

from __future__ import annotations

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.instruments.catalogue.builders import (
    DETAILED,
    OF_WORKER,
    SUMMARY,
    counter,
    gauge,
    histogram,
)
from kcl_pipeline.metrics.instruments.instrument import FORCED, WORKER

_RENEW: Final = "RenewAllLeases"
LOST_LEASES: Final = counter(
    "LostLeases", _RENEW, SUMMARY, "leases lost", ev.LeaseLost, dimensions=OF_WORKER
)
CURRENT_LEASES: Final = gauge(
    "CurrentLeases",
    _RENEW,
    "leases that the worker holds",
    ev.WorkerStarted,
    ev.LeaseGained,
    ev.LeaseLost,
    ev.LeaseReleased,
    ev.HandoffCompleted,
    ev.WorkerStopped,
    dimensions=OF_WORKER,
)
RENEW_SUCCESS: Final = counter(
    "Success",
    _RENEW,
    SUMMARY,
    "1 per completed renewal of all leases, 0 per failed one",
    ev.TaskFinished,
    dimensions=OF_WORKER,
)
RENEW_TIME: Final = histogram(
    "Time", _RENEW, SUMMARY, "renewal of all leases", ev.TaskFinished, dimensions=OF_WORKER
)
RENEW_LEASE_SUCCESS: Final = counter(
    "RenewLease.Success", _RENEW, DETAILED, "leases renewed", ev.TaskFinished, dimensions=OF_WORKER
)
_DISCOVERY: Final = "LeaseDiscovery"
DISCOVERY_SUCCESS: Final = counter(
    "Success",
    _DISCOVERY,
    SUMMARY,
    "1 per completed discovery, 0 per failed one",
    ev.TaskFinished,
    dimensions=OF_WORKER,
)
DISCOVERY_TIME: Final = histogram(
    "Time", _DISCOVERY, SUMMARY, "one discovery", ev.TaskFinished, dimensions=OF_WORKER
)
NEW_LEASES: Final = counter(
    "NewLeasesDiscovered",
    _DISCOVERY,
    DETAILED,
    "leases gained",
    ev.LeaseGained,
    dimensions=OF_WORKER,
)
_REPORT: Final = "WorkerMetricStatsReporter"
REPORT_SUCCESS: Final = counter(
    "Success",
    _REPORT,
    SUMMARY,
    "1 per written worker metrics row, 0 per failed write",
    ev.TaskFinished,
    dimensions=OF_WORKER,
)
REPORT_TIME: Final = histogram(
    "Time",
    _REPORT,
    SUMMARY,
    "write of the worker metrics row",
    ev.TaskFinished,
    dimensions=OF_WORKER,
)
REPORT_FAILURE: Final = counter(
    "InMemoryMetricStatsReporterFailure",
    _REPORT,
    SUMMARY,
    "failed writes of the row",
    ev.TaskFinished,
    dimensions=OF_WORKER,
)
INITIALIZE_SUCCESS: Final = counter(
    "Initialize.Success", "Scheduler:Initialize", SUMMARY, "starts of a worker", ev.WorkerStarted
)
WORKER_ID_SHARED: Final = counter(
    "WorkerIdShared",
    _REPORT,
    SUMMARY,
    "reports of another process with this worker id",
    ev.WorkerIdShared,
    dimensions=OF_WORKER,
    in_kcl=False,
)
_HANDOFF: Final = "LeaseHandoff"
HANDOFF_SUCCESS: Final = counter(
    "Success",
    _HANDOFF,
    SUMMARY,
    "1 per handoff, 0 per forced one",
    ev.HandoffCompleted,
    dimensions=(WORKER, FORCED),
    in_kcl=False,
)
HANDOFF_TIME: Final = histogram(
    "Time",
    _HANDOFF,
    SUMMARY,
    "handoff of a lease by its old owner",
    ev.HandoffCompleted,
    dimensions=(WORKER, FORCED),
    in_kcl=False,
)
