"""Make fleets from a seed, plan each once, and measure the quality of the plan.

    python -m verification.planning.traces
    python -m verification.planning.traces --seed 7 --count 40 --strategy kcl_variance

Without `--seed` a fresh seed is drawn; it is printed. A trace is a fleet with a distribution of
loads, something that has just happened to it, groups and capacities of workers.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.explain import owners_after
from kcl_pipeline.planning.model import LeaseState, Plan, PlanInput, PlanLimits, WorkerState
from verification.planning.quality import PlanQuality, quality_of

DISTRIBUTIONS = ("lognormal", "zipf", "uniform", "equal", "bimodal")
STARTS = ("cold", "joined", "left", "drifted", "one_holds_all", "new_group")
SIZES = ((60, 6), (300, 20), (1_000, 40), (2_000, 100), (5_000, 200))
LARGEST_PEAK = 1.05
LARGEST_RATIO = {"bimodal": 1.4}
USUAL_RATIO = 1.25
_LEAST_MOVES = 8
"""A ratio of fewer moves says little: one move more is a third more."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A fleet, and the distribution of its loads."""

    name: str
    distribution: str
    case: PlanInput


@dataclass(frozen=True, slots=True)
class Measured:
    """A trace with its first plan.

    Attributes:
        trace: The trace.
        quality: The quality of the plan.
        is_reachable: Whether a plan is known after which no worker is above `LARGEST_PEAK`.
        moves_again: Number of moves of the next plan.
        seconds: CPU time of the plan.
    """

    trace: Trace
    quality: PlanQuality
    is_reachable: bool
    moves_again: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """What the plan does not reach of `docs/planning.md`."""
        quality, most = (
            self.quality,
            LARGEST_RATIO.get(self.trace.distribution, USUAL_RATIO),
        )
        return [
            sentence
            for sentence, holds in (
                ("uneven", not self.is_reachable or quality.max_over_mean <= LARGEST_PEAK + 1e-9),
                (
                    "many moves",
                    quality.moves_over_lower_bound <= most
                    or quality.moves <= quality.lower_bound + _LEAST_MOVES,
                ),
                ("not at rest", self.moves_again == 0),
            )
            if not holds
        ]


def traces(seed: int, count: int) -> Iterator[Trace]:
    """Return traces that differ in all that matters to a plan."""
    rng = random.Random(f"traces/{seed}")
    for number in range(count):
        distribution = DISTRIBUTIONS[number % len(DISTRIBUTIONS)]
        start = STARTS[(number // len(DISTRIBUTIONS)) % len(STARTS)]
        leases, workers = SIZES[rng.randrange(len(SIZES))]
        groups = rng.choice((1, 2, 3))
        capacities = rng.choice(((1.0,), (1.0,), (1.0, 2.0)))
        case = fleet_case(rng, distribution, start, leases, workers, groups, capacities)
        name = f"{number} {distribution} {start} {leases}x{workers} g{groups} c{len(capacities)}"
        yield Trace(name, distribution, case)


def loads_of(rng: random.Random, distribution: str, leases: int) -> list[float]:
    """Return KB/s per lease, with a mean near 100; a shard carries at most 1,000."""
    if distribution == "lognormal":
        loads = [100 * rng.lognormvariate(-0.5, 1.0) for _ in range(leases)]
    elif distribution == "zipf":
        loads = [15.2 * leases / (rank + 1) for rank in range(leases)]
        rng.shuffle(loads)
    elif distribution == "uniform":
        loads = [rng.uniform(10, 190) for _ in range(leases)]
    elif distribution == "equal":
        loads = [100.0] * leases
    else:
        loads = [rng.choice((400.0, 25.0, 25.0, 25.0, 25.0)) for _ in range(leases)]
    return [min(load, 1_000.0) for load in loads]


def fleet_case(
    rng: random.Random,
    distribution: str,
    start: str,
    leases: int,
    workers: int,
    groups: int = 1,
    capacities: Sequence[float] = (1.0,),
) -> PlanInput:
    """Return a fleet with loads of `distribution`, to which `start` has just happened."""
    loads = loads_of(rng, distribution, leases)
    if start == "new_group":
        groups = 2
    crew = [
        WorkerState(f"g{w % groups}-{w:04}", f"g{w % groups}", capacity=rng.choice(capacities))
        for w in range(workers)
    ]
    if start == "new_group":
        half = workers // 2
        crew = [
            replace(one, worker_id=f"g{w // half}-{w:04}", group=f"g{w // half}")
            for w, one in enumerate(crew[: 2 * half])
        ]
    held = list(range(len(crew)))
    if start == "joined":
        held = held[: -max(len(crew) // 10, 1)]
    elif start == "new_group":
        held = held[: len(crew) // 2]
    elif start == "one_holds_all":
        held = held[:1]
    if start == "cold":
        owner = [held[i % len(held)] for i in rng.sample(range(leases), leases)]
    else:
        owner = [held[w] for w in even([crew[w].capacity for w in held], loads)]
    dead = set(rng.sample(held, max(len(held) // 10, 1))) if start == "left" else set()
    if start == "drifted":
        loads = [load * rng.lognormvariate(-0.06, 0.35) for load in loads]
    return PlanInput(
        tuple(
            LeaseState(f"shardId-{i:012}", None, load)
            if w in dead
            else LeaseState(f"shardId-{i:012}", crew[w].worker_id, load)
            for i, (load, w) in enumerate(zip(loads, owner, strict=True))
        ),
        tuple(one for w, one in enumerate(crew) if w not in dead),
        PlanLimits(re_balance_threshold_percentage=5),
    )


def even(capacities: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Assign from scratch: the heaviest lease to the worker that is least utilized afterwards."""
    heap = [(0.0, w) for w in range(len(capacities))]
    owner = [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        used, w = heapq.heappop(heap)
        owner[i] = w
        heapq.heappush(heap, (used + loads[i] / capacities[w], w))
    return owner


def is_reachable(case: PlanInput) -> bool:
    """Return whether `even` finds a plan after which no worker is above `LARGEST_PEAK`."""
    loads = [lease.throughput_kbps or 0.0 for lease in case.leases]
    capacities = [worker.capacity for worker in case.workers]
    used = [0.0] * len(capacities)
    for i, w in enumerate(even(capacities, loads)):
        used[w] += loads[i] / capacities[w]
    return max(used) <= LARGEST_PEAK * math.fsum(loads) / math.fsum(capacities)


def measure(trace: Trace, strategy: str) -> Measured:
    """Plan a trace twice, and measure the first plan."""
    plan_with = strategies.get(strategy)
    began = time.process_time()
    plan = plan_with(trace.case)
    seconds = time.process_time() - began
    then = plan_with(carried_out(trace.case, plan))
    return Measured(
        trace, quality_of(trace.case, plan), is_reachable(trace.case), len(then.moves), seconds
    )


def carried_out(case: PlanInput, plan: Plan) -> PlanInput:
    """Return the case after the moves of the plan."""
    owners = owners_after(case, plan)
    return replace(
        case, leases=tuple(replace(lease, owner=owners[lease.lease_key]) for lease in case.leases)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per trace; return 1 if a plan is not as good as documented."""
    parser = argparse.ArgumentParser(prog="python -m verification.planning.traces")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--strategy", default="balanced")
    options = parser.parse_args(arguments)
    print(f"--seed {options.seed}")
    faults = 0
    for trace in traces(options.seed, options.count):
        result = measure(trace, options.strategy)
        quality = result.quality
        faults += bool(result.faults)
        print(
            f"{trace.name:48} {quality.max_over_mean:7.4f} {'' if result.is_reachable else '*':1}"
            f"{quality.moves:6} moves, at least {quality.lower_bound:5}, "
            f"{quality.moves_over_lower_bound:6.3f}, then {result.moves_again:3}"
            f"{result.seconds * 1000:8.0f} ms  {', '.join(result.faults)}",
            flush=True,
        )
    print(f"{faults} of {options.count} plans fall short")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
