"""Decide how many worker runs to start or to drain.

`decide` is a pure function of Dagster's runs and of the memory in the sensor's cursor. It counts
active runs and does not use run keys, because Dagster never starts a second run with a used key.
Runs that fail soon after their start are replaced with a growing delay. Otherwise a transform
that always fails would start a run every five seconds.
"""

from collections.abc import Sequence
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kcl_pipeline.assets.runs import RunView, worst_lag_millis

EARLY_FAILURE_SECONDS: Final = 60.0
FIRST_BACKOFF_SECONDS: Final = 10.0
LONGEST_BACKOFF_SECONDS: Final = 300.0
SCALE_COOLDOWN_SECONDS: Final = 120.0
SCALE_DOWN_AFTER_SECONDS: Final = 600.0
SCALE_DOWN_BELOW: Final = 0.1
"""Share of the scale-up lag. One worker is drained after `SCALE_DOWN_AFTER_SECONDS` below it."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class AutoscalerMemory(_Value):
    """State of the autoscaler, stored as JSON in the sensor's cursor.

    Times are epoch seconds of the code server. A backoff that is read from here is never longer
    than `LONGEST_BACKOFF_SECONDS`, even if the clock was changed.

    Attributes:
        desired: Number of workers, limited to the fleet's `min` and `max`. It may be edited in
            the Dagster UI.
        last_death: The newest run that failed early and was counted.
        retry_at: No replacement starts before this time.
        scaled_at: When `desired` was last changed because of the lag.
        calm_since: Since when the lag is low enough to drain a worker.
    """

    desired: int = Field(0, ge=0)
    last_death: str | None = Field(
        None, description="The newest run that failed early and was counted"
    )
    retry_at: float = 0.0
    scaled_at: float = 0.0
    calm_since: float | None = None

    @classmethod
    def parse(cls, cursor: str | None) -> Self:
        """Parse a cursor. An invalid one (a wrong edit) gives the default memory."""
        try:
            return cls.model_validate_json(cursor or "{}")
        except ValidationError:
            return cls.model_validate({})


class ScalingDecision(_Value):
    """How many runs to start, which workers to drain, and why.

    Attributes:
        start: Number of runs to start.
        drain: Ids of the workers to drain.
        memory: The next cursor.
        reason: A sentence for the log.
    """

    start: int = 0
    drain: tuple[str, ...] = ()
    memory: AutoscalerMemory
    reason: str


def early_failures(recent: Sequence[RunView], now: float) -> tuple[RunView, ...]:
    """Consecutive failures, from the newest run back, of runs that lived less than a minute.

    Active runs younger than a minute are ignored: they may still fail early.
    """
    failures: list[RunView] = []
    for run in sorted(recent, key=lambda r: r.created, reverse=True):
        lived = run.lived_seconds
        if run.active:
            if run.started is not None and now - run.started >= EARLY_FAILURE_SECONDS:
                break
            continue
        if run.status.value != "FAILURE" or lived is None or lived >= EARLY_FAILURE_SECONDS:
            break
        failures.append(run)
    return tuple(failures)


def backoff_seconds(failures: int, desired: int) -> float:
    """Delay before the next replacement.

    It is 0 until `desired` runs have failed early, then it doubles with every `desired` failures.
    """
    rounds = failures // max(desired, 1)
    return (
        0.0
        if rounds == 0
        else min(FIRST_BACKOFF_SECONDS * 2 ** min(rounds - 1, 10), LONGEST_BACKOFF_SECONDS)
    )


def _scaled(
    memory: AutoscalerMemory,
    active: Sequence[RunView],
    now: float,
    largest: int,
    smallest: int,
    scale_up_lag_seconds: float | None,
) -> AutoscalerMemory:
    desired = min(max(memory.desired, smallest), largest)
    memory = memory.model_copy(update={"desired": desired, "scaled_at": min(memory.scaled_at, now)})
    lag = worst_lag_millis(tuple(r for r in active if r.continuous))
    if scale_up_lag_seconds is None or lag is None or smallest == 0:
        return memory
    if (
        lag > scale_up_lag_seconds * 1000
        and desired < largest
        and now - memory.scaled_at >= SCALE_COOLDOWN_SECONDS
    ):
        return memory.model_copy(
            update={"desired": desired + 1, "scaled_at": now, "calm_since": None}
        )
    if lag > scale_up_lag_seconds * 1000 * SCALE_DOWN_BELOW:
        return memory.model_copy(update={"calm_since": None})
    calm_since = now if memory.calm_since is None else min(memory.calm_since, now)
    if desired > smallest and now - calm_since >= SCALE_DOWN_AFTER_SECONDS:
        return memory.model_copy(
            update={"desired": desired - 1, "scaled_at": now, "calm_since": now}
        )
    return memory.model_copy(update={"calm_since": calm_since})


def decide(
    active: Sequence[RunView],
    recent: Sequence[RunView],
    memory: AutoscalerMemory,
    *,
    minimum: int,
    maximum: int,
    now: float,
    scale_up_lag_seconds: float | None = None,
) -> ScalingDecision:
    """Compare the number of workers with the desired number.

    Args:
        active: All active runs.
        recent: The newest continuous runs in any status.
        memory: The state of the last decision.
        minimum: Smallest number of workers.
        maximum: Largest number of workers.
        now: Epoch seconds.
        scale_up_lag_seconds: Lag that starts one more worker; None disables scaling by lag.
    """
    workers = [r for r in active if r.continuous]
    before = memory.desired
    memory = _scaled(memory, active, now, max(maximum, minimum), minimum, scale_up_lag_seconds)
    running = [r for r in workers if r.status.value != "CANCELING"]
    lowered = before > memory.desired
    surplus = len(running) - (memory.desired if lowered else max(maximum, minimum))
    if surplus > 0:
        started = sorted(
            (r for r in running if r.status.value == "STARTED"),
            key=lambda r: r.created,
            reverse=True,
        )
        drain = tuple(r.worker_id for r in started[:surplus])
        return ScalingDecision(
            drain=drain,
            memory=memory,
            reason=f"{len(workers)} workers, {memory.desired} desired: draining {len(drain)}",
        )
    missing = memory.desired - len(workers)
    if missing <= 0:
        return ScalingDecision(
            memory=memory, reason=f"{len(workers)} workers, {memory.desired} desired"
        )
    failures = early_failures(recent, now)
    backoff = backoff_seconds(len(failures), memory.desired)
    latest = max(failures, key=lambda r: (r.ended or 0.0, r.run_id)).run_id if failures else None
    if latest is not None and latest != memory.last_death:
        memory = memory.model_copy(update={"last_death": latest, "retry_at": now + backoff})
    remaining = min(memory.retry_at - now, backoff)
    if remaining > 0:
        reason = (
            f"{len(workers)} workers, {memory.desired} desired: the last {len(failures)} "
            f"failed within a minute, next start in {remaining:.0f} s"
        )
        return ScalingDecision(memory=memory, reason=reason)
    return ScalingDecision(
        start=missing,
        memory=memory,
        reason=f"{len(workers)} workers, {memory.desired} desired: starting {missing}",
    )
