"""Find the records that a transform fails on, by running it on smaller and smaller pieces.

The pieces of one round are evaluated together (`BatchWriter.probe`), several at a time. Each needs
a Spark job or a call of an Arrow function. Nothing is written. A piece that fails is cut into at
most `MAX_PIECES` pieces for the next round, down to single records.

A broken transform fails on most records, and a test of each of them would take hours. So a sample
is tested first. The search in a shard ends when more of its pieces fail than records may fail.
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
_PIECES_AT_ONCE: Final = 256

Probe = Callable[[Sequence[pa.Table]], Sequence[str | None]]


class IsolationStoppedError(Exception):
    """The worker was asked to stop before all failing records were found."""


@dataclass(slots=True)
class ShardFailures:
    """The failures found in one shard's part of a batch.

    Attributes:
        rows: Error by row number, of every record that fails alone.
        exceeded: Why more records fail than allowed. Then `rows` is incomplete.
        first_error: The error of the first piece that failed. None: no piece failed.
    """

    rows: dict[int, str] = field(default_factory=dict)
    exceeded: str | None = None
    first_error: str | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    shard: str
    start: int
    length: int


class Isolation:
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
        self._failures = {key: ShardFailures() for key in shards}

    def run(self) -> dict[str, ShardFailures]:
        """Find the failing records of every shard.

        Raises:
            IsolationStoppedError: The worker stops.
            SinkError: Spark failed.
        """
        whole = [_Piece(key, 0, rows.num_rows) for key, rows in self._shards.items()]
        failing = self._failing([piece for piece in whole if piece.length])
        self._look_at_samples([piece for piece in failing if self._is_worth_a_sample(piece)])
        while failing := self._within_limits(failing):
            failing = self._failing(list(self._divided(failing)))
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
                found.rows[piece.start] = error
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
            own = errors[number * SAMPLES : (number + 1) * SAMPLES]
            failed = [error for error in own if error is not None]
            share = self._limits[piece.shard] / piece.length
            if failed and _at_least(len(failed), SAMPLES, share) < _UNLIKELY:
                self._failures[
                    piece.shard
                ].exceeded = (
                    f"{len(failed)} of {SAMPLES} records chosen at random from {piece.length} fail"
                )

    def _within_limits(self, failing: Sequence[_Piece]) -> list[_Piece]:
        """Return the pieces to search: none of a shard that is over its limit.

        Each failing piece has at least one failing record. If no record of a shard may fail, only
        its first piece is searched, so that the report can name a record.
        """
        kept: list[_Piece] = []
        for key, found in self._failures.items():
            own = [piece for piece in failing if piece.shard == key]
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

    def _divided(self, pieces: Sequence[_Piece]) -> Iterator[_Piece]:
        for piece in pieces:
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
