"""Report rows that cannot be used: each once, and again when the reason changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from kcl_pipeline.events import EventSink, RowRejected
from kcl_pipeline.leases.lease.values import BadRow

MAX_REMEMBERED: Final = 1000
"""Largest number of rows that are reported at the same time (our own limit)."""


class RejectedRows:
    """Emits `RowRejected` for rows that are not reported yet. Thread-safe."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._reported: dict[tuple[str, str], str] = {}

    def note(self, row: BadRow) -> None:
        """Report one row that cannot be used."""
        key = (row.table, row.key)
        with self._lock:
            is_known = self._reported.get(key) == row.reason
            is_full = key not in self._reported and len(self._reported) >= MAX_REMEMBERED
            if is_known or is_full:
                return
            self._reported[key] = row.reason
        self._events(RowRejected(row.table, row.key, row.reason))

    def note_all(self, rows: Iterable[BadRow]) -> None:
        """Report all bad rows of a scan.

        Rows that are not among them are forgotten. If they occur again, they are reported again.
        """
        found = {(row.table, row.key): row for row in rows}
        with self._lock:
            for key in [key for key in self._reported if key not in found]:
                del self._reported[key]
        for row in found.values():
            self.note(row)

    def forget(self, table: str, key: str) -> None:
        """Forget a row that can be used again, or does not exist any more."""
        with self._lock:
            self._reported.pop((table, key), None)
