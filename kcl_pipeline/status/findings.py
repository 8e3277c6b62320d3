"""Judge a snapshot: what is wrong with an application, how urgent it is, and what to do.

Each finding belongs to one of the checks of a pipeline. A check without a fault has one finding of
the level `ok`, which says why it passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    NotFoundError,
    ThrottledError,
    UnreadableRowError,
)
from kcl_pipeline.leases.coordinator import UnreadableLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.coverage import hole_in_leases
from kcl_pipeline.planning.state import is_failing
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import Failure, RunProblem, Snapshot, group_by_stream
from kcl_pipeline.status.streams import is_lease_stream
from kcl_pipeline.text import counted, duration_text, printable
from kcl_pipeline.worker_status import WorkerStatus

SHOWN: Final = 5
HOT_RATIO: Final = 2.0
"""A shard is hot if its throughput is at least so many times the mean of the others."""
STILL_SECONDS: Final = 60.0
"""A checkpoint that has not changed for so long is named as the cause of a lag."""
NO_LAG_SECONDS: Final = 5.0
SHARED_ID_SECONDS: Final = 3_600.0
"""How long a worker id that two processes used is reported."""
DATE_FROM_SECONDS: Final = 43_200.0


ADVICE_ON_RUNS: Final[Mapping[str, str]] = {
    "runs_queued": "raise the limit of the run queue, or lower Fleet.min",
    "runs_failing": "read the log of the newest run, and deploy a corrected version",
    "runs_silent": "read the log of the run. If its host is gone, the leader sensor ends the run",
    "replacement_stopped": "read the log of the newest run, and deploy a corrected version",
}
"""By name of a finding about runs, what to do."""


class FindingLevel(StrEnum):
    """How urgent a finding is.

    `unknown` means that it could not be judged, because something was not read or does not exist
    yet.
    """

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


class CheckName(StrEnum):
    """The checks of a pipeline. Every finding belongs to one of them."""

    LAG = "lag_below_threshold"
    MOVING = "shards_moving"
    RETENTION = "data_within_retention"
    LOSSES = "no_records_lost"
    DEAD_LETTERS = "no_new_dead_letters"
    COVERED = "shards_covered"
    WORKERS = "workers_running"
    LEADER = "leader_present"


STILL: Final = frozenset({CheckName.LAG, CheckName.MOVING})
"""While one of these checks has a fault, records wait longer than they should."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a snapshot shows.

    Attributes:
        check: The check that it belongs to. None: it is about the set-up.
        name: What was found, such as `worker_hung`. The name of the check if nothing is wrong.
        level: How urgent it is.
        sentence: What was found, without a period at the end.
        advice: What to do. Empty: nothing.
        rows: The shards, workers or rows that it is about.
        numbers: Values that Dagster plots.
    """

    check: CheckName | None
    name: str
    level: FindingLevel
    sentence: str
    advice: str = ""
    rows: tuple[Mapping[str, object], ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_fault(self) -> bool:
        """Whether somebody should look at it."""
        return self.level in {FindingLevel.WARNING, FindingLevel.PROBLEM}


def findings_of(
    snapshot: Snapshot, limits: CheckLimits, lag_threshold_seconds: float = 60.0
) -> list[Finding]:
    """Judge a snapshot. Every check has at least one finding; faults come first within a check.

    Args:
        snapshot: The state.
        limits: When checks fail.
        lag_threshold_seconds: Largest lag that is normal.
    """
    checks = {
        CheckName.LAG: _lag(snapshot, limits, lag_threshold_seconds),
        CheckName.MOVING: _moving(snapshot, limits),
        CheckName.RETENTION: _retention(snapshot, limits),
        CheckName.LOSSES: _losses(snapshot),
        CheckName.DEAD_LETTERS: _dead_letters(snapshot, limits),
        CheckName.COVERED: _covered(snapshot),
        CheckName.WORKERS: _workers(snapshot),
        CheckName.LEADER: _leader(snapshot, limits),
    }
    parts = {
        "the leases": CheckName.COVERED,
        "the worker metrics": CheckName.WORKERS,
        "the leader lock": CheckName.LEADER,
        "the record of losses": CheckName.LOSSES,
    }
    # What is judged without these rows would be wrong, such as leases without a worker.
    of_rows = {CheckName.COVERED, CheckName.WORKERS}
    rows = [failure.part for failure in snapshot.failures if parts.get(failure.part) in of_rows]
    found: list[Finding] = []
    for check, judged in checks.items():
        own = [f for f in snapshot.failures if parts.get(f.part, CheckName.COVERED) is check]
        if any(parts.get(failure.part) is check for failure in own):
            every = _not_read(check, own)
        elif rows and check in {CheckName.LAG, CheckName.MOVING}:
            text = f"{' and '.join(rows)} cannot be read"
            every = [Finding(check, "not_known", FindingLevel.UNKNOWN, text)]
        else:
            every = [*_not_read(check, own), *judged]
        faults = [one for one in every if one.is_fault]
        found += faults or every[:1]
    return found


def worst(findings: Iterable[Finding], check: CheckName) -> Finding:
    """The most urgent finding of a check."""
    order = list(FindingLevel)
    return max((one for one in findings if one.check is check), key=lambda f: order.index(f.level))


def _not_read(check: CheckName, failures: Sequence[Failure]) -> list[Finding]:
    """Parts of the state that could not be read; those with the same kind of error together."""
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        kinds.setdefault(_kind_of(failure.error), []).append(failure)
    found = []
    for name, group in kinds.items():
        parts, error = " and ".join(one.part for one in group), group[0].error
        why = "there is no table yet" if name == "table_missing" else error
        text = f"{parts} cannot be read: {why}".rstrip(".")
        level = FindingLevel.WARNING if name == "table_missing" else FindingLevel.PROBLEM
        advice = _NOT_READ[name].format(action=error.operation or "the action")
        found.append(Finding(check, name, level, text, advice))
    return found


_NOT_READ: Final[Mapping[str, str]] = {
    "table_missing": "start the leader sensor, or a worker: the first worker creates the tables. "
    "If one has run, check the name of the application and AWS_REGION",
    "no_permission": "allow {action} in the IAM policy; `kcl-pipeline doctor` tries every action",
    "throttled": "raise the capacity of the table, or use on-demand mode",
    "record_unreadable": "find out what wrote it, and correct or remove it",
    "not_read": "check the network and AWS_ENDPOINT_URL, and try again",
}
"""By name of a finding about a part that could not be read, what to do."""


def _kind_of(error: AwsError) -> str:
    match error:
        case NotFoundError():
            return "table_missing"
        case AccessDeniedError():
            return "no_permission"
        case ThrottledError():
            return "throttled"
        case UnreadableRowError():
            return "record_unreadable"
        case _:
            return "not_read"


def _lag(snapshot: Snapshot, limits: CheckLimits, threshold_seconds: float) -> Iterator[Finding]:
    """Whether every record that is older than the threshold is in the table."""
    waits = {key: age for key, age in snapshot.unowned.items() if age > threshold_seconds}
    ages = waits | dict(snapshot.unread)
    seconds = max([snapshot.lag_seconds or 0.0, *ages.values()])
    unknown = sum(w.status.unknown_lags for w in snapshot.live if w.status is not None)
    unowned = [key for key in snapshot.unowned if key not in ages]
    if snapshot.lag_seconds is None and not ages:
        text = "no running worker has reported its lag"
        yield Finding(CheckName.LAG, "lag_unknown", FindingLevel.UNKNOWN, text)
        return
    text = f"{seconds:.1f} s behind the end of the stream"
    reports = [snapshot.age(w) for w in snapshot.live if w.status is not None]
    if reports:
        text += f", reported {max(reports):.0f} s ago"
    if unknown:
        text += f"; not read yet: {counted(unknown, 'shard')}"
    if unowned:
        text += (
            f"; without a worker, so that the lag is not known: {counted(len(unowned), 'shard')}"
        )
    numbers = {"lag_seconds": seconds}
    if seconds <= threshold_seconds:
        idle = idle_text(snapshot) if not unowned else None
        name = "lag_unknown" if unowned else CheckName.LAG.value
        # `lease_without_worker` says that a lease has no worker.
        level = FindingLevel.UNKNOWN if unowned and snapshot.observed is None else FindingLevel.OK
        text += "" if idle is None else f"; {idle}"
        yield Finding(CheckName.LAG, name, level, text, numbers=numbers)
        return
    late = late_leases(snapshot.unfinished, ages, threshold_seconds)
    if late:
        text += f". {_cause_of_lag(snapshot, late, ages)}"
    yield Finding(
        CheckName.LAG,
        "lag",
        FindingLevel.PROBLEM if seconds > limits.lag_error_seconds else FindingLevel.WARNING,
        text,
        "`kcl-pipeline status` shows which shards lag. If all do, raise `workers.max` or make the "
        "transform faster; if one does, it is hot or paused",
        tuple({"lease": le.lease_key, "lag": duration_text(ages[le.lease_key])} for le in late),
        numbers,
    )


def late_leases(
    leases: Iterable[Lease], unread: Mapping[str, float], threshold_seconds: float
) -> list[Lease]:
    """The unfinished leases with a lag above the threshold, the largest first."""
    late = [le for le in leases if unread.get(le.lease_key, 0.0) > threshold_seconds]
    return sorted(late, key=lambda lease: -unread[lease.lease_key])


def _cause_of_lag(snapshot: Snapshot, late: Sequence[Lease], ages: Mapping[str, float]) -> str:
    """Which shard lags most, since when, and why."""
    lease = late[0]
    age = ages[lease.lease_key]
    cause = (
        (None if snapshot.pause is None else f"the application is {snapshot.pause.sentence}")
        or stands_still(snapshot, lease)
        or _hot(lease, snapshot.unfinished)
        or f"its worker commits less than arrives, as on {len(late)} of "
        f"{len(snapshot.unfinished)} shards"
    )
    return (
        f"{printable(lease.lease_key)} of worker {printable(lease.actual_owner or 'none')} lags "
        f"most, since {time_text(snapshot.at, age)} UTC ({duration_text(age)}): {cause}"
    )


def stands_still(snapshot: Snapshot, lease: Lease) -> str | None:
    """Why records of the lease are not committed at all. None: they are."""
    key = lease.lease_key
    if key in snapshot.unowned:
        waits = snapshot.unowned[key]
        return "it has no live owner" + (f" for {duration_text(waits)}" if waits else "")
    status = next((w.status for w in snapshot.live if w.worker_id == lease.actual_owner), None)
    if status is None:
        return None
    paused = next((one for one in status.paused if one.lease_key == key), None)
    if paused is not None:
        return f"it is paused: {paused.reason}"
    if status.hung is not None:
        return (
            f"its worker is hung in step {status.hung.step} for "
            f"{duration_text(status.hung.seconds)}"
        )
    if status.failed_batches:
        return f"the table refuses the batches of its worker: {status.failure}"
    unchanged = {} if snapshot.observed is None else snapshot.observed.unchanged
    idle = idle_seconds(status)
    if (seconds := unchanged.get(key, 0.0)) >= STILL_SECONDS:
        text = f"its checkpoint has not changed for {duration_text(seconds)}"
    elif idle >= STILL_SECONDS:
        text = f"its worker has committed no batch for {duration_text(idle)}"
    else:
        return None
    return f"{text}: a batch takes long or is repeated"


def idle_seconds(status: WorkerStatus) -> float:
    """For how long the worker has committed no batch: since its last one, or its start."""
    last = status.last_batch_seconds
    return status.totals.seconds if last is None else last


def _hot(lease: Lease, unfinished: Sequence[Lease]) -> str | None:
    rate = lease.throughput_kbps or 0.0
    others = [le.throughput_kbps or 0.0 for le in unfinished if le is not lease]
    if not others or rate <= 0 or rate < HOT_RATIO * sum(others) / len(others):
        return None
    share = rate / (rate + sum(others))
    return f"it is hot, with {share:.0%} of the throughput of {len(unfinished)} shards; split it"


def idle_text(snapshot: Snapshot) -> str | None:
    """Since when nothing has arrived. None: data arrives, or it is not known."""
    lag = snapshot.lag_seconds
    states = [w.status for w in snapshot.live if w.status is not None]
    if lag is None or lag > NO_LAG_SECONDS or any(one.unknown_lags for one in states):
        return None
    batches = [one.last_batch_seconds for one in states if one.last_batch_seconds is not None]
    silent = min(batches) if batches else max((one.totals.seconds for one in states), default=0.0)
    if silent < STILL_SECONDS:
        return None
    event = "the last batch was committed" if batches else "the workers started"
    return (
        f"nothing waits, and nothing has arrived since {event} at "
        f"{time_text(snapshot.at, silent)} UTC ({duration_text(silent)} ago)"
    )


def time_text(wall_seconds: float, age_seconds: float) -> str:
    """The time of something that is so old; with the date if it is half a day or more."""
    at = datetime.fromtimestamp(wall_seconds - age_seconds, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}" if age_seconds >= DATE_FROM_SECONDS else f"{at:%H:%M:%S}"


def _moving(snapshot: Snapshot, limits: CheckLimits) -> Iterator[Finding]:
    """Whether every shard is read."""
    check = CheckName.MOVING
    if snapshot.pause is not None:
        text = f"the application is {snapshot.pause.sentence}"
        advice = "nothing is read; `kcl-pipeline do resume` resumes it"
        yield Finding(check, "application_paused", FindingLevel.WARNING, text, advice)
    states = [(w.worker_id, w.status) for w in snapshot.live if w.status is not None]
    paused = [
        {"lease": one.lease_key, "worker": worker, "seconds": round(one.seconds), "why": one.reason}
        for worker, status in states
        for one in status.paused
    ]
    if count := sum(status.paused_leases for _, status in states):
        yield Finding(
            check,
            "shard_paused",
            FindingLevel.PROBLEM,
            f"{counted(count, 'shard')} {_are(count)} paused: {_listed(paused)}",
            "do what the reason says. If the transform fails, repair it and deploy it: the shards "
            "go on by themselves. See docs/dead-letters.md",
            tuple(paused),
        )
    stalled = [
        {
            "lease": one.lease_key,
            "worker": worker,
            "seconds": round(one.seconds),
            "why": f"in the step {one.step}" + ("" if one.error is None else f": {one.error}"),
        }
        for worker, status in states
        for one in status.stalled
    ]
    if count := sum(status.stalled_leases for _, status in states):
        yield Finding(
            check,
            "shard_stalled",
            FindingLevel.PROBLEM,
            f"{counted(count, 'shard')} {_have(count)} not moved: {_listed(stalled)}",
            "remove the cause; docs/checks-and-events.md#shardstalled names what each step waits "
            "for",
            tuple(stalled),
        )
    yield from _without_worker(snapshot)
    yield from _still(snapshot, limits)
    count, waiting = len(snapshot.unfinished), len(snapshot.unowned)
    if not count:
        text = "no shard yet"
    elif waiting:
        text = (
            f"{waiting} of {counted(count, 'shard')} wait{'s' if waiting == 1 else ''} for a worker"
        )
    else:
        text = f"{counted(count, 'unfinished shard')} {_are(count)} read"
        text += ", as the reports of the workers say" if snapshot.observed is None else ""
    yield Finding(check, check.value, FindingLevel.OK, text)


def _without_worker(snapshot: Snapshot) -> Iterator[Finding]:
    """Leases without a live owner."""
    observed = snapshot.observed
    limit = 0.0 if observed is None else observed.limit_seconds
    waits = {key: seconds for key, seconds in snapshot.unowned.items() if seconds >= limit}
    if not waits or snapshot.pause is not None:
        return
    owners = {lease.lease_key: lease.actual_owner for lease in snapshot.unfinished}
    rows = [
        {"lease": key, "worker": owners[key] or "none", "seconds": round(waits[key])}
        for key in sorted(waits, key=lambda key: (-waits[key], key))
    ]
    keys = ", ".join(f"{printable(str(row['lease']))} of {row['worker']}" for row in rows[:SHOWN])
    how = (
        "by the clocks of its writers"
        if observed is None
        else f"not renewed for {duration_text(min(waits.values()))}"
    )
    yield Finding(
        CheckName.MOVING,
        "lease_without_worker",
        FindingLevel.PROBLEM if observed is not None and snapshot.live else FindingLevel.WARNING,
        f"{counted(len(waits), 'lease')} without a live worker ({how}): {keys}{_more(rows)}",
        "start workers, and see leader_present: a leader assigns the leases. `kcl-pipeline plan` "
        "shows which worker would get them",
        tuple(rows),
    )


def _still(snapshot: Snapshot, limits: CheckLimits) -> Iterator[Finding]:
    """Checkpoints that do not change while records wait."""
    limit, unread = limits.checkpoint_age_seconds, snapshot.unread
    unchanged = {} if snapshot.observed is None else snapshot.observed.unchanged
    if snapshot.observed is not None and not snapshot.observed.goes_on:
        # Two looks are shorter than the limit: the age of the record says for how long.
        unchanged = {key: unread.get(key, 0.0) for key in unchanged}
    late = [
        lease
        for lease in late_leases(snapshot.unfinished, unread, limit)
        if unchanged.get(lease.lease_key, 0.0) > limit and lease.lease_key not in snapshot.unowned
    ]
    if late:
        key = late[0].lease_key
        yield Finding(
            CheckName.MOVING,
            "checkpoint_still",
            FindingLevel.PROBLEM,
            f"the checkpoints of {counted(len(late), 'shard')} have not changed while records "
            f"wait; the first, {printable(key)} of worker "
            f"{printable(late[0].actual_owner or 'none')}: its oldest unread record is "
            f"{duration_text(unread[key])} old",
            "look at the log of its worker for shard_stalled, shard_paused or batch_refused",
            tuple(
                {"lease": le.lease_key, "oldest unread": duration_text(unread[le.lease_key])}
                for le in late
            ),
        )


def _retention(snapshot: Snapshot, limits: CheckLimits) -> Iterator[Finding]:
    """Whether all unread records stay within the retention period for long enough."""
    check, left = CheckName.RETENTION, []
    for stream in snapshot.resolved:
        ages = [
            (snapshot.unread[lease.lease_key], lease.shard_id)
            for lease in snapshot.unfinished
            if lease.stream in (None, stream.serialized) and lease.lease_key in snapshot.unread
        ]
        if ages and stream.retention_hours is not None:
            age, shard = max(ages)
            left.append((stream.retention_hours * 3600 - age, stream, age, shard))
    if not left:
        text = "the age of unread records is not known"
        yield Finding(check, "retention_unknown", FindingLevel.UNKNOWN, text)
        return
    seconds, stream, age, shard = min(left, key=lambda row: (row[0], row[1].name))
    about = (
        f"its oldest unread record is at most {duration_text(age)} old, of shard "
        f"{printable(shard)}; the retention period is "
        f"{duration_text((stream.retention_hours or 0) * 3600)}"
    )
    begin = (
        "unread records leave the retention period now"
        if seconds <= 0
        else f"{duration_text(seconds)} until records are lost"
    )
    text, numbers = f"{stream.name}: {begin}; {about}", {"hours_left": round(seconds / 3600, 2)}
    if seconds >= limits.retention_warn_seconds:
        yield Finding(check, check.value, FindingLevel.OK, text, numbers=numbers)
        return
    level = (
        FindingLevel.PROBLEM if seconds < limits.retention_error_seconds else FindingLevel.WARNING
    )
    advice = (
        "raise the retention period of the stream now: it keeps the records that still exist. "
        "Then remove the cause of the lag"
    )
    yield Finding(check, "retention_short", level, text, advice, numbers=numbers)


def _losses(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether no records were lost, or all losses are acknowledged."""
    check, losses = CheckName.LOSSES, snapshot.losses
    numbers = {"losses": losses.count, "acknowledged": losses.acknowledged}
    if not losses.unacknowledged:
        yield Finding(check, check.value, FindingLevel.OK, losses.sentence, numbers=numbers)
        return
    is_restore = losses.last is not None and losses.last.restored is not None
    name = "table_restored" if is_restore else "records_lost"
    advice = (
        "repair the output if the producer still has the records, and acknowledge: "
        "kcl-pipeline do acknowledge. See docs/operations-repair.md"
    )
    yield Finding(check, name, FindingLevel.PROBLEM, losses.sentence, advice, numbers=numbers)


def _dead_letters(snapshot: Snapshot, limits: CheckLimits) -> Iterator[Finding]:
    """Whether few records became dead letters in the last hour."""
    check, count = CheckName.DEAD_LETTERS, snapshot.dead_letters
    advice = (
        "the column `error` of the dead-letter table says why, with file and line. Repair the "
        "transform or the producer, then replay them. See docs/dead-letters.md"
    )
    if count is None:
        failed = sum(w.status.totals.dead_letters for w in snapshot.live if w.status is not None)
        text = f"{counted(failed, 'record')} failed since the workers started"
        text = text if snapshot.live else "no worker reports how many records failed"
        if failed:
            text += ": they are dead letters, or skipped with failed_records='skip'"
            yield Finding(check, "dead_letters", FindingLevel.WARNING, text, advice)
        else:
            yield Finding(check, "dead_letters_unknown", FindingLevel.UNKNOWN, text)
        return
    text = f"{counted(count, 'record')} became dead letters in the last hour"
    numbers = {"dead_letters_last_hour": count}
    if count <= limits.dead_letters_per_hour:
        yield Finding(check, check.value, FindingLevel.OK, text, numbers=numbers)
    else:
        yield Finding(check, "dead_letters", FindingLevel.WARNING, text, advice, numbers=numbers)


def _covered(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether every shard of every stream has a lease that can be read."""
    check, streams, leases = CheckName.COVERED, snapshot.streams, snapshot.leases
    if rows := snapshot.bad_rows:
        shown = sorted(rows, key=lambda row: (row.table, row.key))
        yield Finding(
            check,
            "row_unreadable",
            FindingLevel.PROBLEM,
            f"{counted(len(rows), 'row')} cannot be parsed: "
            f"{'; '.join(f'table {row.table}: {row.reason}' for row in shown[:SHOWN])}"
            f"{_more(shown)}",
            "find out what wrote it, and correct or delete it: leader and workers ignore it, and "
            "its shard is not read",
            tuple({"table": r.table, "key": printable(r.key), "reason": r.reason} for r in shown),
        )
    if lost := snapshot.unavailable:
        # Messages of AWS end with a full stop.
        texts = [f"{one.stream}: {one.reason.rstrip('.')}" for one in lost]
        yield Finding(
            check,
            "stream_unavailable",
            FindingLevel.PROBLEM,
            f"{counted(len(lost), 'stream')} {_are(len(lost))} not read: "
            f"{'; '.join(texts[:SHOWN])}{_more(texts)}",
            "create the stream, or allow the action in the IAM policy. Its leases are kept, and "
            "the leader tries again every 30 s",
            tuple({"stream": one.stream, "reason": one.reason} for one in lost),
        )
    if not leases:
        text = "there are no leases yet"
        advice = "start the leader sensor, or a worker: the leader creates them"
        yield Finding(check, "no_leases", FindingLevel.WARNING, text, advice)
        return
    groups = group_by_stream(leases)
    holes = {
        stream or next(iter(streams), ""): str(hole)
        for stream, group in groups.items()
        if all(le.hash_key_range is not None for le in group if not le.ended)
        and (hole := hole_in_leases(group)) is not None
    }
    if None not in groups:
        for name in streams:
            if not any(is_lease_stream(name, one, streams) for one in groups if one is not None):
                holes[name] = "no lease at all"
    if holes:
        yield Finding(
            check,
            "hash_keys_uncovered",
            FindingLevel.PROBLEM,
            "; ".join(f"{stream}: {gap}" for stream, gap in sorted(holes.items())),
            "keep a leader running: it creates missing leases after three audits. If the gap "
            "stays, a lease row was deleted or cannot be parsed",
        )
    gone = [
        le.lease_key
        for le in snapshot.unfinished
        if snapshot.listed is not None and le.lease_key not in snapshot.listed
    ]
    if gone:
        yield Finding(
            check,
            "shard_gone",
            FindingLevel.WARNING,
            f"unfinished leases of shards that Kinesis no longer lists: "
            f"{', '.join(gone[:SHOWN])}{_more(gone)}",
            "their records passed the retention period unread; the leader will delete the leases",
        )
    count = len(snapshot.unfinished)
    text = f"{counted(count, 'lease')} {'covers' if count == 1 else 'cover'} all hash keys"
    text += f" of {counted(len(groups), 'stream')}"
    yield Finding(check, check.value, FindingLevel.OK, text, numbers={"leases": len(leases)})


def _workers(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether workers run, make progress, and can write."""
    check = CheckName.WORKERS
    hung = [(w, w.status.hung) for w in snapshot.live if w.status is not None and w.status.hung]
    if hung:
        worker, state = hung[0]
        yield Finding(
            check,
            "worker_hung",
            FindingLevel.PROBLEM,
            f"{counted(len(hung), 'worker')} {_are(len(hung))} hung; the first, "
            f"{printable(worker.worker_id)}, has been in step {state.step} for "
            f"{duration_text(state.seconds)} while records of {counted(state.leases, 'lease')} "
            "wait",
            "look for worker_hung in the log of its run: the stacks of its threads name the call "
            "that blocks. Terminate the run, or kill its process: no record is lost, and other "
            "workers read its shards",
            tuple({"worker": w.worker_id, "step": s.step, "run": w.run_id} for w, s in hung),
        )
    refused = [(w, w.status) for w in snapshot.live if w.status and w.status.failed_batches]
    if refused:
        worker, status = refused[0]
        yield Finding(
            check,
            "batches_refused",
            FindingLevel.PROBLEM,
            "the sink refused the last "
            f"{counted(status.failed_batches, 'batch', 'batches')} of "
            f"{printable(worker.worker_id)}: {status.failure or 'unknown'}",
            "correct the table or its permissions; this worker commits nothing until then",
            tuple({"worker": w.worker_id, "why": s.failure} for w, s in refused),
        )
    failing = [w.worker_id for w in snapshot.live if is_failing(w)]
    if failing:
        yield Finding(
            check,
            "cpu_not_measured",
            FindingLevel.PROBLEM,
            f"cannot measure their CPU and get no leases: {', '.join(failing[:SHOWN])}"
            f"{_more(failing)}",
            "read their logs, or set disable_worker_metrics=True",
        )
    if snapshot.silent:
        how = "by their own clocks" if snapshot.observed is None else "observed"
        texts = [
            f"{printable(worker)} for {duration_text(seconds)}"
            for worker, seconds in sorted(snapshot.silent.items())
        ]
        yield Finding(
            check,
            "worker_silent",
            FindingLevel.WARNING,
            f"{counted(len(texts), 'worker')} {_have(len(texts))} not reported ({how}): "
            f"{', '.join(texts[:SHOWN])}{_more(texts)}",
            "if its process has ended, do nothing: the leader assigns its leases to others and "
            "deletes its row",
        )
    shared = [
        (worker, ago)
        for worker in snapshot.workers
        if worker.former_ended_millis is not None
        and (ago := max(snapshot.at - worker.former_ended_millis / 1000, 0.0)) < SHARED_ID_SECONDS
    ]
    if shared:
        worker, ago = min(shared, key=lambda pair: pair[1])
        yield Finding(
            check,
            "worker_id_shared",
            FindingLevel.WARNING,
            f"{counted(len(shared), 'worker id')} {_have(len(shared))} been used by two processes; "
            f"the last, {printable(worker.worker_id)}: {printable(worker.former_run_id or 'one')} "
            f"ended {duration_text(ago)} ago because another process started, and "
            f"{printable(worker.run_id or 'another one')} has the id",
            "give each process a worker id of its own, and let no supervisor restart a worker that "
            "ended with code 4. A run id of `kcl-pipeline worker` begins with the name of its host",
            tuple(
                {"worker": w.worker_id, "ended": w.former_run_id, "run": w.run_id}
                for w, _ in shared
            ),
        )
    for problem in snapshot.run_problems:
        name = problem.name if isinstance(problem, RunProblem) else "replacement_stopped"
        yield Finding(check, name, FindingLevel.WARNING, problem, ADVICE_ON_RUNS[name])
    count, starting = len(snapshot.live), snapshot.starting
    if not count and not starting and snapshot.pause is None and snapshot.unfinished:
        advice = "start the leader sensor, or `kcl-pipeline worker`"
        yield Finding(check, "no_worker", FindingLevel.WARNING, "no worker reports", advice)
    text = f"{counted(count, 'worker')} {'reports' if count == 1 else 'report'}"
    text = text if count else "no worker reports" + (" yet" if starting else "")
    text += f", {starting} {_are(starting)} starting" if starting else ""
    yield Finding(check, check.value, FindingLevel.OK, text, numbers={"workers": count})


def _leader(snapshot: Snapshot, limits: CheckLimits) -> Iterator[Finding]:
    """Whether somebody leads."""
    check, lock, observed = CheckName.LEADER, snapshot.lock, snapshot.observed
    if isinstance(lock, UnreadableLock):
        yield Finding(
            check,
            "lock_unreadable",
            FindingLevel.PROBLEM,
            f"the leader lock cannot be parsed: {lock.reason}",
            "find out what wrote it, or delete the row; a leader takes the lock when the row has "
            f"not changed for {MAX_LOCK_DURATION_MILLIS // 1000} s",
        )
        return
    owner = None if lock is None or lock.is_released else lock.owner_name
    absent = 0.0 if observed is None else observed.leader_absent
    limit = limits.leader_absent_seconds if observed is not None and observed.goes_on else 0.0
    numbers = {"absent_seconds": round(absent, 1)}
    if owner is not None and not absent:
        how = f"{printable(owner)} leads"
        if observed is None and not _reports(snapshot, owner):
            how = f"{printable(owner)} holds the leader lock; one look does not show if it lives"
        yield Finding(check, check.value, FindingLevel.OK, how, numbers=numbers)
        return
    why = None if observed is None else observed.leader_reason
    if owner is None:
        # Until it is a fault, the sentence stays the same: the sensor reports each change of it.
        is_new = absent <= limit
        text = "there is no leader" if is_new else f"nobody has led for {duration_text(absent)}"
        text += f": {why.rstrip('.')}" if why else ""
    else:
        text = f"{printable(owner)} has not renewed the leader lock"
        text += "" if absent <= limit else f" for {duration_text(absent)}"
    is_short = lock is not None and owner is not None and absent * 1000 < lock.lease_duration_millis
    if observed is not None and observed.goes_on:
        level = FindingLevel.OK if absent <= limit else FindingLevel.PROBLEM
    elif is_short or not snapshot.live:
        # An application that was stopped has no leader either
        level = FindingLevel.WARNING
    else:
        level = FindingLevel.PROBLEM
    if level is FindingLevel.OK:
        yield Finding(check, check.value, level, text, numbers=numbers)
        return
    advice = (
        "start the leader sensor, or a worker. Without a leader no lease is assigned; workers go "
        "on with the leases that they hold"
    )
    yield Finding(check, "no_leader", level, text, advice, numbers=numbers)


def _reports(snapshot: Snapshot, owner: str) -> bool:
    return any(worker.worker_id == owner for worker in snapshot.live)


def _listed(rows: Sequence[Mapping[str, object]]) -> str:
    """The first shards with their reasons."""
    texts = [
        f"{printable(str(row['lease']))} of worker {printable(str(row['worker']))} for "
        f"{duration_text(float(str(row['seconds'])))}, {printable(str(row['why']))}"
        for row in rows[:SHOWN]
    ]
    return "; ".join(texts) + _more(rows)


def _more(rows: Sequence[object]) -> str:
    return f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
