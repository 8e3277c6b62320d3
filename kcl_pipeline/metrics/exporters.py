"""What operators see: events as structured log lines, and several sinks behind one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from kcl_pipeline import events as ev
from kcl_pipeline.events import Event, EventSink

_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")
_HOLE_WARNING_TIMES: Final = 2
_SHOWN_ITEMS: Final = 5

logger = logging.getLogger("kcl_pipeline.events")

_LEVELS: Final[dict[type[Event], int]] = {
    ev.BatchCommitted: logging.DEBUG,
    ev.LeaseLost: logging.WARNING,
    ev.BatchRefused: logging.WARNING,
    ev.RecordsDeadLettered: logging.WARNING,
    ev.Stalled: logging.WARNING,
    ev.AwsTrouble: logging.WARNING,
    ev.CycleFailed: logging.ERROR,
}
"""Only what differs from INFO, and does so whatever the event says."""


def level_of(event: Event) -> int:
    """The logging level. A fleet in good health, which reshards, hands over and stops in good order, logs nothing above INFO."""
    match event:
        case ev.WorkerStopped(reason="failed"):
            return logging.ERROR
        case ev.HandoffCompleted(forced=True):
            return logging.WARNING
        case ev.HoleFound(times=times) if times >= _HOLE_WARNING_TIMES:
            return logging.WARNING
        case ev.PlanMade(moves=0, spilled=0):
            return logging.DEBUG
        case ev.PlanMade(spilled=spilled) if spilled:
            return logging.WARNING
        case _:
            return _LEVELS.get(type(event), logging.INFO)


def name_of(event: Event) -> str:
    """The event's name in snake case: `lease_gained`."""
    return _WORD_START.sub("_", type(event).__name__).lower()


def facts_of(event: Event) -> dict[str, Any]:
    """What the event says, by field."""
    return {f.name: getattr(event, f.name) for f in fields(event)}


def text_of(event: Event) -> str:
    """The event as one line: `lease_gained worker_id=w1 ...`."""
    return " ".join((name_of(event), *(f"{key}={_shown(value)}" for key, value in facts_of(event).items())))


class LoggingEvents:
    """An event sink that logs. The message reads `lease_gained worker_id=w1 ...`; the same facts are in the record's `kcl_event` and `kcl` attributes."""

    def __init__(self, log: logging.Logger = logger) -> None:
        self._log = log

    def __call__(self, event: Event) -> None:
        """Log one event; nothing is formatted when its level is off."""
        level = level_of(event)
        if self._log.isEnabledFor(level):
            self._log.log(level, "%s", text_of(event), extra={"kcl_event": name_of(event), "kcl": facts_of(event)})


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > _SHOWN_ITEMS:
        return f"({', '.join(map(str, value[:_SHOWN_ITEMS]))}, … {len(value)} in all)"
    if isinstance(value, float):
        return f"{value:.1f}"
    return repr(value) if isinstance(value, str) and " " in value else str(value)


def fan_out(*sinks: EventSink) -> EventSink:
    """One sink that hands every event to all of them, in order. A sink that raises does not keep it from the others; its first failure is logged."""
    failed: set[int] = set()

    def give(event: Event) -> None:
        for number, sink in enumerate(sinks):
            _give(sink, event, number, failed)

    return give


def _give(sink: Callable[[Event], None], event: Event, number: int, failed: set[int]) -> None:
    try:
        sink(event)
    except Exception:
        if number not in failed:
            failed.add(number)
            logger.exception("the event sink %r failed; its further failures are not logged", sink)
