"""Open the rows of an application, wherever its layout has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY
from kcl_pipeline.leases.layout.entity_rows import EntityRows
from kcl_pipeline.leases.layout.layout import Layout
from kcl_pipeline.leases.layout.migrator import Leading, TableMigrator
from kcl_pipeline.leases.layout.routed import RoutedStore
from kcl_pipeline.leases.lease.rows import LeaseRows
from kcl_pipeline.leases.state.coordinator_rows import CoordinatorRows
from kcl_pipeline.leases.state.values import LeaderLock
from kcl_pipeline.leases.state.worker_rows import WorkerRows

SINGLE_TABLE_SUPPORT: Final = 1
"""The support code of a worker that can work on, and move to, the single table (§2.2)."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of one application.

    Attributes:
        lease: The leases.
        workers: The worker metrics rows.
        coordinator: The coordinator-state rows.
        layout: Where they are.
    """

    lease: LeaseRows
    workers: WorkerRows
    coordinator: CoordinatorRows
    layout: Layout


def open_rows(layout: Layout, clock: Clock, bake_seconds: float) -> Tables:
    """Return the rows of an application. This reads no table.

    Args:
        layout: The layout.
        clock: The clock.
        bake_seconds: See `TableMigrator`.
    """
    migrator = TableMigrator(layout, bake_seconds, clock)

    def migrate(lock: LeaderLock, owners: frozenset[str]) -> str | None:
        if layout.placement().is_single:
            return None
        proof = layout.coordinator.check(LEADER_KEY, coordinator.held_conditions(lock))
        return migrator.advance(Leading(lock.owner_name, proof), owners)

    leases, workers, state = layout.leases, layout.workers, layout.coordinator
    shared_state = EntityRows(leases, state.key_name)
    coordinator = CoordinatorRows(RoutedStore(layout, state, shared_state, clock), migrate)
    worker_rows = RoutedStore(layout, workers, layout.shared_workers, clock)
    return Tables(
        LeaseRows(leases, lambda: layout.ensure(leases), layout.refuse_two_layouts),
        WorkerRows(worker_rows, SINGLE_TABLE_SUPPORT),
        coordinator,
        layout,
    )
