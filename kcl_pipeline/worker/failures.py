"""Records that fail: find them, limit their number, set them aside, and pause their shard.

A record fails if the transform refuses it, or if the table cannot hold what it becomes
(`BatchWriter.probe` reports both). There are two ways to find these records:

- The transform returns them itself, with the column `_error`. Nothing is searched: `judge` compares
  their number with the limits of their shards.
- The transform raises. Then the records of each shard are searched (`_Search`): a part that fails
  is divided, down to single records. If the rows that it had returned show where it failed, it is
  divided there, else into at most `MAX_PIECES` equal pieces. The parts of one round are evaluated
  together, in Spark jobs or by calls of an Arrow function. Nothing is written by that.
  A search finds at least the records that fail as the batch did, when it was written last. What it
  leaves is written. If that fails, too, it is searched again.

The budget of a search is the number of records that may fail (`FailureLimits`): each part that
fails has at least one, and a shard with more of them pauses. A broken transform fails on most
records, and a test of each of them would take hours, so a sample is tested first.

Shards without failing records are written and committed before the search begins. A shard also
pauses if the table is not the one of its checkpoint (`OtherTableError`).
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import NOTHING_WRITTEN, RECORD_SCHEMA, Batch, BatchWriter, PartFailure
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import BrokenTransformError, ResultMismatchError, TransformFailedError
from kcl_pipeline.events import RecordsDeadLettered, ShardPaused, ShardResumed
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies


def records_of(batch: Batch, lease_keys: Collection[str]) -> pa.Table:
    """Return the rows of a batch that belong to these leases, in the order of the batch.

    The ranges decide. The columns `stream` and `shard_id` do not: two leases of a worker can have
    the same values, if one of them is of a former stream.

    Raises:
        ValueError: The ranges have another number of rows than the batch.
    """
    records = batch.records
    total = sum(part.record_count for part in batch.ranges)
    if total != records.num_rows:
        raise ValueError(f"{batch.batch_id} has {records.num_rows} rows, not {total}")
    found = [part.records for part in batch.ranges if part.lease_key in lease_keys]
    return pa.concat_tables(found) if found else records.slice(0, 0)


def without(batch: Batch, lease_keys: Collection[str]) -> Batch:
    """Return the batch without the ranges and records of these leases. It must be written again."""
    if not lease_keys:
        return batch
    ranges = tuple(r for r in batch.ranges if r.lease_key not in lease_keys)
    records = records_of(batch, [part.lease_key for part in ranges])
    failed = {key: rows for key, rows in batch.failed.items() if key not in lease_keys}
    return replace(batch, ranges=ranges, records=records, written=None, failed=failed)


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


def failed_rows(records: pa.Table, errors: Mapping[int, str]) -> pa.Table:
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
        records = records_of(batch, [part.lease_key])
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
            found[part.lease_key] = failed_rows(records, errors)
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


MAX_PIECES: Final = 16
"""Fewer pieces would need more rounds. On the Spark path, each round needs a plan and a job."""
SAMPLES: Final = 16
_WORTH_A_SAMPLE: Final = 10 * SAMPLES
_UNLIKELY: Final = 1e-3
_PIECES_AT_ONCE: Final = 256
_NOT_TOGETHER: Final = "the transform takes these records one by one, but not together: "

Probe = Callable[[Sequence[pa.Table]], Sequence[PartFailure | None]]
Pause = Callable[[Mapping[str, str]], None]
"""Pauses leases, given the reason of each by its key. None of them is committed."""


class IsolationStoppedError(Exception):
    """The worker was asked to stop before all failing records were found."""


class FailureIsolation:
    """Split batches that the transform fails on, and write their parts.

    Args:
        writer: Transforms and writes.
        limits: Limit the failing records of a lease.
        rng: Chooses samples.
        stop: Whether the worker stops. True raises `IsolationStoppedError`.
    """

    def __init__(
        self,
        writer: BatchWriter,
        limits: FailureLimits,
        rng: random.Random,
        stop: Callable[[], bool],
    ) -> None:
        self._writer = writer
        self._limits = limits
        self._rng = rng
        self._is_stopped = stop

    def isolate_failures(
        self, batch: Batch, pause: Pause, mismatch: ResultMismatchError | None = None
    ) -> Iterator[Batch]:
        """Write a loaded batch that failed as a whole, in parts. Healthy leases come first.

        Args:
            batch: The batch.
            pause: Pauses the leases that are in no part.
            mismatch: Why the columns of its result do not fit the table. If each record has this
                failure, no record is at fault, and all shards pause. None: it failed otherwise.

        Raises:
            SinkError: Writing failed, or Spark did.
            IsolationStoppedError: The worker stops.
        """
        if mismatch is not None and self._is_failure_of_all(batch.records):
            pause(dict.fromkeys(batch.lease_keys, str(mismatch)))
            return
        shards = {key: records_of(batch, [key]) for key in batch.lease_keys}
        healthy = self._healthy(shards)
        if healthy:
            is_less = len(healthy) < len(shards)
            yield from self._written(only(batch, healthy), pause, is_less=is_less)
        failing = {key: records for key, records in shards.items() if key not in healthy}
        if not failing:
            return
        earlier = {key: batch.failed[key].num_rows for key in failing if key in batch.failed}
        limits = {
            key: self._limits.of(key, records.num_rows + earlier.get(key, 0))
            for key, records in failing.items()
        }
        search = _Search(failing, earlier, limits, self._writer.probe, self._rng, self._is_stopped)
        found = search.run()
        over = {key: self._over_text(key, failing[key], f) for key, f in found.items() if f.over}
        if over:
            pause(over)
        rows = {key: failures.errors for key, failures in found.items() if key not in over}
        if rows:
            rest = _without_rows(only(batch, rows), failing, rows)
            is_less = len(rows) < len(shards) or any(rows.values())
            yield from self._written(rest, pause, is_less=is_less)

    def _is_failure_of_all(self, records: pa.Table) -> bool:
        """Return whether each record of the batch, or of a sample, fails alone."""
        count = records.num_rows
        rows = sorted(self._rng.sample(range(count), min(count, SAMPLES)))
        return None not in self._writer.probe([records.slice(row, 1) for row in rows])

    def _healthy(self, shards: Mapping[str, pa.Table]) -> list[str]:
        """Return the leases without failing records, if several leases have records."""
        with_records = {key: records for key, records in shards.items() if records.num_rows}
        failures: Sequence[PartFailure | None] = [PartFailure("")]
        if len(with_records) > 1:
            failures = self._writer.probe(list(with_records.values()))
        fails = {key for key, failure in zip(with_records, failures, strict=True) if failure}
        return [key for key in shards if key not in fails]

    def _written(self, batch: Batch, pause: Pause, *, is_less: bool) -> Iterator[Batch]:
        """Write leases together. If that fails, search them again, or write each alone.

        Args:
            batch: The leases, without their failed records.
            pause: Pauses the leases that are in no part.
            is_less: Whether these are fewer leases or records than were searched. Otherwise another
                search would find no more.
        """
        try:
            judged = self.judge(self._with_files(batch), pause)
        except TransformFailedError as error:
            # No record is at fault.
            is_of_all = isinstance(error, BrokenTransformError | ResultMismatchError)
            if is_less and not is_of_all:
                yield from self.isolate_failures(batch, pause)
            elif len(batch.ranges) == 1:
                reason = str(error) if is_of_all else f"{_NOT_TOGETHER}{error}"
                pause({batch.ranges[0].lease_key: reason})
            else:
                for key in batch.lease_keys:
                    yield from self._written(only(batch, [key]), pause, is_less=True)
        else:
            if judged is not None:
                yield judged

    def judge(self, batch: Batch, pause: Pause) -> Batch | None:
        """Check the failed records of a written batch against the limits.

        The batch is written again without the leases that exceed their limit, which pause.

        Args:
            batch: A loaded and written batch.
            pause: Pauses leases.

        Returns:
            The part to commit, whose failed records include those that the transform rejected.
            None: all leases pause.
        """
        paused: dict[str, str] = {}
        while True:
            try:
                failed = _all_failed(batch)
            except BrokenTransformError as error:
                pause(dict.fromkeys(batch.lease_keys, str(error)) | paused)
                return None
            over = {
                key: reason
                for key, records in failed.items()
                if (reason := self._over(key, batch, records)) is not None
            }
            if not over:
                break
            paused |= over
            batch = self._with_files(without(batch, over))
        # Not before: if a write fails, each lease is written alone, and judged again.
        if paused:
            pause(paused)
        return replace(batch, failed=failed) if batch.ranges else None

    def _over(self, key: str, batch: Batch, failed: pa.Table) -> str | None:
        """Return why a lease exceeds its limit; None: it does not."""
        records = records_of(batch, [key]).num_rows
        records += batch.failed[key].num_rows if key in batch.failed else 0
        if failed.num_rows <= self._limits.of(key, records):
            return None
        first = failed.slice(0, 1)
        return (
            f"{first['error'][0].as_py()} (the record at {_place(first, 0)}); "
            f"{failed.num_rows} of {records} records fail, and "
            f"{self._limits.reason(key, records)}"
        )

    def _over_text(self, key: str, records: pa.Table, failures: _Failures) -> str:
        """Return why a lease pauses whose search went over its limit.

        The error comes first, because tables and rows show the beginning of the sentence only.
        """
        first = failures.first_error
        if failures.errors:
            row = min(failures.errors)
            first = f"{failures.errors[row]} (the record at {_place(records, row)})"
        return f"{first}; {failures.over}, and {self._limits.reason(key, failures.records)}"

    def _with_files(self, batch: Batch) -> Batch:
        has_records = batch.records.num_rows > 0
        return replace(batch, written=self._writer.write(batch) if has_records else NOTHING_WRITTEN)


@dataclass(slots=True)
class _Failures:
    """The failures found in one shard's part of a batch.

    Attributes:
        records: Number of the records, with those that earlier searches found.
        known: How many earlier searches found.
        errors: Error by row number, of every record that fails alone.
        over: Why more records fail than allowed. Then `errors` is incomplete. Empty: not so.
        first_error: The error of the first piece that failed. None: no piece failed.
    """

    records: int
    known: int
    errors: dict[int, str] = field(default_factory=dict)
    over: str = ""
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive records of a shard.

    Attributes:
        shard: Its lease key.
        start: The row of the first one.
        length: Their number.
        suspects: Of a failing piece, its rows that `PartFailure.suspects` names.
        is_suspect: Whether these were the suspects of a longer piece.
    """

    shard: str
    start: int
    length: int
    suspects: range = range(0)
    is_suspect: bool = False


class _Search:
    """One search for failing records. Use an instance once.

    Args:
        shards: Records by lease key.
        earlier: How many others were found in the same batch before, by lease key.
        limits: How many of both may fail, by lease key.
        probe: Evaluates pieces; see `BatchWriter.probe`.
        rng: Chooses the sample.
        is_stopped: Called before each group of pieces. True ends the search.
    """

    def __init__(
        self,
        shards: Mapping[str, pa.Table],
        earlier: Mapping[str, int],
        limits: Mapping[str, int],
        probe: Probe,
        rng: random.Random,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._shards = shards
        self._limits = limits
        self._probe = probe
        self._rng = rng
        self._is_stopped = is_stopped
        self._failures = {
            key: _Failures(rows.num_rows + earlier.get(key, 0), earlier.get(key, 0))
            for key, rows in shards.items()
        }
        # How many suspects failed, less those that did not. Below 0 they are not divided off: a
        # transform that filters, collects or multiplies rows fails elsewhere.
        self._confirmed = 0

    def run(self) -> dict[str, _Failures]:
        """Find the failing records of every shard.

        Raises:
            IsolationStoppedError: The worker stops.
            SinkError: Spark failed.
        """
        # Each shard has failed as a whole already, so its parts are the first to be evaluated.
        whole = [_Piece(key, 0, rows.num_rows) for key, rows in self._shards.items()]
        failing = self._first_round([piece for piece in whole if piece.length])
        while failing := self._within_limits(failing):
            pieces = [part for piece in failing for part in self._divided(piece)]
            failing = self._noted(pieces, self._probed(pieces))
        return self._failures

    def _first_round(self, whole: Sequence[_Piece]) -> list[_Piece]:
        """Evaluate the parts of each shard, and a sample of its records, together.

        A shard whose sample shows that more records fail than allowed is noted.
        """
        sampled = [piece for piece in whole if self._is_worth_a_sample(piece)]
        singles = [
            _Piece(piece.shard, row, 1)
            for piece in sampled
            for row in sorted(self._rng.sample(range(piece.length), SAMPLES))
        ]
        divided = [part for piece in whole for part in self._divided(piece)]
        failures = self._probed([*singles, *divided])
        for number, piece in enumerate(sampled):
            sample = failures[number * SAMPLES : (number + 1) * SAMPLES]
            failed = sum(failure is not None for failure in sample)
            share = self._allowed_share(piece)
            # If no more than the allowed share failed, so many of a sample would be a rare chance.
            if failed and _at_least(failed, SAMPLES, share) < _UNLIKELY:
                self._failures[
                    piece.shard
                ].over = f"{failed} of {SAMPLES} records chosen at random from {piece.length} fail"
        return self._noted(divided, failures[len(singles) :])

    def _noted(
        self, pieces: Sequence[_Piece], results: Sequence[PartFailure | None]
    ) -> list[_Piece]:
        """Return the failing pieces with more than one record; note failing single records."""
        failing = []
        for piece, failure in zip(pieces, results, strict=True):
            if piece.is_suspect:
                self._confirmed += 1 if failure else -1
            if failure is None:
                continue
            failures = self._failures[piece.shard]
            failures.first_error = failures.first_error or failure.error
            if piece.length == 1:
                failures.errors[piece.start] = failure.error
            else:
                failing.append(replace(piece, suspects=failure.suspects))
        return failing

    def _divided(self, piece: _Piece) -> Iterator[_Piece]:
        """Divide a piece: into suspects, what is before them, and thirds of what follows.

        Without suspects, all rounds down to single records have about as many pieces each. The
        pieces are shorter than the divided one, and have all of its records.
        """
        suspects = range(piece.length)[piece.suspects.start : piece.suspects.stop]
        if 0 < len(suspects) < piece.length and self._confirmed >= 0:
            third = (piece.length - suspects.stop) // 3
            ends = (suspects.stop + third, piece.length - third, piece.length)
            edges = sorted({0, suspects.start, suspects.stop, *ends})
        else:
            suspects = range(0)
            rounds = max(math.ceil(math.log(piece.length, MAX_PIECES) - 1e-9), 1)
            count = min(math.ceil(piece.length ** (1 / rounds)), MAX_PIECES, piece.length)
            edges = [piece.length * number // count for number in range(count + 1)]
        for begin, end in pairwise(edges):
            is_suspect = range(begin, end) == suspects
            yield _Piece(piece.shard, piece.start + begin, end - begin, is_suspect=is_suspect)

    def _probed(self, pieces: Sequence[_Piece]) -> list[PartFailure | None]:
        failures: list[PartFailure | None] = []
        for begin in range(0, len(pieces), _PIECES_AT_ONCE):
            if self._is_stopped():
                raise IsolationStoppedError
            chosen = pieces[begin : begin + _PIECES_AT_ONCE]
            failures += self._probe(
                [self._shards[piece.shard].slice(piece.start, piece.length) for piece in chosen]
            )
        return failures

    def _is_worth_a_sample(self, piece: _Piece) -> bool:
        return piece.length >= _WORTH_A_SAMPLE and 0 < self._allowed_share(piece) < 1

    def _allowed_share(self, whole: _Piece) -> float:
        """Return which share of all records of a shard may still fail."""
        return (self._limits[whole.shard] - self._failures[whole.shard].known) / whole.length

    def _within_limits(self, failing: Sequence[_Piece]) -> list[_Piece]:
        """Return the pieces to search: none of a shard that is over its limit.

        Each failing piece has at least one failing record. If no record of a shard may fail, only
        its first piece is searched, so that the report can name a record.
        """
        kept: list[_Piece] = []
        for key, found in self._failures.items():
            pieces = [piece for piece in failing if piece.shard == key]
            known = found.known + len(found.errors) + len(pieces)
            limit = self._limits[key]
            if found.over:
                continue
            if limit == 0 and not found.errors:
                kept += pieces[:1]
            elif limit == 0:
                found.over = f"a record of {found.records} fails"
            elif known > limit:
                found.over = f"at least {known} of {found.records} records fail"
            else:
                kept += pieces
        return kept


def _at_least(count: int, samples: int, share: float) -> float:
    """Return the probability of at least `count` failures in a sample if `share` of all fail."""
    return sum(
        math.comb(samples, number) * share**number * (1 - share) ** (samples - number)
        for number in range(count, samples + 1)
    )


def _all_failed(batch: Batch) -> dict[str, pa.Table]:
    """Return the failed records of a batch, with those that the transform rejected."""
    if batch.written is None or batch.written.rejected is None:
        return dict(batch.failed)
    return _joined(batch.failed, rejected_records(batch, batch.written.rejected))


def _joined(failed: Mapping[str, pa.Table], more: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """Return the failed records of both, by lease key."""
    joined = {
        key: pa.concat_tables([failed[key], records]) if key in failed else records
        for key, records in more.items()
    }
    return {**failed, **joined}


def _without_rows(
    batch: Batch, shards: Mapping[str, pa.Table], errors: Mapping[str, Mapping[int, str]]
) -> Batch:
    """Move the failing records of a batch to `failed`. The order of the others is kept."""
    kept, failed = [], {}
    for key in batch.lease_keys:
        records, bad = shards[key], errors[key]
        rows = [row for row in range(records.num_rows) if row not in bad]
        kept.append(records.take(pa.array(rows, pa.int64())) if bad else records)
        if bad:
            failed[key] = failed_rows(records, bad)
    ranges = zip(batch.ranges, kept, strict=True)
    return replace(
        batch,
        ranges=tuple(replace(part, records=records) for part, records in ranges),
        records=pa.concat_tables(kept),
        failed=_joined(batch.failed, failed),
    )


def _place(records: pa.Table, row: int) -> str:
    names = ("shard_id", "sequence_number", "sub_sequence_number")
    return ", ".join(f"{name}={records.column(name)[row].as_py()}" for name in names)


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
