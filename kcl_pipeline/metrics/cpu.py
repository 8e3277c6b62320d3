"""CPU of a whole machine by /proc/stat (protocol §11.2).

It counts what KCL counts: user, nice, system and waiting for I/O are busy; interrupts, stolen and
guest time are left out, so that the figures of a mixed fleet can be compared.
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
        """How busy the machine was between two readings; None when no time passed.

        The kernel lets the I/O wait and idle of a sleeping CPU go back now and then: such a step
        counts as none.
        """
        busy = max(self.busy - before.busy, 0.0)
        return percent(busy, busy + max(self.idle - before.idle, 0.0))


def parse_proc_stat(text: str) -> CpuTimes:
    """The line for all CPUs, which is the first. Raises `ValueError` for any other text."""
    fields = text.partition("\n")[0].split()
    if len(fields) < _FIELDS_NEEDED or fields[0] != "cpu":
        raise ValueError(f"{PROC_STAT} does not begin with a line for all CPUs: {text[:80]!r}")
    user, nice, system, idle, io_wait = (float(f) for f in fields[1:6])
    return CpuTimes(busy=user + nice + system + io_wait, idle=idle)


class MachineCpu:
    """CPU of this machine, from whatever `read` gives."""

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, read: Callable[[], CpuTimes]) -> None:
        self._read = read
        self._before: CpuTimes | None = None

    def sample(self) -> float | None:
        """Percent busy since the last call.

        Raises `OSError` or `ValueError` when there is nothing readable.
        """
        now = self._read()
        before, self._before = self._before, now
        return None if before is None else now.percent_since(before)


def proc_stat_cpu(read: ReadText = read_text) -> MachineCpu:
    """By /proc/stat."""
    return MachineCpu(lambda: parse_proc_stat(read(PROC_STAT)))
