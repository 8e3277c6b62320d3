"""Open the rows of an application, wherever its layout has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.leases.coordinator_rows import CoordinatorRows
from kcl_pipeline.leases.layout.layout import Layout
from kcl_pipeline.leases.lease_rows import LeaseRows
from kcl_pipeline.leases.store import RowStore
from kcl_pipeline.leases.worker_rows import WorkerRows

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


def open_rows(layout: Layout, leases: RowStore) -> Tables:
    """Return the rows of an application. This reads no table."""
    return Tables(
        LeaseRows(leases, layout),
        WorkerRows(layout.worker_rows, SINGLE_TABLE_SUPPORT),
        CoordinatorRows(layout.state),
        layout,
    )
