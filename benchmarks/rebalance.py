"""Assignment strategies compared over 24 virtual hours of a fleet.

    python -m benchmarks.rebalance --json

The load follows a daily curve, in which night is at a sixth of the peak. An autoscaler follows the
curve. Leases drift, and some shards are hot. Three rolling deploys replace every worker; a new
worker starts before the old one stops. Workers that die are replaced five minutes later. Every
strategy gets the same day. Once per minute the leader plans with smoothed samples of the past. The
result of the plan is measured with the load of the next minute.

- `max_over_mean`: Load of the most loaded worker divided by the fleet's mean. It is the mean of the
  day.
- `moves`: All moves, including assignments of leases without an owner.
- `over_1_10`: Share of the minutes in which max over mean is above 1.10.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.svg import line_chart
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import LeaseState, Plan, PlanInput, WorkerState
from verification.kcl_variance_exact import kcl_variance_exact

MINUTES = 24 * 60
_SHARD_KBPS = 1_000.0
_SMOOTHING = 0.5
_DRIFT_PER_MINUTE = 0.005
_DRIFT_PULL = 0.002
_BURSTS_PER_MINUTE = 1 / 60
_BURST_FACTOR = 5.0
_DEPLOYS = (3 * 60, 11 * 60, 17 * 60)
_DEATHS_PER_DAY = 6
_REPLACED_AFTER = 5
_SURGE_MINUTES = 2
_GROUPS = 3
_SCALING_PERIOD = 30
_HEADROOM = 0.15


@dataclass(slots=True)
class Day:
    """Events of the day, which are the same for every strategy.

    They are the KB/s per minute and lease, and the minutes in which slots of the fleet start a new
    worker and stop the oldest one.
    """

    loads: list[list[float]]
    stops: dict[int, list[int]] = field(default_factory=dict)
    starts: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """Result of one strategy; `peaks` has the max over mean of each minute."""

    peaks: list[float]
    moves: int

    @property
    def row(self) -> dict[str, float | int]:
        """Return the columns of the result."""
        return {
            "max_over_mean": round(math.fsum(self.peaks) / len(self.peaks), 4),
            "moves": self.moves,
            "over_1_10": round(sum(1 for peak in self.peaks if peak > 1.10) / len(self.peaks), 4),
        }


def make_day(seed: int, leases: int, workers: int, minutes: int = MINUTES) -> Day:
    """Generate loads, deploys and deaths from one seed."""
    rng = random.Random(f"rebalance/{seed}")
    base = [86.0 * rng.lognormvariate(-0.5, 1.0) for _ in range(leases)]
    drift = [0.0] * leases
    hot_until = [-1] * leases
    loads = []
    for minute in range(minutes):
        curve = _curve(minute)
        for i in range(leases):
            drift[i] += rng.gauss(0.0, _DRIFT_PER_MINUTE) - _DRIFT_PULL * drift[i]
        if rng.random() < _BURSTS_PER_MINUTE:
            hot_until[rng.randrange(leases)] = minute + rng.randint(20, 60)
        loads.append(
            [
                min(
                    _SHARD_KBPS,
                    base[i]
                    * curve
                    * math.exp(drift[i])
                    * (_BURST_FACTOR if hot_until[i] > minute else 1.0),
                )
                for i in range(leases)
            ]
        )
    day = Day(loads)
    _schedule(day, rng, workers, minutes)
    return day


def _curve(minute: int) -> float:
    """Return the relative load of a minute: 1 at the peak, 0.16 at night."""
    return 0.58 - 0.42 * math.cos(2 * math.pi * (minute / MINUTES - 0.1))


def _schedule(day: Day, rng: random.Random, workers: int, minutes: int) -> None:
    """Schedule the starts and stops of workers.

    They come from the autoscaler (not during deploys), deploys and deaths.
    """
    running = workers
    quiet = [
        minute
        for minute in range(minutes)
        if all(not begin - 15 <= minute <= begin + workers + 15 for begin in _DEPLOYS)
    ]
    sizes = []
    for minute in range(minutes):
        wanted = max(math.ceil(workers * min(_curve(minute) + _HEADROOM, 1.0)), 2)
        if minute % _SCALING_PERIOD == 0 and minute in quiet:
            for slot in range(running, wanted):
                day.starts.setdefault(minute, []).append(slot)
            for slot in range(wanted, running):
                day.stops.setdefault(minute, []).append(slot)
            running = wanted
        sizes.append(running)
    for begin in _DEPLOYS:
        if begin < minutes:
            for slot in range(sizes[begin]):
                day.starts.setdefault(begin + slot, []).append(slot)
                day.stops.setdefault(begin + slot + _SURGE_MINUTES, []).append(slot)
    # Only slots that are never scaled down die, and not near deploys. Replacements therefore do
    # not overlap with other changes.
    for slot in rng.sample(range(min(sizes)), min(_DEATHS_PER_DAY, *sizes)):
        minute = rng.choice([m for m in quiet if m > 0])
        day.stops.setdefault(minute, []).append(slot)
        day.starts.setdefault(minute + _REPLACED_AFTER, []).append(slot)


def live_through(day: Day, strategy: Callable[[PlanInput], Plan], workers: int) -> Outcome:
    """Simulate the day with one strategy."""
    leases = len(day.loads[0])
    keys = [f"shardId-{i:06}" for i in range(leases)]
    slot_of = {key: i for i, key in enumerate(keys)}
    started = [1] * workers
    stopped = [0] * workers
    owner: list[str | None] = [_name(i % workers, 0) for i in range(leases)]
    sampled = list(day.loads[0])
    moved_at = [-math.inf] * leases
    outcome = Outcome([], 0)
    for minute, loads in enumerate(day.loads):
        for slot in day.starts.get(minute, []):
            started[slot] += 1
        for slot in day.stops.get(minute, []):
            owner = [None if name == _name(slot, stopped[slot]) else name for name in owner]
            stopped[slot] += 1
        crew = [
            _name(slot, generation)
            for slot in range(workers)
            for generation in range(stopped[slot], started[slot])
        ]
        measured = _loads(crew, owner, sampled)
        # A worker with its fair share at the daily peak uses 60 % CPU, of which 3 % is the idle
        # process.
        per_kbps = 57.0 / (86.0 * leases / workers)
        states = tuple(
            WorkerState(
                name,
                name.split("-")[0],
                {"C": min(3.0 + per_kbps * measured[name], 100.0)},
                {"C": 90.0},
            )
            for name in crew
        )
        plan = strategy(
            PlanInput(
                tuple(
                    LeaseState(
                        key,
                        owner[i],
                        sampled[i],
                        waited_seconds=0.0 if owner[i] else 10.0,
                        seconds_since_move=60.0 * (minute - moved_at[i]),
                    )
                    for i, key in enumerate(keys)
                ),
                states,
            )
        )
        for move in plan.moves:
            owner[slot_of[move.lease_key]] = move.to_worker
            moved_at[slot_of[move.lease_key]] = minute
        outcome.moves += len(plan.moves)
        now = _loads(crew, owner, loads)
        outcome.peaks.append(max(now.values()) / (sum(loads) / len(crew)))
        sampled = [
            _SMOOTHING * load + (1 - _SMOOTHING) * before
            for load, before in zip(loads, sampled, strict=True)
        ]
    return outcome


def _name(slot: int, generation: int) -> str:
    return f"az{slot % _GROUPS}-{slot:03}-{generation}"


def _loads(crew: list[str], owner: list[str | None], loads: list[float]) -> dict[str, float]:
    found = dict.fromkeys(crew, 0.0)
    for name, load in zip(owner, loads, strict=True):
        if name is not None:
            found[name] += load
    return found


def contestants() -> dict[str, Callable[[PlanInput], Plan]]:
    """Return the strategies by name.

    KCL's variance strategy is included twice: as this package implements it, and with all of its
    original defects.
    """
    rng = random.Random(1)
    return {
        "balanced": strategies.get("balanced"),
        "lease_count_based": strategies.get("lease_count_based"),
        "kcl_variance": strategies.get("kcl_variance"),
        "kcl_variance_exact": lambda case: kcl_variance_exact(case, rng),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rebalance", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leases", type=int, default=600)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--minutes", type=int, default=MINUTES)
    parser.add_argument("--figures", type=Path, help="write the SVG into this folder")
    options = parser.parse_args(arguments)
    day = make_day(options.seed, options.leases, options.workers, options.minutes)
    found: dict[str, Outcome] = {}
    for name, strategy in contestants().items():
        found[name] = live_through(replace(day), strategy, options.workers)
        print(f"{name} done", file=sys.stderr)
    rows = {name: outcome.row for name, outcome in found.items()}
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        curves = {
            name: [max(outcome.peaks[k : k + 10]) for k in range(0, len(outcome.peaks), 10)]
            for name, outcome in found.items()
        }
        chart = line_chart(
            "24 virtual hours, worst of ten minutes",
            "time",
            "max / mean",
            curves,
            most=3.0,
            marks=(1.10,),
        )
        (options.figures / "rebalance.svg").write_text(chart)
    if options.json:
        print(
            json.dumps(
                {
                    "seed": options.seed,
                    "leases": options.leases,
                    "workers": options.workers,
                    "minutes": options.minutes,
                    "strategies": rows,
                }
            )
        )
        return 0
    print(f"{'strategy':28}{'max/mean':>10}{'moves':>8}{'over 1.10':>11}")
    for name, row in rows.items():
        print(f"{name:28}{row['max_over_mean']:>10.3f}{row['moves']:>8}{row['over_1_10']:>11.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
