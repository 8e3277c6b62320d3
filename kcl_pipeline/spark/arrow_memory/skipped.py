"""State in an event why batches are not passed as Arrow columns in memory."""

from __future__ import annotations

from typing import Literal

from kcl_pipeline.errors import KclError
from kcl_pipeline.events import ArrowMemorySkipped, EventSink
from kcl_pipeline.spark.failures.job_errors import spark_line


class SkipReport:
    """Emit `ArrowMemorySkipped`, but not again while the reason stays the same."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._reasons: dict[str, str] = {}

    def __call__(self, what: Literal["records", "result"], error: Exception) -> None:
        """State the error that prevents this direction."""
        reason = str(error) if isinstance(error, KclError | OSError) else spark_line(error)
        known = reason in self._reasons.values()
        self._reasons[what] = reason
        if not known:
            self._events(ArrowMemorySkipped(reason))
