"""Describe what every thread of this process does."""

from __future__ import annotations

import sys
import threading
import traceback
from itertools import islice
from types import FrameType
from typing import Final

from kcl_pipeline.text import printable

MAX_CHARACTERS: Final = 20_000
MAX_FRAMES: Final = 40
MAX_THREADS: Final = 100


def thread_stacks(first: int) -> str:
    """Return the calls of all threads, of each the newest call first.

    The text has names of files and functions and line numbers. It has no source lines and no
    values of variables, because they may contain records or secrets. At most `MAX_THREADS` threads,
    `MAX_FRAMES` calls of each, and `MAX_CHARACTERS` characters are returned.

    Args:
        first: Identifier of the thread that comes first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 (documented by Python)
    chosen = sorted(frames, key=lambda ident: (ident != first, names.get(ident, "")))[:MAX_THREADS]
    found = [
        _stack(f"thread {printable(names.get(ident, str(ident)))}", frames[ident])
        for ident in chosen
    ]
    text = "\n".join(found)
    cut = "\n... (cut)"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - len(cut)] + cut


def _stack(title: str, frame: FrameType) -> str:
    calls = [
        f"  {printable(one.f_code.co_filename)}:{line} {printable(one.f_code.co_name)}"
        for one, line in islice(traceback.walk_stack(frame), MAX_FRAMES)
    ]
    return "\n".join((f"{title}:", *calls))
