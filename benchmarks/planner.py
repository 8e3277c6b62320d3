"""Balance, number of moves and speed of the planner.

    python -m benchmarks.planner --json

`balanced` is compared with KCL's variance strategy after 1, 10 and 60 rounds, and with LPT from
scratch. Then every strategy is timed, also where one worker holds all leases. The benchmark prints
values and does not check them. Plan times are processor times, so that other load does not count;
`plan_wall_ms_p99` is elapsed time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner_cases import (
    DISTRIBUTIONS,
    ONE_WORKER,
    STARTS,
    carried_out,
    from_trace,
    lpt,
    make,
)
from benchmarks.planner_text import text_of
from benchmarks.svg import line_chart
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.explain import explain, max_over_mean, worker_loads
from kcl_pipeline.planning.model import PlanInput
from kcl_pipeline.planning.strategies import balanced
from verification.kcl_variance_exact import kcl_variance_exact
from verification.planning.quality import quality_of

_ROUNDS = (1, 10, 60)
_CPU_AT_MEAN, _CPU_LIMIT = 40.0, 80.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line instead of a table"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--kcl-seeds", type=int, default=3, help="seeds on which KCL's 60 rounds are run"
    )
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument(
        "--large",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time one plan of 100,000 leases on 5,000 workers",
    )
    parser.add_argument("--figures", type=Path, help="write one SVG per scenario into this folder")
    parser.add_argument("--trace", type=Path, help="plan this case instead")
    options = parser.parse_args(arguments)
    if options.trace:
        return plan_trace(options.trace, as_json=options.json)
    result = run(options)
    print(json.dumps(result) if options.json else table(result))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    times: list[tuple[float, float]] = []
    scenarios = []
    for distribution in DISTRIBUTIONS:
        for start in STARTS:
            scenarios.append(scenario(distribution, start, options, times))
            print(f"{distribution} {start} done", file=sys.stderr)
    cpu, wall = sorted(one for one, _ in times), sorted(one for _, one in times)
    sizes = [(options.leases, options.workers), *([(100_000, 5_000)] if options.large else [])]
    return {
        "scenarios": scenarios,
        "plan_ms_p50": round(statistics.median(cpu), 1),
        "plan_ms_p99": round(p99(cpu), 1),
        "plan_wall_ms_p99": round(p99(wall), 1),
        "strategies": [row for size in sizes for row in strategy_times(*size)],
        "kcl_seeds": min(options.kcl_seeds, options.seeds),
    }


def strategy_times(leases: int, workers: int) -> list[dict[str, Any]]:
    """Time one plan of each strategy, for each start, with lognormal loads."""
    rows = []
    for name in ("balanced", "worker_utilization_aware", "lease_count_based", "kcl_variance"):
        milliseconds = {}
        for start in (*STARTS, ONE_WORKER):
            case = make("lognormal", start, 0, leases, workers)
            begin = time.process_time()
            strategies.get(name)(case)
            milliseconds[start] = round((time.process_time() - begin) * 1_000, 1)
        print(f"{name} {leases} x {workers} done", file=sys.stderr)
        rows.append({"name": name, "leases": leases, "workers": workers, "ms": milliseconds})
    return rows


def p99(ordered: list[float]) -> float:
    return ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]


def scenario(
    distribution: str, start: str, options: argparse.Namespace, times: list[tuple[float, float]]
) -> dict[str, Any]:
    found, baseline, kcl = [], [], []
    for seed in range(options.seeds):
        case = make(distribution, start, seed, options.leases, options.workers)
        begin, wall = time.process_time(), time.perf_counter()
        plan = balanced(case)
        times.append(((time.process_time() - begin) * 1_000, (time.perf_counter() - wall) * 1_000))
        found.append(quality_of(case, plan))
        baseline.append(from_scratch(case))
        if seed < options.kcl_seeds:
            rounds, after_kcl = kcl_rounds(case, seed)
            kcl.append(rounds)
            if seed == 0 and options.figures:
                draw(
                    options.figures,
                    f"{distribution}_{start}",
                    case,
                    carried_out(case, plan),
                    after_kcl,
                )
    result: dict[str, Any] = {
        "name": f"{distribution}_{start}",
        "seeds": options.seeds,
        "max_over_mean": round(max(one.max_over_mean for one in found), 4),
        "largest_over_mean": round(max(one.largest_over_mean for one in found), 4),
        "moves": statistics.median(one.moves for one in found),
        "lower_bound": statistics.median(one.lower_bound for one in found),
        "moves_over_lower_bound": round(
            statistics.median(one.moves_over_lower_bound for one in found), 4
        ),
        "moves_over_lower_bound_worst": round(max(one.moves_over_lower_bound for one in found), 4),
    }
    for count in _ROUNDS:
        if kcl:
            result[f"kcl_{count}"] = {
                "max_over_mean": round(statistics.median(one[count][0] for one in kcl), 4),
                "moves": statistics.median(one[count][1] for one in kcl),
            }
    result["lpt"] = {
        "max_over_mean": round(max(one[0] for one in baseline), 4),
        "moves": statistics.median(one[1] for one in baseline),
    }
    return result


def from_scratch(case: PlanInput) -> tuple[float, int]:
    """Return (max over mean, moves) of LPT, which ignores current owners."""
    owner = lpt([lease.throughput_kbps or 0.0 for lease in case.leases], len(case.workers))
    owners = {
        lease.lease_key: case.workers[w].worker_id
        for lease, w in zip(case.leases, owner, strict=True)
    }
    moves = sum(1 for lease in case.leases if owners[lease.lease_key] != lease.owner)
    return max_over_mean(case, owners), moves


def kcl_rounds(case: PlanInput, seed: int) -> tuple[dict[int, tuple[float, int]], PlanInput]:
    """Run KCL's strategy round by round with ideal metrics.

    The CPU of each worker is proportional to its load, without delay. It is 40 % at the mean, and
    the limit is 80 %.
    """
    rng = random.Random(seed)
    found: dict[int, tuple[float, int]] = {}
    moves = 0
    mean = sum(lease.throughput_kbps or 0.0 for lease in case.leases) / len(case.workers)
    for count in range(1, max(_ROUNDS) + 1):
        loads = worker_loads(case, {lease.lease_key: lease.owner for lease in case.leases})
        crew = tuple(
            replace(
                worker,
                metrics={"C": _CPU_AT_MEAN * loads[worker.worker_id] / mean},
                limits={"C": _CPU_LIMIT},
            )
            for worker in case.workers
        )
        plan = kcl_variance_exact(replace(case, workers=crew), rng)
        moves += len(plan.moves)
        if plan.moves:
            to = {move.lease_key: move.to_worker for move in plan.moves}
            case = replace(
                case,
                leases=tuple(
                    replace(lease, owner=to[lease.lease_key]) if lease.lease_key in to else lease
                    for lease in case.leases
                ),
            )
        if count in _ROUNDS:
            found[count] = (
                max_over_mean(case, {lease.lease_key: lease.owner for lease in case.leases}),
                moves,
            )
    return found, case


def draw(folder: Path, name: str, before: PlanInput, after: PlanInput, kcl: PlanInput) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    curves = {}
    for label, case in (("before", before), ("KCL, 60 rounds", kcl), ("balanced, one plan", after)):
        loads = sorted(
            worker_loads(case, {lease.lease_key: lease.owner for lease in case.leases}).values(),
            reverse=True,
        )
        mean = sum(lease.throughput_kbps or 0.0 for lease in case.leases) / len(loads)
        curves[label] = [load / mean for load in loads]
    chart = line_chart(
        name.replace("_", " "),
        "workers, most loaded first",
        "load / mean",
        curves,
        most=2.5,
        marks=(1.05,),
    )
    (folder / f"planner_{name}.svg").write_text(chart)


def plan_trace(path: Path, *, as_json: bool) -> int:
    try:
        case = from_trace(path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    begin = time.perf_counter()
    plan = balanced(case)
    milliseconds = (time.perf_counter() - begin) * 1_000
    shown, found = explain(case, plan), quality_of(case, plan)
    if not as_json:
        print(text_of(plan, shown, found.lower_bound))
        print(f"\nplanned in {milliseconds:.1f} ms")
        return 0
    print(
        json.dumps(
            {
                "moves": [
                    {
                        "key": move.lease_key,
                        "from": move.from_worker,
                        "to": move.to_worker,
                        "reason": move.reason,
                    }
                    for move in plan.moves
                ],
                "spilled": list(plan.spilled),
                "max_over_mean_before": round(shown.max_over_mean_before, 4),
                "max_over_mean": round(found.max_over_mean, 6),
                "largest_over_mean": round(found.largest_over_mean, 6),
                "moves_count": found.moves,
                "lower_bound": found.lower_bound,
                "moves_over_lower_bound": round(found.moves_over_lower_bound, 4),
                "plan_ms": round(milliseconds, 1),
            }
        )
    )
    return 0


def table(result: dict[str, Any]) -> str:
    lines = [
        (
            f"{'scenario':26}{'max/mean':>9}{'moves':>8}{'bound':>8}{'ratio':>7}"
            f"{'KCL 1':>15}{'KCL 10':>15}{'KCL 60':>15}{'LPT':>15}"
        )
    ]
    for one in result["scenarios"]:
        peers = "".join(
            f"{one[key]['max_over_mean']:>9.3f}/{one[key]['moves']:>5.0f}"
            if key in one
            else f"{'':>15}"
            for key in ("kcl_1", "kcl_10", "kcl_60", "lpt")
        )
        lines.append(
            f"{one['name']:26}{one['max_over_mean']:>9.4f}{one['moves']:>8.0f}"
            f"{one['lower_bound']:>8.0f}{one['moves_over_lower_bound']:>7.3f}{peers}"
        )
    lines.append(f"plan: p50 {result['plan_ms_p50']} ms, p99 {result['plan_ms_p99']} ms")
    starts = (*STARTS, ONE_WORKER)
    lines.append(f"{'strategy, ms of one plan':44}" + "".join(f"{s:>15}" for s in starts))
    lines += [
        f"{row['name']:26}{row['leases']:>9} x {row['workers']:<6}"
        + "".join(f"{row['ms'][start]:>15.0f}" for start in starts)
        for row in result["strategies"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
