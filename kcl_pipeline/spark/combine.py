"""Combined commits: batches that wait for a crowded log are announced, and whoever commits next takes them along (design §3).

An announcement is one small object beside the log: the files of a prepared batch and, per lease, its number and the two numbers it expects. Anyone may land
it, at any later time and also after its owner died, if and only if the table has **exactly** the expected numbers: so it lands once or never,
whoever tries. The numbers of a lease never come back to what they were, so an announcement that does not match any more is hopeless for ever.
Losing the race for a version then costs nothing: the winner has usually taken the batch along.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from kcl_pipeline.batch import DataFile, SinkNumbers
from kcl_pipeline.clock import Clock
from kcl_pipeline.spark.delta_log import DeltaLog, first_line
from kcl_pipeline.spark.files import unique_name
from kcl_pipeline.spark.storage import Storage

FOLDER: Final = "_kcl_pipeline/announced"
MAX_RIDERS: Final = 64
_FORMAT: Final = 1
_CROWDED: Final = 1.2
_POLL_SECONDS: Final = 0.004
_LONGEST_ATTEMPT_SECONDS: Final = 0.5
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """One lease of a batch: the application transactions of its two numbers, the data number it sets and the numbers it expects."""

    data_id: str
    fence_id: str
    number: int
    expected: SinkNumbers

    def transactions(self) -> dict[str, int]:
        """What the commit writes for this lease: the fence as it is, so that any client's conflict check sees both."""
        fence = {} if self.expected.fence is None else {self.fence_id: self.expected.fence}
        return {self.data_id: self.number, **fence}


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to land. `name` is its announcement's object; empty while it is not announced."""

    files: tuple[DataFile, ...]
    claims: tuple[Claim, ...]
    name: str = ""

    def matches(self, log: DeltaLog) -> bool:
        """Whether the table has exactly the numbers that this batch expects."""
        return all(SinkNumbers(log.transaction(claim.data_id), log.transaction(claim.fence_id)) == claim.expected for claim in self.claims)


class Pace:
    """How crowded the log is, and how long to wait for others before trying oneself: long enough that about one of the waiting writers tries at a time."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._batches_per_commit = 1.0
        self._attempt_seconds = 2 * _POLL_SECONDS

    @property
    def crowded(self) -> bool:
        """Whether other writers were in the way lately."""
        return self._batches_per_commit > _CROWDED

    def lost(self, batches: int) -> None:
        """Another writer had the version first, when this many batches were waiting to land."""
        self._batches_per_commit = max(self._batches_per_commit, 2.0, float(batches))

    def landed(self, batches: float) -> None:
        """A commit landed, with this many batches in it."""
        self._batches_per_commit += (max(batches, 1.0) - self._batches_per_commit) / 4

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measures one attempt. The shortest ones count: the others say how busy this machine is, and waiting for that too would feed on itself."""
        began = self._clock.monotonic()
        yield
        seconds = min(max(self._clock.monotonic() - began, _POLL_SECONDS), _LONGEST_ATTEMPT_SECONDS)
        self._attempt_seconds = min(seconds, self._attempt_seconds + (seconds - self._attempt_seconds) / 32)

    def polls(self) -> Iterator[None]:
        """Wait, and come back now and then to look; ends when it is time to try oneself."""
        patience = self._rng.uniform(0, 2 * self._batches_per_commit * self._attempt_seconds)
        pause = max(self._attempt_seconds / 2, _POLL_SECONDS)
        for _ in range(math.ceil(patience / pause)):
            self._clock.sleep(pause)
            yield


class Board:
    """The announcements of one table. Every failure here is survived: a batch that cannot be announced is committed by its owner alone."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, PreparedBatch | None] = {}

    def announce(self, batch: PreparedBatch) -> PreparedBatch:
        """Make the batch known to all writers; it comes back with its name, or as it was when that failed."""
        name = f"{FOLDER}/{unique_name()}.json"
        try:
            self._storage.write(name, _encoded(batch))
        except OSError as error:
            _LOG.warning("a batch could not be announced, it goes on alone: %s", first_line(error))
            return batch
        return replace(batch, name=name)

    def remove(self, batches: Iterable[PreparedBatch]) -> None:
        """Take announcements away that have landed or never can."""
        for batch in batches:
            if not batch.name:
                continue
            self._known.pop(batch.name, None)
            try:
                self._storage.delete(batch.name)
            except OSError as error:
                _LOG.info("an announcement that is settled stays until the next reader: %s", first_line(error))

    def riders(self, log: DeltaLog, own: PreparedBatch | None = None) -> tuple[PreparedBatch, ...]:
        """Announced batches that may land on the log's version together with `own`: exactly the expected numbers, no lease twice, files still there.

        What was announced before the previous call and does not match now is hopeless and taken away. It was read before the log was, so it cannot be newer.
        """
        before = set(self._known)
        taken = {claim.data_id for claim in own.claims} if own else set()
        found: list[PreparedBatch] = []
        for batch in self._read(skip={own.name} if own else set()):
            if not batch.matches(log):
                if batch.name in before:
                    self.remove([batch])
                continue
            leases = {claim.data_id for claim in batch.claims}
            if len(found) < MAX_RIDERS and taken.isdisjoint(leases) and all(self._exists(file) for file in batch.files):
                taken |= leases
                found.append(batch)
        return tuple(found)

    def _exists(self, file: DataFile) -> bool:
        try:
            return self._storage.exists(file.path)
        except OSError:
            return False

    def _read(self, skip: Collection[str]) -> list[PreparedBatch]:
        try:
            names = [stored.path for stored in self._storage.list(FOLDER) if stored.path.endswith(".json")]
        except OSError as error:
            _LOG.info("the announcements could not be listed: %s", first_line(error))
            return []
        self._known = {name: self._known[name] for name in names if name in self._known}
        for name in names:
            if name not in self._known and name not in skip:
                try:
                    self._known[name] = _decoded(self._storage.read(name), name)
                except OSError:  # landed and taken away since it was listed
                    continue
        return [batch for name in names if name not in skip and (batch := self._known.get(name)) is not None]


def combined(batches: Sequence[PreparedBatch]) -> tuple[tuple[DataFile, ...], dict[str, int]]:
    """The files and the transactions of one commit that lands all these batches."""
    files = tuple(file for batch in batches for file in batch.files)
    return files, {key: number for batch in batches for claim in batch.claims for key, number in claim.transactions().items()}


def _encoded(batch: PreparedBatch) -> bytes:
    content = {
        "format": _FORMAT,
        "files": [
            {"path": file.path, "size": file.size, "rows": file.rows, "partitionValues": dict(file.partition_values), "modifiedMillis": file.modified_millis}
            for file in batch.files
        ],
        "claims": [
            {
                "dataId": claim.data_id,
                "fenceId": claim.fence_id,
                "number": claim.number,
                "expectedData": claim.expected.data,
                "expectedFence": claim.expected.fence,
            }
            for claim in batch.claims
        ],
    }
    return json.dumps(content).encode()


def _decoded(data: bytes, name: str) -> PreparedBatch | None:
    """The batch of an announcement; None for what is none of ours, or of a later format: nobody lands what he does not understand."""
    try:
        content: dict[str, Any] = json.loads(data)
        if content["format"] != _FORMAT or not content["claims"]:
            return None
        files = [DataFile(one["path"], one["size"], one["rows"], one["partitionValues"], one["modifiedMillis"]) for one in content["files"]]
        claims = [Claim(one["dataId"], one["fenceId"], one["number"], SinkNumbers(one["expectedData"], one["expectedFence"])) for one in content["claims"]]
    except (ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not an announcement: %s", name, first_line(error))
        return None
    return PreparedBatch(tuple(files), tuple(claims), name)
