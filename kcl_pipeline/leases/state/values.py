"""The values of worker metrics rows and of the rows of the coordinator-state table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.state.worker_status import WorkerStatus
from kcl_pipeline.leases.store import Item

CPU: Final = "C"
"""Short name of the CPU metric (protocol §2.2)."""


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """A worker metrics row (protocol §2.2).

    A worker without metrics has empty `stats` and `operating_range`. `drain_requested`, `run_id`,
    `status`, `own_cpu` and `replaces` are our own attributes (`kclpDrain` N 1 with
    `kclpDrainReason` S, `kclpRunId` S, `kclpStatus` S, `kclpCpu` L of N, `kclpReplaces` S), which
    Java readers ignore.

    Attributes:
        worker_id: Id of the worker.
        last_update_seconds: Time of the last report, in epoch seconds of the writer's clock.
        stats: Up to ten averages of each metric, oldest first; −1 for a failed interval. The keys
            are the short names C, M, NI, NO and T.
        operating_range: `(max utilization percent,)` of each metric.
        support_code: 1 means for a Java leader that this worker can work on the single table
            (protocol §4.5). Our workers publish it there alone, so that no Java leader moves an
            application with three tables while one of them lives.
        drain_requested: Whether the worker is requested to stop.
        drains_for_pause: Whether the reason of the request is that the application is paused.
        run_id: Identifies the process.
        status: Lag, paused shards and failures.
        own_cpu: Up to ten averages of the CPU in percent, on a platform where a Java worker reports
            no metric. In `stats`, a Java leader would compare them with workers without a metric,
            and would not give this worker its share.
        replaces: Id of the worker whose leases the leader moves to this one. None: of no worker.
    """

    worker_id: str
    last_update_seconds: int
    stats: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    operating_range: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    support_code: int | None = None
    drain_requested: bool = False
    run_id: str | None = None
    status: WorkerStatus | None = None
    drains_for_pause: bool = False
    own_cpu: tuple[float, ...] = ()
    replaces: str | None = None

    @property
    def cpu(self) -> tuple[float, ...]:
        """The averages of the CPU, from either attribute."""
        return tuple(self.stats.get(CPU, self.own_cpu))


@dataclass(frozen=True, slots=True)
class WorkerListing:
    """The result of a scan: the workers, in no particular order, and the unreadable rows."""

    workers: tuple[WorkerMetrics, ...]
    bad_rows: tuple[BadRow, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaderLock:
    """The leader lock (protocol §3.3).

    Attributes:
        owner_name: Name of the leader.
        lease_duration_millis: Time without a heartbeat after which the lock is expired.
        version: Unique string that every heartbeat changes. No time is stored.
        is_released: Whether the owner has released the lock.
    """

    owner_name: str
    lease_duration_millis: int
    version: str
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableLock:
    """A lock row that cannot be read. An unknown process may hold the lock.

    Attributes:
        reason: What is wrong with the row.
        attributes: The attributes of a lock that the row has. If they are equal in two reads, the
            row has not changed.
    """

    reason: str
    attributes: Item


StateChange = tuple[str, str, int]
"""A state, the worker that wrote it, and when, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The client-version row `Migration3.0` (protocol §3.5).

    Attributes:
        client_version: The client version (`cv`).
        modified_by: The worker that wrote it (`mb`).
        modified_millis: When, in epoch milliseconds (`mts`).
        history: Former states (cv, mb, mts), newest first, at most ten.
    """

    client_version: str
    modified_by: str
    modified_millis: int
    history: tuple[StateChange, ...] = ()
