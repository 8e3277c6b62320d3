"""Simulated hosts and the processes that run on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError, SinkError
from kcl_pipeline.worker.dependencies import Mode
from verification.simulation.environment.scheduler import Host

CALM_CPU_PERCENT: Final = 30.0


@dataclass(eq=False)
class SimulatedHost(Host):
    """A host that reports its crash to the checks."""

    crashing: Callable[[], None] = lambda: None

    def crash(self) -> None:
        """See `Host.crash`."""
        self.crashing()
        super().crash()


@dataclass(eq=False)
class Machine:
    """A host with the process that runs on it.

    Attributes:
        stop: Requests a graceful end. A quirky peer does no handoff and releases nothing.
        fetches_in_jobs: The worker's executors fetch; their calls are this host's.
        streams: Streams that differ from the application's; such a machine must be refused.
        configured: The streams in its settings, if `streams` is None.
        cpu_percent: The utilization that it reports, if workers report one.
        leaders: Number of processes with a leader that it has run.
    """

    name: str
    host: SimulatedHost
    stop: StopSignal
    strategy: str
    is_worker: bool
    worker_id: str
    mode: Mode = "continuous"
    quirky: bool = False
    fetches_in_jobs: bool = False
    streams: tuple[str, ...] | None = None
    configured: tuple[str, ...] = ()
    cpu_percent: float = CALM_CPU_PERCENT
    leaders: int = 0


def is_drawn(seed: int, name: str, trait: str, share: float) -> bool:
    """Whether the machine of this name has a trait that a share of all machines have."""
    return random.Random(f"{seed}/{name}/{trait}").random() < share


def is_expected(error: Exception) -> bool:
    """Whether a worker may end with this error: AWS or the sink did not respond for too long."""
    return isinstance(error, AwsError | SinkError)


class SimulatedCpu:
    """A metric provider that returns the utilization of a machine."""

    short_name = "C"
    max_utilization_percent = 80

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def sample(self) -> float | None:
        """See `MetricProvider.sample`."""
        return self._machine.cpu_percent
