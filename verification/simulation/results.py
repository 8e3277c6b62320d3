"""Results of a run of many seeds, as numbers and as a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from verification.simulation.environment.calls import EXPIRED_ITERATOR, SITES, Fault, applicable
from verification.simulation.incidents.choices import CELLS, INCIDENTS
from verification.simulation.run import Outcome

_SHOWN_CELLS: Final = 10


def all_cells() -> list[tuple[str, str]]:
    """Everything that a sufficiently long run must inject at least once."""
    return [*CELLS, EXPIRED_ITERATOR, *(("incident", name) for name in INCIDENTS)]


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant, under the options of this run."""

    seed: int
    violations: tuple[str, ...]

    def __str__(self) -> str:
        return f"seed {self.seed} fails: {'; '.join(self.violations)}"


@dataclass
class Result:
    """Result of some seeds.

    `settled` has the seconds from the end of each storm until the fleet was settled.
    """

    seeds: int = 0
    seconds: float = 0.0
    steps: int = 0
    published: int = 0
    committed: int = 0
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    settled: list[float] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add the result of other seeds."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.published += other.published
        self.committed += other.committed
        self.faults.update(other.faults)
        self.settled += other.settled
        self.failures = sorted([*self.failures, *other.failures], key=lambda one: one.seed)

    @property
    def empty_cells(self) -> list[tuple[str, str]]:
        """The faults that no seed had."""
        return [cell for cell in all_cells() if not self.faults[cell]]

    @property
    def failing_seeds(self) -> list[int]:
        """The seeds that broke an invariant."""
        return [one.seed for one in self.failures]

    def as_json(self) -> dict[str, Any]:
        """The last line of `--json`."""
        kinds: Counter[str] = Counter()
        for (site, fault), count in self.faults.items():
            kinds[f"incident {fault}" if site == "incident" else str(fault)] += count
        return {
            "seeds": self.seeds,
            "violations": len(self.failures),
            "failing_seeds": self.failing_seeds,
            "faults": dict(sorted(kinds.items())),
            "empty_cells": len(self.empty_cells),
            "seeds_per_s": round(self.seeds / self.seconds, 2) if self.seconds else 0.0,
        }


def result_of(outcome: Outcome) -> Result:
    """The result of one seed."""
    faults = {(str(site), str(fault)): count for (site, fault), count in outcome.faults.items()}
    return Result(
        seeds=1,
        steps=outcome.steps,
        published=outcome.published,
        committed=outcome.committed,
        faults=Counter(faults),
        settled=[outcome.settled_seconds],
        failures=[Failure(outcome.seed, outcome.violations)] if outcome.violations else [],
    )


def report(result: Result, out: TextIO) -> None:
    """Print the metrics of a run as text."""
    by_fault: Counter[str] = Counter()
    for (site, fault), count in result.faults.items():
        if site != "incident":
            by_fault[fault] += count
    print(
        f"\n{result.seeds} seeds in {result.seconds:.0f} s: "
        f"{result.seeds / max(result.seconds, 1e-9):.1f} seeds/s, {result.steps:,} steps",
        file=out,
    )
    print(
        f"{result.published:,} events published, {result.committed:,} in the table; the "
        "others left retention, are poison or before the begin",
        file=out,
    )
    if settled := sorted(result.settled):
        print(
            f"settled after the storm: median {settled[len(settled) // 2]:.1f} s, 99 % "
            f"{settled[len(settled) * 99 // 100]:.1f} s, most {settled[-1]:.1f} s",
            file=out,
        )
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(by_fault.items()))
    print(f"\n{by_fault.total():,} faults: {faults}", file=out)
    incidents = sorted(INCIDENTS)
    incidents += sorted(name for site, name in result.faults if name.endswith("(done)"))
    counts = ", ".join(f"{name} {result.faults[('incident', name)]}" for name in incidents)
    print(f"incidents: {counts}", file=out)
    _table(result, out)
    empty = ", ".join(f"{fault} at {site}" for site, fault in result.empty_cells[:_SHOWN_CELLS])
    more = len(result.empty_cells) - _SHOWN_CELLS
    rest = f", and {more} more" if more > 0 else ""
    print(f"\nempty cells: {empty or 'none'}{rest}", file=out)


def _table(result: Result, out: TextIO) -> None:
    print("\n" + " " * 31 + "".join(f"{_short(fault):>11}" for fault in Fault), file=out)
    for site in SITES:
        counts = [
            str(result.faults[(site, fault)]) if applicable(site, fault) else "·" for fault in Fault
        ]
        print(f"{site:31}" + "".join(f"{count:>11}" for count in counts), file=out)


def _short(fault: Fault) -> str:
    return (
        fault.value.replace("_applying", "")
        .replace("timeout", "t/o")
        .replace("server_error", "error")
    )
