"""A Delta table as the sink: files and application transactions enter its log in one commit, exactly once (design §3).

Per lease the table keeps two application transactions: `<application>/<lease key>` (the data number) and `<application>/<lease key>/fence`. A commit states
the numbers it expects, compares them with those of a version of the log, and writes the very next version or nothing. So a commit that was paused for
an hour, or sent twice, or overtaken by a fence, cannot land. What may lose is only the race for the next version; that is tried again here, from the
comparison on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import CommitEntry, CommitOutcome, DataFile, SinkNumbers, Written
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.spark.combine import Board, Claim, Pace, PreparedBatch, combined
from kcl_pipeline.spark.delta_log import DeltaLog, delta_errors
from kcl_pipeline.spark.schema import delta_schema, misfit, missing_columns, partition_misfit
from kcl_pipeline.spark.storage import table_root

MAX_ATTEMPTS: Final = 200
_TABLE_PROPERTIES: Final = {"delta.checkpointInterval": "50"}
_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """A Delta table to write to.

    `uri` is a local path or an object store's (`s3://bucket/folder`); `storage_options` are delta-rs's (`AWS_ENDPOINT_URL`, `AWS_REGION`, …).
    `partition_by` names columns of the transform's output. `dead_letter_uri` None: `<uri>_dead_letters`. `schema_evolution` adds columns that the output
    has and the table has not; otherwise such a batch is an error. `table_properties` are set when the table is created (`delta.checkpointInterval` is 50
    unless given: the cost of a commit grows with the entries since the last checkpoint). `combined_commits`: a worker that loses the race for a version
    announces its batch, and takes along what others announced. Raises `SettingsError`.
    """

    uri: str
    partition_by: Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict)
    dead_letter_uri: str | None = None
    schema_evolution: bool = False
    table_properties: Mapping[str, str] = field(default_factory=dict)
    combined_commits: bool = True

    def __post_init__(self) -> None:
        if not self.uri.strip():
            raise SettingsError('DeltaSink uri is empty; write a path such as "/data/orders" or "s3://bucket/orders"')
        if isinstance(self.partition_by, str):
            raise SettingsError(f'DeltaSink partition_by="{self.partition_by}" is one text; write partition_by=("{self.partition_by}",)')
        object.__setattr__(self, "partition_by", tuple(self.partition_by))
        if self.dead_letter_uri is not None and table_root(self.dead_letter_uri) == table_root(self.uri):
            raise SettingsError(f"DeltaSink dead_letter_uri={self.dead_letter_uri} is the table itself; name another, or none for {self.uri}_dead_letters")

    @property
    def dead_letters(self) -> str:
        """Where failed records go."""
        return self.dead_letter_uri or f"{table_root(self.uri)}_dead_letters"


class DeltaCommitter:
    """The `TransactionalSink` of a Delta table. One per worker; used by one thread at a time (a lock sees to it)."""

    def __init__(self, sink: DeltaSink, application_name: str, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        self._sink = sink
        self._application = application_name
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._log = DeltaLog(sink.uri, sink.storage_options)
        self._board = Board(self._log.storage)
        self._pace = Pace(self._clock, self._rng)
        self._lock = self._clock.lock()

    def ensure_table(self, schema: pa.Schema) -> None:
        """Create the table with this schema unless it exists, or see that the schema fits (see `TransactionalSink.ensure_table`)."""
        with self._lock:
            reason = partition_misfit(delta_schema(schema), self._sink.partition_by)
            if reason:
                raise SinkError(f"{self._log.root}: {reason}")
            if not self._log.refresh():
                self._log.create(delta_schema(schema), self._sink.partition_by, _TABLE_PROPERTIES | dict(self._sink.table_properties))
                self._log.refresh()
            self._check_table()
            self._fit(schema)

    def numbers(self, lease_keys: Sequence[str]) -> dict[str, SinkNumbers]:
        """The newest numbers of these leases (see `TransactionalSink.numbers`)."""
        with self._lock:
            exists = self._log.refresh()
            return {key: self._numbers(key) if exists else SinkNumbers() for key in lease_keys}

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """Land the batch, or say which leases stand in the way (see `TransactionalSink.commit`)."""
        _check_entries(entries)
        with self._lock:
            if not self._log.peek():
                self._refresh_existing()
            self._fit(written.schema)
            own = PreparedBatch(tuple(written.files), tuple(self._claim(entry) for entry in entries))
            for attempt in range(MAX_ATTEMPTS):
                outcome = self._decided(entries)
                if outcome is None and self._sink.combined_commits and self._pace.crowded:
                    own = own if own.name else self._board.announce(own)
                    outcome = self._taken_along(entries)
                if outcome is None:
                    self._refresh_existing()
                    outcome = self._decided(entries)
                if outcome is not None:
                    self._board.remove([own])
                    return outcome
                with self._pace.attempt():
                    riders = self._board.riders(self._log, own) if own.name else ()
                    outcome = self._land((own, *riders))
                if outcome is not None:
                    return outcome
                self._pace.lost(1 + len(riders))
                if not self._sink.combined_commits:
                    self._back_off(attempt)
            raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts to commit lost to other writers")

    def fence(self, lease_key: str, expected: SinkNumbers) -> SinkNumbers | None:
        """Raise the fence number alone (see `TransactionalSink.fence`). A batch of this lease that is announced is landed instead: read again."""
        with self._lock:
            if not self._log.refresh():
                return expected
            raised = SinkNumbers(expected.data, (expected.fence or 0) + 1)
            for attempt in range(MAX_ATTEMPTS):
                if self._numbers(lease_key) != expected:
                    return None
                announced = [batch for batch in self._board.riders(self._log) if any(claim.data_id == self._data_id(lease_key) for claim in batch.claims)]
                if announced:
                    if self._land(announced) is not None:
                        return None
                elif self._attempt((), {self._fence_id(lease_key): raised.fence or 0}) is not None:
                    return raised
                self._back_off(attempt)
            raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts to fence {lease_key} lost to other writers")

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table, at least once."""
        with self._lock:
            append_dead_letters(self._sink.dead_letters, self._sink.storage_options, records)

    def _numbers(self, lease_key: str) -> SinkNumbers:
        return SinkNumbers(self._log.transaction(self._data_id(lease_key)), self._log.transaction(self._fence_id(lease_key)))

    def _data_id(self, lease_key: str) -> str:
        return f"{self._application}/{lease_key}"

    def _fence_id(self, lease_key: str) -> str:
        return f"{self._application}/{lease_key}/fence"

    def _claim(self, entry: CommitEntry) -> Claim:
        return Claim(self._data_id(entry.lease_key), self._fence_id(entry.lease_key), entry.number, entry.expected)

    def _decided(self, entries: Sequence[CommitEntry]) -> CommitOutcome | None:
        """What the log already says about these entries; None: nothing stands in their way.

        Since the numbers were as expected, a number belongs to one range of one lease alone, so if all are there, all ranges landed: an answer was lost,
        or another writer took them along. Older entries prove nothing: where a lease row was deleted by hand, its numbers begin anew.
        """
        numbers = {self._data_id(entry.lease_key): entry.number for entry in entries}
        version = self._log.landed_together(numbers, after={self._data_id(entry.lease_key): entry.expected.data for entry in entries})
        if version is not None:
            return CommitOutcome(version)
        now = {entry.lease_key: self._numbers(entry.lease_key) for entry in entries}
        if all(now[entry.lease_key].data == entry.number for entry in entries):
            return CommitOutcome(self._log.landed_at(self._data_id(entries[0].lease_key)))
        refused = tuple(entry.lease_key for entry in entries if now[entry.lease_key] != entry.expected)
        return CommitOutcome(None, refused) if refused else None

    def _taken_along(self, entries: Sequence[CommitEntry]) -> CommitOutcome | None:
        """Wait a little for another writer to land the announced batch; None: nobody has yet."""
        for _ in self._pace.polls():
            self._log.peek()
            outcome = self._decided(entries)
            if outcome is not None:
                if outcome.version is not None:
                    self._pace.landed(self._log.transactions_at(outcome.version) / len(entries))
                return outcome
        return None

    def _land(self, batches: Sequence[PreparedBatch]) -> CommitOutcome | None:
        """Land the batches in one commit, if nobody was quicker; then their announcements are settled."""
        version = self._attempt(*combined(batches))
        if version is None:
            return None
        self._board.remove(batches)
        self._pace.landed(len(batches))
        self._log.maintain(version)
        return CommitOutcome(version)

    def _attempt(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> int | None:
        """Write the next version. Its number, or None when another writer had it first: the log is then read up to its end."""
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
        self._clock.sleep(self._rng.uniform(0, min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2 ** min(attempt, 10))))
        self._refresh_existing()

    def _refresh_existing(self) -> None:
        if not self._log.refresh():
            raise SinkError(f"the table {self._log.root} does not exist; it was removed while a worker writes to it")

    def _check_table(self) -> None:
        columns, wanted = self._log.partition_columns(), tuple(self._sink.partition_by)
        if columns != wanted:
            raise SinkError(f"{self._log.root} is partitioned by {list(columns)} and partition_by says {list(wanted)}; write partition_by={columns!r}")
        reason = self._log.unsupported()
        if reason:
            raise SinkError(f"{self._log.root} has {reason}, which a writer of finished files that must land exactly once cannot honour; take another table")

    def _fit(self, schema: pa.Schema) -> None:
        for attempt in range(MAX_ATTEMPTS):
            reason = misfit(self._log.schema(), schema)
            if reason is None:
                return
            added = missing_columns(self._log.schema(), schema)
            if not self._sink.schema_evolution or not added or misfit(pa.schema([*self._log.schema(), *added]), schema):
                hint = "; set schema_evolution=True to add columns" if added and not self._sink.schema_evolution else ""
                raise SinkError(f"the transform's output does not fit {self._log.root}: {reason}{hint}")
            before = self._log.version
            try:
                self._log.add_columns(added)
            except SinkError:
                self._refresh_existing()
                if self._log.version == before:
                    raise
                self._back_off(attempt)
            else:
                self._refresh_existing()
        raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts to add columns lost to other writers")


def append_dead_letters(uri: str, storage_options: Mapping[str, str], records: pa.Table) -> None:
    """Append failed records to a Delta table of their own, made when it is first needed, at least once. Raises `SinkError`."""
    from deltalake import write_deltalake  # noqa: PLC0415 (its runtime must start in the process that uses it)

    root = table_root(uri)
    with delta_errors(f"could not write {records.num_rows} dead letters to {root}"):
        log = DeltaLog(root, storage_options)
        if not log.refresh():
            log.create(delta_schema(records.schema), (), _TABLE_PROPERTIES)
        write_deltalake(root, records, mode="append", schema_mode="merge", storage_options=dict(storage_options))


def _check_entries(entries: Sequence[CommitEntry]) -> None:
    keys = [entry.lease_key for entry in entries]
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"a commit needs at least one lease, and each once: {keys}")
    same = [entry.lease_key for entry in entries if entry.number == entry.expected.data]
    if same:
        raise ValueError(f"the number of a batch must be new, and for {same} the table has it already")
