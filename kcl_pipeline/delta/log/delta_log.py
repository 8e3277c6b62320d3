"""One Delta table's log, followed cheaply: a handle at a version, and the application transactions
at exactly that version.

delta-rs reads a transaction's number by reading the log again, once for each, so all numbers are
read together when the first is asked for (`transactions`) and kept in a map; afterwards only
the log's new entries are read. Where the old part of the log cannot be read that way, the handle is
asked for each number once. When a new entry is not there any more (the handle jumped over a cleaned
part) everything is opened anew.

`peek` reads the entries that are there beyond the handle's version without moving it, for next to
nothing. What it finds is true for ever (a number that is not the expected one never will be again),
what it does not find is not: only `refresh` knows where the log ends.

`append` is strict: an entry is written at the handle's version + 1, if nobody wrote that one, or
not at all. delta-rs would otherwise check what the winners did and write further back; with
`max_commit_retries=0` it never does, so what is true at the handle's version is true right before
the new entry.

delta-rs panics in a forked child (its runtime does not survive a fork): every process must be
spawned. The first use remembers the process, and a use in another one is refused with a sentence
instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.errors import delta_errors, first_line
from kcl_pipeline.delta.layout import TableLayout
from kcl_pipeline.delta.log.entries import MAX_ENTRY_BYTES, entry_facts, entry_path
from kcl_pipeline.delta.log.transactions import read_transactions
from kcl_pipeline.delta.storage.storage import open_storage, table_root
from kcl_pipeline.errors import SinkError

_LOG: Final = logging.getLogger(__name__)
_DEFAULT_CHECKPOINT_INTERVAL: Final = 100
_UNSUPPORTED_FEATURES: Final = {
    "identityColumns",
    "generatedColumns",
    "rowTracking",
    "icebergCompatV1",
    "icebergCompatV2",
    "columnMapping",
}
_ENTRIES_KEPT: Final = 1024


class DeltaLog:
    """The log of the table at `uri`. Not for use by two threads at a time."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.root = table_root(uri)
        self.storage = open_storage(self.root, storage_options)
        self._options = dict(storage_options or {})
        self._table: Any = None
        self._numbers: dict[str, int | None] = {}
        self._numbers_read: bool | None = None
        self._landed: dict[str, int] = {}
        self._schema: pa.Schema | None = None
        self._layout: TableLayout | None = None
        self.metadata_changes = 0
        """Grows whenever the table's metadata or protocol may have changed."""
        self._opened_at = -1
        self._read_to = -1
        self._recent: dict[int, dict[str, int]] = {}

    @property
    def version(self) -> int:
        """The version that everything here speaks of; −1 before `refresh` found a table."""
        return -1 if self._table is None else int(self._table.version())

    def refresh(self) -> bool:
        """Go to the end of the log. False: there is no table. Raises `SinkError`."""
        with delta_errors(f"could not read the log of {self.root}", self._options):
            if self._table is not None and self._follow():
                return True
            return self._open()

    def peek(self) -> bool:
        """Read the entries that follow what has been read, as far as they are there. False: nothing
        has been read yet.
        """
        if self._table is None:
            return False
        while True:
            try:
                entry = self.storage.read(entry_path(self._read_to + 1), MAX_ENTRY_BYTES)
                self._read_entry(self._read_to + 1, entry)
            except (OSError, ValueError):  # not there, or for delta-rs to read: `refresh` knows
                return True

    def transactions_at(self, version: int) -> int:
        """How many application transactions the commit of a version carried that was read lately; 0
        when it was not.
        """
        return len(self._recent.get(version, ()))

    def landed_together(
        self, transactions: Mapping[str, int], after: Mapping[str, int | None]
    ) -> int | None:
        """The newest version read lately whose commit set all these numbers, and which is after
        those that set the numbers of `after`.

        It is proof that a commit on the numbers of `after` landed, also when others have moved the
        numbers on since.
        """
        for version, entry in reversed(self._recent.items()):
            if transactions.items() <= entry.items():
                return version
            if any(
                entry.get(application_id) == number
                for application_id, number in after.items()
                if number is not None
            ):
                return None
        return None

    def transaction(self, application_id: str) -> int | None:
        """The number of an application transaction at `version`, or as far as `peek` has read."""
        if application_id not in self._numbers and self._numbers_read is None:
            found = read_transactions(self.storage, self.version)
            self._numbers, self._numbers_read = (
                {**(found or {}), **self._numbers},
                found is not None,
            )
        if application_id not in self._numbers:
            if self._numbers_read:
                return None
            with delta_errors(f"could not read the transactions of {self.root}", self._options):
                self._numbers[application_id] = self._table.transaction_version(application_id)
        return self._numbers[application_id]

    def landed_at(self, application_id: str) -> int:
        """The version whose commit set the transaction last, as far as it was seen here, else
        `version`.
        """
        return self._landed.get(application_id, self.version)

    def schema(self) -> pa.Schema:
        """The table's columns."""
        if self._schema is None:
            self._catch_up()
            with delta_errors(f"could not read the schema of {self.root}", self._options):
                self._schema = pa.schema(self._table.schema().to_arrow())
        return self._schema

    def layout(self) -> TableLayout:
        """What a file must have to fit the table."""
        if self._layout is None:
            schema = self.schema()
            with delta_errors(f"could not read the metadata of {self.root}", self._options):
                metadata, text = self._table.metadata(), self._table.schema().to_json()
                columns = list(metadata.partition_columns)
            digest = hashlib.sha256(json.dumps([metadata.id, columns, text]).encode()).hexdigest()
            self._layout = TableLayout(digest, {name: schema.field(name).type for name in columns})
        return self._layout

    def _catch_up(self) -> None:
        """Bring the handle to what `peek` has read: a change of the metadata may be in it."""
        if self._read_to > self.version:
            self.refresh()

    def paths(self) -> list[str]:
        """The paths of the table's files at `version`, relative to its root."""
        with delta_errors(f"could not list the files of {self.root}", self._options):
            return list(pa.table(self._table.get_add_actions(flatten=True))["path"].to_pylist())

    def partition_columns(self) -> tuple[str, ...]:
        """The columns the table is partitioned by."""
        return tuple(self._table.metadata().partition_columns)

    def unsupported(self) -> str | None:
        """What in the table's settings asks more of a writer than adding files, in words; None when
        nothing does.
        """
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
        features = sorted(
            (set(protocol.writer_features or ()) & _UNSUPPORTED_FEATURES) - {"columnMapping"}
        )
        computed = [
            field.name
            for field in self._table.schema().fields
            if {"delta.invariants", "delta.generationExpression"} & set(field.metadata)
        ]
        return ", ".join(features) or (
            f"invariants or generated columns ({', '.join(computed)})" if computed else None
        )

    def create(
        self, schema: pa.Schema, partition_by: Sequence[str], properties: Mapping[str, str]
    ) -> bool:
        """Write version 0 if nobody has. False: somebody else did, or it is not known; read
        again.
        """
        # its runtime must start in the process that uses it
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
            if self.refresh():
                return False
            raise
        return True

    def append(self, files: Sequence[DataFile], transactions: Mapping[str, int]) -> None:
        """Write the next entry: these files and numbers, at `version` + 1 and nowhere else.
        `version` stays until `refresh`.

        Raises `SinkError` whatever the reason. When `refresh` then shows a newer version, the place
        was taken: by this very entry if its numbers are there, else by somebody else's, and this
        one can never land. When it does not, the outcome is not known.
        """
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
                    stats=json.dumps({"numRecords": file.rows}),
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
        """Add nullable columns at `version` + 1 and nowhere else; errors as in `append`."""
        from deltalake import CommitProperties, Schema  # noqa: PLC0415 (as above)

        names = ", ".join(field.name for field in fields)
        with delta_errors(f"could not add {names} to {self.root}", self._options):
            self._table.alter.add_columns(
                list(Schema.from_arrow(pa.schema(fields)).fields),
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        self._metadata_changed()

    def maintain(self, landed: int) -> None:
        """Checkpoint the log after the commit that landed at a multiple of the table's interval.

        Failing is no harm: the next multiple does it.
        """
        if landed <= 0 or landed % self._interval():
            return
        try:
            with delta_errors(f"could not checkpoint the log of {self.root}", self._options):
                self._follow()
                self._table.create_checkpoint()
                if (
                    self._table.metadata().configuration.get(
                        "delta.enableExpiredLogCleanup", "true"
                    )
                    != "false"
                ):
                    self._table.cleanup_metadata()
        except SinkError as error:
            _LOG.warning("%s; the log grows until the next attempt", error)

    def _interval(self) -> int:
        given = self._table.metadata().configuration.get("delta.checkpointInterval", "")
        number = int(given) if re.fullmatch(r"[0-9]{1,9}", given) else _DEFAULT_CHECKPOINT_INTERVAL
        return max(number, 1)

    def _open(self) -> bool:
        from deltalake import DeltaTable  # noqa: PLC0415 (as above)
        from deltalake.exceptions import TableNotFoundError  # noqa: PLC0415 (as above)

        self._table, self._numbers_read = None, None
        self._numbers, self._landed, self._recent = {}, {}, {}
        self._metadata_changed()
        try:
            self._table = DeltaTable(self.root, storage_options=self._options)
        except TableNotFoundError:
            return False
        self._opened_at = self._read_to = self.version
        return True

    def _follow(self) -> bool:
        """Bring the handle to the end and read what is new. False: this cannot be done from here,
        open anew.
        """
        before = self.version
        try:
            self._advance()
            if self.version < before:
                return False
            for version in range(self._read_to + 1, self.version + 1):
                self._read_entry(version, self.storage.read(entry_path(version), MAX_ENTRY_BYTES))
        except Exception as error:  # noqa: BLE001
            # any of them is answered by opening the table anew, which raises its own
            _LOG.info("reading the log of %s from its start: %s", self.root, first_line(error))
            return False
        return True

    def _advance(self) -> None:
        """Bring the handle to the end of the log; a handle reads everything since the checkpoint it
        was opened at, so it is renewed after the next one.
        """
        from deltalake import DeltaTable  # noqa: PLC0415 (as above)

        interval = self._interval()
        if self.version // interval > self._opened_at // interval and self.version % interval > 1:
            self._table = DeltaTable(self.root, storage_options=self._options)
            self._opened_at = self.version
            self._numbers_read = self._numbers_read or None
        else:
            self._table.update_incremental()

    def _read_entry(self, version: int, entry: bytes) -> None:
        facts = entry_facts(entry)
        self._read_to = version
        self._recent[version] = facts.transactions
        self._recent.pop(version - _ENTRIES_KEPT, None)
        self._numbers |= facts.transactions
        self._landed |= dict.fromkeys(facts.transactions, version)
        if facts.changes_table:
            self._metadata_changed()

    def _metadata_changed(self) -> None:
        self._schema = self._layout = None
        self.metadata_changes += 1
