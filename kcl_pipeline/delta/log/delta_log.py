"""Follow the log of one Delta table: a handle at a version, and the transactions at that version.

delta-rs reads the whole log again for each application transaction. Therefore all transactions are
read together at the first request (`transactions`) and kept in a map. Afterwards only new entries
of the log are read. If the old part of the log cannot be read in this way, delta-rs reads each
requested transaction once. If a new entry does not exist any more (log cleanup removed it), the
table is opened again.

`peek` reads entries after the handle's version, if they exist, without moving the handle. It is
cheap. A mismatch that it finds is final, because a transaction never returns to an expected
version. Only `refresh` finds the end of the log.

`append` writes the entry of the handle's version + 1, or fails if that entry exists. With retries,
delta-rs would check the other writers' entries and write a later version. `max_commit_retries=0`
prevents this, so the state at the handle's version is the state directly before the new entry.

delta-rs panics in a forked child, because its runtime does not survive a fork. Every process must
be spawned. The first use stores the process id, and a use in another process raises an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.errors import delta_errors, first_line
from kcl_pipeline.delta.layout import TableLayout
from kcl_pipeline.delta.log.entries import (
    MAX_ENTRY_BYTES,
    entry_facts,
    entry_path,
    protocol_of,
)
from kcl_pipeline.delta.log.restores import Restores
from kcl_pipeline.delta.log.seen_entries import SeenEntries
from kcl_pipeline.delta.log.transactions import read_transactions
from kcl_pipeline.delta.log.upkeep import LogUpkeep
from kcl_pipeline.delta.statistics import Indexed, indexed_columns, log_statistics
from kcl_pipeline.delta.storage.options import delta_options
from kcl_pipeline.delta.storage.storage import open_storage, table_root
from kcl_pipeline.errors import SinkError

_LOG: Final = logging.getLogger(__name__)
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
"""A commit that took longer is read back. Log cleanup keeps entries for hours at least."""
_ENTRIES_KEPT: Final = 1024
_REOPEN_EVERY: Final = 8
"""Number of versions from one attempt to use another writer's log checkpoint to the next."""


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
        self.upkeep = LogUpkeep(self.root, self.storage, self._options)
        self._table: Any = None
        self._numbers: dict[str, int | None] = {}
        self._numbers_read: bool | None = None
        self.metadata_changes = 0
        """Counter of possible changes of the table's metadata or protocol."""
        self._opened_at = self._asked_at = -1
        self.read_to = -1
        self._seen_entries = SeenEntries(self.storage)
        self._recent: dict[int, dict[str, int]] = {}
        self.restores = Restores()
        """Each RESTORE since the checkpoint that the table was opened at, as far as it was read."""

    @property
    def version(self) -> int:
        """Version of the handle; −1 before `refresh` found a table."""
        return -1 if self._table is None else int(self._table.version())

    def refresh(self) -> bool:
        """Move to the end of the log.

        Returns:
            False if the table does not exist.

        Raises:
            SinkError: The log cannot be read.
        """
        with delta_errors(f"could not read the log of {self.root}", self._options):
            is_open = self._table is not None and not self._is_in_doubt
            found = (is_open and self._follow()) or self._open()
            self._is_in_doubt = False
            return found

    def peek(self) -> bool:
        """Read the existing entries after the last one that was read.

        Returns:
            False if the table has not been opened yet.
        """
        if self._table is None:
            return False
        while True:
            try:
                entry = self.storage.read(entry_path(self.read_to + 1), MAX_ENTRY_BYTES)
                self._read_entry(self.read_to + 1, entry)
            except (OSError, ValueError):  # does not exist, or only delta-rs can parse it
                return True

    def transactions_at(self, version: int) -> int:
        """Number of application transactions in a recently read commit; 0 for other commits."""
        return len(self._recent.get(version, ()))

    def transaction(self, application_id: str) -> int | None:
        """Version of an application transaction at `version`, or as far as `peek` has read."""
        if application_id not in self._numbers:
            self._read_numbers()
        if application_id not in self._numbers:
            if self._numbers_read:
                return None
            with delta_errors(f"could not read the transactions of {self.root}", self._options):
                self._numbers[application_id] = self._table.transaction_version(application_id)
        return self._numbers[application_id]

    def _read_numbers(self) -> None:
        if self._numbers_read is None:
            found = read_transactions(self.storage, self.version, self.restores)
            self._numbers, self._numbers_read = (
                {**(found or {}), **self._numbers},
                found is not None,
            )

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
        """Move the handle to the entries that `peek` has read: they may change the metadata."""
        if self.read_to > self.version:
            self.refresh()

    def paths(self) -> list[str]:
        """The paths of the table's files at `version`, relative to its root."""
        with delta_errors(f"could not list the files of {self.root}", self._options):
            return list(pa.table(self._table.get_add_actions(flatten=True))["path"].to_pylist())

    def partition_columns(self) -> tuple[str, ...]:
        """The columns the table is partitioned by."""
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
        """Write an entry with these files and transactions at `version` + 1.

        `version` does not change until `refresh`.

        A write that hung may arrive after the entry of another writer was removed by log cleanup.
        It then creates an entry of that version again, below the checkpoint, where nobody reads it.
        So the table is opened anew after a write that took long, also after one that succeeded.

        Raises:
            SinkError: The entry was not written, or the outcome is not known. If `refresh` then
                finds a newer version, that entry is either this one (its transactions are there)
                or another writer's, and this one can never be committed.
        """
        began = self._clock.monotonic()
        try:
            self._append(files, transactions)
        finally:
            seconds = self._clock.monotonic() - began
            self._is_in_doubt = seconds > LONGEST_BELIEVED_SECONDS
        if self._is_in_doubt:
            raise SinkError(f"the commit to {self.root} took {seconds:.0f} s; the table is read")

    def _append(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> None:
        from deltalake.transaction import (  # noqa: PLC0415 (as above)
            AddAction,
            CommitProperties,
            PostCommitHookProperties,
            Transaction,
        )

        with delta_errors(f"could not commit to {self.root}", self._options):
            adds = [
                AddAction(
                    file.path,
                    file.size,
                    dict(file.partition_values),
                    file.modified_millis,
                    data_change=True,
                    stats=log_statistics(file.rows, file.statistics, self.indexed),
                )
                for file in files
            ]
            self._table.create_write_transaction(
                adds,
                "append",
                self._table.schema(),
                list(self.partition_columns()),
                commit_properties=CommitProperties(
                    max_commit_retries=0,
                    app_transactions=[
                        Transaction(key, number) for key, number in transactions.items()
                    ],
                ),
                post_commithook_properties=PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add nullable columns at `version` + 1. Errors are those of `append`."""
        from deltalake import CommitProperties, Schema  # noqa: PLC0415 (as above)

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
            self.upkeep.write_checkpoint(landed)

    def _interval(self) -> int:
        given = self._table.metadata().configuration.get("delta.checkpointInterval", "")
        number = int(given) if re.fullmatch(r"[0-9]{1,9}", given) else _DEFAULT_CHECKPOINT_INTERVAL
        return max(number, 1)

    def _open(self) -> bool:
        from deltalake import DeltaTable  # noqa: PLC0415 (as above)
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415 (as above)

        self.upkeep.discard()
        self._table, self._numbers_read = None, None
        self._numbers, self._recent = {}, {}
        self.restores.clear()
        self._metadata_changed()
        try:
            self._table = DeltaTable(self.root, storage_options=self._options)
        except TableNotFoundError:
            return False
        self._opened_at = self.read_to = self._asked_at = self.version
        self._seen_entries.begin(self.version)
        return True

    def _follow(self) -> bool:
        """Move the handle to the end and read the new entries. False: open the table again."""
        before = self.version
        if not self._seen_entries.is_same(before):
            return False
        try:
            self._advance()
            if self.version < before:
                return False
            for version in range(self.read_to + 1, self.version + 1):
                self._read_entry(version, self.storage.read(entry_path(version), MAX_ENTRY_BYTES))
        except Exception as error:  # noqa: BLE001
            # After any error the table is opened again, which raises an error of its own.
            _LOG.info(
                "reading the log of %s from its start: %s",
                self.root,
                first_line(error, self._options),
            )
            return False
        return True

    def _advance(self) -> None:
        """Move the handle to the end of the log.

        A handle reads all entries since the checkpoint that it was opened at. It is therefore
        replaced after the next checkpoint by one that another thread has opened.
        """
        opened = self.upkeep.take_opened()
        if opened is not None:
            self._table = opened
            self._opened_at = self.version
            self._numbers_read = self._numbers_read or None
        self._table.update_incremental()
        interval, version = self._interval(), self.version
        multiple = version - version % interval
        if multiple > self._opened_at and version >= self._asked_at + _REOPEN_EVERY:
            self._asked_at = version
            self.upkeep.reopen(multiple)

    def _read_entry(self, version: int, entry: bytes) -> None:
        facts = entry_facts(entry)
        self.read_to = version
        self._seen_entries.note(version, entry)
        self._recent[version] = facts.transactions
        self._recent.pop(version - _ENTRIES_KEPT, None)
        if facts.restored_to is not None:
            self._read_numbers()  # It needs the transactions before this entry.
            before = self._numbers if self._numbers_read else None
            self.restores.note(version, facts.restored_to, before)
        self._numbers |= facts.transactions
        if facts.changes_table:
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
