"""Describe what every thread of this process does."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
from typing import Final

from kcl_pipeline.text import printable

MAX_CHARACTERS: Final = 20_000
MAX_FRAMES: Final = 40

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_CALL: Final = re.compile(r'  File "(.*)", line (\S+) in (.*)')


def thread_stacks(first: int) -> str:
    """Return the calls of all threads, of each the newest call first.

    The text has names of files and functions and line numbers. It has no source lines and no
    values of variables, because they may contain records or secrets. At most 100 threads (the limit
    of `faulthandler`), `MAX_FRAMES` calls of each, and `MAX_CHARACTERS` characters are returned. If
    no temporary file can be written, the text says why.

    Args:
        first: Identifier of the thread that comes first.
    """
    try:
        stacks = _stacks()
    except OSError as error:
        return f"(the calls of the threads are not known: {printable(str(error))})"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(stacks, key=lambda ident: (ident != first, names.get(ident, "")))
    text = "\n".join(
        "\n".join((f"thread {printable(names.get(ident, str(ident)))}:", *stacks[ident]))
        for ident in order
    )
    cut = "\n... (cut)"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - len(cut)] + cut


def _stacks() -> dict[int, list[str]]:
    """Return the calls by the identifier of the thread.

    The frames of `sys._current_frames` are not used: while Python code walks them, their threads go
    on, and the process ends with a segmentation fault (CPython 3.11.7). `faulthandler` walks all of
    them before another thread runs. It writes to a file descriptor only.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = file.read().decode("ascii", "backslashreplace").splitlines()
    stacks: dict[int, list[str]] = {}
    calls: list[str] = []
    for line in lines:
        if (thread := _THREAD.match(line)) is not None:
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.match(line)) is not None and len(calls) < MAX_FRAMES:
            calls.append(f"  {printable(call[1])}:{call[2]} {printable(call[3])}")
    return stacks
