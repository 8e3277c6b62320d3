"""The application that an operator changes."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable


@dataclass(frozen=True, slots=True)
class ApplicationControl:
    """The tables of an application, and the operator who changes it.

    Attributes:
        settings: All settings.
        leases: The lease table.
        workers: The worker-metrics table.
        coordinator: The coordinator-state table.
        clock: The clock.
        by: Who makes the change; stored with a pause.
    """

    settings: ConsumerSettings
    leases: LeaseTable
    workers: WorkerMetricsTable
    coordinator: CoordinatorStateTable
    clock: Clock
    by: str

    @property
    def name(self) -> str:
        """Name of the application."""
        return self.settings.application_name

    @property
    def report_seconds(self) -> float:
        """Reporting period of the workers."""
        return self.settings.worker.worker_metrics_reporter_freq_in_millis / 1000

    def held_leases(self) -> tuple[Lease, ...]:
        """Return the unfinished leases that have an owner, sorted by key."""
        return tuple(
            sorted(
                (one for one in self.leases.list_leases().leases if is_held(one)),
                key=lambda lease: lease.lease_key,
            )
        )


def is_held(lease: Lease) -> bool:
    """Return whether a worker owns the lease, and its shard is not finished."""
    return not lease.ended and (lease.owner is not None or lease.checkpoint_owner is not None)
