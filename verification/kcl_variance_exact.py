"""The variance strategy of KCL 3.5.1 with its defects, for comparison in benchmarks only.

See protocol §5.5. No other code may use it. These defects are kept on purpose:

- A receiver that would get too much load is excluded for the rest of the run.
- The overshoot rule moves the one lightest lease.
- Java's heap starves workers in ties.
- Leases are picked in random order.
- CPU after a move is estimated from the fleet's average.
- Leases without a sample count as average.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, WorkerState


@dataclass(slots=True)
class _Worker:
    state: WorkerState
    metrics: dict[str, float]
    limits: dict[str, float]
    kbps: float = 0.0
    leases: list[str] = field(default_factory=list)


class _JavaHeap:
    """`java.util.PriorityQueue`, greatest priority first.

    KCL's result depends on the order of equal elements.
    """

    def __init__(self) -> None:
        self.items: list[tuple[float, _Worker]] = []

    def add(self, priority: float, worker: _Worker) -> None:
        """Insert an element and sift it up."""
        items = self.items
        items.append((priority, worker))
        k = len(items) - 1
        while k > 0:
            parent = (k - 1) // 2
            if not _greater(priority, items[parent][0]):
                break
            items[k] = items[parent]
            k = parent
        items[k] = (priority, worker)

    def poll(self) -> _Worker | None:
        """Remove the head and sift down; None if the heap is empty."""
        items = self.items
        if not items:
            return None
        head, last = items[0][1], items.pop()
        k = 0
        while items and 2 * k + 1 < len(items):
            child = 2 * k + 1
            if child + 1 < len(items) and _greater(items[child + 1][0], items[child][0]):
                child += 1
            if not _greater(items[child][0], last[0]):
                break
            items[k] = items[child]
            k = child
        if items:
            items[k] = last
        return head


def _greater(one: float, other: float) -> bool:
    """`Double.compare`: not-a-number is the greatest value."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and not math.isnan(other)
    return one > other


def kcl_variance_exact(plan_input: PlanInput, rng: random.Random) -> Plan:
    """Plan one leader run with balancing (in production every third run, once a minute).

    Not pure: `rng` replaces `Collections.shuffle`.
    """
    run = _Run(plan_input, rng)
    spilled = run.assign_unowned()
    if plan_input.limits.balance:
        run.balance()
    moves = tuple(
        Move(key, run.owner_before[key], to, "variance") for key, to in run.planned.items()
    )
    return Plan("kcl_variance_exact", moves, tuple(spilled))


class _Run:
    def __init__(self, plan_input: PlanInput, rng: random.Random) -> None:
        self.limits, self.rng = plan_input.limits, rng
        self.owner_before = {lease.lease_key: lease.owner for lease in plan_input.leases}
        self.owner = dict(self.owner_before)
        self.planned: dict[str, str] = {}
        self.leases: dict[str, LeaseState] = {lease.lease_key: lease for lease in plan_input.leases}
        known = [
            lease.throughput_kbps
            for lease in plan_input.leases
            if lease.throughput_kbps is not None
        ]
        average = math.fsum(known) / len(known) if known else 0.0
        self.kbps = {
            lease.lease_key: average if lease.throughput_kbps is None else lease.throughput_kbps
            for lease in plan_input.leases
        }
        active = [worker for worker in plan_input.workers if worker.accepts_leases]
        self.target_kbps = average * len(plan_input.leases) / max(1, len(active))
        self.leases_per_worker = max(len(plan_input.leases) // max(len(active), 1), 1)
        self.workers = {
            worker.worker_id: _Worker(worker, dict(worker.metrics), dict(worker.limits))
            for worker in active
        }
        for key, owner in self.owner.items():
            if owner in self.workers:
                self.workers[owner].leases.append(key)
                self.workers[owner].kbps += self.kbps[key]
        for worker in self.workers.values():
            if not worker.metrics:
                share = worker.kbps / self.target_kbps * 100.0 if self.target_kbps else math.nan
                worker.metrics, worker.limits = {"T": share}, {"T": 100.0}
        values: dict[str, list[float]] = {}
        for worker in self.workers.values():
            for name, value in worker.metrics.items():
                values.setdefault(name, []).append(value)
        self.fleet = {name: sum(found) / len(found) for name, found in values.items()}
        self.queue = _JavaHeap()
        for worker in self.workers.values():
            self._enqueue(worker)

    def _enqueue(self, worker: _Worker) -> None:
        if (
            worker.kbps <= self.limits.max_throughput_per_host_kbps
            and len(worker.leases) < self.limits.max_leases_for_worker
        ):
            margins = [
                1.0 if value == 0 else (self.fleet[name] - value) / value
                for name, value in worker.metrics.items()
            ]
            self.queue.add(min(margins) if margins else math.inf, worker)

    def _after(self, worker: _Worker, key: str, name: str) -> float:
        """The metric after one more lease, as KCL estimates it."""
        fleet = self.fleet[name]
        growth = (
            self.kbps[key] * fleet / self.target_kbps
            if self.target_kbps > 0
            else fleet / self.leases_per_worker
        )
        return worker.metrics[name] + growth

    def _assign(self, key: str, worker: _Worker) -> None:
        if self.owner[key] != worker.state.worker_id:
            for name in worker.metrics:
                worker.metrics[name] = self._after(worker, key, name)
            old = self.workers.get(self.owner[key] or "")
            if old is not None:
                old.leases.remove(key)
                old.kbps -= self.kbps[key]
            worker.leases.append(key)
            worker.kbps += self.kbps[key]
            self.owner[key] = self.planned[key] = worker.state.worker_id
        self._enqueue(worker)

    def assign_unowned(self) -> list[str]:
        """Assign leases without an owner, longest waiting first, each to the head of the queue.

        Returns the leases that are left when the queue is empty.
        """
        waiting = [lease for lease in self.leases.values() if lease.owner is None and lease.movable]
        waiting.sort(key=lambda lease: -lease.waited_seconds)
        for k, lease in enumerate(waiting):
            worker = self.queue.poll()
            if worker is None:
                return [left.lease_key for left in waiting[k:]]
            self._assign(lease.lease_key, worker)
        return []

    def balance(self) -> None:
        """Move leases from the most loaded workers, by the metric with the most to move."""
        chosen: tuple[float, str, list[tuple[float, _Worker]]] = (-1.0, "", [])
        for name in self.fleet:
            sources = self._sources(name)
            total = sum(take for take, _ in sources)
            if total > chosen[0]:
                chosen = (total, name, sources)
        for take, source in sorted(chosen[2], key=lambda item: -item[0]):
            for key in self._candidates(source, take):
                target = self.queue.poll()
                if target is None:
                    continue
                limits = target.limits
                if any(
                    self._after(target, key, name)
                    > min(self.fleet[name], limits.get(name, math.inf))
                    for name in target.metrics
                ):
                    break
                self._assign(key, target)

    def _sources(self, name: str) -> list[tuple[float, _Worker]]:
        fleet = self.fleet[name]
        band = self.limits.re_balance_threshold_percentage / 100.0
        upper, lower = fleet * (1 + band), fleet * (1 - band)
        having = [worker for worker in self.workers.values() if name in worker.metrics]

        def above_range(worker: _Worker) -> bool:
            return worker.metrics[name] > worker.limits.get(name, math.inf)

        if not any(
            worker.metrics[name] > upper or worker.metrics[name] < lower or above_range(worker)
            for worker in having
        ):
            return []
        sources = [
            worker for worker in having if worker.metrics[name] >= upper or above_range(worker)
        ]
        sources = sources or [max(having, key=lambda worker: worker.metrics[name])]
        damping = self.limits.dampening_percentage / 100.0
        return [
            (worker.kbps * (worker.metrics[name] - fleet) / worker.metrics[name] * damping, worker)
            for worker in sources
            if worker.metrics[name]
        ]

    def _candidates(self, source: _Worker, take: float) -> list[str]:
        if not source.leases:
            return []
        if source.kbps == 0:
            return source.leases[:1]
        shuffled = list(source.leases)
        self.rng.shuffle(shuffled)
        picked: list[str] = []
        for key in shuffled:
            if take - self.kbps[key] > 0:
                take -= self.kbps[key]
                picked.append(key)
        if not picked and self.limits.allow_throughput_overshoot:
            return [min(shuffled, key=lambda key: self.kbps[key])]
        return picked
