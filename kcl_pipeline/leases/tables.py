"""The three tables of an application, and the values of their rows.

Each table works on a `RowStore`, in DynamoDB or in memory. These rules hold for every method
(protocol §1.4, §2.3, §3):

* A write whose condition does not hold returns None or False. It does not raise.
* After `errors.UnavailableError` it is unknown whether a write was applied. The caller repeats the
  call with the same arguments. If the row has exactly the values of this write, the write counts
  as applied, although its condition does not hold any more.
* A row is not read, modified and put back. Unknown attributes are kept.
* Throttling raises `errors.ThrottledError`, a missing table `errors.NotFoundError`, a missing
  permission `errors.AccessDeniedError`.
"""

from __future__ import annotations

from kcl_pipeline.leases.state.coordinator_rows import CoordinatorRows as CoordinatorStateTable
from kcl_pipeline.leases.state.values import (
    LeaderLock,
    MigrationState,
    UnreadableLock,
    WorkerListing,
    WorkerMetrics,
)
from kcl_pipeline.leases.state.worker_rows import WorkerRows as WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable

__all__ = [
    "CoordinatorStateTable",
    "LeaderLock",
    "LeaseTable",
    "MigrationState",
    "UnreadableLock",
    "WorkerListing",
    "WorkerMetrics",
    "WorkerMetricsTable",
]
