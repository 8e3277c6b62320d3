"""Commit batches to a Delta table exactly once.

See docs/decisions/0002-exactly-once.md. Per lease the table stores two application transactions:
`<application>/<lease key>` (data) and `<application>/<lease key>/fence`. A commit compares the
versions that it expects with those at one version of the log, and writes exactly the next version
or nothing. A commit that was paused, repeated, or invalidated by a fence therefore fails. A commit
that only lost the race for the next version is tried again, beginning with the comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import (
    CommitEntry,
    CommitOutcome,
    DataFile,
    TxnVersions,
    Written,
    names_of,
)
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.commits import names, positions
from kcl_pipeline.delta.commits.announcements import Claim, PreparedBatch
from kcl_pipeline.delta.commits.combined import AnnouncementStore, Pace, combined
from kcl_pipeline.delta.dead_letters.writer import DeadLetterTable
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.log.entries import MAX_NUMBER, MIN_NUMBER
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.table_check import TableCheck
from kcl_pipeline.errors import SinkError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.position import Position

__all__ = ["DeltaCommitter", "DeltaSink"]

MAX_ATTEMPTS: Final = 200
_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4
_NOT_REPRESENTABLE: Final = (
    f"its number is not between {MIN_NUMBER} and {MAX_NUMBER}, which a Delta transaction can hold"
)
_SUSPECT: Final = "a commit that included it failed, and succeeded without it"


class DeltaCommitter:
    """The `TransactionalSink` of a Delta table. One per worker.

    Thread-safe: a lock serializes the calls.
    """

    def __init__(
        self,
        sink: DeltaSink,
        application_name: str,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        events: EventSink = ignore_events,
    ) -> None:
        self._sink = sink
        self._application = application_name
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._log = DeltaLog(sink.uri, sink.storage_options, self._clock)
        self._announcements = AnnouncementStore(self._log.storage, events)
        self._check = TableCheck(sink, self._log, self._back_off)
        dead_letters = DeltaSink(sink.dead_letters, storage_options=sink.storage_options)
        self._dead_letters = DeadLetterTable(dead_letters, application_name, self._clock, self._rng)
        self._pace = Pace(self._clock, self._rng)
        self._prefer_short = False
        self._lock = self._clock.lock()

    def check(self) -> int | None:
        """Check the store and the table (see `CheckedSink.check`). Returns the table's version."""
        with self._lock:
            return self._log.version if self._check.start() else None

    def ensure_table(self, schema: pa.Schema) -> None:
        """Create the table, or check that the schema fits (`TransactionalSink.ensure_table`)."""
        with self._lock:
            self._check.ensure(schema)

    def columns(self) -> TableColumns:
        """What the result of a transform must fit (see `TableCheck.columns`)."""
        with self._lock:
            return self._check.columns()

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """See `TransactionalSink.txn_versions`."""
        with self._lock:
            exists = self._log.refresh()
            if exists:
                self._check.table()
            return {key: self._numbers(key) if exists else TxnVersions() for key in lease_keys}

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Commit the batch, or return the refused leases (see `TransactionalSink.commit`)."""
        _check_entries(entries)
        unfit = tuple(one.lease_key for one in entries if not _representable(one.number))
        if unfit:
            return CommitOutcome(None, unfit, _NOT_REPRESENTABLE)
        with self._lock:
            if not self._log.peek():
                self._refresh_existing()
            claims = tuple(self._claim(entry) for entry in entries)
            return self._commit(PreparedBatch(tuple(written.files), claims), entries, written)

    def _commit(
        self, own: PreparedBatch, entries: Sequence[CommitEntry], written: Written
    ) -> CommitOutcome:
        alone = not self._sink.combined_commits
        for attempt in range(MAX_ATTEMPTS):
            outcome = self._decided(own, entries)
            if outcome is None and self._pace.contended and not alone:
                self._check.fit(written.schema)
                own = own if own.name else self._announcements.announce(own, self._log)
                alone = not own.name
                outcome = self._wait_for_others(own, entries)
            if outcome is None:
                self._refresh_existing()
                outcome = self._decided(own, entries)
            if outcome is not None:
                self._announcements.remove([own])
                return outcome
            compared = self._log.version
            self._check.fit(written.schema)
            if self._log.version != compared:
                continue
            outcome, batches = self._land_with_others(own)
            if outcome is not None:
                return outcome
            self._pace.lost(batches)
            if not self._sink.combined_commits:
                self._back_off(attempt)
        raise SinkError(
            f"{self._log.root}: {MAX_ATTEMPTS} attempts to commit lost to other writers"
        )

    def _land_with_others(self, own: PreparedBatch) -> tuple[CommitOutcome | None, int]:
        """Make one attempt to commit the batch, with announced ones if it is announced itself.

        If the combined commit fails, the batch is committed alone: batches of others never fail
        this one.

        Returns:
            The outcome (None: another writer was faster), and the number of batches.
        """
        with self._pace.attempt():
            others = self._announcements.piggybacked(self._log, own) if own.name else ()
            try:
                return self._land((own, *others)), 1 + len(others)
            except SinkError:
                if not others:
                    raise
        outcome = self._land((own,))
        if outcome is not None:
            self._announcements.reject((one.name for one in others), _SUSPECT)
        return outcome, 1

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """Increment the fence version alone (see `TransactionalSink.fence`).

        If a batch of this lease is announced, that batch is committed instead, and the caller
        reads the versions again.
        """
        raised = replace(expected, fence=(expected.fence or 0) + 1)
        if not _representable(raised.fence or 0):
            raise SinkError(f"cannot increment the fence of {lease_key}: {_NOT_REPRESENTABLE}")
        fence_id = f"{self._application}/{names_of(lease_key)[0]}/fence"
        return self._replace(lease_key, expected, raised, lambda: {fence_id: raised.fence or 0})

    def move(
        self, key: str, expected: TxnVersions, position: Position | None, *, ended: bool
    ) -> TxnVersions | None:
        """Set the position without files (see `PositionStore.move`). Announcements: see `fence`."""
        sets = expected.moved_to(position, ended=ended)
        entry = CommitEntry(key, sets.number or 0, expected, sets)
        return self._replace(key, expected, sets, lambda: self._claim(entry).transactions())

    def _replace(
        self,
        key: str,
        expected: TxnVersions,
        raised: TxnVersions,
        transactions: Callable[[], Mapping[str, int]],
    ) -> TxnVersions | None:
        """Commit transactions without files if the table has the expected versions of a lease."""
        with self._lock:
            if not self._log.refresh():
                return expected
            self._check.store()
            self._check.table()
            suspects: tuple[PreparedBatch, ...] = ()
            for attempt in range(MAX_ATTEMPTS):
                if not expected.fits(self._numbers(key)):
                    return None
                announced = () if suspects else self._announced_of(key)
                try:
                    if announced:
                        if self._land(announced) is not None:
                            return None
                    elif self._attempt((), transactions()) is not None:
                        self._announcements.reject((one.name for one in suspects), _SUSPECT)
                        return raised
                except SinkError:
                    if not announced:
                        raise
                    suspects = announced
                    continue
                self._back_off(attempt)
            raise SinkError(
                f"{self._log.root}: {MAX_ATTEMPTS} attempts to commit the versions of {key} lost "
                "to other writers"
            )

    def prefers_short_names(self) -> bool:
        """See `ShortNames.prefers_short_names`."""
        with self._lock:
            if not self._log.refresh():
                return True
            found = self._log.transactions()
            return found is not None and names.prefers_short(self._application, found)

    def name_positions(self, *, short: bool) -> None:
        """See `ShortNames.name_positions`."""
        with self._lock:
            self._prefer_short = short

    def use_long_names(self) -> None:
        """See `ShortNames.use_long_names`."""
        with self._lock:
            self._prefer_short = False
            for attempt in range(MAX_ATTEMPTS):
                if not self._log.refresh():
                    return
                renamed = self._renamed()
                if not renamed or self._attempt((), renamed) is not None:
                    return
                self._back_off(attempt)
            raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts lost to other writers")

    def _renamed(self) -> dict[str, int]:
        """Return the long names and numbers of all positions that have short names now."""
        transactions = self._log.transactions()
        if transactions is None:
            raise SinkError(f"the application transactions of {self._log.root} cannot be listed")
        found: dict[str, int] = {}
        for long in names.long_ids_with_marker(self._application, transactions):
            stored = positions.versions_of(transactions.get, "", "", long, short=True)
            found |= positions.named(long, stored, short=False)
        return found

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records that the table does not have yet (see `DeadLetterTable`)."""
        with self._lock:
            self._dead_letters.append(records)

    def _numbers(self, key: str) -> TxnVersions:
        return self._stored(self._claim(CommitEntry(key, 0, TxnVersions())))

    def _stored(self, claim: Claim) -> TxnVersions:
        return replace(claim.versions(self._log.transaction), table=self._log.table_id)

    def _claim(self, entry: CommitEntry) -> Claim:
        """Return the claim of an entry with the names that the table has for its shard now."""
        return Claim.of(
            entry, self._application, self._log.transaction, prefer_short=self._prefer_short
        )

    def _decided(self, own: PreparedBatch, entries: Sequence[CommitEntry]) -> CommitOutcome | None:
        """The outcome that the log already shows; None if the batch can be committed.

        After the expected versions, a number belongs to exactly one range of one lease. If all
        numbers are in the table, all ranges are committed: a response was lost, or another writer
        committed the batch. Older entries of the log prove nothing, because numbers start again
        after a lease row was deleted by hand.
        """
        required = {key: n for claim in own.claims for key, n in claim.required().items()}
        before = {key: n for claim in own.claims for key, n in claim.before().items()}
        version = self._log.landed_together(required, after=before)
        if version is not None:
            return CommitOutcome(version)
        claims = [self._claim(entry) for entry in entries]
        now = [self._stored(claim) for claim in claims]
        if all(entry.is_at(found) for entry, found in zip(entries, now, strict=True)):
            return CommitOutcome(self._log.landed_at(next(iter(required))))
        refused = tuple(
            entry.lease_key
            for entry, found, claim, mine in zip(entries, now, claims, own.claims, strict=True)
            # the position may have got other names since
            if not entry.expected.fits(found) or claim.is_short != mine.is_short
        )
        return CommitOutcome(None, refused) if refused else None

    def _announced_of(self, lease_key: str) -> tuple[PreparedBatch, ...]:
        """Announced batches that have this lease."""
        data_id = f"{self._application}/{names_of(lease_key)[0]}"
        return tuple(
            batch
            for batch in self._announcements.piggybacked(self._log)
            if any(claim.data_id == data_id for claim in batch.claims)
        )

    def _wait_for_others(
        self, own: PreparedBatch, entries: Sequence[CommitEntry]
    ) -> CommitOutcome | None:
        """Wait a short time for another writer to commit the batch; None if none has done so."""
        decided_at = None
        for _ in self._pace.polls():
            self._log.peek()
            if self._log.read_to == decided_at:
                continue
            decided_at = self._log.read_to
            outcome = self._decided(own, entries)
            if outcome is not None:
                if outcome.version is not None:
                    mine = sum(len(claim.transactions()) for claim in own.claims)
                    self._pace.landed(self._log.transactions_at(outcome.version) / mine)
                return outcome
        return None

    def _land(self, batches: Sequence[PreparedBatch]) -> CommitOutcome | None:
        """Commit the batches together and delete their announcements.

        None: another writer was faster.
        """
        version = self._attempt(*combined(batches))
        if version is None:
            return None
        self._announcements.remove(batches)
        self._pace.landed(len(batches))
        self._log.maintain(version)
        return CommitOutcome(version)

    def _attempt(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> int | None:
        """Write the next version of the log and return its number.

        None: another writer was faster. The log is then read up to its end.
        """
        before = self._log.version
        try:
            self._log.append(files, transactions)
        except SinkError:
            self._refresh_existing()
            if self._log.version == before:
                raise
            return None
        return before + 1

    def _back_off(self, attempt: int) -> None:
        self._clock.sleep(
            self._rng.uniform(
                0, min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2 ** min(attempt, 10))
            )
        )
        self._refresh_existing()

    def _refresh_existing(self) -> None:
        if not self._log.refresh():
            raise SinkError(
                f"the table {self._log.root} does not exist any more; it was removed while a "
                "worker was writing to it"
            )


def _representable(number: int) -> bool:
    return MIN_NUMBER <= number <= MAX_NUMBER


def _check_entries(entries: Sequence[CommitEntry]) -> None:
    keys = [entry.lease_key for entry in entries]
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"a commit needs at least one lease and each only once: {keys}")
    same = [one.lease_key for one in entries if one.sets is None and one.is_at(one.expected)]
    if same:
        raise ValueError(
            f"the number of a batch must be new, but the table already has it for {same}"
        )
