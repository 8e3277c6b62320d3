"""Count the workers of an application: by the rows that move, and by the runs that start.

A worker counts while its row moves, also if this Dagster instance has no run of it. A successor and
the worker that it replaces count as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagster import DagsterRunStatus

from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.scaling.reconcile import Heartbeats


@dataclass(frozen=True, slots=True)
class CountedWorkers:
    """The continuous workers of an application.

    Attributes:
        runs: The active runs of continuous workers by worker id.
        moving: Ids of the workers whose row moves, without those of drains.
        rows: The rows that can be read by worker id.
        ended: Ids of the workers that have deleted their row, and whose run is still active.
    """

    runs: Mapping[str, RunView] = field(default_factory=dict)
    moving: frozenset[str] = frozenset()
    rows: Mapping[str, WorkerMetrics] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, active: Sequence[RunView], heartbeats: Heartbeats, limit_seconds: float
    ) -> "CountedWorkers":
        """Count the workers of the last observation.

        Args:
            active: All active runs of the application.
            heartbeats: The rows.
            limit_seconds: After this time without a change a row does not move any more.
        """
        drains = {run.worker_id for run in active if not run.continuous}
        return cls(
            {run.worker_id: run for run in active if run.continuous},
            frozenset(
                key
                for key in heartbeats.rows
                if key not in drains and (heartbeats.silent_seconds(key) or 0.0) <= limit_seconds
            ),
            {key: row for key, row in heartbeats.rows.items() if isinstance(row, WorkerMetrics)},
            heartbeats.ended,
        )

    @property
    def starting(self) -> tuple[RunView, ...]:
        """The runs whose worker has no row that moves yet. One that is canceled gets none."""
        return tuple(
            run
            for run in self.runs.values()
            if run.worker_id not in self.moving and run.status is not DagsterRunStatus.CANCELING
        )

    @property
    def pairs(self) -> tuple[tuple[RunView, str], ...]:
        """Each run of a successor that is not canceled, with the worker that it replaces.

        Until the run of that worker has ended, too: its row is gone before.
        """
        return tuple(
            (run, run.replaces)
            for run in self.runs.values()
            if run.replaces is not None
            and run.replaces in self._alive
            and run.status is not DagsterRunStatus.CANCELING
        )

    @property
    def paired(self) -> frozenset[str]:
        """Ids of the successors and of the workers that they replace."""
        return frozenset(
            worker_id for run, former in self.pairs for worker_id in (run.worker_id, former)
        )

    @property
    def number(self) -> int:
        """Number of workers. A successor counts only if the worker that it replaces is gone."""
        return len(self._alive - {run.worker_id for run, _ in self.pairs})

    @property
    def leaving(self) -> int:
        """How many of `number` are asked to end or have ended, and are not replaced."""
        return sum(
            self.is_draining(worker_id) or worker_id in self.ended
            for worker_id in self._alive - self.paired
        )

    @property
    def _alive(self) -> frozenset[str]:
        return self.moving | {run.worker_id for run in self.starting}

    def is_draining(self, worker_id: str) -> bool:
        """Whether the worker was asked to end, or its run is being canceled."""
        row, run = self.rows.get(worker_id), self.runs.get(worker_id)
        is_canceled = run is not None and run.status is DagsterRunStatus.CANCELING
        return is_canceled or (row is not None and row.drain_requested)
