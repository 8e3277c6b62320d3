"""Commit batches to a Delta table exactly once, and append failed records to its dead letters.

`DeltaCommitter` is the `Sink` of a worker. It is the `TableSink` of a `DeltaTableLog`, which reads
and writes one log (`log.DeltaLog`), and checks the table before each commit.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.files import (
    BATCH_FOLDER,
    TableColumns,
    delta_schema,
    misfit,
    missing_columns,
    partition_misfit,
    unique_name,
    untyped,
    untyped_reason,
    write_table,
)
from kcl_pipeline.delta.log import DeltaLog
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.storage import cause_of, first_line, is_local, is_s3, s3_option
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.events import EventSink, TableRestored, ignore_events
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.sinks.announcements import AnnouncementStore
from kcl_pipeline.sinks.log import Head
from kcl_pipeline.sinks.sink import MAX_ATTEMPTS, TableSink, backoff_seconds

__all__ = ["DeadLetterTable", "DeltaCommitter", "DeltaSink", "DeltaTableLog", "is_batch_file"]

TABLE_PROPERTIES: Final = {"delta.checkpointInterval": "50"}
_YOUNG_SECONDS: Final = 3600.0
"""Shortest time between the writing of a file and its removal by a vacuum."""
_PATH: Final = re.compile(
    r"batches/[A-Za-z0-9][A-Za-z0-9.-]{0,79}-(?P<unique>[0-9a-f]{32})"  # `files.batch_folder`
    r"(/[0-9a-f]{32})?"  # of a task
    r"(/[^/\\=\x00-\x1f\x7f]+=[^/\\\x00-\x1f\x7f]*)*"  # partition values, as Spark writes them
    r"/[A-Za-z0-9][A-Za-z0-9._-]*\.parquet"
)
"""The path of a batch file. A whitelist: no `..`, no absolute path, nothing in `_delta_log`."""


def is_batch_file(path: str, name: str) -> bool:
    """Return whether a path is that of a file in the batch folder whose unique part is `name`."""
    match = _PATH.fullmatch(path)
    return match is not None and match["unique"] == name


@dataclass(frozen=True, slots=True)
class DeltaHead:
    """The `Head` of a Delta table: a view of its log, valid until that is read again."""

    version: int
    changed: int
    _log: DeltaLog
    _look: Callable[[str], None]

    @property
    def table_id(self) -> str:
        """See `Head`."""
        return self._log.table_id

    @property
    def form(self) -> str:
        """See `Head`."""
        return self._log.layout.digest

    def stored(self, key: str) -> StoredPosition:
        """See `Head`."""
        found = stored_position(key, self._log.transaction)
        if found != NOTHING_STORED:
            self._look(key)
        return found


class DeltaTableLog:
    """The `Log` of a Delta table. It checks the table before each commit.

    Others may change a table while workers write to it: add a check constraint, add columns, or let
    application transactions expire. So the table and the columns of a batch are checked again
    whenever an entry of the log has changed the table's metadata.

    Args:
        sink: The settings of the table.
        clock: Measures the waits of writers that add columns at the same time.
        rng: Spreads these waits.
        application: Name of the application.
        events: Receives `TableRestored`, once for each RESTORE after the first commit of the
            application.
        any_partitions: Whether the table may have other partition columns than the settings.
    """

    def __init__(
        self,
        sink: DeltaSink,
        clock: Clock,
        rng: random.Random,
        application: str = "",
        events: EventSink = ignore_events,
        *,
        any_partitions: bool = False,
    ) -> None:
        self._sink = sink
        self._application = application
        self._events = events
        self._any_partitions = any_partitions
        self._reported: set[tuple[int, str]] = set()
        self._clock = clock
        self._rng = rng
        self._log = DeltaLog(sink.uri, sink.storage_options, clock)
        self._checked = -1
        self._fitting: pa.Schema | None = None
        self.storage = self._log.storage
        self._is_local = is_local(self._log.root)

    @property
    def name(self) -> str:
        """See `Log`."""
        return self._log.root

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The columns that the table is partitioned by."""
        return self._log.partition_columns()

    def columns(self) -> TableColumns:
        """What a result must fit, as of the last read of the log.

        If the table has changed since, `ensure` notices it before a commit.

        Raises:
            SinkError: The log cannot be read.
        """
        exists = self._log.version >= 0 or self._log.refresh()
        return TableColumns(
            self._log.schema if exists else None,
            tuple(self._sink.partition_by),
            self._sink.schema_evolution,
            self.name,
        )

    def has_files(self, files: Sequence[DataFile]) -> bool:
        """Return whether each file exists with its size."""
        return all(self.storage.size(file.path) == file.size for file in files)

    # -- before the first commit

    def check(self) -> int | None:
        """Check the store, and the table if it exists, before anything is committed.

        Returns:
            The table's version. None: it does not exist.

        Raises:
            TableMismatchError: The table may not be written.
            SinkError: The store cannot be used now.
        """
        self._check_store()
        try:
            exists = self._log.refresh()
        except SinkError as error:
            reason = self._log.unopened()
            if reason is None:
                raise
            raise self._unwritable(reason) from error
        if not exists:
            return None
        self._check_table()
        return self._log.version

    def ensure(self, schema: pa.Schema) -> bool:
        """See `Log`."""
        before = self._log.version
        if before < 0:
            self._create(schema)
        self._fit(schema)
        return self._log.version != before

    def _create(self, schema: pa.Schema) -> None:
        """Create the table for this schema unless it exists."""
        columns = delta_schema(schema)
        reason = partition_misfit(columns, self._sink.partition_by)
        if reason is None:
            self._check_store()
            if self._log.refresh():
                return
            reason = untyped_reason([field.name for field in untyped(schema)])
        if reason:
            raise TableMismatchError(f"{self.name}: {reason}")
        properties = TABLE_PROPERTIES | dict(self._sink.table_properties)
        self._log.create(columns, self._sink.partition_by, properties)
        self._log.refresh()

    # -- before each commit

    def _check_store(self) -> None:
        """Check that the store can create an object only if it does not exist.

        The first call writes to the store.

        Raises:
            TableMismatchError: It cannot, so two writers could commit the same version.
            SinkError: The store cannot be used now.
        """
        options = self._sink.storage_options
        if is_s3(self.name):
            unsafe = s3_option(options, "s3_allow_unsafe_rename")
            if (unsafe or os.environ.get("AWS_S3_ALLOW_UNSAFE_RENAME", "")).lower() == "true":
                raise TableMismatchError(
                    "AWS_S3_ALLOW_UNSAFE_RENAME=true lets two writers commit the same version of "
                    f"{self.name}, and one of them loses its rows. Leave the option out."
                )
        try:
            refuses = self.storage.creates_once()
        except OSError as error:
            message = f"cannot check the store of {self.name}: {first_line(error, options)}"
            raise SinkError(message) from cause_of(error, options)
        if not refuses:
            raise TableMismatchError(
                f"the store of {self.name} ignores conditional writes (If-None-Match) and replaces "
                "existing objects, so two writers would commit the same version and lose rows. "
                "Use a store with conditional writes."
            )

    def _check_table(self) -> None:
        """Check that the table may be written with these settings.

        Does nothing while the table's metadata does not change.

        Raises:
            TableMismatchError: The table may not be written.
        """
        if self._checked == self._log.metadata_changes:
            return
        self._fitting = None
        columns, configured = self.partition_columns, tuple(self._sink.partition_by)
        if columns != configured and not self._any_partitions:
            raise TableMismatchError(
                f"partition_by={list(configured)} does not fit {self.name}, which is "
                f"partitioned by {list(columns)}; write partition_by={columns!r}"
            )
        reason = self._log.unsupported()
        if reason:
            raise self._unwritable(reason)
        self._checked = self._log.metadata_changes

    def _unwritable(self, reason: str) -> TableMismatchError:
        return TableMismatchError(
            f"{self.name} has {reason}, which exactly-once commits of finished files do not "
            "support; remove it from the table, or use another table"
        )

    def _fit(self, schema: pa.Schema) -> None:
        """Check the table, and that a batch of this schema fits.

        With `schema_evolution` the batch's new columns are added. The log may then be at a newer
        version.

        Raises:
            TableMismatchError: The table may not be written, or the batch does not fit.
            SinkError: The columns cannot be added.
        """
        self._check_store()
        self._check_table()
        for attempt in range(MAX_ATTEMPTS):
            if self._fitting is not None and self._fitting.equals(schema):
                return
            known = self._log.schema
            reason = misfit(known, schema)
            if reason is None:
                self._fitting = schema
                return
            added, allowed = missing_columns(known, schema), self._sink.schema_evolution
            if not allowed or not added or misfit(pa.schema([*known, *added]), schema):
                hint = "; set schema_evolution=True to add columns" if added and not allowed else ""
                raise TableMismatchError(
                    f"the transform's output does not fit {self.name}: {reason}{hint}"
                )
            before = self._log.version
            try:
                self._log.add_columns(added)
                self._log.refresh()
            except SinkError:
                self._log.refresh()
                if self._log.version == before:
                    raise
                self._back_off(attempt)
            self._check_table()
        raise SinkError(
            f"{self.name}: {MAX_ATTEMPTS} attempts to add columns lost to other writers"
        )

    def _back_off(self, attempt: int) -> None:
        self._clock.sleep(self._rng.uniform(0, backoff_seconds(attempt)))
        if not self._log.refresh():
            raise SinkError(f"the table {self.name} does not exist any more")

    # -- commits

    def read(self) -> DeltaHead | None:
        """See `Log`. It also checks that the table may be written with these settings."""
        if not self._log.refresh():
            return None
        self._check_table()
        return self._head()

    def peek(self) -> DeltaHead | None:
        """See `Log`."""
        return self._head() if self._log.peek() else None

    def _head(self) -> DeltaHead:
        _ = self._log.table_id  # It opens the table again if another program has changed it.
        changed = self._log.changed // len(SUFFIXES)
        return DeltaHead(self._log.version, changed, self._log, self._report_restores)

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        """See `Log`. The log entry of a version is created only if it does not exist."""
        self._check_store()
        if self._log.version != head.version:
            raise SinkError(f"{self.name} is not at version {head.version} any more")
        found = [position_transactions(key, stored) for key, stored in sets.items()]
        self._log.append(files, {name: value for one in found for name, value in one.items()})

    def batch_name(self, files: Sequence[DataFile]) -> str | None:
        """See `Log`: the unique part of the folder of the files."""
        matches = [_PATH.fullmatch(one.path) for one in files]
        folders = {None if match is None else match["unique"] for match in matches}
        if len(folders) > 1:
            return None
        return folders.pop() if folders else unique_name()

    def problem(self, name: str, files: Sequence[DataFile]) -> str | None:
        """See `Log`.

        In an object store the size costs a request for each file. A young file is there: its writer
        announces it after it was written, and no program removes it so soon.
        """
        young = 0.0 if self._is_local else self._clock.wall() - _YOUNG_SECONDS
        for file in files:
            if not is_batch_file(file.path, name):
                return "a path is not that of a file in the announcer's own folder"
            reason = self._log.layout.problem(file.partition_values)
            if reason is not None:
                return reason
            is_young = young and file.modified_millis >= young * 1000
            if not is_young and not self.has_files([file]):
                return f"a file of {file.size} bytes is not there"
        return None

    def upkeep(self, version: int) -> None:
        """See `Log`: it writes a log checkpoint from time to time."""
        self._log.maintain(version)

    def _report_restores(self, key: str) -> None:
        """Report each RESTORE after the first commit of a shard that the table knows.

        The keys of announced batches may be those of other applications.
        """
        if not key.startswith(f"{self._application}/"):
            return
        for one in self._log.restores:
            known = (one.version, one.restored_to)
            if known not in self._reported and one.is_after_first_commit(transaction_names(key)[0]):
                self._reported.add(known)
                self._events(TableRestored(one.version, one.restored_to, self._log.table_id))


class DeadLetterTable:
    """Appends failed records to a Delta table, created when it is first needed. Not thread-safe.

    A batch that cannot be committed is read, transformed and written again, by this worker or
    another one, and often with another end. Its dead letters are then appended again: readers take
    one row of each record (docs/dead-letters.md).

    Args:
        sink: Settings of the table: its address and storage options.
        clock: For waiting.
        rng: For waiting.
    """

    def __init__(self, sink: DeltaSink, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        evolving = replace(sink, schema_evolution=True)
        # A user may have created the table with partition columns.
        self._log = DeltaTableLog(evolving, clock, rng, any_partitions=True)

    def append(self, records: pa.Table) -> None:
        """Append the records. A row is written once per call, whatever is lost on the way.

        Raises:
            SinkError: The table cannot be written, or the outcome is not known. Call again.
        """
        if not records.num_rows:
            return
        head = self._log.read()
        files: tuple[DataFile, ...] = ()
        for attempt in range(MAX_ATTEMPTS):
            if self._log.ensure(records.schema) or head is None:
                head = self._log.read()
            if head is None:
                raise SinkError(f"the table {self._log.name} does not exist any more")
            files = files or write_table(
                self._log.storage,
                f"{BATCH_FOLDER}/dead-letters-{unique_name()}",
                TableColumns().convert(records),
                self._log.partition_columns,
                modified_millis=int(self._clock.wall() * 1000),
            )
            version = head.version
            try:
                self._log.add(head, files, {})
            except SinkError:
                head = self._log.read()
                if head is not None and head.version == version:
                    raise
                # Another writer was faster, or this commit has landed and its answer was lost. A
                # table has a file once, however often it is added.
                self._clock.sleep(self._rng.uniform(0, backoff_seconds(attempt)))
            else:
                self._log.upkeep(version + 1)
                return
        raise SinkError(f"{self._log.name}: {MAX_ATTEMPTS} attempts lost to other writers")


class DeltaCommitter(TableSink):
    """The `Sink` of a Delta table. One per worker.

    Args:
        sink: The settings of the table.
        application_name: Name of the application.
        clock: Measures waits.
        rng: Spreads waits.
        events: Receives rejected announcements, and each RESTORE of the table.
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
        clock, rng = clock or SystemClock(), rng or random.SystemRandom()
        log = DeltaTableLog(sink, clock, rng, application_name, events)
        dead_letters = DeltaSink(sink.dead_letters, storage_options=sink.storage_options)
        super().__init__(
            log,
            application_name,
            dead_letters=DeadLetterTable(dead_letters, clock, rng).append,
            announcements=AnnouncementStore(log.storage, events) if sink.combined_commits else None,
            clock=clock,
            rng=rng,
        )
        self._table = log

    def has_files(self, files: Sequence[DataFile]) -> bool:
        """See `FileKeepingSink.has_files`."""
        with self._serialized():
            return self._table.has_files(files)

    def check(self) -> int | None:
        """Check the store and the table (see `CheckedSink.check`). Returns the table's version."""
        with self._lock:
            return self._table.check()

    def columns(self) -> TableColumns:
        """What the result of a transform must fit (see `DeltaTableLog.columns`)."""
        with self._lock:
            return self._table.columns()


# The position of a shard as application transactions of the table.
#
# One commit sets all four transactions of a shard. Their names begin with a hash of application,
# stream and creation time, and the number of the shard: every writer of a commit stores and parses
# all names of the commit, so short names make a log smaller and faster.
#
# * ``l``, ``m``, ``h``: the sequence number, 62 bits each, the lowest first. The next bit of ``h``
#   is set when the shard has ended;
# * ``v``: v · 2²⁸ + s + 1, where v is how many times the position was set, and s the sub-sequence
#   number, −1 if there is no position.

SUFFIXES: Final = ("v", "l", "m", "h")
"""Ends of the four names of a shard."""

_HASH_BYTES: Final = 12
_CANONICAL: Final = re.compile(r"shardId-([0-9]{12})")
_DIGIT_BITS: Final = 62
_DIGIT: Final = 2**_DIGIT_BITS - 1
_LIMIT: Final = 2 ** (3 * _DIGIT_BITS)
_ENDED: Final = 2**_DIGIT_BITS
_NO_POSITION: Final = -1
_SUB_BITS: Final = 28
_SUB: Final = 2**_SUB_BITS - 1
_MAX_SET: Final = 2**35 - 1
"""Hundred commits per second for ten years."""

VersionOf = Callable[[str], int | None]
"""Returns the version of an application transaction. None: it was never written."""


@lru_cache(maxsize=100_000)
def transaction_names(key: str) -> tuple[str, ...]:
    """Return the names of the transactions of a shard, in the order of `SUFFIXES`.

    A shard id of the usual form becomes its number. The names never contain a slash.

    Args:
        key: Application, stream and creation time, and after the last slash the id of the shard.
    """
    stream, _, shard = key.rpartition("/")
    digest = hashlib.sha256(stream.encode()).digest()[:_HASH_BYTES]
    hashed = base64.urlsafe_b64encode(digest).decode()
    canonical = _CANONICAL.fullmatch(shard)
    begin = f"{hashed}.{int(canonical[1])}" if canonical else f"{hashed}:{shard}"
    return tuple(begin + suffix for suffix in SUFFIXES)


def position_transactions(key: str, stored: StoredPosition) -> dict[str, int]:
    """Return the transactions of a shard with their versions.

    Raises:
        SinkError: The sequence number has more than 186 bits, the sub-sequence number more than 28,
            or the number of commits more than 35.
    """
    position = stored.position
    sequence = 0 if position is None else int(position.sequence_number)
    sub = _NO_POSITION if position is None else position.sub_sequence_number
    for what, value, limit, bits in (
        ("sequence number", sequence, _LIMIT, 3 * _DIGIT_BITS),
        ("sub-sequence number", sub, _SUB, _SUB_BITS),
        ("number of commits", stored.number, _MAX_SET + 1, 35),
    ):
        if value >= limit:
            raise SinkError(
                f"the {what} {value} of {key} has more than {bits} bits, which the table cannot "
                "store; write to another table"
            )
    digits = [sequence >> _DIGIT_BITS * index & _DIGIT for index in range(3)]
    digits[2] += _ENDED if stored.ended else 0
    values = ((stored.number << _SUB_BITS) + sub + 1, *digits)
    return dict(zip(transaction_names(key), values, strict=True))


def stored_position(key: str, version_of: VersionOf) -> StoredPosition:
    """Read what a log stores for a shard.

    Raises:
        TableMismatchError: The position cannot be read, because another program removed or changed
            some of its transactions.
    """
    try:
        return _decoded_position(tuple(map(version_of, transaction_names(key))))
    except ValueError as error:
        raise TableMismatchError(f"the position of {key} cannot be read: {error}") from error


@lru_cache(maxsize=10_000)
def _decoded_position(values: tuple[int | None, ...]) -> StoredPosition:
    found = [value for value in values if value is not None]
    if not found:
        return NOTHING_STORED
    if len(found) != len(SUFFIXES):
        raise ValueError(f"{len(found)} of {len(SUFFIXES)} of its transactions are there")
    first, low, middle, high = found
    number, sub = first >> _SUB_BITS, (first & _SUB) - 1
    ended, high = high >= _ENDED, high & _DIGIT if high >= 0 else high
    if number < 1 or not all(0 <= digit <= _DIGIT for digit in (low, middle, high)):
        raise ValueError("its transactions are outside their limits")
    if sub == _NO_POSITION:
        return StoredPosition(number, None, ended)
    sequence_number = low | middle << _DIGIT_BITS | high << 2 * _DIGIT_BITS
    return StoredPosition(number, Position(str(sequence_number), sub), ended)
