"""What a source of worker metrics is, and how providers reach files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

ReadText = Callable[[str], str]
"""Gives the text of a file. Raises `OSError` when it cannot be read."""

CPU: Final = "C"
FULL_PERCENT: Final = 100


class MetricProvider(Protocol):
    """One utilization of this worker (protocol §11).

    `short_name` is the name in the worker's row: C, M, NI, NO or T. `max_utilization_percent` is
    the end of its operating range, 1 to 100.
    """

    short_name: str
    max_utilization_percent: int

    def sample(self) -> float | None:
        """Percent, 0 to 100 inclusive, since the last call; None when there is nothing to compare
        with yet, or no time has passed.

        Whatever it raises counts as a failed capture.
        """
        ...


def read_text(path: str) -> str:
    """The text of a file of this machine."""
    return Path(path).read_text(encoding="ascii", errors="replace")


def percent(used: float, available: float) -> float | None:
    """`used` of `available` in percent, at most 100; None when nothing was available or a counter
    went back.
    """
    if available <= 0 or used < 0:
        return None
    return min(used / available * FULL_PERCENT, float(FULL_PERCENT))
