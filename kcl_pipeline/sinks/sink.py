"""Commit to a table exactly once: the interface `Sink`, and its one implementation for all formats.

A table stores an id and, per shard, a number v, the position p of the last row, and whether the
shard has ended. A commit adds files and sets these values for several shards, all or none. It is
refused unless the table has exactly what the committer read, so a paused writer cannot commit a
range again. See docs/architecture.md, "Exactly once".

`Sink` is what a worker calls. `TableSink` implements it over the log of any format. A commit reads
the end of the log, compares the id of the table and every shard with what the caller expects, and
makes the one successor of the state that it has read. After **any** failed attempt it reads the log
again and compares: if the table has what the commit sets, it has landed; if the table has what is
expected, the commit is tried again; otherwise it is refused. So a commit that was paused, was
repeated, or lost its answer does no harm, and the type of an exception does not matter.

A log accepts one commit at a time. A writer commits alone until another writer is faster. Then it
announces its batch (`announcements`), and each writer commits announced batches with its own.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import NOTHING_STORED, StoredPosition, check_entries
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.announcements import AnnouncedBatch, AnnouncementStore, share_of_names
from kcl_pipeline.sinks.log import Head, Log


@dataclass(frozen=True, slots=True)
class Positions:
    """What a table stores for several shards, read at one version.

    Attributes:
        table_id: Id of the table, which no other table has. None: the table does not exist.
        shards: One value for each requested key.
    """

    table_id: str | None
    shards: Mapping[str, StoredPosition] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """Whether a commit landed.

    Attributes:
        version: A version of the table that has the commit. None: it was refused.
        refused: Keys of the shards of which anything differs from what was expected; all keys if
            the table has another id.
    """

    version: int | None
    refused: tuple[str, ...] = ()


class Sink(Protocol):
    """Where a worker commits batches: `TableSink` is a table, `foreach` a user's function.

    Files are written by a `batch.BatchWriter` before the commit.

    Attributes:
        stores_positions: False: the positions are those that this process has committed, as with a
            user's function. Then records are processed at least once.
    """

    @property
    def stores_positions(self) -> bool: ...  # noqa: D102 (see Attributes)

    def ensure(self, schema: pa.Schema) -> None:
        """Create the table, or add missing columns.

        Raises:
            TableMismatchError: The columns do not fit the table. The message names them.
            SinkError: The table cannot be used now.
        """

    def positions(self, keys: Sequence[str]) -> Positions:
        """Return the id of the table and what it stores, at the end of its log.

        Raises:
            TableMismatchError: The table may not be written, or a position cannot be read.
            SinkError: The table cannot be read now.
        """

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """Add the files and set what is stored of some shards, or change nothing.

        Also if an earlier attempt or another writer has committed the same, it has landed.

        Args:
            table_id: From `positions`, before the files were written.
            files: The files; without files only the shards are set.
            expected: What the committer read of each shard, by `shard_key`. At least one shard.
            becomes: What the table stores of the same shards afterwards (`StoredPosition.moved`).
            schema: Columns of the output. Those that the table lacks are added to it (see
                `ensure`). None: they are not known, because there are no files.

        Raises:
            ValueError: There is no shard, or `becomes` does not follow what is expected.
            TableMismatchError: The columns do not fit the table any more.
            SinkError: The outcome is unknown. Call again, or read `positions`.
        """

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table.

        A batch that is repeated, also with another end, appends them again. Readers take one row of
        each record.

        Args:
            records: `RECORD_SCHEMA` and at least the columns `lease_key` and `error`.

        Raises:
            SinkError: The caller may repeat the call.
        """


@runtime_checkable
class CheckedSink(Protocol):
    """A sink that can check its output before the first batch."""

    def check(self) -> object:
        """Check that the output can be written.

        Raises:
            TableMismatchError: It cannot, also later.
            SinkError: It cannot be reached now.
        """


@runtime_checkable
class FileKeepingSink(Protocol):
    """A sink that knows whether files that were written before its table are in the table's place.

    Without this, such files are written again after the table was created.
    """

    def has_files(self, files: Sequence[DataFile]) -> bool:
        """Return whether each file exists with its size.

        Raises:
            SinkError: It cannot be found out now.
        """


def shard_key(stream: StreamId, shard_id: str) -> str:
    """Return the key of a shard in a sink: ARN and creation time of its stream, and the shard.

    A stream that is created again has other keys. A stream whose description has no creation time
    uses 0, and one whose description has no ARN its name.

    Args:
        stream: The stream, as the service or its lease keys describe it.
        shard_id: The shard.

    Raises:
        SinkError: The ARN is not known, because the service does not describe the stream now.
    """
    created = stream.creation_epoch
    if created is None:
        created = (stream.created_millis or 0) // 1000
    if stream.arn is None and stream.account is not None:
        raise SinkError(
            f"the shard {shard_id} of {stream.name} has no key in the sink: the ARN of its stream "
            "is unknown"
        )
    return f"{stream.arn or stream.name}/{created}/{shard_id}"


MAX_ATTEMPTS: Final = 200
_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4
_CROWDED: Final = 1.2
_POLL_SECONDS: Final = 0.004
_LONGEST_ATTEMPT_SECONDS: Final = 2.0
_ATTEMPTS_KEPT: Final = 5
_ATTEMPTS_OF_COLLECTED: Final = 4
_FIRST_LOOK: Final = 1.2
_NEXT_LOOK: Final = 0.5
_FEWEST_WRITERS: Final = 4.0
"""A writer that has met another one expects so many. It finds out how many there are."""
_TURN: Final = 0.4
"""Attempts that pass between the turns of two writers, if they are evenly spread.

Closer turns make a lone commit a little faster. But several writers then read the announcements at
the same time, and the store takes longer for each of them.
"""
_MOST_TURNS: Final = 2
"""Turns that a writer leaves to the announcements before its own. Their writers may have died."""
_LOG: Final = logging.getLogger(__name__)
_SUSPECT: Final = "a commit that included it failed, and succeeded without it"


@dataclass(slots=True)
class _Commit:
    """A commit that is under way.

    Attributes:
        table_id: Id of the table that the positions were read from.
        files: The files.
        schema: Columns of the output. None: they are not known.
        expected: What the caller read of each shard. The keys begin with the application.
        becomes: What the table stores of the same shards afterwards.
        is_alone: Whether it is not, or cannot be, announced.
        announced: The batch as other writers see it. None: it is not announced.
        suspects: Batches of others with which the last attempt failed. The next one is without.
        attempts: Number of attempts up to now.
    """

    table_id: str
    files: Sequence[DataFile]
    schema: pa.Schema | None
    expected: Mapping[str, StoredPosition]
    becomes: Mapping[str, StoredPosition]
    is_alone: bool
    announced: AnnouncedBatch | None = None
    suspects: tuple[AnnouncedBatch, ...] = ()
    attempts: int = 0


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
        self._head: Head | None = None

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
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """See `Sink.commit`."""
        check_entries(expected, becomes)
        if table_id is None:
            raise ValueError("a commit needs the id of the table, from `positions`")
        commit = _Commit(
            table_id,
            files,
            schema,
            {self._named(key): stored for key, stored in expected.items()},
            {self._named(key): stored for key, stored in becomes.items()},
            is_alone=self._announcements is None,
        )
        with self._serialized():
            outcome = self._commit(commit)
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
        decided: CommitOutcome | None = None
        while decided is None:
            attempt = commit.attempts
            if attempt >= MAX_ATTEMPTS:
                raise SinkError(
                    f"{self._log.name}: {MAX_ATTEMPTS} attempts to commit lost to other writers"
                )
            try:
                decided = self._round(commit)
            except TableMismatchError:
                # Nobody may land it until the table fits again; then its writer looks at the log
                self._withdraw(commit)
                raise
            if decided is None and commit.is_alone and not commit.suspects:
                self._back_off(attempt)
        # Who lands an announcement removes it. An attempt may have landed without an answer.
        if decided.version is None or commit.attempts:
            self._withdraw(commit)
        return decided

    def _withdraw(self, commit: _Commit) -> None:
        """Delete the announcement of a commit, if it has one."""
        if self._announcements is not None and commit.announced is not None:
            self._announcements.remove([commit.announced])
            commit.announced = None

    def _round(self, commit: _Commit) -> CommitOutcome | None:
        """Compare the shards with the end of the log, and make an attempt if all fit."""
        if self._pace.contended and not commit.is_alone:
            decided = self._wait_for_others(commit)
            if decided is not None:
                return decided
        with self._pace.attempt():
            announced = None if commit.suspects else commit.announced
            if self._announcements is not None and announced is not None:
                self._announcements.collect(announced.name, self._head, self._log)
            try:
                head = self._read()
            except TableMismatchError:
                decided = self._decided(self._peek(), commit)
                if decided is None:
                    raise
                return decided  # it has landed, or another writer has the shard
            # A writer that commits alone needs less time. So what was collected is tried again.
            most = commit.attempts + (1 if announced is None else _ATTEMPTS_OF_COLLECTED)
            while commit.attempts < min(most, MAX_ATTEMPTS):
                commit.attempts += 1
                decided = self._decided(head, commit)
                if decided is not None:
                    return decided
                if commit.schema is not None and self._log.ensure(commit.schema):
                    return None  # It has added columns, which is a version of its own.
                decided, head = self._attempt(head, commit)
                if decided is not None or commit.suspects:
                    return decided
        return None

    def _attempt(self, head: Head, commit: _Commit) -> tuple[CommitOutcome | None, Head]:
        """Make one attempt to add the batch after `head`, with announced ones if it is announced.

        Returns:
            The outcome, None if another attempt may succeed. And the end of the log after it.

        Raises:
            SinkError: The attempt failed, and the log has not moved. The request may still be on
                its way; the next commit finds out.
        """
        others: tuple[AnnouncedBatch, ...] = ()
        store = self._announcements
        version = head.version
        if store is not None and commit.announced is not None and not commit.suspects:
            others = store.piggybacked(head, commit.expected)
        files, sets = list(commit.files), dict(commit.becomes)
        for other in others:
            files += other.files
            sets |= other.becomes
        try:
            self._log.add(head, files, sets)
        except Exception:
            now = self._next(version)  # the caller compares the shards with it
            if now.version == version:
                if not others:
                    raise
                commit.suspects = others  # The next attempt is without them.
                return None, now
            commit.suspects = ()
            self._pace.lost(1 + len(others))
            return None, now
        self._withdraw(commit)
        if store is not None and others:
            store.remove(others)
        if store is not None and commit.suspects:
            store.reject((one.name for one in commit.suspects), _SUSPECT)
        self._pace.landed(1 + len(others))
        self._head = None  # It is not the newest one any more, and may be a copy.
        try:
            self._log.upkeep(version + 1)
        except Exception as error:  # noqa: BLE001 (the commit has landed)
            _LOG.warning("upkeep of %s failed: %s", self._log.name, error)
        return CommitOutcome(version + 1), head

    def _wait_for_others(self, commit: _Commit) -> CommitOutcome | None:
        """Announce the batch, and wait until another writer commits it, or it is this one's turn.

        Returns:
            The outcome; None if this writer makes the next attempt.
        """
        decided = self._announce(commit) if commit.announced is None else None
        store, announced = self._announcements, commit.announced
        if decided is not None or store is None or announced is None:
            return decided
        turns, began = 0, self._clock.monotonic()
        version = -1 if self._head is None else self._head.version
        for is_turn in self._pace.looks(share_of_names(announced.name)):
            # Version by version: the one that has the batch ends the wait.
            while (head := self._peek()).version != version:
                version = head.version
                decided = self._decided(head, commit)
                if decided is not None:
                    if decided.version is not None:
                        batches = head.changed / len(commit.becomes)
                        self._pace.landed_by_others(batches, self._clock.monotonic() - began)
                    return decided
            turns += is_turn
            if is_turn:
                # 0: it is the first one. None: another writer has removed it.
                ahead = 0 if turns > _MOST_TURNS else store.before(announced.name)
                if not ahead:
                    return None
                self._pace.left(ahead)
        return None

    def _announce(self, commit: _Commit) -> CommitOutcome | None:
        """Announce the batch, unless the last state that was read decides."""
        if self._announcements is None:
            return None
        # A state older than the end of the log will do: nobody commits what does not fit.
        head = self._head or self._peek()
        decided = self._decided(head, commit)
        if decided is not None:
            return decided
        # It also checks that the table may be written: who may not write announces nothing.
        if commit.schema is None or self._log.ensure(commit.schema):
            head = self._read()
        commit.announced = self._announcements.announce(
            head.form,
            commit.table_id,
            commit.files,
            commit.expected,
            commit.becomes,
            self._log,
        )
        commit.is_alone = commit.announced is None
        return None

    def _decided(self, head: Head, commit: _Commit) -> CommitOutcome | None:
        """Return the outcome that a state of the table shows. None: the batch can be committed."""
        if head.table_id != commit.table_id:
            return CommitOutcome(None, tuple(commit.expected))
        now = {key: head.stored(key) for key in commit.expected}
        if now == commit.becomes:
            return CommitOutcome(head.version)
        refused = tuple(key for key, stored in commit.expected.items() if now[key] != stored)
        return CommitOutcome(None, refused) if refused else None

    def _read(self) -> Head:
        head = self._log.read()
        if head is None:
            raise SinkError(
                f"the table {self._log.name} does not exist any more; it was removed while a "
                "worker was writing to it"
            )
        self._head = head
        return head

    def _next(self, version: int) -> Head:
        """Return the state after a failed attempt to succeed `version`.

        After a lost race the next version is enough. A writer that reads up to the end every time
        loses again and again to one that commits alone, which needs fewer requests.
        """
        head = self._peek()
        return head if head.version != version else self._read()

    def _peek(self) -> Head:
        self._head = self._log.peek() or self._read()
        return self._head

    def _back_off(self, attempt: int) -> None:
        self._clock.sleep(self._rng.uniform(0, backoff_seconds(attempt)))


def backoff_seconds(attempt: int) -> float:
    """Return the longest wait after an attempt (from 0) that lost to another writer."""
    return min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2.0 ** min(attempt, 10))


class CommitPace:
    """Estimate the contention on the log, and when a writer looks at it or makes an attempt.

    Announcements have an order, which all writers see. A writer whose name comes early has its
    turn early, so mostly the first one makes an attempt while the others wait. The more writers
    there are, the longer the turns are spread: two fifths of an attempt pass between two of them.
    Only a writer that has its turn lists the announcements. If others come before its own, its next
    turn is after theirs. So writers that meet for the first time, and do not know how many they
    are, do not attempt all at once.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._batches_per_commit = 1.0
        self._ahead = 0
        self._attempts: deque[float] = deque(maxlen=_ATTEMPTS_KEPT)

    @property
    def contended(self) -> bool:
        """Whether other writers recently committed between this writer's commits."""
        return self._batches_per_commit > _CROWDED

    def lost(self, batches: int) -> None:
        """Note that another writer took the version while this many batches were waiting."""
        self._batches_per_commit = max(self._batches_per_commit, _FEWEST_WRITERS, float(batches))

    def left(self, ahead: int) -> None:
        """Note that a turn is left to the writers of so many announcements, which come earlier."""
        self._ahead = ahead
        self.lost(ahead + 1)

    def landed(self, batches: float) -> None:
        """Note a successful commit with this many batches."""
        self._batches_per_commit += (max(batches, 1.0) - self._batches_per_commit) / 4

    def landed_by_others(self, batches: float, waited_seconds: float) -> None:
        """Note that another writer has committed this one's batch after so long a wait.

        Args:
            batches: Number of batches in that commit, about. 0: unknown.
            waited_seconds: From the announcement to the look that found it. This is mostly some two
                attempts. A writer that makes no attempts learns from it how long they take now.
        """
        if batches:
            self.landed(batches)
        self._note_attempt(waited_seconds / 2)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measure one attempt, also one that is lost: from the reading of announcements on."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self._note_attempt(self._clock.monotonic() - began)

    def _note_attempt(self, seconds: float) -> None:
        self._attempts.append(min(max(seconds, _POLL_SECONDS), _LONGEST_ATTEMPT_SECONDS))

    @property
    def _attempt_seconds(self) -> float:
        """What an attempt takes now. One that waited for a failed request does not count alone.

        It follows a slow store: turns that are closer than an attempt make many writers attempt at
        the same time, and the store even slower.
        """
        return statistics.median(self._attempts) if self._attempts else 0.0

    def looks(self, share: float) -> Iterator[bool]:
        """Wait, and yield when the caller looks at the log: whether it is also its turn.

        The first look is when an attempt of another writer has probably ended. A turn that is left
        to others comes again after the turns of those that `left` has named.

        Args:
            share: Which part of all names is before that of the writer's announcement.
        """
        began, waited, wait = self._clock.monotonic(), 0.0, _FIRST_LOOK
        turn = share * _TURN * self._batches_per_commit * self._attempt_seconds
        while True:
            seconds = max(min(self._spread(wait), turn - waited), _POLL_SECONDS)
            self._clock.sleep(seconds)
            waited = max(waited + seconds, self._clock.monotonic() - began)
            is_turn = waited >= turn
            yield is_turn
            wait = _NEXT_LOOK
            if is_turn:
                turn = waited + self._spread(max(_TURN * self._ahead, 1.0))

    def _spread(self, attempts: float) -> float:
        return attempts * self._attempt_seconds * self._rng.uniform(0.8, 1.2)
