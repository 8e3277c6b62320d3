"""Format an error of the user's transform as one line with the user's file and line number."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from kcl_pipeline.text import printable

MAX_ERROR_CHARACTERS: Final = 500
"""Longest text of an error.

The text is stored in logs, Dagster's database and the dead-letter table. An exception's message may
contain the payload of a record.
"""

_PACKAGE: Final = str(Path(__file__).parents[1])
_STANDARD_LIBRARY: Final = tuple(
    {path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))}
)
_INSTALLED: Final = re.compile(
    r"(^|[/\\])(site-packages|dist-packages|pyspark\.zip|py4j-[^/\\]*\.zip)([/\\]|$)"
    r"|[/\\]lib[/\\]python\d+(\.\d+)?[/\\]|^<frozen "
)
_SPARK_CLIENT: Final = re.compile(r"(^|[/\\])(pyspark|py4j)([/\\.-]|$)")
_FRAME: Final = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


def error_line(error: BaseException) -> str:
    """The error's type, the first line of its message, and its frame in the user's code.

    At most `MAX_ERROR_CHARACTERS` printable characters.
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = type(error).__name__ + (f": {lines[0].strip()}" if lines else "")
    return with_frame(text, frame_of(error.__traceback__))


def with_frame(text: str, frame: str | None) -> str:
    """The first line of `text` and the frame. Only the text is shortened."""
    end = "" if frame is None else f" ({frame})"
    line = text.strip().partition("\n")[0].strip()
    most = MAX_ERROR_CHARACTERS - len(end)
    shown = printable(line, most)
    return (shown if len(shown) <= most else f"{shown[: most - 3]}...") + end


def frame_of(raised_at: TracebackType | None) -> str | None:
    """The innermost frame of the user's code, outside this package and installed packages.

    Without such a frame, the innermost frame outside this package and Spark's client; else None.
    """
    return _innermost(
        [(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(raised_at)]
    )


def frame_in(text: str) -> str | None:
    """Like `frame_of`, for the printed traceback of a Python process of Spark."""
    return _innermost([(file, int(line), name) for file, line, name in _FRAME.findall(text)])


def _innermost(frames: list[tuple[str, int, str]]) -> str | None:
    foreign = [
        frame
        for frame in frames
        if not frame[0].startswith(_PACKAGE + os.sep) and not _SPARK_CLIENT.search(frame[0])
    ]
    own = [
        frame
        for frame in foreign
        if not _INSTALLED.search(frame[0]) and not frame[0].startswith(_STANDARD_LIBRARY)
    ]
    if not foreign:
        return None
    file, line, name = (own or foreign)[-1]
    # relative to the working directory if the file is below it
    path = file.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109 (a string is compared)
    return printable(f"{path}:{line} in {name}")
