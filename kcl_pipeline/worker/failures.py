"""Records that fail: limit their number, set them aside, and pause their shard.

Failing records are found by `worker.isolation`, or the transform returns them itself, with the
column `_error`. Up to the limits of its shard (`FailureLimits`) a failing record becomes a dead
letter, and the others are written. A shard with more of them pauses, and so does one whose table
is not the one of its checkpoint (`OtherTableError`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import RECORD_SCHEMA, Batch
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import BrokenTransformError
from kcl_pipeline.events import RecordsDeadLettered, ShardPaused, ShardResumed
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies


def without(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch without the ranges and records of these leases. It must be written again.

    The ranges decide. The columns `stream` and `shard_id` do not: two leases of a worker can have
    the same values, if one of them is of a former stream. Without any lease key it is the batch
    itself.

    Raises:
        ValueError: The ranges have another number of rows than the batch.
    """
    if not lease_keys:
        return batch
    records = batch.records
    total = sum(part.record_count for part in batch.ranges)
    if total != records.num_rows:
        raise ValueError(f"{batch.batch_id} has {records.num_rows} rows, not {total}")
    ranges = tuple(part for part in batch.ranges if part.lease_key not in lease_keys)
    kept = [part.records for part in ranges]
    return replace(
        batch.unwritten(),
        ranges=ranges,
        records=pa.concat_tables(kept) if kept else records.slice(0, 0),
        failed={key: rows for key, rows in batch.failed.items() if key not in lease_keys},
    )


def only(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch with the ranges and records of these leases alone."""
    return without(batch, [key for key in batch.lease_keys if key not in lease_keys])


JUDGED_RECORDS: Final = 20
"""Limits by share use at least this many records: one failed record of one would be 100 %."""

_POSITION: Final = ["stream", "shard_id", "sequence_number", "sub_sequence_number"]
_Place = tuple[str | None, str, str, int]
_ERROR: Final = pa.field("error", pa.string())
FAILED_SCHEMA: Final = RECORD_SCHEMA.append(_ERROR)
"""Schema of the failed records of one lease."""

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        *RECORD_SCHEMA,
        pa.field("lease_key", pa.string()),
        _ERROR,
        pa.field("batch_id", pa.string()),
        pa.field("failed_at", pa.timestamp("us", tz="UTC")),
        pa.field("replayed_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""The columns of the dead-letter table (docs/dead-letters.md)."""


class FailureLimits:
    """Compute how many records of a shard may fail in one batch.

    Only the processing thread uses it.

    Args:
        settings: The policy and its limits.
        takes_dead_letters: Whether the sink can store dead letters.
    """

    def __init__(self, settings: BatchSettings, takes_dead_letters: bool = True) -> None:
        self._settings = settings
        self._takes_dead_letters = takes_dead_letters
        self._recent: dict[str, deque[tuple[int, int]]] = {}

    def of(self, lease_key: str, records: int) -> int:
        """Return how many of `records` records of a lease may fail. More failures pause it."""
        settings = self._settings
        if settings.failed_records == "fail" or self._has_no_place:
            return 0
        judged, failed = records, 0
        for earlier_records, earlier_failed in reversed(self._recent.get(lease_key, ())):
            if judged >= JUDGED_RECORDS:
                break
            judged += earlier_records
            failed += earlier_failed
        by_share = math.floor(settings.max_dead_letter_share * max(judged, JUDGED_RECORDS)) - failed
        if settings.failed_records == "skip":
            return max(by_share, 0)
        return max(min(by_share, settings.max_dead_letters_per_batch), 0)

    def exceeded(self, batch: Batch, failed: Mapping[str, pa.Table]) -> dict[str, str]:
        """Return why leases pause, by lease key.

        Args:
            batch: The batch.
            failed: All of its failed records, by lease key (`FAILED_SCHEMA`).
        """
        counts = {part.lease_key: part.record_count for part in batch.ranges}
        over = {}
        for key, rows in failed.items():
            records = counts[key] + failed_count(batch.failed, key)
            if rows.num_rows > self.of(key, records):
                first = error_at(rows, 0, rows["error"][0].as_py())
                reason = self.reason(key, records)
                over[key] = f"{first}; {rows.num_rows} of {records} records fail, and {reason}"
        return over

    def reason(self, lease_key: str, records: int) -> str:
        """Return the reason for the limit, with the settings and their values."""
        settings = self._settings
        if settings.failed_records == "fail":
            return "failed_records is 'fail'"
        if self._has_no_place:
            return "the sink has no dead_letter_uri; set one, or failed_records='skip'"
        named = f"max_dead_letter_share={settings.max_dead_letter_share:g}"
        if settings.failed_records != "skip":
            named += f" and max_dead_letters_per_batch={settings.max_dead_letters_per_batch}"
        return f"{named} allow {self.of(lease_key, records)}"

    @property
    def _has_no_place(self) -> bool:
        return self._settings.failed_records == "dead_letter" and not self._takes_dead_letters

    def note(self, lease_key: str, records: int, failed: int) -> None:
        """Note a committed batch. The limits of later small batches depend on it."""
        if not records:
            return
        recent = self._recent.setdefault(lease_key, deque(maxlen=JUDGED_RECORDS))
        if records >= JUDGED_RECORDS:
            recent.clear()
        recent.append((records, failed))

    def keep(self, lease_keys: Collection[str]) -> None:
        """Forget all other leases."""
        for key in [key for key in self._recent if key not in lease_keys]:
            del self._recent[key]


def positions_of(records: pa.Table) -> list[tuple[str, int]]:
    """Return the sequence number and sub-sequence number of each row."""
    return list(
        zip(
            records["sequence_number"].to_pylist(),
            records["sub_sequence_number"].to_pylist(),
            strict=True,
        )
    )


def failed_count(failed: Mapping[str, pa.Table], lease_key: str) -> int:
    """Return how many records of a lease are among failed ones."""
    return int(failed[lease_key].num_rows) if lease_key in failed else 0


def error_at(records: pa.Table, row: int, error: str) -> str:
    """Return an error with the position of its record.

    The error comes first, because tables and rows show the beginning of a sentence only.
    """
    names = ("shard_id", "sequence_number", "sub_sequence_number")
    place = ", ".join(f"{name}={records.column(name)[row].as_py()}" for name in names)
    return f"{error} (the record at {place})"


def all_failed(batch: Batch) -> dict[str, pa.Table]:
    """Return the failed records of a written batch, with those that the transform rejected.

    Raises:
        BrokenTransformError: As in `rejected_records`.
    """
    if batch.rejected is None:
        return dict(batch.failed)
    return _joined(batch.failed, rejected_records(batch, batch.rejected))


def _joined(failed: Mapping[str, pa.Table], more: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return the failed records of both, by lease key."""
    both = {
        key: pa.concat_tables([failed[key], records]) if key in failed else records
        for key, records in more.items()
    }
    return {**failed, **both}


def without_rows(batch: Batch, errors: Mapping[str, Mapping[int, str]]) -> Batch:
    """Move failing records of a batch to `failed`. The order of the others is kept.

    Args:
        batch: The batch.
        errors: Errors by lease key, and by row of the lease's records. Without any it is the batch
            itself.
    """
    if not errors:
        return batch
    ranges, failed = [], {}
    for part in batch.ranges:
        records = part.records
        if part.lease_key in errors:
            bad = errors[part.lease_key]
            failed[part.lease_key] = _failed_rows(records, bad)
            rows = [row for row in range(records.num_rows) if row not in bad]
            records = records.take(pa.array(rows, pa.int64()))
        ranges.append(replace(part, records=records))
    return replace(
        batch,
        ranges=tuple(ranges),
        records=pa.concat_tables([part.records for part in ranges]),
        failed=_joined(batch.failed, failed),
    )


def _failed_rows(records: pa.Table, errors: Mapping[int, str]) -> pa.Table:
    """Return the rows that have an error, in order, with their errors (`FAILED_SCHEMA`)."""
    rows = sorted(errors)
    return records.take(pa.array(rows, pa.int64())).append_column(
        _ERROR, pa.array([errors[row] for row in rows], pa.string())
    )


def rejected_records(batch: Batch, rejected: pa.Table) -> dict[str, pa.Table]:
    """Return the records that a transform rejected, by lease key (`FAILED_SCHEMA`).

    A record that was rejected more than once has its first error.

    Args:
        batch: The loaded batch.
        rejected: Positions and errors, with `batch.REJECTED_SCHEMA`.

    Raises:
        BrokenTransformError: A position is not in the batch, or matches two streams.
    """
    wanted: dict[_Place, str] = {}
    for row in rejected.to_pylist():
        wanted.setdefault(_place_of(row), row["error"])
    numbers = pa.array([place[2] for place in wanted], pa.string())
    found: dict[str, pa.Table] = {}
    matched: set[_Place] = set()
    for part in batch.ranges:
        records = part.records
        if not records.num_rows:  # PyArrow 26 ends the process: is_in returns no chunk then.
            continue
        rows = pc.indices_nonzero(pc.is_in(records["sequence_number"], value_set=numbers))
        errors: dict[int, str] = {}
        for row, record in zip(
            rows.to_pylist(), records.select(_POSITION).take(rows).to_pylist(), strict=True
        ):
            place = _place_of(record)
            if place not in wanted:
                place = (None, *place[1:])
            if place not in wanted:
                continue
            if place in matched:
                raise BrokenTransformError(
                    f"the transform returns _error for shard_id={place[1]} of two streams; return "
                    "the column stream too"
                )
            matched.add(place)
            errors[row] = wanted[place]
        if errors:
            found[part.lease_key] = _failed_rows(records, errors)
    for _, shard_id, number, sub in (place for place in wanted if place not in matched):
        raise BrokenTransformError(
            f"the transform returns _error for shard_id={shard_id}, sequence_number={number}, "
            f"sub_sequence_number={sub}, which is not in the batch; return these columns as they "
            "are in the records"
        )
    return found


def _place_of(row: Mapping[str, Any]) -> _Place:
    stream, shard_id, number, sub = (row[name] for name in _POSITION)
    return stream, shard_id, number, sub


def dead_letters(failed: Mapping[str, pa.Table], batch_id: str, failed_at: float) -> pa.Table:
    """Return failed records as rows of the dead-letter table; `failed_at` is in epoch seconds."""
    now = datetime.fromtimestamp(failed_at, UTC)
    tables = []
    for key, records in failed.items():
        constants = {"lease_key": key, "batch_id": batch_id, "failed_at": now, "replayed_at": None}
        columns = [
            records.column(field.name)
            if field.name not in constants
            else pa.array([constants[field.name]] * records.num_rows, field.type)
            for field in DEAD_LETTER_SCHEMA
        ]
        tables.append(pa.Table.from_arrays(columns, schema=DEAD_LETTER_SCHEMA))
    return pa.concat_tables(tables) if tables else DEAD_LETTER_SCHEMA.empty_table()


def write_dead_letters(
    dependencies: WorkerDependencies,
    failed: Mapping[str, pa.Table],
    batch_id: str,
    consumers: Mapping[str, ShardConsumer],
) -> None:
    """Write failed records to the dead letters, except those that an earlier attempt wrote.

    Call it before the rest of the batch is committed. With the policy `skip`, the records are only
    reported.

    Args:
        dependencies: The dependencies of the worker.
        failed: The records by lease key (`FAILED_SCHEMA`).
        batch_id: Their batch.
        consumers: The consumers of the leases.

    Raises:
        SinkError: The records could not be written. Call again.
    """
    skip = dependencies.settings.batch.failed_records == "skip"
    new = {}
    for key, records in failed.items():
        fresh = records.filter(
            pa.array([place not in consumers[key].set_aside for place in positions_of(records)])
        )
        if fresh.num_rows:
            new[key] = fresh
    if new and not skip:
        dependencies.sink.write_dead_letters(dead_letters(new, batch_id, dependencies.clock.wall()))
    for key, records in new.items():
        consumers[key].set_aside.update(positions_of(records))
        error = records["error"][0].as_py()
        dependencies.events(
            RecordsDeadLettered(dependencies.worker_id, key, records.num_rows, error, skipped=skip)
        )


SHORTEST_RETRY_SECONDS: Final = 0.1
LONGEST_RETRY_SECONDS: Final = 60.0
GIVEN_SECONDS: Final = 60.0
"""How long a shard that was given away while it was paused counts for the end of the worker."""


@dataclass(frozen=True, slots=True)
class ShardPause:
    """Reason and start (monotonic seconds) of a shard's pause, and the attempts so far."""

    reason: str
    since: float
    attempts: int = 1


class PausedShards:
    """The paused shards of one worker. Any thread may call `current`."""

    def __init__(self, dependencies: WorkerDependencies) -> None:
        self._dependencies = dependencies
        self._lock = threading.Lock()
        self._pauses: dict[str, ShardPause] = {}
        # By lease key, when a paused shard was given away, and its pause
        self._given: dict[str, tuple[float, ShardPause]] = {}
        self._refused: set[str] = set()
        backoff_seconds = dependencies.settings.worker.task_backoff_time_millis / 1000
        self._first_seconds = max(2 * backoff_seconds, SHORTEST_RETRY_SECONDS)

    def current(self) -> dict[str, ShardPause]:
        """Return the paused shards by lease key."""
        with self._lock:
            return dict(self._pauses)

    def at_the_end(self) -> dict[str, ShardPause]:
        """Return the paused shards of a worker that was asked to end.

        The leader moves its leases as soon as it was asked, and the worker learns up to a report
        period later that it was. So a shard also counts if it was paused when it was given away, at
        most `GIVEN_SECONDS` ago.
        """
        since = self._dependencies.clock.monotonic() - GIVEN_SECONDS
        given = {key: pause for key, (at, pause) in self._given.items() if at >= since}
        return given | self.current()

    def pause(self, lease_key: str, reason: str) -> float:
        """Note a failed attempt; return the wait before the next one in seconds.

        The wait doubles up to 60 s. It begins with twice `worker.task_backoff_time_millis` (1 s).
        The event is repeated when the reason changes, and after 2, 4, 8, ... attempts.
        """
        now = self._dependencies.clock.monotonic()
        before = self._pauses.get(lease_key)
        pause = (
            ShardPause(reason, now)
            if before is None
            else ShardPause(reason, before.since, before.attempts + 1)
        )
        with self._lock:
            self._pauses[lease_key] = pause
        doubled: float = self._first_seconds * 2 ** min(pause.attempts - 1, 10)
        retry_seconds = min(doubled, LONGEST_RETRY_SECONDS)
        is_power_of_two = pause.attempts & (pause.attempts - 1) == 0
        if before is None or before.reason != reason or is_power_of_two:
            self._dependencies.events(
                ShardPaused(
                    self._dependencies.worker_id,
                    lease_key,
                    reason,
                    pause.attempts,
                    now - pause.since,
                    retry_seconds,
                )
            )
        return retry_seconds

    def follow(self, consumers: Mapping[str, ShardConsumer]) -> None:
        """Pause the shards for which the table was refused, and resume them when it is accepted.

        Shards that this worker does not hold any more are forgotten.
        """
        now = self._dependencies.clock.monotonic()
        for key in [key for key in self._pauses if key not in consumers]:
            with self._lock:
                self._given[key] = now, self._pauses.pop(key)
        for key in [key for key, (at, _) in self._given.items() if now - at > GIVEN_SECONDS]:
            del self._given[key]
        self._refused &= consumers.keys()
        for key, consumer in consumers.items():
            if consumer.refused is not None:
                wait = self.pause(key, consumer.refused)
                consumer.due, consumer.refused = self._dependencies.clock.monotonic() + wait, None
                self._refused.add(key)
            elif key in self._refused and consumer.state is ConsumerState.READING:
                self._refused.discard(key)
                self.resume([key])

    def resume(self, lease_keys: Collection[str]) -> None:
        """End the pauses of these shards, because they were committed or their table is back."""
        for key in self._given.keys() & set(lease_keys):
            del self._given[key]
        for key in [key for key in self._pauses if key in lease_keys]:
            with self._lock:
                pause = self._pauses.pop(key)
            seconds = self._dependencies.clock.monotonic() - pause.since
            self._dependencies.events(
                ShardResumed(self._dependencies.worker_id, key, pause.attempts, seconds)
            )


def reason_sentence(paused: Mapping[str, ShardPause], unread: str | None) -> str:
    """Return why a worker failed.

    Args:
        paused: The paused shards. The sentence has their number and the first reason.
        unread: What a drain did not read. None: it read everything.
    """
    if not paused:
        return unread or "no shard is paused"
    key = min(paused)
    count = f"{len(paused)} shards are paused" if len(paused) > 1 else "a shard is paused"
    return "; ".join(filter(None, (unread, f"{count}: {key}: {paused[key].reason}")))
