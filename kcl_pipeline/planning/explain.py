"""Describe a plan as tables: moves with reasons, and loads of workers and groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.text import counted


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One move. `kbps` None: no sample."""

    lease_key: str
    from_worker: str | None
    to_worker: str
    kbps: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A worker or a group before and after the plan.

    For a group, `name` and `group` are its name. A utilization of 1.0 is the fair share.
    """

    name: str
    group: str
    leases_before: int
    leases_after: int
    kbps_before: float
    kbps_after: float
    utilization_before: float
    utilization_after: float


@dataclass(frozen=True, slots=True)
class PlanTable:
    """A plan as tables.

    Moves are in the order of the plan, workers by decreasing load, groups by name. For
    `max_over_mean` see the function of this name.
    """

    strategy: str
    moves: tuple[MoveRow, ...]
    workers: tuple[LoadRow, ...]
    groups: tuple[LoadRow, ...]
    max_over_mean_before: float
    max_over_mean: float

    @property
    def summary(self) -> str:
        """The number of moves, and the evenness before and after, in one sentence."""
        return (
            f"{self.strategy}: {counted(len(self.moves), 'move')}, "
            f"most loaded worker {self.max_over_mean_before:.3f} -> {self.max_over_mean:.3f} "
            "of the mean"
        )


def owners_after(plan_input: PlanInput, plan: Plan) -> dict[str, str | None]:
    """Return the owner of each lease after the plan."""
    owners = {lease.lease_key: lease.owner for lease in plan_input.leases}
    owners.update((move.lease_key, move.to_worker) for move in plan.moves)
    return owners


def worker_loads(plan_input: PlanInput, owners: Mapping[str, str | None]) -> dict[str, float]:
    """Return KB/s per worker id, with 0.0 for workers without load and leases without a sample."""
    loads = {worker.worker_id: 0.0 for worker in plan_input.workers}
    for lease in plan_input.leases:
        owner = owners[lease.lease_key]
        if owner in loads and not lease.ended:
            loads[owner] += lease.throughput_kbps or 0.0
    return loads


def max_over_mean(plan_input: PlanInput, owners: Mapping[str, str | None]) -> float:
    """Return the evenness of an assignment: largest utilization of a worker over the mean."""
    loads = worker_loads(plan_input, owners)
    capacity = {
        worker.worker_id: worker.capacity for worker in plan_input.workers if worker.capacity > 0
    }
    total, capacity_sum = math.fsum(loads.values()), math.fsum(capacity.values())
    if total <= 0 or capacity_sum <= 0:
        return 1.0
    return max(loads[worker] / size for worker, size in capacity.items()) / (total / capacity_sum)


def explain(plan_input: PlanInput, plan: Plan) -> PlanTable:
    """Return the tables of a plan of any strategy."""
    kbps = {lease.lease_key: lease.throughput_kbps for lease in plan_input.leases}
    before = {lease.lease_key: lease.owner for lease in plan_input.leases}
    after = owners_after(plan_input, plan)
    workers = _worker_rows(plan_input, before, after)
    return PlanTable(
        strategy=plan.strategy,
        moves=tuple(
            MoveRow(
                move.lease_key,
                move.from_worker,
                move.to_worker,
                kbps.get(move.lease_key),
                move.reason,
            )
            for move in plan.moves
        ),
        workers=tuple(
            sorted(
                workers,
                key=lambda row: (-max(row.utilization_before, row.utilization_after), row.name),
            )
        ),
        groups=_group_rows(plan_input, workers),
        max_over_mean_before=max_over_mean(plan_input, before),
        max_over_mean=max_over_mean(plan_input, after),
    )


def _worker_rows(
    plan_input: PlanInput, before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> list[LoadRow]:
    loads_before, loads_after = worker_loads(plan_input, before), worker_loads(plan_input, after)
    count_before, count_after = Counter(before.values()), Counter(after.values())
    capacity_sum = sum(worker.capacity for worker in plan_input.workers) or 1.0
    fair_before, fair_after = (
        sum(loads.values()) / capacity_sum or 1.0 for loads in (loads_before, loads_after)
    )
    return [
        LoadRow(
            worker.worker_id,
            worker.group,
            count_before[worker.worker_id],
            count_after[worker.worker_id],
            loads_before[worker.worker_id],
            loads_after[worker.worker_id],
            loads_before[worker.worker_id] / (worker.capacity or 1.0) / fair_before,
            loads_after[worker.worker_id] / (worker.capacity or 1.0) / fair_after,
        )
        for worker in sorted(plan_input.workers, key=lambda worker: worker.worker_id)
    ]


def _group_rows(plan_input: PlanInput, workers: Sequence[LoadRow]) -> tuple[LoadRow, ...]:
    capacity: dict[str, float] = {}
    for worker in plan_input.workers:
        capacity[worker.group] = capacity.get(worker.group, 0.0) + worker.capacity
    capacity_sum = sum(capacity.values()) or 1.0
    fair_before = sum(row.kbps_before for row in workers) / capacity_sum or 1.0
    fair_after = sum(row.kbps_after for row in workers) / capacity_sum or 1.0
    found = []
    for group in sorted(capacity):
        mine = [row for row in workers if row.group == group]
        kbps_before, kbps_after = (
            sum(row.kbps_before for row in mine),
            sum(row.kbps_after for row in mine),
        )
        found.append(
            LoadRow(
                group,
                group,
                sum(row.leases_before for row in mine),
                sum(row.leases_after for row in mine),
                kbps_before,
                kbps_after,
                kbps_before / (capacity[group] or 1.0) / fair_before,
                kbps_after / (capacity[group] or 1.0) / fair_after,
            )
        )
    return tuple(found)
