"""Measure the CPU of this worker's own processes by psutil.

Several workers may run on one machine outside a container, for example on a laptop. The CPU of the
whole machine is the same for all of them, so the planner could not compare their load. The CPU of
each worker's processes (Python, the JVM, Spark's Python workers) can be compared.
"""

import psutil

from kcl_pipeline.clock import Clock
from kcl_pipeline.metrics.provider import FULL_PERCENT, OWN_CPU, percent


class ProcessCpu:
    """Percent of the machine that this process and its descendants use.

    When a descendant ends, the sum of the CPU times decreases. A decrease counts as 0.
    """

    short_name = OWN_CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._process = psutil.Process()
        self._before: tuple[float, float] | None = None

    def sample(self) -> float | None:
        """Percent of all cores since the last call; None at the first call.

        Raises:
            psutil.Error: The process cannot be read.
        """
        now = (self._clock.monotonic(), self._used_seconds())
        before, self._before = self._before, now
        if before is None:
            return None
        return percent(max(now[1] - before[1], 0.0), (now[0] - before[0]) * self._cores)

    def _used_seconds(self) -> float:
        used = _seconds(self._process)
        for child in self._process.children(recursive=True):
            try:
                used += _seconds(child)
            except psutil.NoSuchProcess:
                continue
        return used


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
