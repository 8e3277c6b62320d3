"""Evaluate and observe the check `lag_below_threshold`: how old the oldest unread record is.

The leader sensor and an executed check call the same function with the same kinds of values: the
rows of live workers, which a worker writes even while it is hung, and the lease rows. A lease
without a live worker counts with the time since all its records were in the table.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.orchestration.assets.checks import health
from kcl_pipeline.orchestration.assets.checks.living import observe_live_workers
from kcl_pipeline.orchestration.assets.checks.unread import unread_seconds
from kcl_pipeline.orchestration.assets.checks.worst_shard import (
    STILL_SECONDS,
    late_leases,
    stands_still,
    time_text,
    worst_shard,
)
from kcl_pipeline.orchestration.assets.runs.runs import (
    RunView,
    fleet_lag_age_seconds,
    fleet_lag_millis,
    stalled_shards,
    worst_lag_millis,
)
from kcl_pipeline.text import duration_text

IDLE_SECONDS: Final = 60.0
"""After this time without a batch, the check says since when nothing has arrived."""
_NO_LAG_MILLIS: Final = 5_000
_POLL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class LagObservation:
    """What the check is evaluated from.

    Attributes:
        leases: All leases.
        workers: The live workers.
        unread: By lease key, how old its oldest unread record can be. See `unread_seconds`.
        waits: By lease key, for how long it has had no live owner. `math.inf`: not known.
        unchanged: By lease key, for how long its checkpoint was observed not to change.
        runs: The active runs.
        wall_seconds: Epoch seconds.
        threshold_seconds: Largest lag that is normal.
        pause: The pause of the application. None: it is not paused.
    """

    leases: Sequence[Lease]
    workers: Sequence[WorkerMetrics]
    unread: Mapping[str, float]
    waits: Mapping[str, float]
    unchanged: Mapping[str, float]
    runs: tuple[RunView, ...]
    wall_seconds: float
    threshold_seconds: float
    pause: Pause | None = None

    @property
    def ages(self) -> dict[str, float]:
        """`unread`, and the time without a live owner where it is unknown and too long."""
        waits = {
            lease.lease_key: seconds
            for lease in self.leases
            if not lease.ended
            and (seconds := self.waits.get(lease.lease_key, 0.0)) > self.threshold_seconds
            and not math.isinf(seconds)
        }
        return waits | dict(self.unread)

    @property
    def lag_millis(self) -> int | None:
        """The lag of the application; None if it is not known.

        The last lag that a run reported counts only if it is above the threshold: a worker that
        hangs, or is gone, does not change it.
        """
        found = fleet_lag_millis(self.workers, self.ages.values())
        reported = worst_lag_millis(self.runs)
        if found is None and reported is not None and reported > self.threshold_seconds * 1000:
            return reported
        return found

    @property
    def unread_shards(self) -> int:
        """Number of shards whose lag their worker does not know yet."""
        return sum(w.status.unknown_lags for w in self.workers if w.status is not None)

    @property
    def idle(self) -> str | None:
        """Since when nothing has arrived; None while data arrives, or if it is not known."""
        return idle_text(self.workers, self.lag_millis, self.unread_shards, self.wall_seconds)

    @property
    def lag_age_seconds(self) -> float | None:
        """How old the reports are that the lag is from. For display only."""
        if self.unread and not self.workers:
            return None
        return fleet_lag_age_seconds(self.workers, self.runs, self.wall_seconds)


def lag(observation: LagObservation, error_seconds: float) -> health.Health | None:
    """Whether every record that is older than the threshold is in the table.

    Args:
        observation: The observation.
        error_seconds: The severity is ERROR above this lag.

    Returns:
        The result. None: nothing is known about any shard.
    """
    millis, ages, threshold_seconds = (
        observation.lag_millis,
        observation.ages,
        observation.threshold_seconds,
    )
    stalled = max(stalled_shards(observation.runs), stalled_leases(observation.workers))
    unowned = sum(
        math.isinf(observation.waits.get(lease.lease_key, 0.0)) and lease.lease_key not in ages
        for lease in observation.leases
        if not lease.ended
    )
    if millis is None and not stalled and not unowned:
        return None
    return health.lag(
        millis,
        threshold_seconds,
        stalled,
        unread_shards=observation.unread_shards,
        age_seconds=observation.lag_age_seconds,
        worst=worst_shard(
            observation.leases,
            observation.workers,
            ages,
            observation.unchanged,
            observation.waits,
            threshold_seconds,
            observation.wall_seconds,
            None if observation.pause is None else observation.pause.sentence,
        ),
        error_seconds=error_seconds,
        unowned_shards=unowned,
        idle=observation.idle,
        stalled=next(
            (one for w in observation.workers if w.status is not None for one in w.status.stalled),
            None,
        ),
    )


def stalled_leases(workers: Sequence[WorkerMetrics]) -> int:
    """Return the number of leases of these workers that make no progress."""
    return sum(w.status.stalled_leases for w in workers if w.status is not None)


def idle_text(
    workers: Sequence[WorkerMetrics], millis: int | None, unknown: int, wall_seconds: float
) -> str | None:
    """Say that nothing arrives, and since when; None while data arrives or the lag is not known."""
    if millis is None or millis > _NO_LAG_MILLIS or unknown:
        return None
    totals = [w.status.totals for w in workers if w.status is not None and w.status.totals]
    batches = [one.last_batch_seconds for one in totals if one.last_batch_seconds is not None]
    silent = min(batches) if batches else max((one.seconds for one in totals), default=0.0)
    if silent < IDLE_SECONDS:
        return None
    event = "the last batch was committed" if batches else "the workers started"
    return (
        f"nothing waits, and nothing has arrived since {event} at "
        f"{time_text(wall_seconds, silent)} UTC ({duration_text(silent)} ago)"
    )


def observe_lag(
    leases: LeaseTable,
    workers: WorkerMetricsTable,
    runs: tuple[RunView, ...],
    *,
    drained_at: float | None,
    pause: Pause | None,
    threshold_seconds: float,
    error_seconds: float,
    silence_seconds: float,
    clock: Clock,
    rejected: RejectedRows,
) -> health.Health:
    """Evaluate the check by observing the tables.

    It waits until all workers have reported, at most for `silence_seconds`. If it fails without a
    cause in the rows, the shard that lags most is observed for a minute at most.
    """
    living = observe_live_workers(workers, silence_seconds, clock, rejected)
    listed = leases.list_leases().leases
    live = {worker.worker_id for worker in living}
    now = clock.wall()
    unowned = {
        lease.lease_key: math.inf
        for lease in listed
        if not lease.ended and lease.actual_owner not in live
    }
    unread = unread_seconds(listed, living, now, drained_at)
    seen = LagObservation(listed, living, unread, unowned, {}, runs, now, threshold_seconds, pause)
    found = lag(seen, error_seconds)
    if found is None:
        return health.lag(None, threshold_seconds)
    late = late_leases(listed, unread, threshold_seconds)
    if found.passed or not late or stands_still(late[0], living, {}, unowned) is not None:
        return found
    unchanged = {late[0].lease_key: _still_seconds(leases, late[0], clock)}
    return lag(replace(seen, unchanged=unchanged), error_seconds) or found


def _still_seconds(table: LeaseTable, lease: Lease, clock: Clock) -> float:
    """Observe for how long the checkpoint does not change, at most for `STILL_SECONDS`."""
    begin = clock.monotonic()
    while clock.monotonic() - begin < STILL_SECONDS:
        clock.sleep(_POLL_SECONDS)
        rows = {one.lease_key: one.checkpoint for one in table.list_leases().leases}
        if rows.get(lease.lease_key) != lease.checkpoint:
            return 0.0
    return clock.monotonic() - begin
