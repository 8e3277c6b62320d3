"""Estimate the CPU cost of leases by a regression over the workers.

`fit` regresses the CPU of each worker on the bytes and records of its leases. With `x = (KB/s,
records/s)` summed over a worker's leases,

    cpu(worker) = idle + factor(class of the worker) * (x · slopes)

`slopes` and `idle` come from a ridge regression over all workers (both features scaled to mean one,
so that one penalty fits both), the class factors from a second, one-parameter ridge towards 1: the
factor of a class with one worker hardly differs from 1, that of a class with many workers follows
its samples. Costs are not negative, so a feature with a negative slope is omitted. The residual of
a worker is distributed over its leases in proportion (within a factor of two), because a shard that
costs more than its bytes suggest does so on every worker.

Fallbacks, in this order: if fewer than `MIN_WORKERS` workers report CPU, or the bytes vary too
little, CPU is proportional to throughput. Without throughput, every lease has the same cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_WORKERS = 3
"""Smallest number of workers with a CPU value for a regression."""
RIDGE = 0.01
"""Penalty per worker on squared slopes, features scaled to mean one: small against any real spread,
large against none.
"""
CLASS_PRIOR_WORKERS = 2.0
"""Weight of the prior class factor of 1, in workers."""
_RESIDUAL_FACTOR = 2.0
_LEAST_SPREAD = 1e-4


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The CPU of one worker in percent, and the sums over its leases.

    `records_per_s` None: unknown for at least one lease.
    """

    worker_class: str
    cpu_percentage: float
    throughput_kbps: float
    records_per_s: float | None
    leases: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """CPU percentage points per KB/s, per record/s and per lease on a worker of factor 1.

    `basis` is "regression" or the name of the fallback.
    """

    basis: str
    idle_percentage: float
    per_kbps: float
    per_record_per_s: float
    per_lease: float
    class_factors: Mapping[str, float]

    def lease_percentage(self, throughput_kbps: float, records_per_s: float | None) -> float:
        """Return the CPU points of one lease on a worker of factor 1.

        Without a record rate, only its bytes count.
        """
        return (
            self.per_lease
            + self.per_kbps * throughput_kbps
            + self.per_record_per_s * (records_per_s or 0.0)
        )

    def factor(self, worker_class: str) -> float:
        """Return the CPU of this class for the same leases, relative to the fleet."""
        return self.class_factors.get(worker_class, 1.0)

    def residual_factor(self, sample: WorkerSample) -> float:
        """Return the factor, from 0.5 to 2, by which the leases of a worker explain its CPU."""
        explained = self.factor(sample.worker_class) * (
            self.per_lease * sample.leases
            + self.per_kbps * sample.throughput_kbps
            + self.per_record_per_s * (sample.records_per_s or 0.0)
        )
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
        per_lease = total_cpu / max(sum(sample.leases for sample in samples), 1)
        return CostModel("counts", 0.0, 0.0, 0.0, per_lease, {})
    if len(samples) >= MIN_WORKERS:
        fitted = _regress(samples, total_kbps / len(samples))
        if fitted is not None:
            return fitted
    return CostModel("throughput", 0.0, total_cpu / total_kbps, 0.0, 0.0, {})


def _regress(samples: Sequence[WorkerSample], mean_kbps: float) -> CostModel | None:
    mean_cpu = sum(sample.cpu_percentage for sample in samples) / len(samples)
    bytes_ = [sample.throughput_kbps / mean_kbps - 1.0 for sample in samples]
    cpu = [sample.cpu_percentage - mean_cpu for sample in samples]
    records = [sample.records_per_s for sample in samples if sample.records_per_s is not None]
    mean_records = sum(records) / len(samples) if len(records) == len(samples) else 0.0
    scaled_records = (
        [(sample.records_per_s or 0.0) / mean_records - 1.0 for sample in samples]
        if mean_records > 0
        else None
    )
    slope_bytes, slope_records = _ridge(bytes_, scaled_records, cpu)
    if slope_bytes + slope_records <= 0:
        return None
    # The cost of an idle worker is not negative: then the line goes through zero.
    scale = min(1.0, mean_cpu / (slope_bytes + slope_records))
    slope_bytes, slope_records = slope_bytes * scale, slope_records * scale
    idle = mean_cpu - slope_bytes - slope_records
    per_record = slope_records / mean_records if mean_records > 0 else 0.0
    model = CostModel("regression", idle, slope_bytes / mean_kbps, per_record, 0.0, {})
    return CostModel(
        "regression", idle, model.per_kbps, per_record, 0.0, _class_factors(samples, model)
    )


def _ridge(
    first: list[float], second: list[float] | None, target: list[float]
) -> tuple[float, float]:
    """Return the slopes of two centred features, 0 or more; (0, 0) if both vary too little."""
    penalty = RIDGE * len(target)
    s11 = sum(x * x for x in first)
    s1y = sum(x * y for x, y in zip(first, target, strict=True))
    alone_1 = max(s1y / (s11 + penalty), 0.0) if s11 > _LEAST_SPREAD * len(target) else 0.0
    if second is None:
        return alone_1, 0.0
    s22 = sum(x * x for x in second)
    s2y = sum(x * y for x, y in zip(second, target, strict=True))
    alone_2 = max(s2y / (s22 + penalty), 0.0) if s22 > _LEAST_SPREAD * len(target) else 0.0
    if alone_1 == 0.0 or alone_2 == 0.0:
        return alone_1, alone_2
    s12 = sum(x * y for x, y in zip(first, second, strict=True))
    determinant = (s11 + penalty) * (s22 + penalty) - s12 * s12
    both_1 = ((s22 + penalty) * s1y - s12 * s2y) / determinant
    both_2 = ((s11 + penalty) * s2y - s12 * s1y) / determinant
    if both_1 < 0:
        return 0.0, alone_2
    if both_2 < 0:
        return alone_1, 0.0
    return both_1, both_2


def _class_factors(samples: Sequence[WorkerSample], model: CostModel) -> dict[str, float]:
    explained_by_class: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        explained = model.per_kbps * sample.throughput_kbps + model.per_record_per_s * (
            sample.records_per_s or 0.0
        )
        explained_by_class.setdefault(sample.worker_class, []).append(
            (explained, sample.cpu_percentage - model.idle_percentage)
        )
    if len(explained_by_class) == 1:
        return {}
    everything = [pair for pairs in explained_by_class.values() for pair in pairs]
    prior = CLASS_PRIOR_WORKERS * sum(x * x for x, _ in everything) / len(everything)
    return {
        name: max(
            (sum(x * y for x, y in pairs) + prior) / (sum(x * x for x, _ in pairs) + prior), 0.1
        )
        for name, pairs in sorted(explained_by_class.items())
    }
