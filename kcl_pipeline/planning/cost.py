"""Estimate the CPU cost of leases by a regression over the workers.

`fit` regresses the CPU of each worker on the throughput of its leases:

    cpu(worker) = idle + slope * KB/s

by a ridge regression over all workers, with the throughput scaled to mean one. Costs are not
negative. The residual of a worker is distributed over its leases in proportion (within a factor of
two), because a shard that costs more than its bytes suggest does so on every worker.

Fallbacks, in this order: if fewer than `MIN_WORKERS` workers report CPU, or the bytes do not
vary, CPU is proportional to throughput. Without throughput, every lease has the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_WORKERS = 3
"""Smallest number of workers with a CPU value for a regression."""
RIDGE = 0.01
"""Penalty per worker on the squared slope: small against any real spread, large against none."""
_RESIDUAL_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The CPU of one worker in percent, and the sums over its leases."""

    cpu_percentage: float
    throughput_kbps: float
    leases: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """CPU percentage points of an idle worker, per KB/s and per lease."""

    idle_percentage: float
    per_kbps: float
    per_lease: float

    def residual_factor(self, sample: WorkerSample) -> float:
        """Return the factor, from 0.5 to 2, by which the leases of a worker explain its CPU."""
        explained = self.per_lease * sample.leases + self.per_kbps * sample.throughput_kbps
        if explained <= 0:
            return 1.0
        return min(
            max((sample.cpu_percentage - self.idle_percentage) / explained, 1 / _RESIDUAL_FACTOR),
            _RESIDUAL_FACTOR,
        )


def fit(samples: Sequence[WorkerSample]) -> CostModel:
    """Return the cost model of these workers, at least one.

    The order of the samples matters only for rounding.
    """
    total_cpu = sum(sample.cpu_percentage for sample in samples)
    total_kbps = sum(sample.throughput_kbps for sample in samples)
    if total_kbps <= 0:
        return CostModel(0.0, 0.0, total_cpu / max(sum(sample.leases for sample in samples), 1))
    if len(samples) >= MIN_WORKERS:
        fitted = _regress(samples, total_kbps / len(samples))
        if fitted is not None:
            return fitted
    return CostModel(0.0, total_cpu / total_kbps, 0.0)


def _regress(samples: Sequence[WorkerSample], mean_kbps: float) -> CostModel | None:
    """Return the regression; None if the throughput does not vary, or explains no CPU."""
    mean_cpu = sum(sample.cpu_percentage for sample in samples) / len(samples)
    bytes_ = [sample.throughput_kbps / mean_kbps - 1.0 for sample in samples]
    spread = sum(x * x for x in bytes_)
    cpu = (sample.cpu_percentage - mean_cpu for sample in samples)
    slope = sum(x * y for x, y in zip(bytes_, cpu, strict=True)) / (spread + RIDGE * len(samples))
    if slope <= 0:
        return None
    # The cost of an idle worker is not negative: then the line goes through zero.
    slope *= min(1.0, mean_cpu / slope)
    return CostModel(mean_cpu - slope, slope / mean_kbps, 0.0)
