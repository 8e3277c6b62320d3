"""Judge whether the workers have too much load, or so little that one can be drained.

The load is the lag of the application, and the CPU of its workers. Both are from the rows of the
workers, which report them even while a batch hangs. A lag that another worker cannot reduce does
not count: that of a paused shard, of a hung worker, and of a worker whose batches the sink refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dagster import DagsterInstance, DefaultRunLauncher

from kcl_pipeline.leases.tables import WorkerMetrics

CALM_LAG: Final = 0.1
"""Share of the lag limit. A lag at or below it is calm."""
CALM_CPU: Final = 0.9
"""Share of the CPU limit that the other workers may reach after one has been drained."""
CPU_AVERAGES: Final = 4
"""How many of a worker's newest averages count: about two minutes."""
DEFAULT_CPU_PERCENT: Final = 80.0
NO_CPU_PERCENT: Final = 100.0
"""The CPU is never above it, so this limit switches scaling by CPU off."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the workers.

    Attributes:
        lag_millis: Largest lag that another worker can reduce. None: not known.
        cpu_percent: Mean CPU of the workers, 0 to 100. None: not known.
        measured: Number of workers whose CPU is known.
    """

    lag_millis: int | None = None
    cpu_percent: float | None = None
    measured: int = 0

    @classmethod
    def of(cls, lag_millis: int | None, workers: Sequence[WorkerMetrics]) -> "Load":
        """Return the load. Failed intervals of the CPU (−1) and new workers do not count.

        Args:
            lag_millis: Lag of the application. None: not known.
            workers: The live workers.
        """
        found = []
        for worker in workers:
            values = [value for value in worker.cpu[-CPU_AVERAGES:] if value >= 0]
            if len(values) > 1:
                found.append(sum(values) / len(values))
        return cls(
            _reducible(lag_millis, workers), sum(found) / len(found) if found else None, len(found)
        )


def _reducible(lag_millis: int | None, workers: Sequence[WorkerMetrics]) -> int | None:
    """The largest lag without those that another worker cannot reduce."""
    states = [worker.status for worker in workers if worker.status is not None]
    if not any(state.hung or state.failed_batches or state.paused_leases for state in states):
        return lag_millis
    found: list[int | None] = []
    for state in states:
        if state.hung is None and state.failed_batches == 0:
            paused = {lease.lease_key for lease in state.paused}
            found += [lag.millis for lag in state.lags if lag.lease_key not in paused]
            found.append(state.more_lags_millis)
    return max((millis for millis in found if millis is not None), default=None)


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Above which load a worker is started.

    Attributes:
        lag_seconds: Limit of the lag. None: the lag does not count.
        cpu_percent: Limit of the mean CPU. None: the CPU does not count.
    """

    lag_seconds: float | None = None
    cpu_percent: float | None = None

    def excess(self, load: Load) -> str | None:
        """Which limit is exceeded, as a sentence without a period. None: no limit."""
        seconds, percent = self.lag_seconds, self.cpu_percent
        lag, cpu = load.lag_millis, load.cpu_percent
        if seconds is not None and lag is not None and lag > seconds * 1000:
            limit = f"scale_up_lag_seconds ({seconds:g})"
            return f"the lag of {lag / 1000:.0f} s is above {limit}"
        if percent is not None and cpu is not None and cpu > percent:
            limit = f"scale_up_cpu_percent ({percent:g})"
            return f"the mean CPU of the workers, {cpu:.0f} %, is above {limit}"
        return None

    def calm(self, load: Load) -> str | None:
        """Why one worker less is enough, as a phrase. None: it is not, or the load is not known."""
        seconds, percent = self.lag_seconds, self.cpu_percent
        lag, cpu, measured = load.lag_millis, load.cpu_percent, load.measured
        phrases = []
        if seconds is not None:
            if lag is None or lag > seconds * 1000 * CALM_LAG:
                return None
            phrases.append(f"the lag has been at most {seconds * CALM_LAG:g} s")
        if percent is not None and cpu is not None:
            others = measured - 1
            if others < 1 or cpu * measured / others > percent * CALM_CPU:
                return None
            phrases.append(f"the other workers need at most {percent * CALM_CPU:g} % of CPU")
        return " and ".join(phrases) or None

    def is_known(self, load: Load) -> bool:
        """Whether anything that counts is known."""
        lag_is_known = self.lag_seconds is not None and load.lag_millis is not None
        return lag_is_known or (self.cpu_percent is not None and load.cpu_percent is not None)


def cpu_limit(configured: float | None, instance: DagsterInstance) -> float | None:
    """Return the limit of the CPU for runs of this Dagster instance.

    Runs of Dagster's default launcher share the machine of the code server. One worker more adds no
    CPU there.

    Args:
        configured: The option `scale_up_cpu_percent`. None: 80, or no limit on a shared machine.
        instance: Has the launcher.
    """
    if configured is not None:
        return None if configured >= NO_CPU_PERCENT else configured
    return None if shares_machine(instance) else DEFAULT_CPU_PERCENT


def shares_machine(instance: DagsterInstance) -> bool:
    """Whether Dagster's default launcher, or a test, starts the runs.

    The launcher is not loaded: its package may be absent where the code is loaded.
    """
    if instance.is_ephemeral:
        return True
    launcher = instance.get_ref().run_launcher_data
    return launcher is None or launcher.class_name == DefaultRunLauncher.__name__
