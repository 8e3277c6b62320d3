"""Export events: as structured log lines, and to several event sinks."""

import logging
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from kcl_pipeline import events as ev
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import Event, EventSink
from kcl_pipeline.metrics.repeats import RepeatFilter

_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")
_HOLE_WARNING_TIMES: Final = 2
_SHOWN_ITEMS: Final = 5
_SHOWN_CHARACTERS: Final = 1000
_WORD: Final = re.compile(r"[^\s='\"]+")

logger = logging.getLogger("kcl_pipeline.events")

_LEVELS: Final[dict[type[Event], int]] = {
    ev.BatchCommitted: logging.DEBUG,
    ev.LeaseLost: logging.WARNING,
    ev.BatchRefused: logging.WARNING,
    ev.RecordsDeadLettered: logging.WARNING,
    ev.AggregatesRejected: logging.WARNING,
    ev.DeadLettersUnreadable: logging.WARNING,
    ev.ShardPaused: logging.ERROR,
    ev.RecordsLost: logging.ERROR,
    ev.TableRestored: logging.ERROR,
    ev.ShardStalled: logging.WARNING,
    ev.WorkerHung: logging.ERROR,
    ev.WorkerIdShared: logging.ERROR,
    ev.DefectFound: logging.ERROR,
    ev.BatchAbandoned: logging.WARNING,
    ev.StreamsDiffer: logging.WARNING,
    ev.StreamUnavailable: logging.WARNING,
    ev.AnnouncementRejected: logging.WARNING,
    ev.AwsTrouble: logging.WARNING,
    ev.CpuSourceSkipped: logging.WARNING,
    ev.RowRejected: logging.WARNING,
    ev.CycleFailed: logging.ERROR,
    ev.MetricsDropped: logging.WARNING,
    ev.MetricsExportFailed: logging.ERROR,
}
"""Levels other than INFO that do not depend on the event's fields."""


def level_of(event: Event) -> int:
    """The logging level of an event.

    Normal operation, including reshards, handoffs and orderly stops, logs nothing above INFO.
    """
    match event:
        case ev.WorkerStopped(reason="failed" | "hung" | "useless"):
            return logging.ERROR
        case ev.HandoffCompleted(forced=True):
            return logging.WARNING
        case ev.HoleFound(times=times) if times >= _HOLE_WARNING_TIMES:
            return logging.WARNING
        case ev.ShardStalled(step=ev.StallStep.WAITING_FOR_PARENT, error=None):
            # The parents may have days of records. A stalled parent has an event of its own.
            return logging.INFO
        case ev.PlanMade(moves=0, spilled=0):
            return logging.DEBUG
        case ev.PlanMade(spilled=spilled) if spilled:
            return logging.WARNING
        case _:
            is_measured = isinstance(event, ev.Measurement)
            return logging.DEBUG if is_measured else _LEVELS.get(type(event), logging.INFO)


def name_of(event: Event) -> str:
    """The event's name in snake case, for example `lease_gained`."""
    return _WORD_START.sub("_", type(event).__name__).lower()


def facts_of(event: Event) -> dict[str, Any]:
    """The event's fields by name."""
    return {f.name: getattr(event, f.name) for f in fields(event)}


def text_of(event: Event) -> str:
    """The event as one line, for example `lease_gained worker_id=w1 ...`.

    Fields whose metadata has `in_line` False are omitted.
    """
    shown = [f.name for f in fields(event) if f.metadata.get("in_line", True)]
    return " ".join((name_of(event), *(f"{name}={_shown(getattr(event, name))}" for name in shown)))


class LoggingEvents:
    """An event sink that logs.

    The message is `lease_gained worker_id=w1 ...`. The stacks of the threads follow that of
    `WorkerHung`. The log record's attributes `kcl_event` and `kcl` contain the event's name and
    fields. A call that fails repeatedly is logged once per minute.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._filter = RepeatFilter(clock)

    def __call__(self, received: Event) -> None:
        """Log one event. It is formatted only if its level is enabled."""
        event, level = self._filter(received), level_of(received)
        if event is not None and logger.isEnabledFor(level):
            logger.log(
                level,
                "%s",
                f"{text_of(event)}\n{event.stacks}"
                if isinstance(event, ev.WorkerHung)
                else text_of(event),
                extra={"kcl_event": name_of(event), "kcl": facts_of(event)},
            )


def _shown(value: Any) -> str:
    """Format one field.

    A string that is not one plain word is quoted and escaped. A value that others wrote, for
    example the owner in a row, can therefore not start a line, move the cursor or imitate a field.
    """
    match value:
        case float():
            return f"{value:.1f}"
        case str():
            return _quoted(value)
        case tuple() if len(value) > _SHOWN_ITEMS:
            items = ", ".join(_shown(item) for item in value[:_SHOWN_ITEMS])
            return f"({items}, … {len(value)} in all)"
        case tuple():
            items = ", ".join(_quoted(repr(item), is_repr=True) for item in value)
            return f"({items},)" if len(value) == 1 else f"({items})"
        case _:
            return _quoted(str(value), is_repr=True)


def _quoted(text: str, *, is_repr: bool = False) -> str:
    cut = f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    shown = text if len(text) <= _SHOWN_CHARACTERS else cut
    plain = shown.isprintable() and (is_repr or _WORD.fullmatch(shown) is not None)
    return shown if plain else repr(shown)


def fan_out(*sinks: EventSink) -> EventSink:
    """Combine event sinks: every event goes to all of them in order.

    An error of one sink does not affect the others. The first error of each sink is logged.
    """
    failed: set[int] = set()

    def send(event: Event) -> None:
        for number, sink in enumerate(sinks):
            _send(sink, event, number, failed)

    return send


def _send(sink: Callable[[Event], None], event: Event, number: int, failed: set[int]) -> None:
    try:
        sink(event)
    except Exception:
        if number not in failed:
            failed.add(number)
            logger.exception("the event sink %r failed; further errors are not logged", sink)
