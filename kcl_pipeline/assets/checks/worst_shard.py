"""Say which shard lags most, since when, and why."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.text import duration_text, printable

HOT_RATIO: Final = 2.0
"""A shard is hot if its throughput is at least so many times the mean of the others."""
STILL_SECONDS: Final = 60.0
"""A checkpoint that has not changed for so long is named as the cause."""


def worst_shard(
    leases: Sequence[Lease],
    workers: Sequence[WorkerMetrics],
    unread: Mapping[str, float],
    unchanged: Mapping[str, float],
    waits: Mapping[str, float],
    threshold_seconds: float,
    wall_seconds: float,
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
    """
    unfinished = [lease for lease in leases if not lease.ended]
    late = [le for le in unfinished if unread.get(le.lease_key, 0.0) > threshold_seconds]
    if not late:
        return None
    worst = max(late, key=lambda le: unread[le.lease_key])
    age = unread[worst.lease_key]
    since = f"{datetime.fromtimestamp(wall_seconds - age, UTC):%H:%M:%S} UTC"
    cause = (
        _stands_still(worst, workers, unchanged, waits)
        or _hot(worst, unfinished)
        or f"its worker commits less than arrives, as on {len(late)} of {len(unfinished)} shards"
    )
    return (
        f"{printable(worst.lease_key)} of worker {printable(worst.actual_owner or 'none')} lags "
        f"most, since {since} ({duration_text(age)}): {cause}"
    )


def _stands_still(
    lease: Lease,
    workers: Sequence[WorkerMetrics],
    unchanged: Mapping[str, float],
    waits: Mapping[str, float],
) -> str | None:
    """Why records of the lease are not committed at all; None if they are."""
    key = lease.lease_key
    if key in waits:
        return f"it has had no live owner for {duration_text(waits[key])}"
    status = next((w.status for w in workers if w.worker_id == lease.actual_owner), None)
    if status is not None:
        paused = next((one for one in status.paused if one.lease_key == key), None)
        if paused is not None:
            return f"it is paused: {paused.reason}"
        if status.hung is not None:
            seconds = duration_text(status.hung.seconds)
            return f"its worker is hung in step {status.hung.step} for {seconds}"
        if status.failed_batches:
            return f"the table refuses the batches of its worker: {status.failure}"
    if unchanged.get(key, 0.0) >= STILL_SECONDS:
        return (
            f"its checkpoint has not changed for {duration_text(unchanged[key])}: a batch takes "
            "long or is repeated"
        )
    return None


def _hot(lease: Lease, unfinished: Sequence[Lease]) -> str | None:
    own = lease.throughput_kbps or 0.0
    others = [le.throughput_kbps or 0.0 for le in unfinished if le is not lease]
    if not others or own <= 0 or own < HOT_RATIO * sum(others) / len(others):
        return None
    share = own / (own + sum(others))
    return f"it is hot, with {share:.0%} of the throughput of {len(unfinished)} shards; split it"
