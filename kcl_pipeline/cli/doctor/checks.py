"""Check tables, shard coverage, leader, workers and stuck leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.cli.doctor.finding import Finding, ok, problem, unknown, warning
from kcl_pipeline.cli.show import age
from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.errors import KclError, NotFoundError, SettingsError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leases.aws_errors import call
from kcl_pipeline.leases.dynamodb.opening import OWNER_INDEX
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.tables import CoordinatorStateTable, UnreadableLock, WorkerMetrics
from kcl_pipeline.planning.coverage import hole_in_leases
from kcl_pipeline.shards import StreamId
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.text import counted

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


_SHOWN: Final = 5
MAX_BAD_ROWS: Final = 20
LATE_MILLIS: Final = 60_000
"""The default threshold of the lag check in the Dagster UI."""


@dataclass(frozen=True, slots=True)
class RowsSnapshot:
    """The rows of the lease and worker-metrics tables at one moment."""

    leases: tuple[Lease, ...]
    workers: tuple[WorkerMetrics, ...]
    bad_rows: tuple[BadRow, ...] = ()


def check_java(*, needed: bool, require: Callable[[], int] = require_java) -> Finding:
    """Check the Java version and the name of the user, which only the Spark path needs."""
    try:
        version = require()
        require_user_name()
        return ok("java", f"Java {version}")
    except SettingsError as error:
        text, _, advice = str(error).partition(": ")
        return (problem if needed else warning)("java", text, advice)


def check_table(
    client: DynamoDBClient, table: str, key_name: str, *, has_index: bool
) -> tuple[Finding, bool]:
    """Check that a table exists and has the expected key and index.

    Returns:
        The finding, and whether the table can be used.
    """
    subject = f"table {table}"
    try:
        found: Mapping[str, Any] = call(
            client.describe_table, "DescribeTable", table, TableName=table
        )["Table"]
    except NotFoundError:
        return warning(
            subject,
            "does not exist yet",
            "if no worker has run yet, do nothing: the first worker creates the table; "
            "otherwise check --application and AWS_REGION",
        ), False
    except KclError as error:
        return problem(
            subject,
            str(error),
            "allow dynamodb:DescribeTable, and check AWS_ENDPOINT_URL and the network",
        ), False
    keys = [(k["AttributeName"], k["KeyType"]) for k in found["KeySchema"]]
    if keys != [(key_name, "HASH")]:
        return problem(
            subject,
            f"has the key {keys} instead of {key_name}",
            "choose another application name, or another table name in the settings",
        ), False
    if found["TableStatus"] not in {"ACTIVE", "UPDATING"}:
        return problem(subject, f"is {found['TableStatus']}", "wait until it is ACTIVE"), False
    indexes = {
        i["IndexName"]: i.get("IndexStatus") for i in found.get("GlobalSecondaryIndexes", [])
    }
    if has_index and indexes.get(OWNER_INDEX.name) != "ACTIVE":
        state = indexes.get(OWNER_INDEX.name, "missing")
        return problem(
            subject,
            f"its index {OWNER_INDEX.name} is {state}",
            "start a worker, which creates the index, or wait until the index is ACTIVE",
        ), False
    return ok(
        subject, f"{found['TableStatus']}, key {key_name}{', with its index' if has_index else ''}"
    ), True


def check_leader(table: CoordinatorStateTable, *, workers: int) -> Finding:
    """Check that a leader holds the lock."""
    lock = table.observe_lock()
    if isinstance(lock, UnreadableLock):
        return problem(
            "leader",
            f"the lock row cannot be parsed: {lock.reason}",
            "find out what wrote it, or delete the row; a leader takes the lock when the row has "
            f"not changed for {MAX_LOCK_DURATION_MILLIS // 1000} s",
        )
    if lock is not None and not lock.is_released:
        return ok(
            "leader",
            f"{lock.owner_name} holds the lock of {lock.lease_duration_millis / 1000:g} s "
            "(`kcl-pipeline leader --wait` shows whether it is alive)",
        )
    if workers:
        return problem(
            "leader",
            "there is no leader, although there are workers",
            "start the leader sensor, or a worker with a standby leader",
        )
    return warning("leader", "there is no leader", "start the leader sensor, or a worker")


def check_coverage(
    kinesis: KinesisClient, stream: StreamId, leases: tuple[Lease, ...], *, multi_stream: bool
) -> Iterator[Finding]:
    """Check that the leases of one stream cover all hash keys and that their shards exist."""
    subject = f"coverage of {stream.name}"
    mine = [
        lease for lease in leases if lease.stream == (stream.serialized if multi_stream else None)
    ]
    if not mine:
        yield warning(
            subject,
            "there are no leases",
            "start the leader sensor, or a worker: the leader creates the leases",
        )
        return
    without_range = [
        lease.lease_key for lease in mine if lease.hash_key_range is None and not lease.ended
    ]
    if without_range:
        yield warning(
            subject,
            f"leases without a hash-key range: {_some(without_range)}",
            "do nothing: the leader adds the ranges at its next audit",
        )
    hole = hole_in_leases(mine)
    if hole is not None and not without_range:
        yield problem(
            subject,
            str(hole),
            "keep a leader running: it creates the missing leases after three audits in a "
            "row, see `kcl-pipeline leader --wait`",
        )
    elif hole is None:
        yield ok(
            subject,
            f"{counted(sum(not lease.ended for lease in mine), 'lease')} cover all hash keys",
        )
    listed = {stream.lease_key(shard.shard_id) for shard in kinesis.list_shards(stream)}
    gone = sorted(
        lease.lease_key for lease in mine if lease.lease_key not in listed and not lease.ended
    )
    if gone:
        yield warning(
            subject,
            f"unfinished leases of shards that Kinesis no longer lists: {_some(gone)}",
            "their records passed the retention period unread; the leader will delete the "
            "leases; increase the stream's retention period or add workers",
        )


def check_workers(now: RowsSnapshot) -> Iterator[Finding]:
    """Check that workers exist and can measure their CPU."""
    if not now.workers:
        yield warning(
            "workers",
            "no worker is registered",
            "start the leader sensor, or `kcl-pipeline worker`",
        )
        return
    yield ok(
        "workers",
        f"{len(now.workers)} registered: {_some(sorted(w.worker_id for w in now.workers))}",
    )
    failing = sorted(
        w.worker_id
        for w in now.workers
        if any(values and values[-1] < 0 for values in w.stats.values())
    )
    if failing:
        yield problem(
            "workers",
            f"cannot measure their CPU and get no leases: {_some(failing)}",
            "read their logs, or set disable_worker_metrics=True",
        )


def check_paused(now: RowsSnapshot) -> Iterator[Finding]:
    """Check for shards that are paused: their transform fails, or the table was refused."""
    paused = [(w, one) for w in now.workers if w.status is not None for one in w.status.paused]
    for worker, one in paused[:_SHOWN]:
        yield problem(
            f"shard {one.lease_key}",
            f"paused by {worker.worker_id} for {one.seconds:.0f} s: {one.reason}",
            "do what the reason says; if it is an error of the transform, correct the transform "
            "and restart the workers; if the records are invalid, increase max_dead_letter_share, "
            "see docs/dead-letters.md",
        )
    count = sum(w.status.paused_leases for w in now.workers if w.status is not None)
    if count > _SHOWN:
        yield problem("shards", f"{count} are paused", f"correct the first {_SHOWN} above")


def check_stalled(now: RowsSnapshot) -> Iterator[Finding]:
    """Check for shards that have made no progress for `worker.shard_stalled_after_millis`.

    A shard whose records are all read makes progress with every read.
    """
    stalled = [(w, one) for w in now.workers if w.status is not None for one in w.status.stalled]
    for worker, one in stalled[:_SHOWN]:
        yield problem(
            f"shard {one.lease_key}",
            f"has not moved for {one.seconds:.0f} s in {worker.worker_id}, in the step "
            f"{one.step}{'' if one.error is None else f': {one.error}'}",
            "remove the cause; docs/checks-and-events.md#shardstalled names what each step waits "
            "for",
        )
    count = sum(w.status.stalled_leases for w in now.workers if w.status is not None)
    if count > min(len(stalled), _SHOWN):
        yield problem("shards", f"{count} do not move", f"correct the first {_SHOWN} above")


def check_lag(now: RowsSnapshot, epoch_seconds: float) -> Iterator[Finding]:
    """Check the lag of committed data that the workers reported last."""
    reports = [(w.status, w) for w in now.workers if w.status is not None]
    if not reports:
        return
    known = [(s.lag_millis, s, w) for s, w in reports if s.lag_millis is not None]
    unread = sum(status.unknown_lags for status, _ in reports)
    if not known:
        text = f"not known yet: no worker has read a shard, {unread} shards are waiting"
        yield unknown("lag", text)
        return
    millis, status, worker = max(known, key=lambda report: report[0])
    text = f"committed data is at most {millis / 1000:.1f} s behind the streams"
    if status.lags:
        text += f"; the worst shard is {status.lags[0].lease_key}"
    text += f", reported by {worker.worker_id} {_ago(epoch_seconds, worker)}"
    if unread:
        text += f"; {counted(unread, 'shard')} {'is' if unread == 1 else 'are'} not read yet"
    if millis <= LATE_MILLIS:
        yield ok("lag", text)
    else:
        yield warning(
            "lag",
            text,
            "correct paused shards and refused batches (see above), or add workers",
        )


def check_batches(now: RowsSnapshot, epoch_seconds: float) -> Iterator[Finding]:
    """Check for batches that the sink refused, and for dead letters."""
    for worker in now.workers:
        status = worker.status
        if status is None:
            continue
        if status.failed_batches:
            yield problem(
                f"worker {worker.worker_id}",
                f"the sink refused its last {status.failed_batches} batches "
                f"({_ago(epoch_seconds, worker)}): {status.failure or 'unknown'}",
                "correct the table or its permissions; this worker commits nothing until then",
            )
        if status.dead_letters:
            yield warning(
                f"worker {worker.worker_id}",
                f"{status.dead_letters:,} records failed since it started; they are dead letters, "
                "or skipped with failed_records='skip'",
                "read the errors in the dead-letter table, see docs/dead-letters.md",
            )


def _ago(epoch_seconds: float, worker: WorkerMetrics) -> str:
    return f"{age(epoch_seconds - worker.last_update_seconds)} ago"


def check_readable(now: RowsSnapshot) -> Iterator[Finding]:
    """Check that every row can be parsed. Other rows are ignored by leader and workers."""
    for row in sorted(now.bad_rows, key=lambda row: (row.table, row.key))[:MAX_BAD_ROWS]:
        yield problem(
            f"table {row.table}",
            row.reason,
            "find out what wrote the row, and correct or delete it: leader and workers ignore it",
        )
    if len(now.bad_rows) > MAX_BAD_ROWS:
        count = len(now.bad_rows)
        advice = f"correct the first {MAX_BAD_ROWS} above"
        yield problem("rows", f"{count} rows cannot be parsed", advice)


def check_movement(
    before: RowsSnapshot, after: RowsSnapshot, watched_seconds: float, failover_seconds: float
) -> Iterator[Finding]:
    """Check for leases that were not renewed, or had no owner, between two snapshots."""
    subject = "leases"
    if watched_seconds < failover_seconds:
        yield unknown(
            subject,
            f"stuck leases were not checked: that takes the failover time of "
            f"{failover_seconds:g} s",
        )
        return
    earlier = {lease.lease_key: lease for lease in before.leases}
    live = [lease for lease in after.leases if not lease.ended and lease.lease_key in earlier]
    unchanged = [lease for lease in live if earlier[lease.lease_key].counter == lease.counter]
    stuck = sorted(
        f"{lease.lease_key} of {lease.actual_owner}"
        for lease in unchanged
        if lease.actual_owner is not None
    )
    free = sorted(lease.lease_key for lease in unchanged if lease.actual_owner is None)
    if stuck:
        yield problem(
            subject,
            f"not renewed within {watched_seconds:.0f} s: {_some(stuck)}",
            "their workers have ended or are paused; a leader assigns the leases to others, "
            "check it with `kcl-pipeline leader --wait`",
        )
    if free:
        make = problem if after.workers else warning
        yield make(
            subject,
            f"without a worker for {watched_seconds:.0f} s: {_some(free)}",
            "start workers, and check the leader with `kcl-pipeline leader --wait`",
        )
    if not stuck and not free:
        yield ok(
            subject,
            f"all {len(live)} unfinished leases were renewed within {watched_seconds:.0f} s",
        )


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
