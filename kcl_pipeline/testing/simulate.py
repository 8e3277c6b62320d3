"""The simulation over a range of seeds, on all cores: `python -m kcl_pipeline.testing.simulate --seeds 0:2000 [--workers N] [--json]`.

Prints seeds per second, the faults by kind, and the table fault × call site. A failing seed is shrunk, and its timeline printed. The exit code is 1 when
an invariant did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, Final, TextIO

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.testing.simulation import Outcome, StormOptions, simulate
from kcl_pipeline.testing.simulation.calls import CELLS, EXPIRED_ITERATOR, SITES, Fault, applicable
from kcl_pipeline.testing.simulation.storm import incident_names

CHUNK: Final = 20
SHOWN_FAILURES: Final = 5
SHRINK_RUNS: Final = 60
PROGRESS_SECONDS: Final = 20.0

ALL_CELLS: Final = (*CELLS, EXPIRED_ITERATOR, *(("incident", name) for name in incident_names()))
"""Everything that a long enough run has to have injected at least once."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant, under the options of this run."""

    seed: int
    violations: tuple[str, ...]


@dataclass
class Result:
    """What a range of seeds did; `settled` are the seconds from the end of each storm until everything was well."""

    seeds: int = 0
    seconds: float = 0.0
    steps: int = 0
    published: int = 0
    committed: int = 0
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    settled: list[float] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Take in the result of other seeds."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.published += other.published
        self.committed += other.committed
        self.faults.update(other.faults)
        self.settled += other.settled
        self.failures += other.failures

    @property
    def empty_cells(self) -> list[tuple[str, str]]:
        """The faults that no seed had."""
        return [cell for cell in ALL_CELLS if not self.faults[cell]]

    def as_json(self) -> dict[str, Any]:
        """The last line of `--json`."""
        kinds: Counter[str] = Counter()
        for (site, fault), count in self.faults.items():
            kinds[f"incident {fault}" if site == "incident" else str(fault)] += count
        return {
            "seeds": self.seeds,
            "violations": len(self.failures),
            "faults": dict(sorted(kinds.items())),
            "empty_cells": len(self.empty_cells),
            "seeds_per_s": round(self.seeds / self.seconds, 2) if self.seconds else 0.0,
        }


def run_chunk(seeds: tuple[int, ...]) -> Result:
    """Some seeds in this process."""
    result = Result()
    for seed in seeds:
        outcome = simulate(seed)
        result.seeds += 1
        result.steps += outcome.steps
        result.published += outcome.published
        result.committed += outcome.committed
        result.faults.update({(str(site), str(fault)): count for (site, fault), count in outcome.faults.items()})
        result.settled.append(outcome.settled_seconds)
        if outcome.violations:
            result.failures.append(Failure(seed, outcome.violations))
    return result


def run_seeds(seeds: Sequence[int], workers: int, progress: Callable[[Result], None] = lambda _: None) -> Result:
    """All seeds, over `workers` processes; 1 runs them here. `progress` sees the result so far, now and then."""
    clock = SystemClock()
    began, told = clock.monotonic(), clock.monotonic()
    total = Result()
    chunks = [tuple(seeds[at : at + CHUNK]) for at in range(0, len(seeds), CHUNK)]
    for part in _results(chunks, workers):
        total.add(part)
        total.seconds = clock.monotonic() - began
        if clock.monotonic() - told >= PROGRESS_SECONDS:
            told = clock.monotonic()
            progress(total)
    return total


def _results(chunks: Sequence[tuple[int, ...]], workers: int) -> Iterator[Result]:
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) if workers > 1 else None
    with pool or nullcontext():
        yield from pool.map(run_chunk, chunks) if pool is not None else map(run_chunk, chunks)


def _end_with_parent() -> None:
    """A process of the pool would wait for ever for work of a parent that was killed."""
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def shrink(seed: int, options: StormOptions | None = None, most_runs: int = SHRINK_RUNS) -> tuple[StormOptions, Outcome]:
    """The mildest storm found in which this seed still fails: fewer incidents, no chance of faults, no steered fault, a shorter storm.

    Raises `ValueError` for a seed that does not fail.
    """
    best = options or StormOptions()
    outcome = simulate(seed, best)
    if not outcome.violations:
        raise ValueError(f"seed {seed} does not fail under {best}")
    runs = 0
    improved = True
    while improved and runs < most_runs:
        improved = False
        for milder in _milder(best, outcome.incidents + len(best.skipped)):
            runs += 1
            tried = simulate(seed, milder)
            if tried.violations:
                best, outcome, improved = milder, tried, True
                break
            if runs >= most_runs:
                break
    return best, outcome


def _milder(options: StormOptions, incidents: int) -> Iterator[StormOptions]:
    if options.call_fault_chance > 0:
        yield replace(options, call_fault_chance=0.0)
    if options.steer:
        yield replace(options, steer=False)
    left = [place for place in range(incidents) if place not in options.skipped]
    if len(left) > 1:
        half = len(left) // 2
        yield replace(options, skipped=options.skipped | set(left[half:]))
        yield replace(options, skipped=options.skipped | set(left[:half]))
    for place in left:
        yield replace(options, skipped=options.skipped | {place})
    if options.records_per_second > _FEW_RECORDS:
        yield replace(options, records_per_second=options.records_per_second / 2)


_FEW_RECORDS: Final = 5.0


def report(result: Result, out: TextIO) -> None:
    """The figures for people."""
    calls, faults = sum(c for (site, _), c in result.faults.items() if site != "incident"), Counter[str]()
    for (site, fault), count in result.faults.items():
        if site != "incident":
            faults[fault] += count
    print(f"\n{result.seeds} seeds in {result.seconds:.0f} s: {result.seeds / max(result.seconds, 1e-9):.1f} seeds/s, {result.steps:,} steps", file=out)
    print(f"{result.published:,} events published, {result.committed:,} in the table; the others left retention, are poison or before the begin", file=out)
    if settled := sorted(result.settled):
        print(
            f"settled after the storm: median {settled[len(settled) // 2]:.1f} s, 99 % {settled[len(settled) * 99 // 100]:.1f} s, most {settled[-1]:.1f} s",
            file=out,
        )
    print(f"\n{calls:,} faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())), file=out)
    print("incidents: " + ", ".join(f"{name} {result.faults[('incident', name)]}" for name in incident_names()), file=out)
    print("\n" + " " * 31 + "".join(f"{_short(fault):>11}" for fault in Fault), file=out)
    for site in SITES:
        counts = [str(result.faults[(site, fault)]) if applicable(site, fault) else "·" for fault in Fault]
        print(f"{site:31}" + "".join(f"{count:>11}" for count in counts), file=out)
    empty = ", ".join(f"{fault} at {site}" for site, fault in result.empty_cells)
    print(f"\nempty cells: {empty or 'none'}", file=out)


def _short(fault: Fault) -> str:
    return fault.value.replace("_applying", "").replace("timeout", "t/o").replace("server_error", "error")


def explain(failure: Failure, out: TextIO) -> None:
    """The shrunk timeline of a failing seed."""
    print(f"\nseed {failure.seed} fails: {'; '.join(failure.violations)}", file=out)
    options, outcome = shrink(failure.seed)
    print(f"shrunk; to replay it: simulate({failure.seed}, {options})", file=out)
    print(outcome.timeline(), file=out)


def _first_failure(seeds: Sequence[int], out: TextIO) -> int:
    for seed in seeds:
        outcome = simulate(seed)
        if outcome.violations:
            print(outcome.timeline(), file=out)
            print(f"seed {seed} fails: {'; '.join(outcome.violations)}", file=out)
            return 1
    return 0


def seed_range(text: str) -> range:
    """`10:20` (end exclusive), or one seed. Raises `ArgumentTypeError`."""
    first, colon, last = text.partition(":")
    try:
        begin, end = int(first), int(last) if colon else int(first) + 1
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds; write for example 0:2000") from None
    if not 0 <= begin < end:
        raise argparse.ArgumentTypeError(f"{text!r} has no seeds; write for example 0:2000")
    return range(begin, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kcl_pipeline.testing.simulate", description="Simulate fleets under faults; one seed decides everything.")
    parser.add_argument("--seeds", type=seed_range, default=range(2000), help="first:end, end exclusive (default 0:2000)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)")
    parser.add_argument("--first", action="store_true", help="one process, and the end at the first seed that fails")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON; everything else goes to stderr")
    given = parser.parse_args(arguments)
    out = sys.stderr if given.json else sys.stdout

    if given.first:
        return _first_failure(given.seeds, out)

    def progress(so_far: Result) -> None:
        print(f"{so_far.seeds} seeds, {so_far.seeds / so_far.seconds:.1f}/s, {len(so_far.failures)} failed", file=out, flush=True)

    result = run_seeds(given.seeds, max(given.workers, 1), progress)
    for failure in result.failures[:SHOWN_FAILURES]:
        explain(failure, out)
    report(result, out)
    if result.failures:
        print(f"\n{len(result.failures)} seeds broke an invariant: {[f.seed for f in result.failures]}", file=out)
    if given.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
