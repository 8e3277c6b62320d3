"""A fleet that moves a lease back and forth for ever fails a seed of the simulation."""

from __future__ import annotations

from dataclasses import replace

from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import Move
from verification.simulation import StormOptions, simulate

CALM = StormOptions(incidents=(0, 0), call_fault_chance=0.0, steer=False)
SEED = 5
"""One seed in five has the checks under a steady load."""


def swapping(strategy):
    """Return a strategy that moves a lease to another worker when it has nothing else to do."""

    def plan(given):
        found = strategy(given)
        workers = sorted(one.worker_id for one in given.workers if one.accepts_leases)
        owned = sorted(
            (lease.lease_key, lease.owner)
            for lease in given.leases
            if lease.owner in workers and not lease.ended
        )
        if found.moves or not owned or len(workers) == 1:
            return found
        key, owner = owned[0]
        other = next(worker for worker in workers if worker != owner)
        return replace(found, moves=(Move(key, owner, other, "for ever"),))

    return plan


def test_a_lease_that_two_workers_swap_for_ever_is_a_failing_seed(monkeypatch):
    assert simulate(SEED, CALM).violations == ()
    get = strategies.get
    monkeypatch.setattr(strategies, "get", lambda name: swapping(get(name)))
    violations = simulate(SEED, CALM).violations
    assert any(text.startswith("L3:") and "back and forth" in text for text in violations)
