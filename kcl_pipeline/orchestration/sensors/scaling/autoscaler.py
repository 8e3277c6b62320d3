"""Decide how many worker runs to start or to drain.

`decide` is a pure function of the workers, their load, and the memory in the sensor's cursor.

* There are never more workers than open shards, because one more would have nothing to read.
* Only some runs may be on the way at once: queued, starting, or without a worker metrics row. They
  count as workers, so none is started twice.
* Runs that fail soon after their start are replaced with a growing delay. Otherwise a transform
  that always fails would start a run every five seconds.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Self

from dagster import DagsterRunStatus
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.orchestration.assets.runs.problems import early_failures
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.scaling.load import Load, LoadLimits
from kcl_pipeline.orchestration.sensors.scaling.replacement import Failed
from kcl_pipeline.orchestration.sensors.scaling.workers import CountedWorkers
from kcl_pipeline.text import counted, duration_text

FIRST_BACKOFF_SECONDS: Final = 10.0
LONGEST_BACKOFF_SECONDS: Final = 300.0
SCALE_COOLDOWN_SECONDS: Final = 120.0
SCALE_DOWN_AFTER_SECONDS: Final = 600.0
FEWER_SHARDS_AFTER_SECONDS: Final = 60.0
"""A smaller number of open shards counts after this time. A reshard changes it several times."""
LONGEST_CALM_SECONDS: Final = 14_400.0
"""Longest calm before a worker is drained, in a fleet that needed the drained worker again."""
NOTHING_KNOWN: Final = Load()
NO_LIMITS: Final = LoadLimits()


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
        scaled_at: When `desired` was last changed because of the load.
        scaled: How and why it was changed then, for people.
        calm_since: Since when the load is low enough to drain a worker.
        calm_seconds: How long it must be so. It doubles if the worker is needed again soon.
        drained_at: When `desired` was last lowered because of the load.
        open_shards: Number of open shards that limits the workers. None: not known yet.
        fewer_since: Since when fewer shards than `open_shards` are open.
        failed: The version of the code that replaces no other workers. None: no version.
        paused_before: Number of paused shards when the last successor of a worker started.
    """

    desired: int = Field(0, ge=0)
    last_death: str | None = Field(
        None, description="The newest run that failed early and was counted"
    )
    retry_at: float = 0.0
    scaled_at: float = 0.0
    scaled: str | None = None
    calm_since: float | None = None
    calm_seconds: float = Field(SCALE_DOWN_AFTER_SECONDS, gt=0, le=LONGEST_CALM_SECONDS)
    drained_at: float | None = None
    open_shards: int | None = Field(None, ge=0)
    fewer_since: float | None = None
    failed: Failed | None = None
    paused_before: int = Field(0, ge=0)

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
        cancel: Ids of the queued runs to cancel.
        memory: The next cursor.
        reason: A sentence for the log.
        limit: Why there are not more workers, as a sentence without a period. None: nothing limits
            them.
    """

    start: int = 0
    drain: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    memory: AutoscalerMemory
    reason: str
    limit: str | None = None


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
    load: Load,
    limits: LoadLimits,
    now: float,
    largest: int,
    smallest: int,
) -> AutoscalerMemory:
    desired = min(max(memory.desired, smallest), largest)
    memory = memory.model_copy(update={"desired": desired, "scaled_at": min(memory.scaled_at, now)})
    if not limits.is_known(load) or smallest == 0:
        return memory
    excess = limits.excess(load)
    is_settled = now - memory.scaled_at >= SCALE_COOLDOWN_SECONDS
    if excess is not None and desired < largest and is_settled:
        return _grown(memory, now, excess)
    calm = limits.calm(load)
    if calm is None:
        return memory.model_copy(update={"calm_since": None})
    calm_since = now if memory.calm_since is None else min(memory.calm_since, now)
    if desired > smallest and now - calm_since >= memory.calm_seconds:
        why = f"{calm} for {duration_text(now - calm_since)}"
        memory = memory.model_copy(update={"drained_at": now})
        return _changed(memory, desired - 1, now, why)
    return memory.model_copy(update={"calm_since": calm_since})


def _grown(memory: AutoscalerMemory, now: float, why: str) -> AutoscalerMemory:
    """One worker more. If one was drained not long ago, the next calm must last twice as long."""
    calm_seconds = SCALE_DOWN_AFTER_SECONDS
    if memory.drained_at is not None and now - memory.drained_at <= 2 * memory.calm_seconds:
        calm_seconds = min(2 * memory.calm_seconds, LONGEST_CALM_SECONDS)
    memory = memory.model_copy(update={"calm_seconds": calm_seconds})
    return _changed(memory, memory.desired + 1, now, why)


def _changed(memory: AutoscalerMemory, desired: int, now: float, why: str) -> AutoscalerMemory:
    time = f"{datetime.fromtimestamp(now, UTC):%H:%M} UTC"
    scaled = f"{memory.desired} to {desired} at {time}: {why}"
    calm_since = now if desired < memory.desired else None
    changes = {"desired": desired, "scaled_at": now, "scaled": scaled, "calm_since": calm_since}
    return memory.model_copy(update=changes)


def open_shards(leases: Sequence[Lease]) -> int | None:
    """Count the shards that can be read now; None without any lease.

    A shard whose parent is not finished is left out: it is read after its parent.
    """
    if not leases:
        return None
    unfinished = [lease for lease in leases if not lease.ended]
    known = {(lease.stream, lease.shard_id) for lease in unfinished}
    return sum(
        not any((lease.stream, parent) in known for parent in lease.parent_shard_ids)
        for lease in unfinished
    )


def _with_shards(memory: AutoscalerMemory, open_shards: int | None, now: float) -> AutoscalerMemory:
    """Note the number of open shards. None: unknown, so the last number stays."""
    last = memory.open_shards
    if open_shards is None or open_shards == last:
        return memory.model_copy(update={"fewer_since": None})
    since = now if memory.fewer_since is None else min(memory.fewer_since, now)
    if last is not None and open_shards < last and now - since < FEWER_SHARDS_AFTER_SECONDS:
        return memory.model_copy(update={"fewer_since": since})
    return memory.model_copy(update={"open_shards": open_shards, "fewer_since": None})


def _superfluous(workers: CountedWorkers, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The queued runs to cancel, then the workers to drain: the newest first.

    A queued run has no worker yet. One that is starting can neither be canceled nor drained. A
    worker that is being replaced, and its successor, are left alone.
    """
    free = [
        run
        for run in workers.runs.values()
        if run.worker_id not in workers.paired and not workers.is_draining(run.worker_id)
    ]
    newest = sorted(free, key=lambda run: (run.created, run.run_id), reverse=True)
    queued = [run.run_id for run in newest if run.status is DagsterRunStatus.QUEUED][:number]
    moving = [run.worker_id for run in newest if run.worker_id in workers.moving]
    return tuple(queued), tuple(moving[: number - len(queued)])


def decide(
    workers: CountedWorkers,
    recent: Sequence[RunView],
    memory: AutoscalerMemory,
    *,
    minimum: int,
    maximum: int,
    now: float,
    load: Load = NOTHING_KNOWN,
    limits: LoadLimits = NO_LIMITS,
    shards: int | None = None,
    max_starting: int | None = None,
) -> ScalingDecision:
    """Compare the number of workers with the desired number.

    Args:
        workers: The workers.
        recent: The newest continuous runs of this version in any status.
        memory: The state of the last decision.
        minimum: Smallest number of workers.
        maximum: Largest number of workers.
        now: Epoch seconds.
        load: The load of the workers.
        limits: The load that starts one more worker.
        shards: Number of open shards. None: not known, so the last known number counts.
        max_starting: Largest number of runs on the way; None for no limit. While no number of
            shards is known, it is one worker.
    """
    before = memory
    memory = _with_shards(memory, shards, now)
    largest = max(maximum, minimum)
    if memory.open_shards is not None:
        largest = min(largest, max(memory.open_shards, 1))
    memory = _scaled(memory, load, limits, now, largest, min(minimum, largest))
    text = f"{counted(workers.number, 'worker')}, {memory.desired} desired"
    _, _, why = (memory.scaled or "").rpartition(" UTC: ")
    because = f", because {why}" if memory.scaled != before.scaled else ""
    limit = None if because else _limit(memory, limits.excess(load), largest, minimum)
    most = memory.desired if before.desired > memory.desired else largest
    surplus = workers.number - workers.leaving - most
    cancel, drain = _superfluous(workers, surplus) if surplus > 0 else ((), ())
    if cancel or drain:
        actions = [f"canceling {counted(len(cancel), 'queued run')}"] if cancel else []
        actions += [f"draining {len(drain)}"] if drain else []
        reason = f"{text}: {', '.join(actions)}{because}"
        return ScalingDecision(
            drain=drain, cancel=cancel, memory=memory, reason=reason, limit=limit
        )
    start = memory.desired - workers.number
    if start > 0:
        memory, remaining = _backed_off(memory, recent, now)
        if remaining > 0:  # `failure_problem` says why
            reason = f"{text}: next start in {math.ceil(remaining)} s"
            return ScalingDecision(memory=memory, reason=reason, limit=limit)
    if start > 0 and max_starting is not None:
        budget = max_starting - len(workers.starting)
        start = min(start, budget if memory.open_shards is not None else 1 - workers.number)
    if start <= 0:
        return ScalingDecision(memory=memory, reason=text, limit=limit)
    reason = f"{text}: starting {start}{because}"
    return ScalingDecision(start=start, memory=memory, reason=reason, limit=limit)


def _limit(memory: AutoscalerMemory, excess: str | None, largest: int, minimum: int) -> str | None:
    """Why there are not more workers, although the load or `Fleet.min` asks for them."""
    shards = memory.open_shards
    is_short = shards is not None and largest <= shards < minimum
    if excess is None:
        wanted = f"Fleet.min is {minimum}" if is_short else None
    else:
        wanted = excess if memory.desired >= largest else None
    if wanted is None:
        return None
    if shards is None or largest < shards:
        return f"{wanted}, but Fleet.max is {largest}"
    return f"{wanted}, but only {counted(shards, 'shard')} {'is' if shards == 1 else 'are'} open"


def _backed_off(
    memory: AutoscalerMemory, recent: Sequence[RunView], now: float
) -> tuple[AutoscalerMemory, float]:
    """The memory with the newest early failure, and the remaining delay."""
    failures = early_failures(recent, now)
    backoff = backoff_seconds(len(failures), memory.desired)
    latest = max(failures, key=lambda r: (r.ended or 0.0, r.run_id)).run_id if failures else None
    if latest is not None and latest != memory.last_death:
        memory = memory.model_copy(update={"last_death": latest, "retry_at": now + backoff})
    return memory, min(memory.retry_at - now, backoff)
