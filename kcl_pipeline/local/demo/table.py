"""What the demonstration's Delta table holds, and how that compares with what was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Events by id: `missing` were acknowledged but are not in the table, `duplicated` are rows
    beyond the first, `unknown` were never published.
    """

    committed: int
    missing: int
    duplicated: int
    unknown: int

    @property
    def exact(self) -> bool:
        """Whether the table holds exactly what was published."""
        return self.missing == self.duplicated == self.unknown == 0


class CommittedRows:
    """Counts the table's rows by following its log; a table that does not exist yet has none."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._table: DeltaTable | None = None
        self._version = -1
        self._rows = 0

    def count(self) -> int:
        """Rows in the newest version, from the statistics in the log."""
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


def compare(uri: str, published: Iterable[str], column: str = "id") -> Comparison:
    """Read one column of the whole table and compare it with the ids that were acknowledged."""
    try:
        ids = DeltaTable(uri).to_pyarrow_table(columns=[column])[column]
    except TableNotFoundError:
        ids = pa.chunked_array([pa.array([], pa.string())])
    expected = set(published)
    distinct = set(ids.unique().to_pylist())
    return Comparison(
        len(ids), len(expected - distinct), len(ids) - len(distinct), len(distinct - expected)
    )
