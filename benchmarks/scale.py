"""Cycle time, capacity units and memory of applications of up to 100,000 leases.

    python -m benchmarks.scale --json

The tables are in memory and count capacity units as DynamoDB does; requests take no time. Streams
have 100 shards and receive no records. All settings are the defaults. Times are processor times, so
that other load does not count. Memory is that of Python objects (`tracemalloc`), without the
process itself and without the responses of DynamoDB.

- `cycle_s`: the longest of `first_cycle_s` (creates and assigns all leases), `idle_cycle_s`
  (nothing to do) and `failover_cycle_s` (moves the leases of one percent of the workers).
- `rcu_per_s`, `wcu_per_s`: of the whole application while nothing happens; `per_minute` has them by
  operation, for the leader, the other standbys, and the renewals and reports of all workers.
- `leader_mb`: peak of a new leader during two cycles.
- `worker_mb`: a worker with `worker_leases` leases, after it has read each shard.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.capacity import Meter
from benchmarks.scale_fleet import LEADER, Fleet
from kcl_pipeline.leader.assign import WATCHERS
from kcl_pipeline.worker.worker import Worker

CASES: Final = ((1_000, 10), (10_000, 500), (100_000, 5_000))
FAST_CASES: Final = ((500, 10),)
WORKER_LEASES: Final = 2_000
_FAST_WORKER_LEASES: Final = 200
_FAILOVER_STEPS: Final = 30
_SAMPLE_SECONDS: Final = 30.0
_WATCHER_SECONDS: Final = 120.0
_LED_SECONDS: Final = 120.0
_SETTLING_CYCLES: Final = 40
_MB: Final = 1e6


def measure(leases: int, workers: int) -> dict[str, Any]:
    """Return the result of one case."""
    fleet = Fleet(leases, workers)
    leader = fleet.worker(LEADER, leads=True)
    leader.start_up()
    first, _ = _cycle(fleet, leader)
    _require(fleet, leases)
    led = leading(fleet, leader)
    failover = _failover(fleet, leader, workers)
    total = {"leader": led.meter, "standbys": standbys(fleet, workers, 15.0 * led.longest_seconds)}
    total["workers"] = Meter()
    total["workers"].add(_lease_loop(max(leases // workers, 1)), workers)
    return {
        "leases": leases,
        "workers": workers,
        "cycle_s": round(max(first, led.longest_seconds, failover), 3),
        "rcu_per_s": round(sum(one.total_rcu for one in total.values()), 1),
        "wcu_per_s": round(sum(one.total_wcu for one in total.values()), 1),
        "leader_mb": round(_leader_mb(leases, workers), 1),
        "first_cycle_s": round(first, 3),
        "idle_cycle_s": round(led.longest_seconds, 3),
        "failover_cycle_s": round(failover, 3),
        "idle_period_s": round(led.period_seconds, 2),
        "per_minute": {name: one.by_operation(60.0) for name, one in total.items()},
    }


@dataclass(frozen=True, slots=True)
class Led:
    """Idle cycles: their requests per second, the time between two, and the longest one."""

    meter: Meter
    period_seconds: float
    longest_seconds: float


def leading(fleet: Fleet, leader: Worker) -> Led:
    """Run cycles until nothing is left to do, then for `_LED_SECONDS`, and measure these.

    The workers renew as often as real ones.
    """
    longest = max(_cycle(fleet, leader)[0] for _ in range(_SETTLING_CYCLES))
    renewal_seconds = fleet.settings.lease.renewal_interval_millis / 1000
    total, cycles, renewed_at = Meter(), 0, -renewal_seconds
    began = now = fleet.clock.monotonic()
    while now - began < _LED_SECONDS:
        if now - renewed_at >= renewal_seconds:
            fleet.renew_others(besides=(LEADER,))
            renewed_at = now
        leader.lease_tick()
        meter, started = fleet.meter(), time.process_time()
        pause = leader.lead_tick()
        longest, cycles = max(longest, time.process_time() - started), cycles + 1
        total.add(meter)
        fleet.require_no_failure()
        fleet.clock.advance(pause)
        now = fleet.clock.monotonic()
    result = Meter()
    result.add(total, 1 / (now - began))
    return Led(result, (now - began) / cycles, longest)


def _cycle(fleet: Fleet, leader: Worker) -> tuple[float, float]:
    """Run one cycle of a worker that leads. Returns its seconds and the pause after it."""
    fleet.clock.advance(1.0)
    fleet.renew_others(besides=(LEADER,))
    leader.lease_tick()
    fleet.meter()
    began = time.process_time()
    pause = leader.lead_tick()
    seconds = time.process_time() - began
    fleet.require_no_failure()
    return seconds, pause


def _require(fleet: Fleet, leases: int) -> None:
    rows = fleet.lease_store.rows().values()
    owned = sum(1 for item in rows if "leaseOwner" in item)
    if owned != leases:
        raise RuntimeError(f"{owned} of {leases} leases have an owner after the first cycle")


def _failover(fleet: Fleet, leader: Worker, workers: int) -> float:
    """Stop one percent of the workers. Returns the seconds of the longest cycle until the end."""
    fleet.stopped = frozenset(fleet.names[-max(workers // 100, 1) :])
    longest = 0.0
    for _ in range(_FAILOVER_STEPS):
        seconds, _ = _cycle(fleet, leader)
        longest = max(longest, seconds)
        if not fleet.owned_by_stopped():
            return longest
    raise RuntimeError(f"the leases of {len(fleet.stopped)} stopped workers were not moved")


def standbys(fleet: Fleet, workers: int, seconds: float) -> Meter:
    """Return the requests per second of all workers that do not lead.

    Afterwards the former leader has lost its lock.
    """
    total = Meter()
    watchers = min(WATCHERS, workers - 1)
    total.add(_standby(fleet, fleet.names[1], max(_WATCHER_SECONDS, seconds)), watchers)
    if workers > 1 + WATCHERS:
        total.add(_standby(fleet, fleet.names[-1], 0.0), workers - 1 - WATCHERS)
    return total


def _standby(fleet: Fleet, name: str, seconds: float) -> Meter:
    """Return the requests per second of one standby, from one scan to another."""
    standby = fleet.worker(name, leads=True)
    standby.lead_tick()
    meter, began, scans, elapsed = fleet.meter(), fleet.clock.monotonic(), 0.0, 0.0
    renewal_seconds, renewed_at = fleet.settings.lease.renewal_interval_millis / 1000, 0.0
    while elapsed < seconds or meter.requests["Scan"] == scans or not scans:
        scans = meter.requests["Scan"]
        fleet.renew_lock()
        if elapsed - renewed_at >= renewal_seconds:
            fleet.renew_others()
            renewed_at = elapsed
        fleet.clock.advance(standby.lead_tick())
        elapsed = fleet.clock.monotonic() - began
    result = Meter()
    result.add(meter, 1 / elapsed)
    fleet.require_no_failure()
    return result


def _lease_loop(leases: int) -> Meter:
    """Return the requests per second of one worker: renewals, discovery and reports."""
    fleet = Fleet(leases, 1, begun=True)
    worker = fleet.worker(LEADER)
    worker.start_up()
    for _ in range(3):
        worker.process_tick()
        worker.lease_tick()
    meter, end = fleet.meter(), fleet.clock.monotonic() + _SAMPLE_SECONDS
    while fleet.clock.monotonic() < end:
        fleet.clock.advance(max(worker.lease_tick(), 0.01))
    result = Meter()
    result.add(meter, 1 / _SAMPLE_SECONDS)
    return result


def _leader_mb(leases: int, workers: int) -> float:
    fleet = Fleet(leases, workers, begun=True)

    def lead() -> object:
        leader = fleet.leader(LEADER)
        reports = [fleet.cycle(leader) for _ in range(2)]
        return leader, reports[-1]

    return _peak_mb(lead)


def worker_mb(leases: int) -> float:
    """Return the memory of one worker with this number of leases."""
    fleet = Fleet(leases, 1, begun=True)

    def work() -> object:
        worker = fleet.worker(LEADER)
        worker.start_up()
        for _ in range(3):
            worker.process_tick()
            worker.lease_tick()
        for _ in range(2 * leases):
            worker.fetch_tick()
        if len(worker.leases.held()) != leases:
            raise RuntimeError(f"the worker holds {len(worker.leases.held())} of {leases} leases")
        return worker

    return _peak_mb(work)


def _peak_mb(run: Callable[[], object]) -> float:
    gc.collect()
    tracemalloc.start(1)
    try:
        kept = run()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return peak / _MB


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. The last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only one JSON line")
    parser.add_argument("--fast", action="store_true", help="500 leases only")
    parser.add_argument("--worker-leases", type=int, default=None)
    options = parser.parse_args(arguments)
    count = options.worker_leases or (_FAST_WORKER_LEASES if options.fast else WORKER_LEASES)
    of_worker = round(worker_mb(count), 1)
    cases = []
    for leases, workers in FAST_CASES if options.fast else CASES:
        case = {**measure(leases, workers), "worker_mb": of_worker, "worker_leases": count}
        cases.append(case)
        print(f"{leases} leases, {workers} workers: {case['cycle_s']} s", file=sys.stderr)
    if not options.json:
        for case in cases:
            print(", ".join(f"{key} {value}" for key, value in case.items() if key != "per_minute"))
    print(json.dumps({"cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
