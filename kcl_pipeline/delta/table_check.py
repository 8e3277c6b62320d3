"""Check that a table may be written, and that a batch's columns fit it.

Others may change a table while workers write to it: add a check constraint, add columns, or let
application transactions expire. Both checks are therefore repeated before the next commit whenever
an entry of the log has changed the table's metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from kcl_pipeline.delta.errors import cause_of, first_line
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.schema import (
    delta_schema,
    misfit,
    missing_columns,
    partition_misfit,
    untyped,
    untyped_reason,
)
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.storage.options import is_s3, s3_option
from kcl_pipeline.errors import SinkError, TableMismatchError

MAX_ATTEMPTS: Final = 200
TABLE_PROPERTIES: Final = {"delta.checkpointInterval": "50"}


class TableCheck:
    """The checks of one table.

    Args:
        sink: The settings.
        log: The table's log; its owner refreshes it.
        back_off: Waits before another attempt of this number, and refreshes the log.
    """

    def __init__(self, sink: DeltaSink, log: DeltaLog, back_off: Callable[[int], None]) -> None:
        self._sink = sink
        self._log = log
        self._back_off = back_off
        self._checked = -1
        self._fitting: pa.Schema | None = None

    def ensure(self, schema: pa.Schema) -> None:
        """Create the table for this schema unless it exists; then as `fit`."""
        reason = partition_misfit(delta_schema(schema), self._sink.partition_by)
        if reason:
            raise TableMismatchError(f"{self._log.root}: {reason}")
        self.store()
        if not self._log.refresh():
            reason = untyped_reason([field.name for field in untyped(schema)])
            if reason:
                raise TableMismatchError(f"{self._log.root}: {reason}")
            properties = TABLE_PROPERTIES | dict(self._sink.table_properties)
            self._log.create(delta_schema(schema), self._sink.partition_by, properties)
            self._log.refresh()
        self.fit(schema)

    def columns(self) -> TableColumns:
        """What a result must fit, as of the last read of the log.

        If the table has changed since, `fit` notices it before a commit.

        Raises:
            SinkError: The log cannot be read.
        """
        exists = self._log.version >= 0 or self._log.refresh()
        return TableColumns(
            self._log.schema if exists else None,
            tuple(self._sink.partition_by),
            self._sink.schema_evolution,
            self._log.root,
        )

    def start(self) -> bool:
        """Check the store, and the table if it exists, before anything is committed.

        Returns:
            Whether the table exists.

        Raises:
            TableMismatchError: The table may not be written.
            SinkError: The store cannot be used now.
        """
        self.store()
        try:
            exists = self._log.refresh()
        except SinkError as error:
            reason = self._log.unopened()
            if reason is None:
                raise
            raise self._unwritable(reason) from error
        if exists:
            self.table()
        return exists

    def _unwritable(self, reason: str) -> TableMismatchError:
        return TableMismatchError(
            f"{self._log.root} has {reason}, which exactly-once commits of finished files do not "
            "support; remove it from the table, or use another table"
        )

    def store(self) -> None:
        """Check that the store can create an object only if it does not exist.

        The first call writes to the store.

        Raises:
            TableMismatchError: It cannot, so two writers could commit the same version.
            SinkError: The store cannot be used now.
        """
        options, root = self._sink.storage_options, self._log.root
        if is_s3(root):
            unsafe = s3_option(options, "s3_allow_unsafe_rename")
            if (unsafe or os.environ.get("AWS_S3_ALLOW_UNSAFE_RENAME", "")).lower() == "true":
                raise TableMismatchError(
                    "AWS_S3_ALLOW_UNSAFE_RENAME=true lets two writers commit the same version of "
                    f"{root}, and one of them loses its rows. Leave the option out."
                )
        try:
            refuses = self._log.storage.creates_once()
        except OSError as error:
            message = f"cannot check the store of {root}: {first_line(error, options)}"
            raise SinkError(message) from cause_of(error, options)
        if not refuses:
            raise TableMismatchError(
                f"the store of {root} ignores conditional writes (If-None-Match) and replaces "
                "existing objects, so two writers would commit the same version and lose rows. "
                "Use a store with conditional writes."
            )

    def table(self) -> None:
        """Check that the table may be written with these settings.

        Does nothing while the table's metadata does not change.

        Raises:
            TableMismatchError: The table may not be written.
        """
        if self._checked == self._log.metadata_changes:
            return
        self._fitting = None
        columns, configured = self._log.partition_columns(), tuple(self._sink.partition_by)
        if columns != configured:
            raise TableMismatchError(
                f"partition_by={list(configured)} does not fit {self._log.root}, which is "
                f"partitioned by {list(columns)}; write partition_by={columns!r}"
            )
        reason = self._log.unsupported()
        if reason:
            raise self._unwritable(reason)
        self._checked = self._log.metadata_changes

    def fit(self, schema: pa.Schema | None) -> None:
        """Check the table, and that a batch of this schema fits (None: it has no rows).

        With `schema_evolution` the batch's new columns are added. The log may then be at a newer
        version.

        Raises:
            TableMismatchError: The table may not be written, or the batch does not fit.
            SinkError: The columns cannot be added.
        """
        self.store()
        self.table()
        if schema is None:
            return
        for attempt in range(MAX_ATTEMPTS):
            if self._fitting is not None and self._fitting.equals(schema):
                return
            reason = misfit(self._log.schema, schema)
            if reason is None:
                self._fitting = schema
                return
            added = missing_columns(self._log.schema, schema)
            allowed = self._sink.schema_evolution
            if not allowed or not added or misfit(pa.schema([*self._log.schema, *added]), schema):
                hint = "; set schema_evolution=True to add columns" if added and not allowed else ""
                raise TableMismatchError(
                    f"the transform's output does not fit {self._log.root}: {reason}{hint}"
                )
            before = self._log.version
            try:
                self._log.add_columns(added)
            except SinkError:
                self._log.refresh()
                if self._log.version == before:
                    raise
                self._back_off(attempt)
            else:
                self._log.refresh()
            self.table()
        raise SinkError(
            f"{self._log.root}: {MAX_ATTEMPTS} attempts to add columns lost to other writers"
        )
