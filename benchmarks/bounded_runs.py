"""Long run of workers that are replaced every few minutes, with kills, on real processes.

A project outside of the repository has `Fleet(min=2, max=3, run_hours=0.05)`: each worker is
replaced after three minutes. The stream has two shards, and one more worker runs outside of
Dagster, so that there are more workers than shards in each replacement. Records come for a minute,
and then none for a minute. Now and then the process of a worker is killed with SIGKILL.

    python -m benchmarks.bounded_runs [--minutes N] [--kill-seconds S] [--seed S] [--folder F]

At the end the last records are awaited, and every record is counted. The last line of the output is
JSON; the exit code is 1 if a record is missing or duplicated. `gap_s` has, per busy minute, the
longest time in which a shard was not committed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import requests

from benchmarks.deploy_fleet import DeployFleet
from benchmarks.embedded import ProcessBenchmark, working_folder
from benchmarks.failover_fleet import TimedOutError

SHARDS: Final = 2
OUTSIDE: Final = 1
FLEET: Final = "Fleet(min=2, max=3, run_hours=0.05, code_version=VERSION)"
PHASE_SECONDS: Final = 60.0
LIMIT_SECONDS: Final = 300.0


class BoundedFleet(DeployFleet):
    """The fleet, with workers outside of Dagster and with kills."""

    outside: Sequence[subprocess.Popen[bytes]] = ()

    def begin(self) -> None:
        """Start Dagster and the workers outside of it."""
        self.write("1")
        self.start()
        self.outside = [
            self._processes.start_program(
                f"{self.name}-outside-{number}",
                [sys.executable, "-m", "kcl_pipeline.cli", "worker", "-p", f"{self.name}:pipeline"],
                {"PYTHONPATH": f"{self._processes.environment['PYTHONPATH']}:{self._folder}"},
            )
            for number in range(OUTSIDE)
        ]
        self.wait_steady(self.clock.monotonic(), "1", LIMIT_SECONDS)

    def kill(self, rng: random.Random) -> bool:
        """Kill the process of one worker run that has started."""
        found = [self._pids.get(run.run_id) for run in self.runs() if run.status == "STARTED"]
        pids = sorted(pid for pid in found if pid is not None)
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)
        return True


def measure(
    fleet: BoundedFleet, minutes: float, kill_seconds: float, rng: random.Random
) -> dict[str, Any]:
    """Run busy and quiet phases in turn."""
    clock = fleet.clock
    fleet.publisher.start()
    fleet.begin()
    ended = clock.monotonic() + 60 * minutes
    kills, gaps, is_busy = 0, list[float](), True
    next_kill = clock.monotonic() + kill_seconds
    while (began := clock.monotonic()) < ended:
        fleet.publisher.pause(not is_busy)
        while clock.monotonic() < began + PHASE_SECONDS:
            clock.sleep(1.0)
            with suppress(requests.RequestException):
                if clock.monotonic() >= next_kill:
                    kills += fleet.kill(rng)
                    next_kill = clock.monotonic() + kill_seconds * rng.uniform(0.5, 1.5)
        if is_busy:
            gaps.append(round(fleet.commits.longest_gap(began, clock.monotonic()), 2))
        is_busy = not is_busy
    return {"kills": kills, "gap_s": gaps}


class Benchmark(ProcessBenchmark):
    """Runs the fleet on one embedded AWS."""

    def run(self, minutes: float, kill_seconds: float, seed: int) -> dict[str, Any]:
        """Run it, and count."""
        fleet = BoundedFleet(
            "bounded",
            self._folder,
            self._processes,
            self._kinesis,
            self.clock,
            fleet=FLEET,
            shards=SHARDS,
        )
        try:
            found = measure(fleet, minutes, kill_seconds, random.Random(seed))
            missing, duplicated = fleet.drain(LIMIT_SECONDS)
            found |= {
                "records": len(set(fleet.publisher.acknowledged)),
                "missing": missing,
                "duplicated": duplicated,
                "moves": fleet.moves.number,
            }
            with suppress(requests.RequestException):
                found["runs"] = fleet.run_counts()
        finally:
            for one in fleet.outside:
                one.terminate()
            with suppress(TimedOutError):
                fleet.stop()
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with working_folder(options.folder, "bounded-") as folder:
        benchmark = Benchmark(folder)
        try:
            benchmark.start()
            report = benchmark.run(options.minutes, options.kill_seconds, options.seed)
        finally:
            benchmark.stop()
    print(json.dumps(report))
    return int(bool(report["missing"] or report["duplicated"]))


if __name__ == "__main__":
    sys.exit(main())
