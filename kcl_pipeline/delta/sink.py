"""Commit batches to a Delta table exactly once."""

from __future__ import annotations

import random

from kcl_pipeline.batch import Written
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.dead_letters.writer import DeadLetterTable
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.table_log import DeltaTableLog
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.sinks.announcements import AnnouncementStore
from kcl_pipeline.sinks.table import TableSink

__all__ = ["DeltaCommitter", "DeltaSink"]


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

    def has_files(self, written: Written) -> bool:
        """See `FileKeepingSink.has_files`."""
        with self._serialized():
            return self._table.has_files(written.files)

    def check(self) -> int | None:
        """Check the store and the table (see `CheckedSink.check`). Returns the table's version."""
        with self._lock:
            return self._table.check()

    def columns(self) -> TableColumns:
        """What the result of a transform must fit (see `TableCheck.columns`)."""
        with self._lock:
            return self._table.columns()
