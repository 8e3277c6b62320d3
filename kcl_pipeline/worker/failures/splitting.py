"""Split a batch with failing records into parts that are written, set aside or paused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from kcl_pipeline.batch import NOTHING_WRITTEN, Batch, BatchWriter, Written
from kcl_pipeline.errors import BrokenTransformError, ResultMismatchError, TransformFailedError
from kcl_pipeline.worker.batches import records_of, without
from kcl_pipeline.worker.failures.failed_records import FailureLimits, failed_rows, rejected_records
from kcl_pipeline.worker.failures.isolation import SAMPLES, Isolation, ShardFailures


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
        batch = _only(self.batch, [lease_key])
        failed = {lease_key: self.failed[lease_key]} if lease_key in self.failed else {}
        return SplitBatch(batch, NOTHING_WRITTEN, records, failed)


class FailureIsolation:
    """Split batches that the transform fails on, and write their parts.

    Args:
        writer: Transforms and writes.
        limits: Limit the failing records of a lease.
        rng: Chooses samples.
        stop: Whether the worker stops. True raises `isolation.IsolationStoppedError`.
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
        if mismatch is not None and self._is_failure_of_all(batch):
            yield all_paused(batch, str(mismatch))
            return
        shards = {r.lease_key: records_of(batch, [r.lease_key]) for r in batch.ranges}
        healthy = self._healthy(shards)
        if healthy:
            yield from self._together_or_alone(_only(batch, healthy))
        failing = {key: records for key, records in shards.items() if key not in healthy}
        if failing:
            limits = {key: self._limits.of(key, r.num_rows) for key, r in failing.items()}
            search = Isolation(failing, limits, self._writer.probe, self._rng, self._is_stopped)
            yield from self._rest(_only(batch, failing), failing, search.run())

    def _is_failure_of_all(self, batch: Batch) -> bool:
        """Return whether each record of the batch, or of a sample, fails alone."""
        count = batch.records.num_rows
        rows = sorted(self._rng.sample(range(count), min(count, SAMPLES)))
        return None not in self._writer.probe([batch.records.slice(row, 1) for row in rows])

    def _healthy(self, shards: Mapping[str, pa.Table]) -> list[str]:
        """Return the leases without failing records, if several leases have records."""
        with_records = {key: records for key, records in shards.items() if records.num_rows}
        errors: list[str | None] = [""]
        if len(with_records) > 1:
            errors = list(self._writer.probe(list(with_records.values())))
        fails = {key for key, error in zip(with_records, errors, strict=True) if error is not None}
        return [key for key in shards if key not in fails]

    def _together_or_alone(self, batch: Batch) -> Iterator[SplitBatch]:
        """Write healthy leases together; one by one if the transform fails on all of them."""
        try:
            yield self.judge(batch, self._write(batch))
        except TransformFailedError:
            for part in batch.ranges:
                alone = _only(batch, [part.lease_key])
                try:
                    yield self.judge(alone, self._write(alone))
                except TransformFailedError as error:
                    yield all_paused(alone, str(error))

    def _rest(
        self,
        batch: Batch,
        shards: Mapping[str, pa.Table],
        isolated: Mapping[str, ShardFailures],
    ) -> Iterator[SplitBatch]:
        """Write the failing leases without the failing records that the search found."""
        paused = {
            key: self._reason(key, shards[key], failures)
            for key, failures in isolated.items()
            if failures.exceeded is not None
        }
        failed = {
            key: failed_rows(shards[key], failures.rows)
            for key, failures in isolated.items()
            if key not in paused and failures.rows
        }
        rest = _without_rows(without(batch, paused), shards, isolated)
        try:
            split = self.judge(rest, self._write(rest), failed)
        except ResultMismatchError as error:
            yield all_paused(batch, str(error), paused)
        except TransformFailedError as error:
            why = f"the transform takes these records one by one, but not together: {error}"
            yield all_paused(batch, why, paused)
        else:
            yield replace(split, paused={**paused, **split.paused})

    def _reason(self, key: str, records: pa.Table, failures: ShardFailures) -> str:
        named = ""
        if failures.rows and self._limits.of(key, records.num_rows) == 0:
            row = min(failures.rows)
            named = f" the record at {_place(records, row)}: {failures.rows[row]}"
        else:
            named = f" {failures.first_error}"
        return (
            f"{failures.exceeded}, and {self._limits.reason(key, records.num_rows)}; first "
            f"failure:{named}"
        )

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
            f"{merged.num_rows} of {records} records fail, and "
            f"{self._limits.reason(key, records)}; first failure: the record at "
            f"{_place(first, 0)}: {first['error'][0].as_py()}"
        )

    def _write(self, batch: Batch) -> Written:
        return self._writer.write(batch) if batch.records.num_rows else NOTHING_WRITTEN


def _merged(failed: Mapping[str, pa.Table], batch: Batch, written: Written) -> dict[str, pa.Table]:
    merged = dict(failed)
    if written.rejected is not None:
        for key, records in rejected_records(batch, written.rejected).items():
            merged[key] = pa.concat_tables([merged[key], records]) if key in merged else records
    return merged


def _only(batch: Batch, lease_keys: list[str] | Mapping[str, object]) -> Batch:
    return without(batch, [r.lease_key for r in batch.ranges if r.lease_key not in lease_keys])


def _without_rows(
    batch: Batch, shards: Mapping[str, pa.Table], isolated: Mapping[str, ShardFailures]
) -> Batch:
    """Return the batch without the failing records. The order is kept."""
    kept = []
    for part in batch.ranges:
        records = shards[part.lease_key]
        bad = isolated[part.lease_key].rows
        rows = [row for row in range(records.num_rows) if row not in bad]
        kept.append(records.take(pa.array(rows, pa.int64())) if bad else records)
    return replace(
        batch,
        ranges=tuple(
            replace(part, rows=records.num_rows)
            for part, records in zip(batch.ranges, kept, strict=True)
        ),
        records=pa.concat_tables(kept) if kept else batch.records.slice(0, 0),
    )


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


def _place(records: pa.Table, row: int) -> str:
    names = ("shard_id", "sequence_number", "sub_sequence_number")
    return ", ".join(f"{name}={records.column(name)[row].as_py()}" for name in names)
