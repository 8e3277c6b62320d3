"""Define the interface of a source of worker metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

ReadText = Callable[[str], str]
"""Returns the text of a file. Raises `OSError` if it cannot be read."""

CPU: Final = "C"
OWN_CPU: Final = "kclpCpu"
"""Name of the CPU metric on a platform where a Java worker reports none."""
FULL_PERCENT: Final = 100


class MetricProvider(Protocol):
    """One utilization metric of this worker (protocol §11).

    Attributes:
        short_name: Name in the worker metrics row: C, M, NI, NO, T, or `OWN_CPU`.
        max_utilization_percent: Upper end of the operating range, 1 to 100.
    """

    short_name: str
    max_utilization_percent: int

    def sample(self) -> float | None:
        """Percent since the last call, 0 to 100 inclusive.

        None without an earlier call, or if no time has passed. Any exception counts as a failed
        capture.
        """


def read_text(path: str) -> str:
    """Read the text of a file."""
    return Path(path).read_text(encoding="ascii", errors="replace")


def percent(used: float, available: float) -> float | None:
    """`used` in percent of `available`, at most 100.

    None if nothing was available or a counter decreased.
    """
    if available <= 0 or used < 0:
        return None
    return min(used / available * FULL_PERCENT, float(FULL_PERCENT))
