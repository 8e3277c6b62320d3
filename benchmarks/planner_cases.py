"""Cases of the planner benchmark.

By default a case has 10,000 leases on 500 workers. There are two load distributions and four
initial states.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcl_pipeline.planning.explain import owners_after
from kcl_pipeline.planning.model import LeaseState, Plan, PlanInput, PlanLimits, WorkerState

SHARD_KBPS = 1_000.0
"""What a shard takes at most: no lease is heavier."""
STARTS = ("cold", "more_workers", "fewer_workers", "drift")
DISTRIBUTIONS = ("lognormal", "zipf")
ONE_WORKER = "one_worker"
GROUPS = 3
_DRIFT_SIGMA = 0.35


def lease_loads(distribution: str, leases: int, rng: random.Random) -> list[float]:
    """Return KB/s per lease, each at most the limit of a shard.

    Lognormal: sigma 1, mean 86. Zipf: proportional to 1 / rank, mean about 79, shuffled.
    """
    if distribution == "lognormal":
        return [min(SHARD_KBPS, 86.0 * rng.lognormvariate(-0.5, 1.0)) for _ in range(leases)]
    scale = 15.2 * leases
    loads = [min(SHARD_KBPS, scale / (rank + 1)) for rank in range(leases)]
    rng.shuffle(loads)
    return loads


def lpt(loads: list[float], workers: int) -> list[int]:
    """Assign by longest processing time first: the heaviest lease to the least loaded worker.

    Current owners are ignored.
    """
    heap = [(0.0, w) for w in range(workers)]
    owner = [0] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        load, w = heap[0]
        heapq.heapreplace(heap, (load + loads[i], w))
        owner[i] = w
    return owner


def worker_id(w: int) -> str:
    """Return the id of a worker; workers are spread over three zones."""
    return f"az{w % GROUPS}-{w:05}"


def make(
    distribution: str, start: str, seed: int, leases: int = 10_000, workers: int = 500
) -> PlanInput:
    """Build one case.

    In `cold`, each worker has the same number of leases, regardless of load. In `one_worker`, the
    first one has all. The other cases start
    balanced (LPT). Then a tenth of the workers is added or dies, or the loads change by a lognormal
    factor with sigma 0.35.
    """
    rng = random.Random(f"{distribution}/{start}/{seed}")
    loads = lease_loads(distribution, leases, rng)
    crew = list(range(workers))
    owner: list[int | None] = []
    if start == "cold":
        order = list(range(leases))
        rng.shuffle(order)
        owner = [0] * leases
        for position, i in enumerate(order):
            owner[i] = position % workers
    elif start == ONE_WORKER:
        owner = [0] * leases
    else:
        owner = [*lpt(loads, workers)]
    if start == "more_workers":
        crew = list(range(workers + workers // 10))
    if start == "fewer_workers":
        dead = set(rng.sample(crew, workers // 10))
        crew = [w for w in crew if w not in dead]
    if start == "drift":
        loads = [
            min(SHARD_KBPS, load * rng.lognormvariate(-(_DRIFT_SIGMA**2) / 2, _DRIFT_SIGMA))
            for load in loads
        ]
    alive = set(crew)
    return PlanInput(
        tuple(
            LeaseState(f"shardId-{i:012}", worker_id(w), loads[i])
            if w in alive
            else LeaseState(
                f"shardId-{i:012}",
                None,
                loads[i],
                waited_seconds=10.0,
            )
            for i, w in enumerate(owner)
        ),
        tuple(WorkerState(worker_id(w), group=f"az{w % GROUPS}") for w in crew),
    )


def carried_out(case: PlanInput, plan: Plan) -> PlanInput:
    """Return the case after the moves of the plan."""
    owners = owners_after(case, plan)
    return replace(
        case, leases=tuple(replace(lease, owner=owners[lease.lease_key]) for lease in case.leases)
    )


def from_trace(path: Path) -> PlanInput:
    """Read a case from a JSON file.

    The format is `{"workers": [{"id", "group", "capacity"}], "leases": [{"key", "load",
    "owner"}]}`. An owner that is not in `workers` is dead. Loads can have any unit. They are scaled
    to a mean of 1,000 KB/s per worker, so that the absolute dead-band has little effect. Hysteresis
    is off.

    Raises:
        ValueError: The file is invalid; the message names the problem.
    """
    try:
        content: Any = json.loads(path.read_text())
        crew = tuple(
            WorkerState(
                str(worker["id"]),
                group=str(worker.get("group") or ""),
                capacity=float(worker.get("capacity", 1.0)),
            )
            for worker in content["workers"]
        )
        rows = [
            (str(lease["key"]), float(lease["load"] or 0.0), lease.get("owner"))
            for lease in content["leases"]
        ]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not a trace; write {{'workers': [{{'id', 'group', 'capacity'}}], "
            f"'leases': [{{'key', 'load', 'owner'}}]}}: {error!r}"
        ) from error
    living = {worker.worker_id for worker in crew}
    total = sum(load for _, load, _ in rows)
    unit = SHARD_KBPS * max(len(crew), 1) / total if total > 0 else 1.0
    return PlanInput(
        tuple(
            LeaseState(
                key,
                owner if owner in living else None,
                load * unit,
            )
            for key, load, owner in rows
        ),
        crew,
        PlanLimits(re_balance_threshold_percentage=5),
    )
