"""Describe the output table with the metadata that the Dagster UI knows: columns, rows, lineage."""

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.errors import first_line
from kcl_pipeline.delta.storage.options import delta_options
from kcl_pipeline.kinesis.client import RECORD_SCHEMA
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, table_uri

COLUMNS: Final = "dagster/column_schema"
LINEAGE: Final = "dagster/column_lineage"
ROWS: Final = "dagster/row_count"
NAME: Final = "dagster/table_name"
COUNT_SHARE: Final = 0.05
"""Largest part of the time in which rows are counted."""

_log = logging.getLogger(__name__)


def record_columns() -> dg.TableSchema:
    """The columns of the records, which a stream gives to a transform."""
    return dg.TableSchema([dg.TableColumn(one.name, str(one.type)) for one in RECORD_SCHEMA])


def table_name(uri: str) -> str:
    """The last two parts of an address, as in `lake.orders`. `dagster/uri` has all of them."""
    path = uri.rpartition("://")[2]
    return ".".join(path.strip("/").split("/")[-2:])


def column_lineage(pipeline: PipelineLike, names: Names) -> dict[str, dg.TableColumnLineage]:
    """Where each column of the output comes from. Empty: a user's function decides it.

    Without a function, the table has the columns of the records.
    """
    functions = (pipeline.transform, pipeline.transform_arrow)
    if table_uri(pipeline.sink) is None or any(one is not None for one in functions):
        return {}
    streams = (names.selected_streams,) if names.selects_streams else names.streams_keys
    return {
        LINEAGE: dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(key, name) for key in streams]
                for name in RECORD_SCHEMA.names
            }
        )
    }


@dataclass(slots=True)
class OutputTable:
    """Reads columns and number of rows of the output from the log of its Delta table.

    Attributes:
        sink: The sink. One that is not a table has no metadata.
        clock: Measures how long the count takes.
        lineage: What `column_lineage` returns.
        count_at: When the rows are counted again, in monotonic seconds. Counting costs the more the
            more files the table has.
        latest: What was read last.
        reader: The thread of `metadata_within`. None: it was never called.
    """

    sink: Any
    clock: Clock
    lineage: Mapping[str, dg.TableColumnLineage]
    count_at: float = -math.inf
    latest: dict[str, Any] = field(default_factory=dict)
    reader: threading.Thread | None = None

    def metadata(self) -> dict[str, Any]:
        """Columns, rows and lineage as metadata. Empty: there is no table that can be read now."""
        uri = table_uri(self.sink)
        if uri is None:
            return {}
        # deltalake starts threads when it is loaded: load it only in the process that uses it.
        from deltalake import DeltaTable  # noqa: PLC0415
        from deltalake.exceptions import DeltaError  # noqa: PLC0415

        options = delta_options(uri, getattr(self.sink, "storage_options", {}))
        began = self.clock.monotonic()
        counts = began >= self.count_at
        try:
            table = DeltaTable(uri, storage_options=options, without_files=not counts)
            rows = {ROWS: table.count()} if counts else {}
            columns = [_column(one) for one in table.schema().fields]
        except (DeltaError, OSError, ValueError) as error:
            _log.warning("cannot read the output table: %s", first_line(error, options))
            return {}
        if counts:
            now = self.clock.monotonic()
            self.count_at = now + (now - began) / COUNT_SHARE
        return rows | {COLUMNS: dg.TableSchema(columns)} | dict(self.lineage)

    def metadata_within(self, seconds: float) -> dict[str, Any]:
        """Like `metadata`, for a caller that must not wait for a store that does not answer.

        Args:
            seconds: Longest wait. After it, the result is what was read last.
        """

        def read() -> None:
            self.latest = self.metadata()

        if self.reader is None or not self.reader.is_alive():
            self.reader = threading.Thread(target=read, name="output-table", daemon=True)
            self.reader.start()
        self.reader.join(seconds)
        return self.latest


def _column(column: Any) -> dg.TableColumn:
    return dg.TableColumn(
        column.name,
        _type_text(column.type),
        description=column.metadata.get("comment"),
        constraints=dg.TableColumnConstraints(nullable=column.nullable),
    )


def _type_text(kind: Any) -> str:
    """A type of Delta, as SQL writes it."""
    match kind.type:
        case "array":
            return f"array<{_type_text(kind.element_type)}>"
        case "map":
            return f"map<{_type_text(kind.key_type)}, {_type_text(kind.value_type)}>"
        case "struct":
            fields = ", ".join(f"{one.name}: {_type_text(one.type)}" for one in kind.fields)
            return f"struct<{fields}>"
        case text:
            return str(text)
