"""Commit to a table exactly once, over the log of any format.

A commit reads the end of the log, compares the id of the table and every entry with what the caller
expects, and makes the one successor of the state that it has read. After **any** failed attempt it
reads the log again and compares: if the table has what the entries set, the commit has landed; if
it has what they expect, the commit is tried again; otherwise it is refused. So a paused, a
repeated, and a commit whose answer was lost are all right, and no type of exception decides.

A log accepts one commit at a time. A writer commits alone until another writer is faster. Then it
announces its batch (`announcements`), and each writer commits announced batches with its own.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import Written
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.sinks.announcements import AnnouncementStore, PreparedBatch, combined
from kcl_pipeline.sinks.log import Head, Log
from kcl_pipeline.sinks.sink import CommitOutcome, Entry, Positions, check_entries
from kcl_pipeline.sinks.stored import NOTHING_STORED

MAX_ATTEMPTS: Final = 200
_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4
_CROWDED: Final = 1.2
_POLL_SECONDS: Final = 0.004
_LONGEST_ATTEMPT_SECONDS: Final = 0.5
_LOG: Final = logging.getLogger(__name__)
_SUSPECT: Final = "a commit that included it failed, and succeeded without it"


@dataclass(slots=True)
class _Commit:
    """A commit that is under way.

    Attributes:
        batch: The batch; it has a name after it was announced.
        schema: Columns of the output. None: there is no output.
        is_alone: Whether it is not, or cannot be, announced.
        suspects: Batches of others with which the last attempt failed. The next one is without.
    """

    batch: PreparedBatch
    schema: pa.Schema | None
    is_alone: bool
    suspects: tuple[PreparedBatch, ...] = field(default=())


class TableSink:
    """The `Sink` of a table. One per worker.

    Thread-safe: a lock serializes the calls.

    Args:
        log: The log of the table.
        application: Name of the application. The keys of two applications in one table differ.
        dead_letters: Appends failed records to the dead-letter table.
        announcements: Has the batches that other writers may commit. None: every writer commits
            alone.
        clock: Measures waits.
        rng: Spreads the waits of writers that meet.
    """

    stores_positions = True

    def __init__(
        self,
        log: Log,
        application: str,
        *,
        dead_letters: Callable[[pa.Table], object],
        announcements: AnnouncementStore | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._log = log
        self._application = application
        self._append_dead_letters = dead_letters
        self._announcements = announcements
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._pace = CommitPace(self._clock, self._rng)
        self._lock = self._clock.lock()

    def ensure(self, schema: pa.Schema) -> None:
        """See `Sink.ensure`."""
        with self._serialized():
            self._log.ensure(schema)

    def positions(self, keys: Sequence[str]) -> Positions:
        """See `Sink.positions`."""
        with self._serialized():
            head = self._log.read()
            if head is None:
                return Positions(None, dict.fromkeys(keys, NOTHING_STORED))
            return Positions(head.table_id, {key: head.stored(self._named(key)) for key in keys})

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `Sink.write_dead_letters`."""
        with self._serialized():
            self._append_dead_letters(records)

    def commit(
        self, table_id: str | None, written: Written, entries: Sequence[Entry]
    ) -> CommitOutcome:
        """See `Sink.commit`."""
        check_entries(entries)
        if table_id is None:
            raise ValueError("a commit needs the id of the table, from `positions`")
        named = tuple(replace(entry, key=self._named(entry.key)) for entry in entries)
        batch = PreparedBatch(table_id, tuple(written.files), named)
        with self._serialized():
            outcome = self._commit(_Commit(batch, written.schema, self._announcements is None))
        begin = len(self._application) + 1
        return replace(outcome, refused=tuple(key[begin:] for key in outcome.refused))

    @contextmanager
    def _serialized(self) -> Iterator[None]:
        """Run one call at a time, and raise any error of the log as a `SinkError`."""
        with self._lock:
            try:
                yield
            except SinkError:
                raise
            except Exception as error:
                raise SinkError(f"the table {self._log.name}: {error}") from error

    def _named(self, key: str) -> str:
        return f"{self._application}/{key}"

    def _commit(self, commit: _Commit) -> CommitOutcome:
        """Attempt the commit until it has landed or is refused."""
        # A commit that was repeated, or landed by another writer, is often known without a read.
        decided = self._decided(self._log.peek() or self._read(), commit.batch)
        attempts = iter(range(MAX_ATTEMPTS))
        while decided is None:
            attempt = next(attempts, None)
            if attempt is None:
                raise SinkError(
                    f"{self._log.name}: {MAX_ATTEMPTS} attempts to commit lost to other writers"
                )
            decided = self._round(commit)
            if decided is None and commit.is_alone and not commit.suspects:
                self._back_off(attempt)
        if self._announcements is not None:
            self._announcements.remove([commit.batch])
        return decided

    def _round(self, commit: _Commit) -> CommitOutcome | None:
        """Compare the entries with the end of the log, and make an attempt if all fit."""
        if self._pace.contended and not commit.is_alone:
            decided = self._wait_for_others(commit)
            if decided is not None:
                return decided
        head = self._read()
        decided = self._decided(head, commit.batch)
        if decided is not None:
            return decided
        if commit.schema is not None and self._log.ensure(commit.schema):
            return None  # It has added columns, which is a version of its own.
        return self._attempt(head, commit)

    def _attempt(self, head: Head, commit: _Commit) -> CommitOutcome | None:
        """Make one attempt to add the batch after `head`, with announced ones if it is announced.

        Returns:
            The outcome. None: another attempt may succeed.

        Raises:
            SinkError: The attempt failed, and the log has not moved. The request may still be on
                its way; the next commit finds out.
        """
        others: tuple[PreparedBatch, ...] = ()
        store = self._announcements
        batches: tuple[PreparedBatch, ...] = (commit.batch,)
        version = head.version
        try:
            with self._pace.attempt():
                if store is not None and commit.batch.name and not commit.suspects:
                    others = store.piggybacked(head, commit.batch, self._log)
                    batches = (commit.batch, *others)
                self._log.add(head, *combined(batches))
        except Exception:
            now = self._read()
            decided = self._decided(now, commit.batch)
            if decided is None and now.version == version:
                if not others:
                    raise
                commit.suspects = others  # The next attempt is without them.
                return None
            commit.suspects = ()
            self._pace.lost(len(batches))
            return decided
        if store is not None:
            store.remove(batches)
            store.reject((one.name for one in commit.suspects), _SUSPECT)
        self._pace.landed(len(batches))
        try:
            self._log.upkeep(version + 1)
        except Exception as error:  # noqa: BLE001 (the commit has landed)
            _LOG.warning("upkeep of %s failed: %s", self._log.name, error)
        return CommitOutcome(version + 1)

    def _wait_for_others(self, commit: _Commit) -> CommitOutcome | None:
        """Announce the batch, and wait a short time for another writer to commit it."""
        if not commit.batch.name and self._announcements is not None:
            if commit.schema is None:
                head = self._read()
            else:
                self._log.ensure(commit.schema)
                # What is known is enough: who finds another form leaves the batch to this writer.
                head = self._log.peek() or self._read()
            commit.batch = self._announcements.announce(commit.batch, head, self._log)
            commit.is_alone = not commit.batch.name
        seen = -1
        for _ in self._pace.polls():
            head = self._log.peek() or self._read()
            if head.version == seen:
                continue
            seen = head.version
            decided = self._decided(head, commit.batch)
            if decided is not None:
                if decided.version is not None and head.changed:
                    self._pace.landed(head.changed / len(commit.batch.entries))
                return decided
        return None

    def _decided(self, head: Head, batch: PreparedBatch) -> CommitOutcome | None:
        """Return the outcome that a state of the table shows. None: the batch can be committed."""
        if head.table_id != batch.table_id:
            return CommitOutcome(None, tuple(one.key for one in batch.entries))
        now = [head.stored(one.key) for one in batch.entries]
        if all(found == one.becomes for found, one in zip(now, batch.entries, strict=True)):
            return CommitOutcome(head.version)
        refused = tuple(
            one.key for found, one in zip(now, batch.entries, strict=True) if found != one.expected
        )
        return CommitOutcome(None, refused) if refused else None

    def _read(self) -> Head:
        head = self._log.read()
        if head is None:
            raise SinkError(
                f"the table {self._log.name} does not exist any more; it was removed while a "
                "worker was writing to it"
            )
        return head

    def _back_off(self, attempt: int) -> None:
        longest = min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2 ** min(attempt, 10))
        self._clock.sleep(self._rng.uniform(0, longest))


class CommitPace:
    """Estimate the contention on the log, and how long to wait before an attempt.

    The waiting time is chosen so that about one of the waiting writers makes an attempt at a time.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._batches_per_commit = 1.0
        self._attempt_seconds = 2 * _POLL_SECONDS

    @property
    def contended(self) -> bool:
        """Whether other writers recently committed between this writer's commits."""
        return self._batches_per_commit > _CROWDED

    def lost(self, batches: int) -> None:
        """Note that another writer took the version while this many batches were waiting."""
        self._batches_per_commit = max(self._batches_per_commit, 2.0, float(batches))

    def landed(self, batches: float) -> None:
        """Note a successful commit with this many batches."""
        self._batches_per_commit += (max(batches, 1.0) - self._batches_per_commit) / 4

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measure one attempt, also one that is lost: from the reading of announcements on.

        The estimate follows the shortest attempts. Longer ones reflect the load of this machine,
        and waiting for that load would increase it.
        """
        began = self._clock.monotonic()
        try:
            yield
        finally:
            took = max(self._clock.monotonic() - began, _POLL_SECONDS)
            seconds = min(took, _LONGEST_ATTEMPT_SECONDS)
            self._attempt_seconds = min(
                seconds, self._attempt_seconds + (seconds - self._attempt_seconds) / 32
            )

    def polls(self) -> Iterator[None]:
        """Wait in short steps. The caller polls the log after each step and then makes an attempt.

        Ends after a random time.
        """
        wait_seconds = self._rng.uniform(0, 2 * self._batches_per_commit * self._attempt_seconds)
        pause = max(self._attempt_seconds / 2, _POLL_SECONDS)
        for _ in range(math.ceil(wait_seconds / pause)):
            self._clock.sleep(pause)
            yield
