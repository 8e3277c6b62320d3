"""What an operator wants of a whole application: a pause.

The request is an attribute of the client-version row `Migration3.0` in the coordinator-state table.
Leaders and workers read this row anyway, so a request needs no further call. Java readers keep
attributes that they do not know. The presence of the attribute decides; its content is shown only.
This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.leases.lease.serialization import string
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.text import printable

PAUSE: Final = "kclpPause"
MAX_TEXT: Final = 10_000
"""Largest number of characters of an attribute."""
MAX_WORDS: Final = 500
"""Largest number of characters of a name or a reason."""

_Words = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Millis = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIS)]


@dataclass(frozen=True, slots=True)
class Pause:
    """The application is paused: workers release their leases and end, and none is assigned.

    Attributes:
        by: Who paused it.
        at_millis: When, in epoch milliseconds of the operator's clock. None: unknown.
        reason: Why; may be empty.
    """

    by: _Words
    at_millis: _Millis | None = None
    reason: _Words = ""

    @property
    def sentence(self) -> str:
        """Since when it is paused, by whom and why."""
        why = f": {printable(self.reason)}" if self.reason else ""
        return f"paused{_since(self.at_millis)} by {printable(self.by)}{why}"

    @property
    def value(self) -> AttributeValue:
        """The attribute."""
        return string(msgspec.json.encode(self, order="deterministic").decode())


UNREADABLE: Final = "an unknown operator (the attribute cannot be read)"


@dataclass(frozen=True, slots=True)
class Control:
    """The request of an operator, as it was read.

    Attributes:
        pause: The pause. None: not paused.
        pause_value: Its attribute. A conditional write compares it.
    """

    pause: Pause | None = None
    pause_value: AttributeValue | None = None


NOTHING_WANTED: Final = Control()


def control_of(item: Item) -> Control:
    """Return the request in a client-version row."""
    value = item.get(PAUSE)
    return NOTHING_WANTED if value is None else Control(_pause_of(value), value)


def words(text: str) -> str:
    """Return a name or a reason as it is stored: printable, and not too long."""
    return printable(text, MAX_WORDS)


def _pause_of(value: AttributeValue) -> Pause:
    text = value.get("S")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        return Pause(UNREADABLE)
    try:
        return msgspec.json.decode(text, type=Pause)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return Pause(UNREADABLE)


def _since(millis: int | None) -> str:
    if millis is None:
        return ""
    try:
        return f" since {datetime.fromtimestamp(millis / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # outside the calendar
        return ""
