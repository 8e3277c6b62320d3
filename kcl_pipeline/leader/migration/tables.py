"""Move the application to the single table of KCL 3.5, one transition at a time."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError
from kcl_pipeline.events import AwsTrouble, EventSink, TableMigrationChanged
from kcl_pipeline.leader.election.lock import LeaderElection
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leases.tables import CoordinatorStateTable

CHECK_SECONDS: Final = 30.0
"""Time between two checks whether a transition is due."""


class TableMigrationPhase:
    """Performs the transitions of the table layout in the cycles of a leader."""

    def __init__(
        self,
        coordinator_table: CoordinatorStateTable,
        election: LeaderElection,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._table = coordinator_table
        self._election = election
        self._clock = clock
        self._events = events
        self._next_check = 0.0

    def advance(self, context: CycleContext) -> None:
        """Perform the next transition if it is due.

        An error does not stop the cycle: the next check repeats the transition.
        """
        held = self._election.held
        if held is None or self._clock.monotonic() < self._next_check:
            return
        self._next_check = self._clock.monotonic() + CHECK_SECONDS
        owners = {
            name
            for lease in context.leases.values()
            for name in (lease.owner, lease.checkpoint_owner)
            if name is not None
        }
        try:
            status = self._table.migrate(held, frozenset(owners))
        except KclError as error:
            self._events(AwsTrouble("move to the single table", str(error)))
            return
        if status is not None:
            self._events(TableMigrationChanged(held.owner_name, status))
