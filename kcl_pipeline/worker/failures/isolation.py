"""Find the records that a transform fails on, by running it on smaller and smaller parts.

The parts of one round are evaluated together (`BatchWriter.probe`), several at a time. Each needs a
Spark job or a call of an Arrow function. Nothing is written. A part that fails is cut into at most
`MAX_PIECES` pieces for the next round, down to single records.

A broken transform fails on most records, and a test of each of them would take hours. So a sample
is tested first. The search in a shard ends when more of its parts fail than records may fail.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import pyarrow as pa

MAX_PIECES: Final = 16
"""Fewer pieces would need more rounds. On the Spark path, each round needs a plan and a job."""

SAMPLES: Final = 16
_WORTH_A_SAMPLE: Final = 10 * SAMPLES
_UNLIKELY: Final = 1e-3
_PARTS_AT_ONCE: Final = 256

Probe = Callable[[Sequence[pa.Table]], Sequence[str | None]]


class IsolationStoppedError(Exception):
    """The worker was asked to stop before all failing records were found."""


@dataclass(slots=True)
class ShardFailures:
    """The failures found in one shard's part of a batch.

    Attributes:
        rows: Error by row number, of every record that fails alone.
        exceeded: Why more records fail than allowed. Then `rows` is incomplete.
        first_error: The error of the first part that failed. None: no part failed.
    """

    rows: dict[int, str] = field(default_factory=dict)
    exceeded: str | None = None
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    shard: str
    start: int
    length: int


class Isolation:
    """One search for failing records. Use an instance once.

    Args:
        shards: Records by lease key.
        limits: How many of them may fail, by lease key.
        probe: Evaluates parts; see `BatchWriter.probe`.
        rng: Chooses the sample.
        is_stopped: Called before each group of parts. True ends the search.
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
        self._found = {key: ShardFailures() for key in shards}

    def run(self) -> dict[str, ShardFailures]:
        """Find the failing records of every shard.

        Raises:
            IsolationStoppedError: The worker stops.
            SinkError: Spark failed.
        """
        whole = [_Part(key, 0, rows.num_rows) for key, rows in self._shards.items()]
        failing = self._failing([part for part in whole if part.length])
        self._look_at_samples([part for part in failing if self._is_worth_a_sample(part)])
        while failing := self._within_limits(failing):
            failing = self._failing(list(self._pieces(failing)))
        return self._found

    def _failing(self, parts: Sequence[_Part]) -> list[_Part]:
        """Return the failing parts with more than one record; note failing single records."""
        failing = []
        for part, error in zip(parts, self._errors(parts), strict=True):
            if error is None:
                continue
            found = self._found[part.shard]
            found.first_error = found.first_error or error
            if part.length == 1:
                found.rows[part.start] = error
            else:
                failing.append(part)
        return failing

    def _errors(self, parts: Sequence[_Part]) -> list[str | None]:
        errors: list[str | None] = []
        for begin in range(0, len(parts), _PARTS_AT_ONCE):
            if self._is_stopped():
                raise IsolationStoppedError
            chosen = parts[begin : begin + _PARTS_AT_ONCE]
            errors += self._probe(
                [self._shards[part.shard].slice(part.start, part.length) for part in chosen]
            )
        return errors

    def _is_worth_a_sample(self, part: _Part) -> bool:
        share = self._limits[part.shard] / part.length
        return part.length >= _WORTH_A_SAMPLE and 0 < share < 1

    def _look_at_samples(self, parts: Sequence[_Part]) -> None:
        """Mark shards whose sample shows that more records fail than allowed."""
        singles = [
            _Part(part.shard, row, 1)
            for part in parts
            for row in sorted(self._rng.sample(range(part.length), SAMPLES))
        ]
        errors = self._errors(singles)
        for number, part in enumerate(parts):
            own = errors[number * SAMPLES : (number + 1) * SAMPLES]
            failed = [error for error in own if error is not None]
            share = self._limits[part.shard] / part.length
            if failed and _at_least(len(failed), SAMPLES, share) < _UNLIKELY:
                self._found[
                    part.shard
                ].exceeded = (
                    f"{len(failed)} of {SAMPLES} records chosen at random from {part.length} fail"
                )

    def _within_limits(self, failing: Sequence[_Part]) -> list[_Part]:
        """Return the parts to search: none of a shard that is over its limit.

        Each failing part has at least one failing record. If no record of a shard may fail, only
        its first part is searched, so that the report can name a record.
        """
        kept: list[_Part] = []
        for key, found in self._found.items():
            own = [part for part in failing if part.shard == key]
            known = len(found.rows) + len(own)
            if found.exceeded is not None:
                continue
            if self._limits[key] > 0 and known > self._limits[key]:
                found.exceeded = f"at least {known} of {self._shards[key].num_rows} records fail"
            elif self._limits[key] > 0:
                kept += own
            elif found.rows:
                found.exceeded = f"a record of {self._shards[key].num_rows} fails"
            else:
                kept += own[:1]
        return kept

    def _pieces(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        for part in parts:
            rounds = max(math.ceil(math.log(part.length, MAX_PIECES) - 1e-9), 1)
            count = min(math.ceil(part.length ** (1 / rounds)), MAX_PIECES, part.length)
            edges = [part.start + part.length * number // count for number in range(count + 1)]
            for begin, end in pairwise(edges):
                yield _Part(part.shard, begin, end - begin)


def _at_least(count: int, samples: int, share: float) -> float:
    """Return the probability of at least `count` failures in a sample if `share` of all fail."""
    return sum(
        math.comb(samples, number) * share**number * (1 - share) ** (samples - number)
        for number in range(count, samples + 1)
    )
