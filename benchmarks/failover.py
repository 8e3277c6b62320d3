"""Failover benchmark: seconds until a fleet has recovered from a change, seen from outside.

Worker processes with default settings consume 8 shards of the embedded AWS, 5 records per second
each. A time ends when every shard concerned is committed again by its new owner.

    python -m benchmarks.failover [--only KEY] [--repetitions N] [--java N] [--json] [--folder F]

Keys:

- `cold_start_s`: Start of the first worker on an empty application → first commit of every shard.
- `worker_crash_s`, `leader_crash_s`: SIGKILL of one of two workers.
- `planned_stop_s`, `leader_planned_stop_s`: SIGTERM of one of two workers.
- `scale_out_2_s`, `scale_out_3_s`: A second (third) worker starts → 4/4 (3/3/2) leases, all
  committed by their owners. The third starts directly after that.
- `scale_out_idle_s`: The longer of both with records of 100 bytes.
- `rolling_deploy_gap_s`: Each worker is replaced: longest time without a commit of any shard.
- `reshard_s`: Split → first commit of the child that gets the records; the other one is empty.

The last line of the output is JSON: `{"p50", "p99", "n"}` per key, and `missing` and `duplicated`
ids in the tables of all repetitions. A repetition that does not recover within 240 s counts as 240.
`--java N` adds N repetitions per key with workers of the Java KCL and its default settings: the key
`java` has their `{"p50", "p99", "n"}`, where 300 s count as not recovered. Without Maven they are
skipped with the reason. `--fast` sets `failover_time_millis` to 3000. With `--sensor` the leader
sensor leads, with ticks 5 s apart, and there are no keys `leader_*`: no worker leads.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.embedded import ProcessBenchmark, working_folder
from benchmarks.failover_fleet import LIMIT_SECONDS, FailoverFleet, TimedOutError
from benchmarks.failover_java import FAMILY, JavaFleet
from benchmarks.peers.setup import NotAvailable
from tests.interop.java import JavaKcl, fetch

NORMAL_BYTES: Final = 2_000
IDLE_BYTES: Final = 100
PHASE_SECONDS: Final = 12.0
"""A fault comes at a random time within this interval: more than a leader cycle."""

Scenario = Callable[[FailoverFleet, random.Random], dict[str, float]]


def _two_workers(fleet: FailoverFleet, rng: random.Random) -> tuple[str, str]:
    """Start two workers; return the leader and the other one at a random time."""
    fleet.start("one", "two")
    fleet.wait_settled()
    fleet.rest(rng.uniform(0.0, PHASE_SECONDS))
    leader = fleet.leader()
    other = next(name for name in fleet.workers if name != leader)
    return leader or other, other


def _loss(key: str, number: signal.Signals, *, leads: bool) -> Scenario:
    def run(fleet: FailoverFleet, rng: random.Random) -> dict[str, float]:
        leader, other = _two_workers(fleet, rng)
        victim = leader if leads else other
        shards = [shard for shard, owner in fleet.owners().items() if owner == victim]
        began = fleet.clock.monotonic()
        fleet.end(victim, number)
        fleet.wait_taken_over(began, shards, victim)
        return {key: fleet.clock.monotonic() - began}

    return run


def _cold_start(fleet: FailoverFleet, _: random.Random) -> dict[str, float]:
    began = fleet.clock.monotonic()
    fleet.start("one")
    fleet.wait("leases", lambda: bool(fleet.owners()))
    fleet.wait_taken_over(began, fleet.owners(), "")
    return {"cold_start_s": fleet.clock.monotonic() - began}


def _join(fleet: FailoverFleet, name: str) -> float:
    before = fleet.owners()
    began = fleet.clock.monotonic()
    fleet.start(name)
    try:
        fleet.wait_settled()
    except TimedOutError:
        return LIMIT_SECONDS
    moved = {k: owner for k, owner in fleet.owners().items() if owner != before.get(k)}
    ends = [
        min(c.at for c in fleet.commits.since(began) if (c.shard_id, c.worker) == item)
        for item in moved.items()
    ]
    return max(ends, default=began) - began


def _scale_out(fleet: FailoverFleet, rng: random.Random) -> dict[str, float]:
    fleet.start("one")
    fleet.wait_settled()
    fleet.rest(rng.uniform(0.0, PHASE_SECONDS))
    return {"scale_out_2_s": _join(fleet, "two"), "scale_out_3_s": _join(fleet, "three")}


def _scale_out_idle(fleet: FailoverFleet, rng: random.Random) -> dict[str, float]:
    return {"scale_out_idle_s": max(_scale_out(fleet, rng).values())}


def _rolling_deploy(fleet: FailoverFleet, rng: random.Random) -> dict[str, float]:
    _two_workers(fleet, rng)
    began = fleet.clock.monotonic()
    for old, new in (("one", "three"), ("two", "four")):
        fleet.start(new)
        fleet.wait_settled()
        fleet.end(old, signal.SIGTERM)
        fleet.wait_settled()
    return {"rolling_deploy_gap_s": fleet.commits.longest_gap(began, fleet.clock.monotonic())}


def _reshard(fleet: FailoverFleet, rng: random.Random) -> dict[str, float]:
    _two_workers(fleet, rng)
    shards = fleet.kinesis.list_shards(StreamName=fleet.name)["Shards"]
    known = {shard["ShardId"] for shard in shards}
    hashes = shards[0]["HashKeyRange"]
    # The publisher's records are in the middle of the range: one child is empty.
    middle = (int(hashes["StartingHashKey"]) + int(hashes["EndingHashKey"])) // 2
    began = fleet.clock.monotonic()
    fleet.kinesis.split_shard(
        StreamName=fleet.name,
        ShardToSplit=shards[0]["ShardId"],
        NewStartingHashKey=str(middle),
    )
    fleet.wait("a child", lambda: any(c.shard_id not in known for c in fleet.commits.since(began)))
    return {"reshard_s": fleet.clock.monotonic() - began}


SCENARIOS: Final[dict[tuple[str, ...], Scenario]] = {
    ("cold_start_s",): _cold_start,
    ("worker_crash_s",): _loss("worker_crash_s", signal.SIGKILL, leads=False),
    ("leader_crash_s",): _loss("leader_crash_s", signal.SIGKILL, leads=True),
    ("planned_stop_s",): _loss("planned_stop_s", signal.SIGTERM, leads=False),
    ("leader_planned_stop_s",): _loss("leader_planned_stop_s", signal.SIGTERM, leads=True),
    ("scale_out_2_s", "scale_out_3_s"): _scale_out,
    ("scale_out_idle_s",): _scale_out_idle,
    ("rolling_deploy_gap_s",): _rolling_deploy,
    ("reshard_s",): _reshard,
}


def summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Return median, 99th percentile (nearest rank) and count."""
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return round(ordered[max(math.ceil(share * len(ordered)) - 1, 0)], 2)

    return {"p50": rank(0.5), "p99": rank(0.99), "n": len(ordered)}


class Benchmark(ProcessBenchmark):
    """Runs repetitions on one embedded AWS."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        settings: dict[str, dict[str, object]],
        *,
        with_sensor: bool,
    ) -> None:
        super().__init__(folder)
        self._with_sensor = with_sensor
        self._rng = random.Random(seed)
        self._settings = settings
        self.seconds: dict[str, list[float]] = {}
        self.java_seconds: dict[str, list[float]] = {}
        self.missing = self.duplicated = 0

    def run(self, keys: tuple[str, ...], number: int, java: JavaKcl | None = None) -> None:
        """Run one repetition of a scenario, with workers of the Java KCL if it is given."""
        make = FailoverFleet if java is None else partial(JavaFleet, java)
        fleet = make(
            f"{'' if java is None else 'java-'}{keys[0].removesuffix('_s')}-{number}",
            self._folder,
            self._processes,
            self._kinesis,
            self.clock,
            size=IDLE_BYTES if keys == ("scale_out_idle_s",) else NORMAL_BYTES,
            settings=self._settings,
        )
        fleet.publisher.start()
        try:
            if self._with_sensor:
                fleet.start_sensor()
            found = SCENARIOS[keys](fleet, self._rng)
            missing, duplicated = fleet.drain()
            self.missing += missing
            self.duplicated += duplicated
        except TimedOutError as error:
            print(error, file=sys.stderr, flush=True)
            found = dict.fromkeys(keys, fleet.limit_seconds)
        finally:
            fleet.stop()
        measured, side = (self.seconds, "") if java is None else (self.java_seconds, "java ")
        for key, seconds in found.items():
            measured.setdefault(key, []).append(seconds)
            print(f"{side}{key} {number}: {seconds:.2f}", file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """Return the last line of the output."""
        return {
            **{key: summary(values) for key, values in self.seconds.items()},
            "missing": self.missing,
            "duplicated": self.duplicated,
            "java": {key: summary(values) for key, values in self.java_seconds.items()},
        }


def _java_kcl() -> JavaKcl | None:
    try:
        return fetch(Path(".run/interop"), FAMILY)
    except NotAvailable as reason:
        print(f"the Java KCL is skipped: {reason}", file=sys.stderr)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a record is missing or duplicated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="KEY")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--java", type=int, default=0, metavar="N")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--sensor", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    known = {key for keys in SCENARIOS for key in keys}
    unknown = set(options.only or ()) - known
    if unknown:
        parser.error(f"--only {min(unknown)} is not a key. Write one of {sorted(known)}")
    settings: dict[str, dict[str, object]] = {}
    if options.fast:
        settings["lease"] = {"failover_time_millis": 3_000}
    with working_folder(options.folder, "failover-") as folder:
        benchmark = Benchmark(
            folder,
            options.seed,
            settings,
            with_sensor=options.sensor,
        )
        java = _java_kcl() if options.java else None
        try:
            benchmark.start()
            for keys in SCENARIOS:
                if options.sensor and keys[0].startswith("leader_"):
                    continue
                if options.only is None or set(keys) & set(options.only):
                    for number in range(options.repetitions):
                        benchmark.run(keys, number)
                    for number in range(options.java if java else 0):
                        benchmark.run(keys, number, java)
        finally:
            benchmark.stop()
    report = benchmark.report()
    if not options.json:
        for key, value in report.items():
            print(f"{key}: {value}")
    print(json.dumps(report))
    return int(bool(report["missing"] or report["duplicated"]))


if __name__ == "__main__":
    sys.exit(main())
