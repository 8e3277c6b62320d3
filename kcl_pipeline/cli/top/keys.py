"""The keys of `kcl-pipeline top`, and the terminal that they come from."""

from __future__ import annotations

import codecs
import os
import re
import select
import termios
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

MAX_FILTER: Final = 100
ESCAPE: Final = "\x1b"
_ENTER: Final = ("\r", "\n")
_BACKSPACE: Final = ("\x7f", "\b")
_QUIT: Final = ("\x03", "\x04", "\x1c")
"""Ctrl-C, Ctrl-D and Ctrl-backslash. The terminal sends them as characters."""
_KEY: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b[^\x1b]|.", re.DOTALL)
"""A sequence of a special key, or one character."""
_BYTES: Final = 1024
_LOCAL_FLAGS: Final = 3
_CONTROL_CHARACTERS: Final = 6


class Sort(StrEnum):
    """What the rows are sorted by."""

    LAG = "lag"
    WORKER = "worker"
    SHARD = "shard"
    RATE = "rate"


SORT_KEYS: Final = {"l": Sort.LAG, "w": Sort.WORKER, "s": Sort.SHARD, "k": Sort.RATE}


@dataclass(frozen=True, slots=True)
class ViewState:
    """What the user has chosen.

    Attributes:
        sort: What the rows are sorted by.
        filter: Only rows that contain this text are shown. Empty: all rows.
        is_typing: Whether the next keys are the text of the filter.
        is_done: Whether the page is to end.
    """

    sort: Sort = Sort.LAG
    filter: str = ""
    is_typing: bool = False
    is_done: bool = False

    def after(self, key: str) -> ViewState:
        """Return the state after a key. Unknown keys change nothing."""
        if key in _QUIT:
            return replace(self, is_done=True)
        if self.is_typing:
            return self._after_typing(key)
        if key == "q":
            return replace(self, is_done=True)
        if key == "/":
            return replace(self, is_typing=True)
        if key == ESCAPE:
            return replace(self, filter="")
        return replace(self, sort=SORT_KEYS.get(key, self.sort))

    def _after_typing(self, key: str) -> ViewState:
        if key in _ENTER:
            return replace(self, is_typing=False)
        if key == ESCAPE:
            return replace(self, is_typing=False, filter="")
        if key in _BACKSPACE:
            return replace(self, filter=self.filter[:-1])
        if len(key) == 1 and key.isprintable() and len(self.filter) < MAX_FILTER:
            return replace(self, filter=self.filter + key)
        return self


def split_keys(text: str) -> list[str]:
    """Split what a terminal has sent into keys. Arrow keys and the like are one key each."""
    return _KEY.findall(text)


class Keyboard:
    """The keys of a terminal, one by one and without echo, until the end of the `with` block.

    The settings of the terminal are restored at the end, whatever ends the block.

    Args:
        fd: File descriptor of the terminal.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._fd)
        changed = termios.tcgetattr(self._fd)
        # Without ISIG, Ctrl-Z does not stop the process while the page is shown.
        off = termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN
        changed[_LOCAL_FLAGS] &= ~off
        changed[_CONTROL_CHARACTERS][termios.VMIN] = 1
        changed[_CONTROL_CHARACTERS][termios.VTIME] = 0
        termios.tcsetattr(self._fd, termios.TCSADRAIN, changed)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(termios.error):  # the terminal may be gone
            # Keys that nobody has read do not go to the shell.
            termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)

    def read(self, seconds: float) -> list[str] | None:
        """Wait for keys, at most `seconds`. None: the terminal is gone."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return []
        try:
            data = os.read(self._fd, _BYTES)
        except OSError:
            return None
        return split_keys(self._decoder.decode(data)) if data else None
