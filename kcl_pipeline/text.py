"""Escape and shorten strings of other parties for terminals, log lines and error messages."""

from __future__ import annotations

from typing import Final

SHOWN_CHARACTERS: Final = 200
"""Largest length in a message (our own limit). An attribute of a row may have 400 KB."""


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


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
