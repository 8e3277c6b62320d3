"""Measure the CPU of the whole machine by /proc/stat (protocol §11.2).

As in KCL, user, nice, system and I/O wait are busy time. Interrupt, steal and guest time are
ignored. Values of Java and Python workers can therefore be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.metrics.provider import CPU, FULL_PERCENT, ReadText, percent, read_text

PROC_STAT: Final = "/proc/stat"
_FIELDS_NEEDED: Final = 6


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time since boot, in any unit (ticks or seconds)."""

    busy: float
    idle: float

    def percent_since(self, before: CpuTimes) -> float | None:
        """Percent of busy time between two readings; None if no time passed.

        The kernel sometimes decreases the I/O wait and idle time of a sleeping CPU. A decrease
        counts as 0.
        """
        busy = max(self.busy - before.busy, 0.0)
        return percent(busy, busy + max(self.idle - before.idle, 0.0))


def parse_proc_stat(text: str) -> CpuTimes:
    """Parse the first line, which sums up all CPUs.

    Raises:
        ValueError: The text has another format.
    """
    fields = text.partition("\n")[0].split()
    if len(fields) < _FIELDS_NEEDED or fields[0] != "cpu":
        raise ValueError(f"{PROC_STAT} does not begin with a line for all CPUs: {text[:80]!r}")
    user, nice, system, idle, io_wait = (float(f) for f in fields[1:6])
    return CpuTimes(busy=user + nice + system + io_wait, idle=idle)


class MachineCpu:
    """CPU of this machine, from the readings of `read`."""

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, read: Callable[[], CpuTimes]) -> None:
        self._read = read
        self._before: CpuTimes | None = None

    def sample(self) -> float | None:
        """Percent of busy time since the last call; None at the first call.

        Raises:
            OSError: The source cannot be read.
            ValueError: The source cannot be parsed.
        """
        now = self._read()
        before, self._before = self._before, now
        return None if before is None else now.percent_since(before)


def proc_stat_cpu(read: ReadText = read_text) -> MachineCpu:
    """The CPU of this machine by /proc/stat."""
    return MachineCpu(lambda: parse_proc_stat(read(PROC_STAT)))
