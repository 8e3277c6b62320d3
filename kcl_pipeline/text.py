"""Strings that others wrote, made safe for a terminal, a log line or an error message."""

from __future__ import annotations

from typing import Final

SHOWN_CHARACTERS: Final = 200
"""Our own limit: an attribute of a row may have 400 KB, which no reader of a log wants."""


def printable(text: str, most: int = SHOWN_CHARACTERS) -> str:
    r"""The string with every character that does not print escaped, as in ``\n`` or ``\x1b``.

    So nothing in it moves a cursor, begins a line or reorders the text around it. A string of more
    than `most` characters is cut, and its length is added.
    """
    if len(text) <= most:
        return text if text.isprintable() else _escaped(text)
    return f"{_escaped(text[:most])}... ({len(text)} characters)"


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
