"""Deploy benchmark: a new version of the code under load, with a real `dagster dev`.

A project outside of the repository has a pipeline with default settings, 8 shards with 5 records
per second each, and `Fleet(min=2, max=4)`. The instance of Dagster has no `dagster.yaml`. The new
version is written into the module, and the code location is reloaded. Each row has the version of
the code that wrote it.

    python -m benchmarks.deploy [--only NAME] [--repetitions N] [--json] [--folder F]

Names:

- `deploy`: a version that works. Ends when all rows come from it, and two workers run.
- `spark`: the same with a transform of a Spark DataFrame.
- `raise`: a version whose transform raises on every record.
- `columns`: a version whose rows the table refuses.
- `exit`: a version whose process ends at its first batch.
- `import`: a version that cannot be imported.

A broken version is expected to be stopped without a person, and named; afterwards every shard is
committed by the old version. `gap_s` is the longest time without a commit, per shard: from the
deploy until that state. `steady_gap_s` is the same before the deploy. `moves` is how often a lease
changed its owner from the deploy until that state. Each worker is replaced once, so a deploy that
works moves each lease once.

The last line of the output is JSON. The exit code is 1 if a record is missing or duplicated, if
`deploy` or `spark` has more moves than leases, or if a scenario does not end as expected within its
time limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.deploy_fleet import ARROW, SPARK, WORKERS, DeployFleet, rows_by_version
from benchmarks.embedded import ProcessBenchmark, working_folder
from benchmarks.failover import summary
from benchmarks.failover_fleet import SHARDS, TimedOutError

STEADY_SECONDS: Final = 20.0
LIMIT_SECONDS: Final = 420.0
WORKING: Final = ("deploy", "spark")
BUCKET_SECONDS: Final = 10.0
STOPPED: Final = "replaces no more workers"
NAMES: Final = ("deploy", "spark", "raise", "columns", "exit", "import")


def measure(fleet: DeployFleet, fault: str) -> dict[str, Any]:
    """Run one deploy. An empty fault is a version that works."""
    fleet.write("1")
    fleet.start()
    fleet.wait_steady(fleet.clock.monotonic(), "1", LIMIT_SECONDS)
    fleet.wait_workers(WORKERS, LIMIT_SECONDS)
    before = fleet.clock.monotonic()
    fleet.clock.sleep(STEADY_SECONDS)
    steady = fleet.commits.gaps(before, fleet.clock.monotonic())
    fleet.said.clear()
    began, moves = fleet.clock.monotonic(), fleet.moves.number
    refused = fleet.deploy("2", fault)
    found: dict[str, Any] = {"steady_gap_s": steady, "said": fleet.said, "as_expected": True}
    try:
        if fault:
            _wait_stopped(fleet, began, refused, found)
        else:
            fleet.wait_steady(began, "2", LIMIT_SECONDS)
            fleet.wait_workers(WORKERS, LIMIT_SECONDS)
    except TimedOutError as error:
        print(error, file=sys.stderr, flush=True)
        found["as_expected"] = False
    ended = fleet.clock.monotonic()
    versions = {one.worker: one.at for one in fleet.commits.since(began)}
    new = [one.at for one in fleet.commits.since(began) if one.worker == "2"]
    return found | {
        "gap_s": fleet.commits.gaps(began, ended),
        "seconds": ended - began,
        "moves": fleet.moves.number - moves,
        "first_new_row_s": min(new) - began if new else None,
        "last_old_row_s": versions["1"] - began if "1" in versions else None,
        "rows_by_version": rows_by_version(fleet.commits.since(before), began, BUCKET_SECONDS),
        "runs": fleet.run_counts(),
    }


def _wait_stopped(
    fleet: DeployFleet, began: float, refused: str | None, found: dict[str, Any]
) -> None:
    """Wait until the broken version is stopped and the old one commits every shard."""
    if refused is not None:
        found["stopped_s"], found["stopped"] = fleet.clock.monotonic() - began, refused
        fleet.clock.sleep(STEADY_SECONDS)
    else:

        def stopped() -> bool:
            fleet.poll()
            return bool(fleet.said) and STOPPED in fleet.said[-1]

        fleet.wait("a sentence that it has stopped", stopped, LIMIT_SECONDS)
        found["stopped_s"], found["stopped"] = fleet.clock.monotonic() - began, fleet.said[-1]
    fleet.wait_steady(fleet.clock.monotonic(), "1", LIMIT_SECONDS)
    fleet.wait_workers(WORKERS, LIMIT_SECONDS)


class Benchmark(ProcessBenchmark):
    """Runs scenarios on one embedded AWS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.results: dict[str, list[dict[str, Any]]] = {}

    def run(self, scenario: str, number: int) -> None:
        """Run one repetition of a scenario."""
        name = f"deploy_{scenario}_{number}"
        fleet = DeployFleet(
            name,
            self._folder,
            self._processes,
            self._kinesis,
            self.clock,
            transform=SPARK if scenario == "spark" else ARROW,
        )
        fleet.publisher.start()
        try:
            found = measure(fleet, "" if scenario in WORKING else scenario)
            missing, duplicated = fleet.drain(LIMIT_SECONDS / 4)
        finally:
            fleet.stop()
        found |= {"missing": missing, "duplicated": duplicated}
        self.results.setdefault(scenario, []).append(found)

    def report(self) -> dict[str, Any]:
        """Return the last line of the output."""
        return {scenario: _summary(found) for scenario, found in self.results.items()}


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"repetitions": len(results)}
    for key in ("steady_gap_s", "gap_s"):
        gaps = [gap for one in results for gap in one[key].values()]
        found[key] = {"p50": summary(gaps)["p50"], "max": round(max(gaps), 2)}
    for key in ("seconds", "first_new_row_s", "last_old_row_s", "stopped_s", "moves"):
        values = [one[key] for one in results if one.get(key) is not None]
        found[key] = round(max(values), 1) if values else None
    for key in ("missing", "duplicated"):
        found[key] = sum(one[key] for one in results)
    found["as_expected"] = all(one["as_expected"] for one in results)
    last = results[-1]
    return found | {key: last.get(key) for key in ("rows_by_version", "runs", "stopped", "said")}


def print_table(report: dict[str, Any]) -> None:
    """Print the results for a person."""
    for scenario, found in report.items():
        print(f"{scenario} ({found['repetitions']} repetitions)")
        print(f"  longest time without a commit of a shard, before: {found['steady_gap_s']}")
        print(f"  longest time without a commit of a shard, deploy: {found['gap_s']}")
        for key in ("first_new_row_s", "last_old_row_s", "stopped_s", "seconds", "moves"):
            print(f"  {key}: {found[key]}")
        print(f"  missing {found['missing']}, duplicated {found['duplicated']}")
        print(f"  runs: {found['runs']}; as expected: {found['as_expected']}")
        print("  rows by version, from second:")
        for begin, counts in found["rows_by_version"]:
            print(f"    {begin:>5} {counts}")
        print("  the sensor said:")
        for text in found["said"]:
            print(f"    {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with working_folder(options.folder, "deploy-") as folder:
        benchmark = Benchmark(folder)
        try:
            benchmark.start()
            for name in NAMES:
                if options.only is None or name in options.only:
                    for repetition in range(options.repetitions):
                        benchmark.run(name, repetition)
        finally:
            benchmark.stop()
    report = benchmark.report()
    if not options.json:
        print_table(report)
    print(json.dumps(report))
    good = all(
        one["as_expected"] and not one["missing"] and not one["duplicated"]
        for one in report.values()
    ) and all(report.get(name, {}).get("moves", 0) <= SHARDS for name in WORKING)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
