"""Compute the load of each lease per resource, in the unit of the resource."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kcl_pipeline.planning.cost import WorkerSample, fit
from kcl_pipeline.planning.model import LeaseState, PlanLimits, WorkerState

CPU_METRIC = "C"
THROUGHPUT, CPU, COUNT = "throughput", "cpu", "count"


@dataclass(slots=True)
class Loads:
    """The loads of all leases.

    Attributes:
        mode: "load", "count" (leases are counted) or "idle" (they are counted, because the traffic
            is negligible).
        resources: Names of the resources.
        loads: Per resource, the load of each lease in the given order.
        base: Per resource, the load of each worker that no lease explains.
        dead_bands: Per resource, the absolute dead-band in its unit.
        kbps: Throughput of each lease in KiB/s.
    """

    mode: str
    resources: list[str]
    loads: list[list[float]]
    base: list[dict[str, float]]
    dead_bands: list[float]
    kbps: list[float]

    def add(
        self, resource: str, loads: list[float], base: dict[str, float], dead_band: float
    ) -> None:
        """Add a resource."""
        self.resources.append(resource)
        self.loads.append(loads)
        self.base.append(base)
        self.dead_bands.append(dead_band)

    def is_balanced(self, resource: int) -> bool:
        """Return whether a resource is balanced. Otherwise it only has hard limits."""
        return self.mode == "load" or self.resources[resource] != THROUGHPUT

    def capacity(self, resource: int, worker: WorkerState) -> float:
        """Return the capacity of a worker. Only ratios between workers matter."""
        if self.resources[resource] != CPU:
            return worker.capacity
        return max(worker.limits.get(CPU_METRIC, 100.0), 1.0) * worker.capacity


def quantile(values: list[float], q: float) -> float:
    """Return the nearest-rank quantile; 0.0 without values.

    It is the smallest value such that at least the share `q` of all values is not larger.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


def lease_loads(
    leases: list[LeaseState],
    workers: list[WorkerState],
    limits: PlanLimits,
    takers: int,
    *,
    measured: bool,
) -> Loads:
    """Return the loads of all leases.

    Args:
        leases: The leases.
        workers: The living workers.
        limits: The settings.
        takers: Number of workers that accept leases, 1 or more.
        measured: False: leases are counted, whatever their throughput.
    """
    samples = [
        lease.throughput_kbps
        for lease in leases
        if lease.throughput_kbps is not None and not lease.ended
    ]
    fresh = max(quantile([_sane(value) for value in samples], limits.fresh_lease_quantile), 0.0)
    kbps = [
        0.0
        if lease.ended
        else fresh
        if lease.throughput_kbps is None
        else _sane(lease.throughput_kbps)
        for lease in leases
    ]
    if not (samples and measured):
        mode = "count"
    elif _is_negligible(math.fsum(kbps) / takers, limits):
        mode = "idle"
    else:
        mode = "load"
    loads = Loads(mode, [], [], [], [], kbps)
    if mode != "load":
        counts = [0.0 if lease.ended else 1.0 for lease in leases]
        loads.add(COUNT, counts, {}, 0.0)
    if mode == "load" or not math.isinf(
        min(limits.max_throughput_per_host_kbps, limits.max_throughput_per_group_kbps)
    ):
        loads.add(THROUGHPUT, kbps, {}, limits.dead_band_kbps)
    cpu = _cpu(leases, kbps, workers) if measured and mode != "idle" else None
    if cpu is not None:
        loads.add(CPU, *cpu, limits.dead_band_cpu_percentage)
    return loads


def _is_negligible(kbps_per_worker: float, limits: PlanLimits) -> bool:
    """Return whether the absolute dead-band is wider than the relative one.

    Then throughput would balance nothing, however uneven the fleet is.
    """
    threshold = limits.re_balance_threshold_percentage / 100.0
    return kbps_per_worker * min(threshold, 1.0) < limits.dead_band_kbps and (
        threshold > 0 or kbps_per_worker < limits.dead_band_kbps
    )


def _sane(value: float) -> float:
    # A sample that is not a finite, positive number is no load.
    return value if 0.0 < value < math.inf else 0.0


def _cpu(
    leases: list[LeaseState], kbps: list[float], workers: list[WorkerState]
) -> tuple[list[float], dict[str, float]] | None:
    """Return the CPU of each lease, and the CPU of each worker without its leases.

    None: no worker reports CPU.
    """
    reporting = {
        worker.worker_id: worker for worker in workers if 0.0 <= _cpu_of(worker) < math.inf
    }
    if not reporting:
        return None
    held: dict[str, list[int]] = {worker_id: [] for worker_id in reporting}
    for i, lease in enumerate(leases):
        if lease.owner in held and not lease.ended:
            held[lease.owner].append(i)
    samples = {
        worker_id: WorkerSample(
            _cpu_of(worker) * worker.capacity,
            math.fsum(kbps[i] for i in held[worker_id]),
            len(held[worker_id]),
        )
        for worker_id, worker in reporting.items()
    }
    model = fit(list(samples.values()))
    costs = [
        0.0 if lease.ended else model.per_lease + model.per_kbps * kbps[i]
        for i, lease in enumerate(leases)
    ]
    base: dict[str, float] = {}
    for worker in workers:
        if worker.worker_id not in samples:
            base[worker.worker_id] = model.idle_percentage
            continue
        if not held[worker.worker_id]:
            # It has just started: its CPU says little about its CPU later
            base[worker.worker_id] = min(_cpu_of(worker) * worker.capacity, model.idle_percentage)
            continue
        adjust = model.residual_factor(samples[worker.worker_id])
        for i in held[worker.worker_id]:
            costs[i] *= adjust
        explained = math.fsum(costs[i] for i in held[worker.worker_id])
        base[worker.worker_id] = max(_cpu_of(worker) * worker.capacity - explained, 0.0)
    return costs, base


def _cpu_of(worker: WorkerState) -> float:
    return worker.metrics.get(CPU_METRIC, -1.0 if worker.own_cpu is None else worker.own_cpu)
