"""Find the records at fault in a batch that cannot be written.

A record fails if the transform raises on it, or if the table cannot hold what it becomes
(`BatchWriter.probe` reports both). Nothing is written here: parts of the batch are returned, and
`WriteSteps` writes them. If a part cannot be written, it is isolated in the same way.

1. Leases whose records pass are one part. It is committed before the search begins.
2. The records of each other lease are searched (`_Search`): a piece that fails is divided, down to
   single records. The pieces of one round are evaluated together, in Spark jobs or by calls of an
   Arrow function. The other part is what the search leaves. It finds at least the records that
   fail as the batch did.

The budget of a search is the number of records that may fail (`FailureLimits`): each piece that
fails has at least one, and a lease with more of them pauses. A broken transform fails on most
records, and a test of each of them would take hours, so a sample is tested first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, PartFailure
from kcl_pipeline.errors import BrokenTransformError, ResultMismatchError, TransformFailedError
from kcl_pipeline.worker.failures import (
    FailureLimits,
    error_at,
    failed_count,
    only,
    without,
    without_rows,
)

MAX_PIECES: Final = 16
"""Fewer pieces would need more rounds. On the Spark path, each round needs a plan and a job."""
SAMPLES: Final = 16
_WORTH_A_SAMPLE: Final = 10 * SAMPLES
_UNLIKELY: Final = 1e-3
_PIECES_AT_ONCE: Final = 256

Pause = Callable[[Mapping[str, str]], None]
"""Pauses leases, given the reason of each by its key. None of them is committed."""


class IsolationStoppedError(Exception):
    """The worker was asked to stop before all failing records were found."""


class FailureIsolation:
    """Split batches that cannot be written.

    Args:
        writer: Evaluates pieces of a batch (`BatchWriter.probe`).
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
        self, batch: Batch, error: TransformFailedError, pause: Pause
    ) -> Iterator[Batch]:
        """Split a loaded batch. Yields at most two parts, leases without failing records first.

        A part has fewer leases or records than the batch. Or it is the batch itself: then no lease
        and no record of it fails alone.

        Args:
            batch: The batch.
            error: Why it cannot be written.
            pause: Pauses the leases that are in no part.

        Raises:
            SinkError: Spark failed.
            IsolationStoppedError: The worker stops.
        """
        if isinstance(error, BrokenTransformError):
            yield from self._halved(batch, error, pause)
            return
        failing = self._failing(batch, error)
        if failing is None:
            pause(dict.fromkeys(batch.lease_keys, str(error)))
            return
        passing = [key for key in batch.lease_keys if key not in failing]
        if passing:
            yield only(batch, passing)
        if failing:
            rest = self._without_failures(only(batch, failing), pause)
            if rest.ranges:
                yield rest

    def _halved(self, batch: Batch, error: BrokenTransformError, pause: Pause) -> Iterator[Batch]:
        """Yield two halves of a batch, so that only leases whose result is broken alone pause.

        The result may be broken for some records only: a wrong position beside `_error`, or None.
        No record of them is set aside, because the transform is at fault. If it is broken for
        every record of a sample, all leases pause at once.
        """
        keys = batch.lease_keys
        if len(keys) == 1 or self._fails_on_sample(batch):
            pause(dict.fromkeys(keys, str(error)))
            return
        middle = len(keys) // 2
        yield only(batch, keys[:middle])
        yield only(batch, keys[middle:])

    def _failing(self, batch: Batch, error: TransformFailedError) -> list[str] | None:
        """Return the leases that fail alone.

        None: no record is at fault, but the columns of the result.
        """
        chunks = [chunk for chunk in batch.ranges if chunk.record_count]
        failures: Sequence[object] = [error]  # One has failed as a batch.
        if len(chunks) > 1:
            failures = self._writer.probe([chunk.records for chunk in chunks])
        # A sample of the batch may have no record of a short lease that passes.
        fits_nowhere = isinstance(error, ResultMismatchError) and all(failures)
        if fits_nowhere and self._fails_on_sample(batch):
            return None
        return [chunk.lease_key for chunk, failure in zip(chunks, failures, strict=True) if failure]

    def _fails_on_sample(self, batch: Batch) -> bool:
        """Return whether each of some records of a batch fails alone."""
        records = batch.records
        rows = sorted(self._rng.sample(range(records.num_rows), min(records.num_rows, SAMPLES)))
        return all(self._writer.probe([records.slice(row, 1) for row in rows]))

    def _without_failures(self, batch: Batch, pause: Pause) -> Batch:
        """Return the batch without failing records. Leases that have too many of them pause."""
        searches, totals = {}, {}
        for chunk in batch.ranges:
            key, known = chunk.lease_key, failed_count(batch.failed, chunk.lease_key)
            totals[key] = chunk.record_count + known
            limit = self._limits.of(key, totals[key])
            searches[key] = _Search(chunk.records, known, limit, self._rng)
        self._run(searches.values())
        over = {
            key: f"{search.first_error}; {search.over}, and {self._limits.reason(key, totals[key])}"
            for key, search in searches.items()
            if search.over
        }
        if over:
            pause(over)
        found = {key: s.errors for key, s in searches.items() if s.errors and key not in over}
        return without_rows(without(batch, over), found)

    def _run(self, searches: Collection[_Search]) -> None:
        """Evaluate the pieces of all searches together, round by round."""
        while open_searches := [search for search in searches if search.pieces]:
            slices = [part for search in open_searches for part in search.slices()]
            failures: list[PartFailure | None] = []
            for begin in range(0, len(slices), _PIECES_AT_ONCE):
                if self._is_stopped():
                    raise IsolationStoppedError
                failures += self._writer.probe(slices[begin : begin + _PIECES_AT_ONCE])
            results = iter(failures)
            for search in open_searches:
                search.note(list(islice(results, len(search.pieces))))


class _Search:
    """The search for the failing records of one lease. A piece is a range of their rows.

    Args:
        records: Its records, which fail together.
        known: How many others of the same batch were found before.
        limit: How many of both may fail.
        rng: Chooses the sample.

    Attributes:
        pieces: What to evaluate next. Empty: the search has ended.
        errors: Error by row, of every record that fails alone.
        over: Why more records fail than allowed. Then `errors` is incomplete. Empty: not so.
    """

    def __init__(self, records: pa.Table, known: int, limit: int, rng: random.Random) -> None:
        self._records = records
        self._known = known
        self._limit = limit
        self.errors: dict[int, str] = {}
        self.over = ""
        self._first_error = ""
        # The pieces that are suspects (`PartFailure.suspects`), and how many suspects have failed,
        # less those that have not. Below 0 none are divided off: a transform that filters, collects
        # or multiplies rows fails elsewhere.
        self._suspected: set[range] = set()
        self._confirmed = 0
        count = records.num_rows
        self._allowed_share = (limit - known) / count
        self._samples = SAMPLES if count >= _WORTH_A_SAMPLE and 0 < self._allowed_share < 1 else 0
        sample = sorted(rng.sample(range(count), self._samples))
        # They fail as a whole, so their parts are the first to be evaluated, beside the sample.
        self.pieces = [*(range(row, row + 1) for row in sample), *_equal_pieces(range(count))]

    @property
    def first_error(self) -> str:
        """The error of the first failing record that was found; else that of a failing piece."""
        if not self.errors:
            return self._first_error
        row = min(self.errors)
        return error_at(self._records, row, self.errors[row])

    def slices(self) -> list[pa.Table]:
        """Return the records of the pieces to evaluate."""
        return [self._records.slice(piece.start, len(piece)) for piece in self.pieces]

    def note(self, failures: Sequence[PartFailure | None]) -> None:
        """Take the results of the pieces, and choose the next pieces."""
        sampled = sum(failure is not None for failure in failures[: self._samples])
        results = list(zip(self.pieces, failures, strict=True))[self._samples :]
        failing: list[tuple[range, PartFailure]] = []
        for piece, failure in results:
            if piece in self._suspected:
                self._confirmed += 1 if failure else -1
            if failure is None:
                continue
            self._first_error = self._first_error or failure.error
            if len(piece) == 1:
                self.errors[piece.start] = failure.error
            else:
                failing.append((piece, failure))
        count = self._records.num_rows
        at_least = self._known + len(self.errors) + len(failing)
        # If no more than the allowed share failed, so many of a sample would be a rare chance.
        if sampled and _at_least(sampled, self._samples, self._allowed_share) < _UNLIKELY:
            self.over = f"{sampled} of {SAMPLES} records chosen at random from {count} fail"
        elif at_least > self._limit and not self._limit and not self.errors:
            failing = failing[:1]  # No record may fail. One is searched, so that it can be named.
        elif at_least > self._limit:
            self.over = f"at least {at_least} of {self._known + count} records fail"
        self._samples, self._suspected, self.pieces = 0, set(), []
        if not self.over:
            for piece, failure in failing:
                self.pieces += self._divided(piece, failure.suspects)

    def _divided(self, piece: range, suspects: range) -> list[range]:
        """Divide a piece: into suspects, what is before them, and thirds of what follows."""
        suspected = piece[suspects.start : suspects.stop]
        if not 0 < len(suspected) < len(piece) or self._confirmed < 0:
            return _equal_pieces(piece)
        self._suspected.add(suspected)
        pieces = [piece[: suspects.start], suspected, *_cut(piece[suspects.stop :], 3)]
        return [each for each in pieces if each]


def _equal_pieces(piece: range) -> list[range]:
    """Divide a piece evenly. All rounds down to single records have about as many pieces."""
    rounds = max(math.ceil(math.log(len(piece), MAX_PIECES) - 1e-9), 1)
    return _cut(piece, min(math.ceil(len(piece) ** (1 / rounds)), MAX_PIECES, len(piece)))


def _cut(piece: range, count: int) -> list[range]:
    edges = [len(piece) * number // count for number in range(count + 1)]
    return [piece[begin:end] for begin, end in pairwise(edges)]


def _at_least(count: int, samples: int, share: float) -> float:
    """Return the probability of at least `count` failures in a sample if `share` of all fail."""
    return sum(
        math.comb(samples, number) * share**number * (1 - share) ** (samples - number)
        for number in range(count, samples + 1)
    )
