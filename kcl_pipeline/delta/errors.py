"""What the Delta library raises, as one bounded line without secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kcl_pipeline.errors import SinkError
from kcl_pipeline.settings_errors import is_secret
from kcl_pipeline.text import printable

MAX_LINE: Final = 500
"""Characters of another library's message in one of ours: it goes into logs and events."""

_SHORTEST_SECRET: Final = 6
_runtime_process: list[int] = []


@contextmanager
def delta_errors(doing: str, options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn whatever delta-rs raises into `SinkError`, also its panics (which Python does not count
    as errors) and a use after a fork. Values of `options` that are secrets are taken out.
    """
    if not _runtime_process:
        _runtime_process.append(os.getpid())
    if _runtime_process[0] != os.getpid():
        raise SinkError(
            f"{doing}: this process was forked from one that had used the Delta library, "
            "which cannot work then; "
            'start processes with multiprocessing.get_context("spawn")'
        )
    try:
        yield
    except (SinkError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 (whatever the library raises)
        raise SinkError(f"{doing}: {first_line(error, options)}") from cause_of(error, options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise SinkError(
            f"{doing}: the Delta library gave up: {first_line(error, options)}"
        ) from cause_of(error, options)


def first_line(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The first line of an error's text, or its type: printable, at most `MAX_LINE` characters."""
    text = str(error).strip()[: 100 * MAX_LINE]
    for value in _secrets_in(text, options):
        text = text.replace(value, "***")
    lines = text.splitlines()
    return bounded(lines[0]) if lines else type(error).__name__


def cause_of(
    error: BaseException, options: Mapping[str, str] | None = None
) -> BaseException | None:
    """The error, for `raise ... from`; None when its text has a secret of the options."""
    return None if _secrets_in(str(error), options) else error


def _secrets_in(text: str, options: Mapping[str, str] | None) -> list[str]:
    """The options' secret values that stand in a text."""
    return [
        value
        for name, value in (options or {}).items()
        if is_secret(name) and len(value) >= _SHORTEST_SECRET and value in text
    ]


def bounded(text: str) -> str:
    """A text from outside as it may stand in a log line."""
    return printable(text, MAX_LINE)
