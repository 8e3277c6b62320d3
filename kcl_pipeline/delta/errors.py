"""Convert the Delta library's errors to one line of limited length without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

from kcl_pipeline.errors import SinkError
from kcl_pipeline.settings_errors import without_credentials
from kcl_pipeline.text import printable

MAX_LINE: Final = 500
"""Characters of another library's message that log lines and events contain."""

_SHORTEST_SECRET: Final = 6
_NO_SECRET: Final = re.compile(
    r"https?://[A-Za-z0-9._:\[\]-]+/?"  # an endpoint without user, path and query
    r"|[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}"  # a region of AWS
)
"""Values without which an error could not be understood."""
_CAUSES: Final = 20
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_ARROW: Final = "↳"
_runtime_process: list[int] = []


@contextmanager
def delta_errors(doing: str, options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert every error of delta-rs to `SinkError`, without the secrets in `options`.

    This includes its panics, which are no subclass of `Exception`, and a use after a fork.
    """
    if not _runtime_process:
        _runtime_process.append(os.getpid())
    if _runtime_process[0] != os.getpid():
        raise SinkError(
            f"{doing}: this process was forked from a process that used the Delta library, "
            "which does not work after a fork; "
            'start processes with multiprocessing.get_context("spawn")'
        )
    try:
        yield
    except (SinkError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 (the library's errors have no common class)
        raise SinkError(f"{doing}: {first_line(error, options)}") from cause_of(error, options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise SinkError(
            f"{doing}: the Delta library panicked: {first_line(error, options)}"
        ) from cause_of(error, options)


def first_line(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The first line of an error's text, or its type: printable, at most `MAX_LINE` characters."""
    text = str(error).strip()[: 100 * MAX_LINE]
    for value in _values_in(text, options):
        text = text.replace(value, "***")
    lines = _COLOUR.sub("", without_credentials(text)).splitlines()
    if not lines:
        return type(error).__name__
    # delta-rs writes each cause on a line of its own.
    causes = [line.partition(_ARROW)[2].strip() for line in lines[1:] if _ARROW in line]
    return bounded(": ".join([lines[0], *causes]))


def cause_of(
    error: BaseException, options: Mapping[str, str] | None = None
) -> BaseException | None:
    """The error, for `raise ... from`; None if its text contains a value of the options.

    The errors that it was raised from are looked at, too: a traceback has them all.
    """
    known: BaseException | None = error
    for _ in range(_CAUSES):
        if known is None:
            return error
        text = f"{known}{known!r}"
        if _values_in(text, options) or without_credentials(text) != text:
            return None
        known = known.__cause__ or known.__context__
    return None


def _values_in(text: str, options: Mapping[str, str] | None) -> list[str]:
    """The values of the options that a text contains, the longest first.

    Which of them is a secret cannot be seen in the name of the option.
    """
    forms = {
        form
        for value in (options or {}).values()
        if len(value) >= _SHORTEST_SECRET and not _NO_SECRET.fullmatch(value)
        for form in (value, quote(value, safe=""), quote(value))
    }
    return sorted((form for form in forms if form in text), key=len, reverse=True)


def bounded(text: str) -> str:
    """A text from outside, printable and short enough for a log line."""
    return printable(text, MAX_LINE)
