"""Content of the demonstration's Delta table, compared with the published events."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from kcl_pipeline.delta.dead_letters import read_rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of the comparison of event ids.

    Attributes:
        committed: Rows of the table.
        missing: Acknowledged events that are not in the table.
        duplicated: Rows with an id that an earlier row has.
        unknown: Ids in the table that were not acknowledged.
    """

    committed: int
    missing: int
    duplicated: int
    unknown: int

    @property
    def exact(self) -> bool:
        """Whether the table holds exactly the acknowledged events."""
        return self.missing == self.duplicated == self.unknown == 0


class CommittedRows:
    """Row counter that follows the log of a Delta table.

    A table that does not exist has no rows.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._table: DeltaTable | None = None
        self._version = -1
        self._rows = 0

    def count(self) -> int:
        """Return the rows of the newest version, from the statistics in the log."""
        try:
            if self._table is None:
                self._table = DeltaTable(self._uri)
            else:
                self._table.update_incremental()
        except TableNotFoundError:
            return 0
        if self._table.version() != self._version:
            actions = pa.table(self._table.get_add_actions(flatten=True))
            self._rows = pc.sum(actions["num_records"]).as_py() or 0 if actions.num_rows else 0
            self._version = self._table.version()
        return self._rows


def compare(uris: str | Iterable[str], published: Iterable[str], column: str = "id") -> Comparison:
    """Compare one column of the whole tables with the acknowledged ids."""
    query = f'select cast("{column}" as varchar) as id from rows'  # noqa: S608
    chunks = [pa.array([], pa.string())]
    for uri in [uris] if isinstance(uris, str) else uris:
        with suppress(TableNotFoundError):
            chunks += read_rows(DeltaTable(uri), query)["id"].cast(pa.string()).chunks
    ids = pa.chunked_array(chunks)
    expected = set(published)
    distinct = set(ids.unique().to_pylist())
    return Comparison(
        len(ids), len(expected - distinct), len(ids) - len(distinct), len(distinct - expected)
    )
