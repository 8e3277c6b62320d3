"""How many worker runs to start or to drain: a pure function of Dagster's runs and a little memory
kept in the sensor's cursor.

The count of active runs decides, never a run key: a key that was used once would make a replacement
impossible for ever. Workers that keep dying young are replaced more and more slowly, or a broken
transform would make a run every five seconds.
"""

from collections.abc import Sequence
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kcl_pipeline.assets.runs import RunView, worst_lag_millis

DIED_YOUNG_SECONDS: Final = 60.0
FIRST_WAIT_SECONDS: Final = 10.0
LONGEST_WAIT_SECONDS: Final = 300.0
SCALE_COOLDOWN_SECONDS: Final = 120.0
SCALE_DOWN_AFTER_SECONDS: Final = 600.0
SCALE_DOWN_BELOW: Final = 0.1
"""A lag below this share of the scale-up lag, for the whole time above, lets one worker go."""


class _Value(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class AutoscalerMemory(_Value):
    """The sensor's cursor. `desired` may be edited on the sensor's page; it is kept between the
    fleet's `min` and `max`.

    Times are epoch seconds of the code server; a wait read from here is never longer than the
    longest wait, whatever its clock did meanwhile.
    """

    desired: int = Field(0, ge=0)
    last_death: str | None = Field(
        None, description="The newest run that died young and was counted"
    )
    retry_at: float = 0.0
    scaled_at: float = 0.0
    calm_since: float | None = None

    @classmethod
    def parse(cls, cursor: str | None) -> Self:
        """Memory from a cursor; text that is none (an edit gone wrong) starts afresh."""
        try:
            return cls.model_validate_json(cursor or "{}")
        except ValidationError:
            return cls.model_validate({})


class ScalingDecision(_Value):
    """Start so many runs, drain these workers. `reason` is a sentence for people."""

    start: int = 0
    drain: tuple[str, ...] = ()
    memory: AutoscalerMemory
    reason: str


def young_deaths(recent: Sequence[RunView], now: float) -> tuple[RunView, ...]:
    """The failures in a row, from the newest run back, that lived less than a minute; active runs
    that are still young are no evidence yet.
    """
    deaths: list[RunView] = []
    for run in sorted(recent, key=lambda r: r.created, reverse=True):
        lived = run.lived_seconds
        if run.active:
            if run.started is not None and now - run.started >= DIED_YOUNG_SECONDS:
                break
            continue
        if run.status.value != "FAILURE" or lived is None or lived >= DIED_YOUNG_SECONDS:
            break
        deaths.append(run)
    return tuple(deaths)


def wait_seconds(deaths: int, desired: int) -> float:
    """How long to wait before the next replacement: nothing until as many have died as are wanted,
    then doubling.
    """
    rounds = deaths // max(desired, 1)
    return (
        0.0
        if rounds == 0
        else min(FIRST_WAIT_SECONDS * 2 ** min(rounds - 1, 10), LONGEST_WAIT_SECONDS)
    )


def _scaled(
    memory: AutoscalerMemory,
    active: Sequence[RunView],
    now: float,
    ceiling: int,
    floor: int,
    scale_up_lag_seconds: float | None,
) -> AutoscalerMemory:
    desired = min(max(memory.desired, floor), ceiling)
    memory = memory.model_copy(update={"desired": desired, "scaled_at": min(memory.scaled_at, now)})
    lag = worst_lag_millis(tuple(r for r in active if r.continuous))
    if scale_up_lag_seconds is None or lag is None or floor == 0:
        return memory
    if (
        lag > scale_up_lag_seconds * 1000
        and desired < ceiling
        and now - memory.scaled_at >= SCALE_COOLDOWN_SECONDS
    ):
        return memory.model_copy(
            update={"desired": desired + 1, "scaled_at": now, "calm_since": None}
        )
    if lag > scale_up_lag_seconds * 1000 * SCALE_DOWN_BELOW:
        return memory.model_copy(update={"calm_since": None})
    calm_since = now if memory.calm_since is None else min(memory.calm_since, now)
    if desired > floor and now - calm_since >= SCALE_DOWN_AFTER_SECONDS:
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
    """What to do about the number of workers now (epoch seconds).

    `active` are all active runs, `recent` the newest continuous ones in any status.
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
            reason=f"{len(workers)} workers, {memory.desired} wanted: {len(drain)} asked to drain",
        )
    missing = memory.desired - len(workers)
    if missing <= 0:
        return ScalingDecision(
            memory=memory, reason=f"{len(workers)} workers, {memory.desired} wanted"
        )
    deaths = young_deaths(recent, now)
    wait = wait_seconds(len(deaths), memory.desired)
    latest = max(deaths, key=lambda r: (r.ended or 0.0, r.run_id)).run_id if deaths else None
    if latest is not None and latest != memory.last_death:
        memory = memory.model_copy(update={"last_death": latest, "retry_at": now + wait})
    remaining = min(memory.retry_at - now, wait)
    if remaining > 0:
        reason = (
            f"{len(workers)} workers, {memory.desired} wanted: the last {len(deaths)} "
            f"died within a minute, next try in {remaining:.0f} s"
        )
        return ScalingDecision(memory=memory, reason=reason)
    return ScalingDecision(
        start=missing,
        memory=memory,
        reason=f"{len(workers)} workers, {memory.desired} wanted: {missing} started",
    )
