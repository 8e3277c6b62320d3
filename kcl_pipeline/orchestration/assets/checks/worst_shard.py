"""Say which shard lags most, since when, and why."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.state.worker_status import WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.text import duration_text, printable

HOT_RATIO: Final = 2.0
"""A shard is hot if its throughput is at least so many times the mean of the others."""
STILL_SECONDS: Final = 60.0
"""A checkpoint that has not changed for so long is named as the cause."""
DATE_FROM_SECONDS: Final = 43_200.0


def worst_shard(
    leases: Sequence[Lease],
    workers: Sequence[WorkerMetrics],
    unread: Mapping[str, float],
    unchanged: Mapping[str, float],
    waits: Mapping[str, float],
    threshold_seconds: float,
    wall_seconds: float,
    pause: str | None = None,
) -> str | None:
    """Return a sentence about the shard with the largest lag; None if none is above the threshold.

    Args:
        leases: All leases.
        workers: The live workers.
        unread: By lease key, how old its oldest record is that is not committed.
        unchanged: By lease key, for how long its checkpoint was observed not to change.
        waits: By lease key, for how long it has had no live owner.
        threshold_seconds: Largest lag that is normal.
        wall_seconds: Epoch seconds of the observation, for the time that is shown.
        pause: Since when the application is paused, by whom and why. None: it is not.
    """
    unfinished = [lease for lease in leases if not lease.ended]
    late = late_leases(unfinished, unread, threshold_seconds)
    if not late:
        return None
    worst = late[0]
    age = unread[worst.lease_key]
    since = time_text(wall_seconds, age)
    cause = (
        (None if pause is None else f"the application is {pause}")
        or stands_still(worst, workers, unchanged, waits)
        or _hot(worst, unfinished)
        or f"its worker commits less than arrives, as on {len(late)} of {len(unfinished)} shards"
    )
    return (
        f"{printable(worst.lease_key)} of worker {printable(worst.actual_owner or 'none')} lags "
        f"most, since {since} UTC ({duration_text(age)}): {cause}"
    )


def late_leases(
    leases: Sequence[Lease], unread: Mapping[str, float], threshold_seconds: float
) -> list[Lease]:
    """Return the unfinished leases with a lag above the threshold, the largest first."""
    late = [
        lease
        for lease in leases
        if not lease.ended and unread.get(lease.lease_key, 0.0) > threshold_seconds
    ]
    return sorted(late, key=lambda lease: -unread[lease.lease_key])


def time_text(wall_seconds: float, age_seconds: float) -> str:
    """Return the time of something that is so old; with the date if it is half a day or more."""
    at = datetime.fromtimestamp(wall_seconds - age_seconds, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}" if age_seconds >= DATE_FROM_SECONDS else f"{at:%H:%M:%S}"


def stands_still(
    lease: Lease,
    workers: Sequence[WorkerMetrics],
    unchanged: Mapping[str, float],
    waits: Mapping[str, float],
) -> str | None:
    """Why records of the lease are not committed at all; None if they are."""
    key = lease.lease_key
    if key in waits:
        if math.isinf(waits[key]):
            return "it has no live owner"
        return f"it has had no live owner for {duration_text(waits[key])}"
    status = next((w.status for w in workers if w.worker_id == lease.actual_owner), None)
    if status is not None:
        paused = next((one for one in status.paused if one.lease_key == key), None)
        if paused is not None:
            return f"it is paused: {paused.reason}"
        if status.hung is not None:
            hung = duration_text(status.hung.seconds)
            return f"its worker is hung in step {status.hung.step} for {hung}"
        if status.failed_batches:
            return f"the table refuses the batches of its worker: {status.failure}"
    if unchanged.get(key, 0.0) >= STILL_SECONDS:
        return (
            f"its checkpoint has not changed for {duration_text(unchanged[key])}: a batch takes "
            "long or is repeated"
        )
    seconds = idle_seconds(status)
    if seconds is not None and seconds >= STILL_SECONDS:
        return (
            f"its worker has committed no batch for {duration_text(seconds)}: a batch takes long "
            "or is repeated"
        )
    return None


def idle_seconds(status: WorkerStatus | None) -> float | None:
    """Return for how long the worker has committed no batch: since its last one, or its start."""
    if status is None or status.totals is None:
        return None
    last = status.totals.last_batch_seconds
    return status.totals.seconds if last is None else last


def _hot(lease: Lease, unfinished: Sequence[Lease]) -> str | None:
    own = lease.throughput_kbps or 0.0
    others = [le.throughput_kbps or 0.0 for le in unfinished if le is not lease]
    if not others or own <= 0 or own < HOT_RATIO * sum(others) / len(others):
        return None
    share = own / (own + sum(others))
    return f"it is hot, with {share:.0%} of the throughput of {len(unfinished)} shards; split it"
