"""Follow the requests of an operator: a pause of the application, and balancing now.

The leader reads them with the identity of the application in every cycle.
"""

from __future__ import annotations

from collections.abc import Callable

from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import DrainRequested, EventSink
from kcl_pipeline.leader.balance_schedule import BalanceSchedule
from kcl_pipeline.leader.election.lock import LeaderElection
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leader.streams.application import ApplicationGuard
from kcl_pipeline.leases.tables import CoordinatorStateTable, WorkerMetricsTable


class OperatorRequests:
    """Decides whether leases are assigned in a cycle, and whether they are balanced.

    Args:
        guard: Has the requests as of this cycle.
        coordinator_table: The coordinator-state table.
        worker_table: The worker-metrics table.
        balance: Decides when the fleet is balanced.
        leadership: Checks that this process still leads.
        events: Receives `DrainRequested`.
    """

    def __init__(
        self,
        guard: ApplicationGuard,
        coordinator_table: CoordinatorStateTable,
        worker_table: WorkerMetricsTable,
        balance: BalanceSchedule,
        leadership: LeaderElection,
        events: EventSink,
    ) -> None:
        self._guard = guard
        self._coordinator_table = coordinator_table
        self._worker_table = worker_table
        self._balance = balance
        self._leadership = leadership
        self._events = events

    @property
    def are_open(self) -> bool:
        """Whether the leader must follow a wish in this cycle."""
        wanted = self._guard.control
        return wanted.pause is not None or wanted.balance is not None

    def assign(self, context: CycleContext, assign: Callable[[CycleContext], None]) -> None:
        """Call `assign`, unless the application is paused.

        Raises:
            NotLeadingError: This process does not lead any more.
            AwsError: The request to balance could not be removed. The next cycle balances again.
        """
        wanted = self._guard.control
        if wanted.pause is not None:
            self._request_drains(context)
            return
        if wanted.balance is not None:
            self._balance.balance_now()
        assign(context)
        if wanted.balance is not None and not context.deadline.passed():
            self._leadership.check()
            self._coordinator_table.put_balance(None, replacing=wanted)

    def _request_drains(self, context: CycleContext) -> None:
        """Request the workers to end that have not been requested yet.

        A worker whose start overlapped with the command that paused the application may have missed
        it. A Java worker does not know the request, and does not get one.
        """
        for row in context.workers:
            if row.run_id is None or row.drain_requested:
                continue
            try:
                if self._worker_table.request_drain(row.worker_id, for_pause=True):
                    self._events(DrainRequested(row.worker_id, "the application is paused"))
            except AwsError as error:
                context.errors.append(error)
