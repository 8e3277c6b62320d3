"""Follow the log of one Delta table: its end, and the application transactions there.

delta-rs opens the table. It reads the whole log again for each application transaction. Therefore
all transactions are read together at the first request (`transactions`) and kept in a map.
Afterwards only new entries of the log are read, one object each; delta-rs reads them only if they
change the metadata of the table. If the old part of the log cannot be read in this way, delta-rs
reads each requested transaction once.

The log ends before the first entry that does not exist. This holds while log cleanup cannot have
removed newer entries than the last one that was read: it keeps entries for hours. So after
`LONGEST_BELIEVED_SECONDS` the log is listed. With a gap, the table is opened again.

`peek` reads the next entry, if it exists. It is cheap. A mismatch that it finds is final, because a
transaction never returns to an expected version. Only `refresh` finds the end of the log, and
finds out that the folder was replaced.

`append` creates the entry of the next version, or fails if that entry exists. So the state at
`version` is the state directly before the new entry.

Entries and log checkpoints are parsed strictly and with limits. Entries of other writers are read,
too. An entry that does not follow the Delta protocol is an error, because a wrong transaction
version would allow a batch to be committed twice. The caller then uses delta-rs.

delta-rs panics in a forked child, because its runtime does not survive a fork. Every process must
be spawned. The first use stores the process id, and a use in another process raises an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.files import Indexed, TableLayout, indexed_columns, log_statistics
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import Storage, delta_errors, delta_options, first_line, table_root
from kcl_pipeline.errors import SinkError
from kcl_pipeline.text import printable
from kcl_pipeline.threads import DaemonPool

MIN_NUMBER: Final = -(2**63)
MAX_NUMBER: Final = 2**63 - 1
"""Range of an application transaction's version (Delta protocol, "Transaction Identifiers")."""
MAX_ENTRY_BYTES: Final = 256 * 1024 * 1024
"""An entry that names about a million files. delta-rs reads larger ones itself."""

_NOTHING: Final = msgspec.Raw(b"")
_NULL: Final = frozenset({b"", b"null"})


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """The parsed content of an entry.

    Attributes:
        transactions: The application transactions that it sets, with their versions.
        changes_table: Whether it changes the table's metadata or protocol.
        restored_to: The version or time that the table was restored to, as text. None: the entry
            is no RESTORE.
    """

    transactions: dict[str, int]
    changes_table: bool
    restored_to: str | None = None


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: Annotated[int, msgspec.Meta(ge=MIN_NUMBER, le=MAX_NUMBER)]


class _Action(msgspec.Struct, rename="camel"):
    txn: _Transaction | None = None
    meta_data: msgspec.Raw = _NOTHING
    protocol: msgspec.Raw = _NOTHING
    commit_info: msgspec.Raw = _NOTHING


_ACTION: Final = msgspec.json.Decoder(_Action)


def entry_path(version: int) -> str:
    """Path of a version's log entry, relative to the table."""
    return f"_delta_log/{version:020d}.json"


def encode_entry(
    millis: int,
    partition_columns: Sequence[str],
    files: Sequence[DataFile],
    statistics: Sequence[str],
    transactions: Mapping[str, int],
) -> bytes:
    """Encode an entry that adds files and sets application transactions.

    Args:
        millis: Time of the commit.
        partition_columns: The columns that the table is partitioned by.
        files: The files.
        statistics: One JSON text for each file.
        transactions: Versions by name.
    """
    columns = msgspec.json.encode(list(partition_columns)).decode()
    information = {
        "timestamp": millis,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": columns},
        "isBlindAppend": True,
        "engineInfo": "kcl_pipeline",
    }
    adds = [
        {
            "path": quote(file.path, safe="/="),
            "partitionValues": file.partition_values,
            "size": file.size,
            "modificationTime": file.modified_millis,
            "dataChange": True,
            "stats": stats,
        }
        for file, stats in zip(files, statistics, strict=True)
    ]
    return msgspec.json.Encoder().encode_lines(
        [
            {"commitInfo": information},
            *({"add": add} for add in adds),
            *({"txn": {"appId": name, "version": n}} for name, n in transactions.items()),
        ]
    )


def entry_facts(entry: bytes) -> EntryFacts:
    """Parse an entry.

    Raises:
        ValueError: The entry does not follow the Delta protocol.
    """
    if not entry.isascii():
        entry.decode()  # msgspec does not look at what it skips
    try:
        actions = _ACTION.decode_lines(entry)
    except RecursionError as error:
        raise ValueError("an action of the Delta log is nested too deeply") from error
    if len(actions) != entry.count(b"\n") + (not entry.endswith(b"\n")):
        _check_lines(entry, len(actions))
    return EntryFacts(
        {one.txn.app_id: one.txn.version for one in actions if one.txn is not None},
        any(
            not _NULL.issuperset((bytes(one.meta_data), bytes(one.protocol)))
            for one in actions
            if one.meta_data is not _NOTHING or one.protocol is not _NOTHING
        ),
        next((to for one in actions if (to := _restored_to(one.commit_info)) is not None), None),
    )


class _CommitInfo(msgspec.Struct, rename="camel"):
    operation: str = ""
    operation_parameters: dict[str, Any] = msgspec.field(default_factory=dict)


_COMMIT_INFO: Final = msgspec.json.Decoder(_CommitInfo)
_RESTORE: Final = "RESTORE"
_SHOWN: Final = 100


def _restored_to(commit_info: msgspec.Raw) -> str | None:
    """Return what a `commitInfo` says the table was restored to. None: it is no RESTORE.

    The protocol lets a writer put anything there, so nothing in it is an error.
    """
    raw = bytes(commit_info)
    if _RESTORE.encode() not in raw:
        return None
    try:
        found = _COMMIT_INFO.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if found.operation != _RESTORE:
        return None
    given = found.operation_parameters
    version, time = given.get("version"), given.get("datetime") or given.get("timestamp")
    if version is not None:
        return f"version {printable(str(version), _SHOWN)}"
    return "an unknown version" if time is None else f"the version of {_time_text(str(time))}"


def _time_text(text: str) -> str:
    """Return a time. delta-rs writes epoch milliseconds, Spark writes text."""
    try:
        return datetime.fromtimestamp(int(text) / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return printable(text, _SHOWN)


class _Protocol(msgspec.Struct, rename="camel"):
    min_writer_version: int
    writer_features: list[str] | None = None
    reader_features: list[str] | None = None


class _ProtocolAction(msgspec.Struct):
    protocol: _Protocol | None = None


_PROTOCOL_ACTION: Final = msgspec.json.Decoder(_ProtocolAction)


def protocol_of(entry: bytes) -> tuple[int, list[str] | None, list[str] | None] | None:
    """Return writer version, writer features and reader features that an entry sets; None: none.

    Raises:
        ValueError: The entry does not follow the Delta protocol.
    """
    for action in _PROTOCOL_ACTION.decode_lines(entry):
        if action.protocol is not None:
            found = action.protocol
            return found.min_writer_version, found.writer_features, found.reader_features
    return None


def _check_lines(entry: bytes, actions: int) -> None:
    """Refuse a line with several actions. Empty lines are ignored."""
    if actions != sum(1 for line in entry.splitlines() if line.strip()):
        raise ValueError("a line of the Delta log is not exactly one action")


MAX_RESTORES: Final = 16
"""Only the newest are kept: each has the names of all transactions."""


@dataclass(frozen=True, slots=True)
class Restore:
    """An entry that restored the table.

    Attributes:
        version: Version of the entry.
        restored_to: The restored version or time, as text.
        transactions: Names of the application transactions that the table had before. None: they
            cannot be read.
    """

    version: int
    restored_to: str
    transactions: frozenset[str] | None

    def is_after_first_commit(self, name: str) -> bool:
        """Return whether a transaction that the table has now was set before this entry."""
        return self.transactions is None or name in self.transactions


def note_restore(
    restores: list[Restore],
    version: int,
    restored_to: str,
    before: Mapping[str, int | None] | None,
) -> None:
    """Add an entry that restored the table, and keep only the newest ones.

    Args:
        restores: The entries that are known, in their order.
        version: Version of the entry.
        restored_to: See `Restore`.
        before: The transactions directly before the entry, with their versions; the version None is
            that of a transaction that was never written. None: they cannot be read.
    """
    names = None
    if before is not None:
        names = frozenset(name for name, number in before.items() if number is not None)
    restores.append(Restore(version, restored_to, names))
    del restores[:-MAX_RESTORES]


MAX_ENTRIES: Final = 1000
"""Most entries since the last log checkpoint. With more of them, delta-rs is faster."""
MAX_HINT_BYTES: Final = 4 * 1024 * 1024
MAX_CHECKPOINT_FILES: Final = 1000
MAX_ACTIONS: Final = 10_000_000
"""Most rows of one file of a log checkpoint.

Each row takes 13 bytes of memory, even a row without a transaction, which takes no file space.
"""

_LAST_CHECKPOINT: Final = "_delta_log/_last_checkpoint"


class _Hint(msgspec.Struct):
    """The file `_last_checkpoint` (Delta protocol, "Last Checkpoint File")."""

    version: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    file_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHECKPOINT_FILES)] | None = msgspec.field(
        default=None, name="parts"
    )


_HINT: Final = msgspec.json.Decoder(_Hint)


def read_transactions(
    storage: Storage, version: int, restores: list[Restore] | None = None
) -> dict[str, int] | None:
    """Every application transaction as of `version` (inclusive); None if it cannot be read.

    It cannot be read if the last log checkpoint is newer than `version` or does not consist of
    Parquet files, or if entries after it do not exist any more. Raises nothing.

    Args:
        storage: The folder of the table.
        version: The last version that is read.
        restores: Receives each RESTORE since the last log checkpoint.
    """
    try:
        checkpoint = _last_checkpoint(storage)
        first = 0 if checkpoint is None else checkpoint.version + 1
        if first > version + 1 or version - first >= MAX_ENTRIES:
            return None
        found = {} if checkpoint is None else _of_checkpoint(storage, checkpoint)
        for number in range(first, version + 1):
            facts = entry_facts(storage.read(entry_path(number), MAX_ENTRY_BYTES))
            if restores is not None and facts.restored_to is not None:
                note_restore(restores, number, facts.restored_to, found)
            found |= facts.transactions
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException):
        return None
    return found


def _last_checkpoint(storage: Storage) -> _Hint | None:
    try:
        return _HINT.decode(storage.read(_LAST_CHECKPOINT, MAX_HINT_BYTES))
    except FileNotFoundError:
        return None


def _of_checkpoint(storage: Storage, checkpoint: _Hint) -> dict[str, int]:
    """Read the `txn` rows of all files of a log checkpoint.

    V2 checkpoints with UUID names are not supported. One with a classic name is read normally.
    """
    stem, count = f"_delta_log/{checkpoint.version:020d}.checkpoint", checkpoint.file_count or 1
    names = (
        [f"{stem}.parquet"]
        if count == 1
        else [f"{stem}.{number:010d}.{count:010d}.parquet" for number in range(1, count + 1)]
    )
    found: dict[str, int] = {}
    for name in names:
        with storage.open(name) as file:
            content = pq.ParquetFile(file)
            if content.metadata.num_rows > MAX_ACTIONS:
                raise ValueError(f"{name} has {content.metadata.num_rows} actions")
            rows = content.read(columns=["txn.appId", "txn.version"])["txn"].drop_null()
        found |= {row["appId"]: row["version"] for row in rows.to_pylist()}
    if not all(isinstance(key, str) and isinstance(one, int) for key, one in found.items()):
        raise TypeError("a transaction of the log checkpoint has no name or no version")
    return found


_LOG: Final = logging.getLogger(__name__)


class LogUpkeep:
    """Log checkpoints of the table at `root`, at most one at a time.

    Of the requests that arrive while one runs, the newest is kept. A failure is only logged: the
    next multiple of the interval of log checkpoints asks again.
    """

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        self._root = root
        self._options = dict(options)
        self._pool = DaemonPool(1, "delta-log")
        self._lock = threading.Lock()
        self._last: Future[None] | None = None

    def write_checkpoint(self, version: int) -> None:
        """Start to write the log checkpoint of `version`, and to remove expired log entries."""
        with self._lock:
            if self._last is not None:
                self._last.cancel()  # No effect if it runs already
            self._last = self._pool.submit(self._write_checkpoint, version)

    def _write_checkpoint(self, version: int) -> None:
        from deltalake import DeltaTable  # noqa: PLC0415 (it starts threads when it is loaded)

        try:
            with delta_errors(f"could not checkpoint the log of {self._root}", self._options):
                table = DeltaTable(self._root, version=version, storage_options=self._options)
                table.create_checkpoint()
                given = table.metadata().configuration
                if given.get("delta.enableExpiredLogCleanup", "true") != "false":
                    table.cleanup_metadata()
        except SinkError as error:
            _LOG.warning("%s; the log grows until the next attempt", error)


_DEFAULT_CHECKPOINT_INTERVAL: Final = 100
_ACCEPTED_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",  # added rows need no file of changes
        "checkConstraints",  # if no constraint is set, see `unsupported`
        "columnMapping",  # if its mode is none
        "deletionVectors",  # files without deleted rows have none
        "invariants",  # if no column has one
        "timestampNtz",
        "v2Checkpoint",
    }
)
"""Table features with which added files and transactions are all that a commit needs, and which
delta-rs writes. A list of features to refuse would accept those that do not exist yet.
"""
_LAST_WRITER_VERSION: Final = 7
_ENTRIES_SEARCHED: Final = 1000
_ENTRY: Final = re.compile(r"_delta_log/[0-9]{20}\.json")
LONGEST_BELIEVED_SECONDS: Final = 60.0
"""A commit that took longer is read back, and an older end of the log is found by a listing. Log
cleanup keeps entries for hours at least."""


class DeltaLog:
    """The log of the table at `uri`. Not for use by two threads at a time."""

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._is_in_doubt = False
        self.root = table_root(uri)
        self.storage = open_storage(self.root, storage_options)
        self._options = delta_options(self.root, storage_options)
        self.checkpoints = LogUpkeep(self.root, self._options)
        self._table: Any = None
        self._versions: dict[str, int | None] = {}
        self._versions_read: bool | None = None
        self.metadata_changes = 0
        """Counter of possible changes of the table's metadata or protocol."""
        self.version = -1
        """Version of the last entry that was read; −1 before `refresh` found a table."""
        self._end_found_at = 0.0
        self._metadata_at = -1
        self._newest: bytes | None = None
        self.changed = 0
        """Application transactions in the entry of `version`; 0 if that was not read by itself."""
        self.restores: list[Restore] = []
        """Each RESTORE since the log checkpoint of the opening, as far as the log was read."""

    def refresh(self) -> bool:
        """Move to the end of the log.

        Returns:
            False if the table does not exist.

        Raises:
            SinkError: The log cannot be read.
        """
        with delta_errors(f"could not read the log of {self.root}", self._options):
            began = self._clock.monotonic()
            is_open = self._table is not None and not self._is_in_doubt
            found = (is_open and self._follow(began)) or self._open()
            self._is_in_doubt = False
            self._end_found_at = began
            return found

    def peek(self) -> bool:
        """Read the entry after the last one that was read, if it exists.

        Returns:
            False if the table has not been opened yet, or must be opened again.
        """
        if self._table is None or self._is_in_doubt:
            return False
        try:
            entry = self._entry(self.version + 1)
            if entry is not None:
                self._read_entry(self.version + 1, entry)
        except (OSError, ValueError) as error:  # perhaps only delta-rs can parse it
            _LOG.debug("cannot peek at the log of %s: %s", self.root, type(error).__name__)
        return True

    def transaction(self, application_id: str) -> int | None:
        """Version of an application transaction at `version`."""
        if application_id not in self._versions:
            self._read_versions()
        if application_id not in self._versions:
            if self._versions_read:
                return None
            # It has no entry after the handle's version: such an entry would be in the map.
            try:
                with delta_errors(f"could not read the transactions of {self.root}", self._options):
                    self._versions[application_id] = self._table.transaction_version(application_id)
            except SinkError:
                self._is_in_doubt = True  # log cleanup may have removed what the handle needs
                raise
        return self._versions[application_id]

    def _read_versions(self) -> None:
        if self._versions_read is None:
            found = read_transactions(self.storage, self.version, self.restores)
            self._versions_read = found is not None
            self._versions |= found or {}

    # Kept until `_metadata_changed`.

    @cached_property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        self._catch_up()
        with delta_errors(f"could not read the schema of {self.root}", self._options):
            return pa.schema(self._table.schema().to_arrow())

    @cached_property
    def layout(self) -> TableLayout:
        """The metadata that a file must fit."""
        schema = self.schema
        with delta_errors(f"could not read the metadata of {self.root}", self._options):
            metadata, text = self._table.metadata(), self._table.schema().to_json()
            columns = list(metadata.partition_columns)
        digest = hashlib.sha256(json.dumps([metadata.id, columns, text]).encode()).hexdigest()
        return TableLayout(digest, {name: schema.field(name).type for name in columns})

    @cached_property
    def indexed(self) -> Indexed:
        """The columns whose statistics go into the log."""
        schema = self.schema
        with delta_errors(f"could not read the metadata of {self.root}", self._options):
            metadata = self._table.metadata()
            return indexed_columns(schema, metadata.partition_columns, metadata.configuration)

    @cached_property
    def table_id(self) -> str:
        """The id of the table, which no other table has."""
        self._catch_up()
        with delta_errors(f"could not read the metadata of {self.root}", self._options):
            return str(self._table.metadata().id)

    def _catch_up(self) -> None:
        """Open the table again if an entry has changed its metadata since it was opened."""
        if self._metadata_at > self._table.version():
            self._reopen()

    def _reopen(self) -> None:
        self._is_in_doubt = True
        if not self.refresh():
            raise SinkError(f"the table {self.root} does not exist any more")

    def partition_columns(self) -> tuple[str, ...]:
        """The columns the table is partitioned by."""
        self._catch_up()
        return tuple(self._table.metadata().partition_columns)

    def unsupported(self) -> str | None:
        """Table features that need more than added files, as text; None without such features."""
        self._catch_up()
        configuration, protocol = self._table.metadata().configuration, self._table.protocol()
        constraints = sorted(
            key.removeprefix("delta.constraints.")
            for key in configuration
            if key.startswith("delta.constraints.")
        )
        if constraints:
            return f"check constraints ({', '.join(constraints)})"
        if configuration.get("delta.columnMapping.mode", "none") != "none":
            return "column mapping"
        if "delta.setTransactionRetentionDuration" in configuration:
            return "application transactions that expire (delta.setTransactionRetentionDuration)"
        refused = _refused_features(
            protocol.min_writer_version, protocol.writer_features, protocol.reader_features
        )
        if refused:
            return refused
        computed = [
            field.name
            for field in self._table.schema().fields
            if {"delta.invariants", "delta.generationExpression"} & set(field.metadata)
            or any(name.startswith("delta.identity.") for name in field.metadata)
        ]
        return f"invariants or computed columns ({', '.join(computed)})" if computed else None

    def unopened(self) -> str | None:
        """Return the features of a table that delta-rs cannot open; None: they are not the reason.

        They are read from the newest entry of the log that has them.
        """
        try:
            names = [one.path for one in self.storage.list("_delta_log")]
            for name in [one for one in reversed(names) if _ENTRY.fullmatch(one)][
                :_ENTRIES_SEARCHED
            ]:
                found = protocol_of(self.storage.read(name, MAX_ENTRY_BYTES))
                if found is not None:
                    return _refused_features(*found)
        except (OSError, ValueError) as error:
            _LOG.info("cannot look for the table's features: %s", first_line(error, self._options))
        return None

    def create(
        self, schema: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> None:
        """Write version 0 if it does not exist. Another writer may do so at the same time."""
        # deltalake starts threads when it is loaded: load it only in the process that uses it.
        from deltalake import CommitProperties, DeltaTable  # noqa: PLC0415

        try:
            with delta_errors(f"could not create the table {self.root}", self._options):
                DeltaTable.create(
                    self.root,
                    schema,
                    mode="error",
                    partition_by=list(partition_by),
                    configuration=dict(properties),
                    storage_options=self._options,
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
        except SinkError:
            if not self.refresh():
                raise

    def append(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> None:
        """Write an entry with these files and transactions at `version` + 1, and move to it.

        A write that hung may arrive after the entry of another writer was removed by log cleanup.
        It then creates an entry of that version again, below the log checkpoint: nobody reads it.
        So the table is opened anew after a write that took long, also after one that succeeded.

        Raises:
            SinkError: The entry was not written, or the outcome is not known. If `refresh` then
                finds a newer version, that entry is either this one (its transactions are there)
                or another writer's, and this one can never be committed.
        """
        began = self._clock.monotonic()
        try:
            entry = self._append(files, transactions)
        finally:
            seconds = self._clock.monotonic() - began
            self._is_in_doubt = seconds > LONGEST_BELIEVED_SECONDS
        if self._is_in_doubt:
            raise SinkError(f"the commit to {self.root} took {seconds:.0f} s; the table is read")
        self._read_entry(self.version + 1, entry)
        self._end_found_at = began

    def _append(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> bytes:
        """Write the entry, and return its content."""
        with delta_errors(f"could not commit to {self.root}", self._options):
            statistics = [log_statistics(one.rows, one.statistics, self.indexed) for one in files]
            millis, columns = int(self._clock.wall() * 1000), self.partition_columns()
            entry = encode_entry(millis, columns, files, statistics, transactions)
            self.storage.create_new(entry_path(self.version + 1), entry)
            return entry

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add nullable columns at `version` + 1. Errors are those of `append`."""
        from deltalake import CommitProperties, Schema  # noqa: PLC0415 (as above)

        self._reopen()  # delta-rs needs a handle at the end of the log
        names = ", ".join(field.name for field in fields)
        with delta_errors(f"could not add {names} to {self.root}", self._options):
            self._table.alter.add_columns(
                list(Schema.from_arrow(pa.schema(fields)).fields),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        self._metadata_changed()

    def maintain(self, landed: int) -> None:
        """Start a log checkpoint if the committed version is a multiple of the table's interval.

        It is written in another thread. A failure is only logged. The next multiple tries again.
        """
        if landed > 0 and landed % self._interval() == 0:
            self.checkpoints.write_checkpoint(landed)

    def _interval(self) -> int:
        given = self._table.metadata().configuration.get("delta.checkpointInterval", "")
        number = int(given) if re.fullmatch(r"[0-9]{1,9}", given) else _DEFAULT_CHECKPOINT_INTERVAL
        return max(number, 1)

    def _open(self) -> bool:
        from deltalake import DeltaTable  # noqa: PLC0415 (as above)
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415 (as above)

        self._table, self._versions_read, self.version = None, None, -1
        self._versions, self.changed, self.restores = {}, 0, []
        self._metadata_changed()
        try:
            self._table = DeltaTable(self.root, storage_options=self._options)
        except TableNotFoundError:
            return False
        self.version = self._metadata_at = int(self._table.version())
        newest = None
        with suppress(OSError, ValueError):
            newest = self._entry(self.version)
        self._newest = newest and hashlib.sha256(newest).digest()
        return True

    def _follow(self, now: float) -> bool:
        """Read the new entries up to the end of the log. False: open the table again."""
        try:
            end = self._known_end(now)
            known, entry = self.storage.map(self._entry, (self.version, self.version + 1))
            # A folder that is emptied, replaced, or restored from a backup has other entries under
            # the same numbers, or none. Without this check, this handle commits to the new table.
            if self._newest not in {None, known and hashlib.sha256(known).digest()}:
                return False
            self._read_new(entry)
        except Exception as error:  # noqa: BLE001
            # After any error the table is opened again, which raises an error of its own.
            _LOG.info(
                "reading the log of %s from its start: %s",
                self.root,
                first_line(error, self._options),
            )
            return False
        return self.version >= end

    def _known_end(self, now: float) -> int:
        """Return the lowest version that the end of the log can have."""
        if now - self._end_found_at <= LONGEST_BELIEVED_SECONDS:
            return self.version
        listed = self.storage.list("_delta_log", after=entry_path(self.version))
        return max(
            (int(one.path[-25:-5]) for one in listed if _ENTRY.fullmatch(one.path)),
            default=self.version,
        )

    def _read_new(self, entry: bytes | None) -> None:
        """Note the next entry and those after it, until one does not exist."""
        while entry is not None:
            self._read_entry(self.version + 1, entry)
            entry = self._entry(self.version + 1)

    def _entry(self, version: int) -> bytes | None:
        """Read an entry. None: it does not exist."""
        try:
            return self.storage.read(entry_path(version), MAX_ENTRY_BYTES)
        except FileNotFoundError:
            return None

    def _read_entry(self, version: int, entry: bytes) -> None:
        facts = entry_facts(entry)
        if facts.restored_to is not None:
            self._read_versions()  # It needs the transactions before this entry.
            before = self._versions if self._versions_read else None
            note_restore(self.restores, version, facts.restored_to, before)
        self.version, self._newest = version, hashlib.sha256(entry).digest()
        self.changed = len(facts.transactions)
        self._versions |= facts.transactions
        if facts.changes_table:
            self._metadata_at = version
            self._metadata_changed()

    def _metadata_changed(self) -> None:
        for name in ("schema", "layout", "indexed", "table_id"):
            self.__dict__.pop(name, None)
        self.metadata_changes += 1


def _refused_features(
    writer_version: int, writer: Iterable[str] | None, reader: Iterable[str] | None
) -> str | None:
    """Return the features that are not accepted, or a version that is too new, as text."""
    features = sorted({*(writer or ()), *(reader or ())} - _ACCEPTED_FEATURES)
    if features:
        return f"the table features {', '.join(features)}"
    if writer_version > _LAST_WRITER_VERSION:
        return f"the writer version {writer_version}"
    return None
