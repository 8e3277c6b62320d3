"""Escape and shorten strings of other parties for terminals, log lines and error messages."""

from __future__ import annotations

from datetime import datetime
from typing import Final

SHOWN_CHARACTERS: Final = 200
"""Largest length in a message (our own limit). An attribute of a row may have 400 KB."""
_HOURS_FROM: Final = 7_200.0
_MINUTES_FROM: Final = 120.0


def printable(text: str, most: int = SHOWN_CHARACTERS) -> str:
    r"""Return the string with every unprintable character escaped, as in ``\n`` or ``\x1b``.

    The result cannot move a cursor, start a line or reorder the text around it. A string of more
    than `most` characters is cut, and its length is appended.
    """
    if len(text) <= most:
        return text if text.isprintable() else _escaped(text)
    return f"{_escaped(text[:most])}... ({len(text)} characters)"


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Return the number and the noun: `1 loss`, `0 losses`. Default plural: with an `s`."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def in_utc(time: datetime) -> str:
    """Return a time without a zone as the text of that time in UTC: `2026-11-23T00:00:00Z`."""
    return f"{time.replace(tzinfo=None).isoformat()}Z"


def duration_text(seconds: float) -> str:
    """A time as text: `12 s`, `5 min`, `3.5 h`."""
    if abs(seconds) < _MINUTES_FROM:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < _HOURS_FROM else f"{seconds / 3600:.1f} h"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
