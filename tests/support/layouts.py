"""The rows of an application in memory, in any layout."""

from __future__ import annotations

from kcl_pipeline.leases.layout import Layout, Tables, open_rows
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.row_store import MemoryStore

LEGACY_WORKERS, LEGACY_STATE = "app-WorkerMetricStats", "app-CoordinatorState"


class LayoutWorld:
    """Three stores, which may not exist, and processes that open them with their settings."""

    def __init__(self, *, exists: bool = False) -> None:
        self.clock = VirtualClock()
        self.leases = MemoryStore("app", "leaseKey", clock=self.clock, exists=exists)
        self.workers = MemoryStore(LEGACY_WORKERS, "wid", clock=self.clock, exists=exists)
        self.state = MemoryStore(LEGACY_STATE, "key", clock=self.clock, exists=exists)

    def open(self, wanted: str = "auto") -> Tables:
        """Open the application as another process does."""
        stores = self.leases.view(), self.workers.view(), self.state.view()
        layout = Layout(
            *stores,
            configured=wanted,  # type: ignore[arg-type]
            clock=self.clock,
        )
        return open_rows(layout, self.clock)

    def start(self, wanted: str = "auto") -> Tables:
        """Open the application and create what is missing, as a start does."""
        tables = self.open(wanted)
        for table in (tables.lease, tables.workers, tables.coordinator):
            table.ensure_exists()
        return tables

    def existing(self) -> list[str]:
        """Return the names of the tables that exist."""
        return [one.name for one in (self.leases, self.workers, self.state) if one.exists()]
