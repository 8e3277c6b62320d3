"""Small fleets and their plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import Plan, PlanInput, PlanLimits, WorkerState

NAMES = ("worker_utilization_aware", "lease_count_based", "kcl_variance")


def plan(name, leases, workers, **limits) -> Plan:
    return strategies.get(name)(PlanInput(tuple(leases), tuple(workers), PlanLimits(**limits)))


def after(leases, moves):
    """The leases as they are when all moves are done."""
    to = {move.lease_key: move.to_worker for move in moves}
    return tuple(replace(lease, owner=to.get(lease.lease_key, lease.owner)) for lease in leases)


def counts(leases, workers):
    held = Counter(lease.owner for lease in leases if not lease.ended)
    return [held[w.worker_id] for w in workers]


def fleet(number, **options):
    return [WorkerState(f"w{i:02}", **options) for i in range(number)]
