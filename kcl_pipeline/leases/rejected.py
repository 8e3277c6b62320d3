"""Telling about rows that cannot be used: once each, and again when the reason changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kcl_pipeline.events import EventSink, RowRejected
from kcl_pipeline.leases.lease import BadRow

MAX_REMEMBERED: Final = 1000
"""Rows that are told about at the same time (our own limit); the others are in the listing."""


class RejectedRows:
    """Emits `RowRejected` for rows that were not told about yet. Thread-safe."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], str] = {}

    def note(self, row: BadRow) -> None:
        """Take in one row that cannot be used."""
        where = (row.table, row.key)
        with self._lock:
            is_known = self._told.get(where) == row.reason
            is_full = where not in self._told and len(self._told) >= MAX_REMEMBERED
            if is_known or is_full:
                return
            self._told[where] = row.reason
        self._events(RowRejected(row.table, row.key, row.reason))

    def note_all(self, rows: Iterable[BadRow]) -> None:
        """Take in all rows of a look at the tables; others are forgotten, and told about again
        when they come back.
        """
        found = {(row.table, row.key): row for row in rows}
        with self._lock:
            for where in [where for where in self._told if where not in found]:
                del self._told[where]
        for row in found.values():
            self.note(row)

    def forget(self, table: str, key: str) -> None:
        """The row can be used again, or is gone."""
        with self._lock:
            self._told.pop((table, key), None)
