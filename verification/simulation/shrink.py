"""Shrinking: find the mildest storm in which a seed still fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from verification.simulation.incidents.storm import StormOptions
from verification.simulation.run import Outcome, simulate

SHRINK_RUNS: Final = 60
_FEW_RECORDS: Final = 5.0


def shrink(
    seed: int, options: StormOptions | None = None, most_runs: int = SHRINK_RUNS
) -> tuple[StormOptions, Outcome]:
    """Return the mildest storm found in which this seed still fails.

    It has fewer incidents, no chance of faults, no steered fault, fewer records. Raises
    `ValueError` for a seed that does not fail.
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
