"""Isolate the records of a batch that fail: which are written, set aside, or wait with their shard.

A record fails if the transform refuses it, or if the table cannot hold what it becomes
(`BatchWriter.probe` reports both). There are two ways to find these records:

- The transform returns them itself, with the column `_error`. Nothing is searched: `judge` compares
  their number with the limits of their shards.
- The transform raises. Then the records of each shard are searched (`_Search`): a part that fails
  is divided into at most `MAX_PIECES`, down to single records. The parts of one round are evaluated
  together, in a Spark job or by calls of an Arrow function. Nothing is written by that.

The budget of a search is the number of records that may fail (`FailureLimits`): each part that
fails has at least one, and a shard with more of them pauses. A broken transform fails on most
records, and a test of each of them would take hours, so a sample is tested first.

Shards without failing records are written and committed before the search begins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import NOTHING_WRITTEN, Batch, BatchWriter, Written
from kcl_pipeline.errors import BrokenTransformError, ResultMismatchError, TransformFailedError
from kcl_pipeline.worker.batches import only, records_of, without
from kcl_pipeline.worker.failures.failed_records import FailureLimits, failed_rows, rejected_records

MAX_PIECES: Final = 16
"""Fewer pieces would need more rounds. On the Spark path, each round needs a plan and a job."""
SAMPLES: Final = 16
_WORTH_A_SAMPLE: Final = 10 * SAMPLES
_UNLIKELY: Final = 1e-3
_PIECES_AT_ONCE: Final = 256
_NOT_TOGETHER: Final = "the transform takes these records one by one, but not together: "

Probe = Callable[[Sequence[pa.Table]], Sequence[str | None]]


class IsolationStoppedError(Exception):
    """The worker was asked to stop before all failing records were found."""


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """A part of a batch that is committed in one commit.

    Attributes:
        batch: The ranges that are committed, and their records without the failed ones.
        written: The files of these records.
        records: Number of records in the ranges, including the failed ones.
        failed: Failed records by lease key (`FAILED_SCHEMA`).
        paused: Why a lease is not committed, by lease key. None of these leases is in `batch`.
    """

    batch: Batch
    written: Written
    records: int
    failed: Mapping[str, pa.Table] = field(default_factory=dict)
    paused: Mapping[str, str] = field(default_factory=dict)

    def of(self, lease_key: str, records: int) -> SplitBatch:
        """Return the part of one lease, with this number of records. It must be written again."""
        batch = only(self.batch, [lease_key])
        failed = {lease_key: self.failed[lease_key]} if lease_key in self.failed else {}
        return SplitBatch(batch, NOTHING_WRITTEN, records, failed)


def all_paused(batch: Batch, reason: str, paused: Mapping[str, str] | None = None) -> SplitBatch:
    """Return a part that commits nothing and pauses every lease.

    Args:
        batch: The batch.
        reason: Reason of leases that are not in `paused`.
        paused: Reasons by lease key.
    """
    nothing = replace(batch, ranges=(), records=batch.records.slice(0, 0))
    reasons = {part.lease_key: reason for part in batch.ranges} | dict(paused or {})
    return SplitBatch(nothing, NOTHING_WRITTEN, 0, {}, reasons)


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
        self, batch: Batch, mismatch: ResultMismatchError | None = None
    ) -> Iterator[SplitBatch]:
        """Write a loaded batch that failed as a whole, in parts. Healthy leases come first.

        Args:
            batch: The batch.
            mismatch: Why the columns of its result do not fit the table. If each record has this
                failure, no record is at fault, and all shards pause. None: it failed otherwise.

        Raises:
            SinkError: Writing failed, or Spark did.
            IsolationStoppedError: The worker stops.
        """
        if mismatch is not None and self._is_failure_of_all(batch.records):
            yield all_paused(batch, str(mismatch))
            return
        shards = {r.lease_key: records_of(batch, [r.lease_key]) for r in batch.ranges}
        healthy = self._healthy(shards)
        if healthy:
            yield from self._written(only(batch, healthy), {}, "")
        failing = {key: records for key, records in shards.items() if key not in healthy}
        if not failing:
            return
        limits = {key: self._limits.of(key, r.num_rows) for key, r in failing.items()}
        search = _Search(failing, limits, self._writer.probe, self._rng, self._is_stopped)
        found = search.run()
        over = {key: self._over_text(key, failing[key], f) for key, f in found.items() if f.over}
        if over:
            yield all_paused(only(batch, over), "", over)
        rows = {key: failures.errors for key, failures in found.items() if key not in over}
        if rows:
            failed = {key: failed_rows(failing[key], errors) for key, errors in rows.items()}
            rest = _without_rows(only(batch, rows), failing, rows)
            yield from self._written(
                rest, {key: f for key, f in failed.items() if f.num_rows}, _NOT_TOGETHER
            )

    def _is_failure_of_all(self, records: pa.Table) -> bool:
        """Return whether each record of the batch, or of a sample, fails alone."""
        count = records.num_rows
        rows = sorted(self._rng.sample(range(count), min(count, SAMPLES)))
        return None not in self._writer.probe([records.slice(row, 1) for row in rows])

    def _healthy(self, shards: Mapping[str, pa.Table]) -> list[str]:
        """Return the leases without failing records, if several leases have records."""
        with_records = {key: records for key, records in shards.items() if records.num_rows}
        errors: Sequence[str | None] = [""]
        if len(with_records) > 1:
            errors = self._writer.probe(list(with_records.values()))
        fails = {key for key, error in zip(with_records, errors, strict=True) if error is not None}
        return [key for key in shards if key not in fails]

    def _written(
        self, batch: Batch, failed: Mapping[str, pa.Table], why: str
    ) -> Iterator[SplitBatch]:
        """Write leases together; each alone if the transform fails on all of them together.

        Args:
            batch: The leases, without their `failed` records.
            failed: Failed records by lease key.
            why: Begin of the reason of a lease that fails alone, too.
        """
        try:
            yield self.judge(batch, self._write(batch), failed)
        except TransformFailedError as error:
            if len(batch.ranges) == 1:
                is_mismatch = isinstance(error, ResultMismatchError)
                yield all_paused(batch, str(error) if is_mismatch else f"{why}{error}")
                return
            for part in batch.ranges:
                key = part.lease_key
                of_lease = {key: failed[key]} if key in failed else {}
                yield from self._written(only(batch, [key]), of_lease, why)

    def judge(
        self, batch: Batch, written: Written, failed: Mapping[str, pa.Table] | None = None
    ) -> SplitBatch:
        """Check the failed records of a written batch against the limits.

        The batch is written again without the leases that exceed their limit.

        Args:
            batch: A loaded batch without the `failed` records.
            written: The result of writing it, with the records that the transform rejected.
            failed: Records that failed before, by lease key.

        Returns:
            The part to commit. Its `paused` has the leases that exceed their limit.
        """
        failed = failed or {}
        paused: dict[str, str] = {}
        while True:
            try:
                merged = _merged(failed, batch, written)
            except BrokenTransformError as error:
                return all_paused(batch, str(error), paused)
            over = {
                key: reason
                for key, records in merged.items()
                if (reason := self._over(key, batch, failed, records)) is not None
            }
            if not over:
                total = batch.records.num_rows + sum(f.num_rows for f in failed.values())
                return SplitBatch(batch, written, total, merged, paused)
            paused |= over
            batch = without(batch, over)
            failed = {key: records for key, records in failed.items() if key not in over}
            written = self._write(batch)

    def _over(
        self, key: str, batch: Batch, failed: Mapping[str, pa.Table], merged: pa.Table
    ) -> str | None:
        """Return why a lease exceeds its limit; None: it does not."""
        records = records_of(batch, [key]).num_rows
        records += failed[key].num_rows if key in failed else 0
        if merged.num_rows <= self._limits.of(key, records):
            return None
        first = merged.slice(0, 1)
        return (
            f"{first['error'][0].as_py()} (the record at {_place(first, 0)}); "
            f"{merged.num_rows} of {records} records fail, and "
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
        return f"{first}; {failures.over}, and {self._limits.reason(key, records.num_rows)}"

    def _write(self, batch: Batch) -> Written:
        return self._writer.write(batch) if batch.records.num_rows else NOTHING_WRITTEN


@dataclass(slots=True)
class _Failures:
    """The failures found in one shard's part of a batch.

    Attributes:
        errors: Error by row number, of every record that fails alone.
        over: Why more records fail than allowed. Then `errors` is incomplete. Empty: not so.
        first_error: The error of the first piece that failed. None: no piece failed.
    """

    errors: dict[int, str] = field(default_factory=dict)
    over: str = ""
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    shard: str
    start: int
    length: int


class _Search:
    """One search for failing records. Use an instance once.

    Args:
        shards: Records by lease key.
        limits: How many of them may fail, by lease key.
        probe: Evaluates pieces; see `BatchWriter.probe`.
        rng: Chooses the sample.
        is_stopped: Called before each group of pieces. True ends the search.
    """

    def __init__(
        self,
        shards: Mapping[str, pa.Table],
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
        self._failures = {key: _Failures() for key in shards}

    def run(self) -> dict[str, _Failures]:
        """Find the failing records of every shard.

        Raises:
            IsolationStoppedError: The worker stops.
            SinkError: Spark failed.
        """
        whole = [_Piece(key, 0, rows.num_rows) for key, rows in self._shards.items()]
        failing = self._failing([piece for piece in whole if piece.length])
        self._look_at_samples([piece for piece in failing if self._is_worth_a_sample(piece)])
        while failing := self._within_limits(failing):
            failing = self._failing([part for piece in failing for part in _divided(piece)])
        return self._failures

    def _failing(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """Return the failing pieces with more than one record; note failing single records."""
        failing = []
        for piece, error in zip(pieces, self._errors(pieces), strict=True):
            if error is None:
                continue
            found = self._failures[piece.shard]
            found.first_error = found.first_error or error
            if piece.length == 1:
                found.errors[piece.start] = error
            else:
                failing.append(piece)
        return failing

    def _errors(self, pieces: Sequence[_Piece]) -> list[str | None]:
        errors: list[str | None] = []
        for begin in range(0, len(pieces), _PIECES_AT_ONCE):
            if self._is_stopped():
                raise IsolationStoppedError
            chosen = pieces[begin : begin + _PIECES_AT_ONCE]
            errors += self._probe(
                [self._shards[piece.shard].slice(piece.start, piece.length) for piece in chosen]
            )
        return errors

    def _is_worth_a_sample(self, piece: _Piece) -> bool:
        share = self._limits[piece.shard] / piece.length
        return piece.length >= _WORTH_A_SAMPLE and 0 < share < 1

    def _look_at_samples(self, pieces: Sequence[_Piece]) -> None:
        """Note the shards whose sample shows that more records fail than allowed."""
        singles = [
            _Piece(piece.shard, row, 1)
            for piece in pieces
            for row in sorted(self._rng.sample(range(piece.length), SAMPLES))
        ]
        errors = self._errors(singles)
        for number, piece in enumerate(pieces):
            sample = errors[number * SAMPLES : (number + 1) * SAMPLES]
            failed = sum(error is not None for error in sample)
            share = self._limits[piece.shard] / piece.length
            # If no more than the allowed share failed, so many of a sample would be a rare chance.
            if failed and _at_least(failed, SAMPLES, share) < _UNLIKELY:
                self._failures[
                    piece.shard
                ].over = f"{failed} of {SAMPLES} records chosen at random from {piece.length} fail"

    def _within_limits(self, failing: Sequence[_Piece]) -> list[_Piece]:
        """Return the pieces to search: none of a shard that is over its limit.

        Each failing piece has at least one failing record. If no record of a shard may fail, only
        its first piece is searched, so that the report can name a record.
        """
        kept: list[_Piece] = []
        for key, found in self._failures.items():
            pieces = [piece for piece in failing if piece.shard == key]
            known, limit = len(found.errors) + len(pieces), self._limits[key]
            if found.over:
                continue
            if limit == 0 and not found.errors:
                kept += pieces[:1]
            elif limit == 0:
                found.over = f"a record of {self._shards[key].num_rows} fails"
            elif known > limit:
                found.over = f"at least {known} of {self._shards[key].num_rows} records fail"
            else:
                kept += pieces
        return kept


def _divided(piece: _Piece) -> Iterator[_Piece]:
    """Divide a piece so that all rounds down to single records have about as many pieces each."""
    rounds = max(math.ceil(math.log(piece.length, MAX_PIECES) - 1e-9), 1)
    count = min(math.ceil(piece.length ** (1 / rounds)), MAX_PIECES, piece.length)
    edges = [piece.start + piece.length * number // count for number in range(count + 1)]
    for begin, end in pairwise(edges):
        yield _Piece(piece.shard, begin, end - begin)


def _at_least(count: int, samples: int, share: float) -> float:
    """Return the probability of at least `count` failures in a sample if `share` of all fail."""
    return sum(
        math.comb(samples, number) * share**number * (1 - share) ** (samples - number)
        for number in range(count, samples + 1)
    )


def _merged(failed: Mapping[str, pa.Table], batch: Batch, written: Written) -> dict[str, pa.Table]:
    merged = dict(failed)
    if written.rejected is not None:
        for key, records in rejected_records(batch, written.rejected).items():
            merged[key] = pa.concat_tables([merged[key], records]) if key in merged else records
    return merged


def _without_rows(
    batch: Batch, shards: Mapping[str, pa.Table], errors: Mapping[str, Mapping[int, str]]
) -> Batch:
    """Return the batch without the failing records. The order is kept."""
    kept = []
    for part in batch.ranges:
        records, bad = shards[part.lease_key], errors[part.lease_key]
        rows = [row for row in range(records.num_rows) if row not in bad]
        kept.append(records.take(pa.array(rows, pa.int64())) if bad else records)
    ranges = zip(batch.ranges, kept, strict=True)
    return replace(
        batch,
        ranges=tuple(replace(part, rows=records.num_rows) for part, records in ranges),
        records=pa.concat_tables(kept),
    )


def _place(records: pa.Table, row: int) -> str:
    names = ("shard_id", "sequence_number", "sub_sequence_number")
    return ", ".join(f"{name}={records.column(name)[row].as_py()}" for name in names)
