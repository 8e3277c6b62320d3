"""Capacity units of DynamoDB per lease and second.

    python -m benchmarks.dynamodb_cost --json
    python -m benchmarks.dynamodb_cost --json --protocol positions

Applications of 10 to 10,000 leases with up to 100 leases per worker, all settings at their
defaults, idle and with batches. The tables are in memory and count capacity units as DynamoDB does
(`benchmarks.capacity`). At one batch per second, each batch of a worker has records of all its
leases. At ten, a shard is read five times per second, which is the limit of Kinesis. So each batch
has records of half of the leases.

- `rcu_per_lease_s`, `wcu_per_lease_s`: all processes together.
- `operations`: the same by operation, in `requests`, `rcu` and `wcu`.
- `batches_per_s`: counted commits of a worker.
- `java`: values of the Java KCL that were recorded earlier, and not measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.capacity import Meter
from benchmarks.scale import leading, standbys
from benchmarks.scale_fleet import LEADER, BusyKinesis, Fleet
from kcl_pipeline.events import BatchCommitted
from kcl_pipeline.testing.clock import VirtualClock

CASES: Final = ((10, 2), (100, 4), (1_000, 10), (10_000, 100))
FAST_CASES: Final = ((10, 2),)
READS_PER_SECOND: Final = 5
RATES: Final = (0, 1, 10)
_SECONDS: Final = {0: 30.0, 1: 20.0, 10: 20.0}
_SETTINGS: Final[dict[int, dict[str, Any]]] = {
    0: {},
    1: {},
    10: {
        "retrieval": {"idle_time_between_reads_in_millis": 200},
        "batch": {"min_batch_interval_millis": 0},
    },
}

JAVA: Final = {
    "measured": False,
    "wcu_per_idle_lease_s": 0.302,
    "rcu_per_idle_lease_s": 0.0057,
    "of": "10,000 leases, 500 workers",
    "source": "derived from the source code of the Java KCL 3.5.1 at its defaults: a renewal of "
    "each lease every 3.308 s, a scan of all leases every 20 s, and a query of the index by each "
    "worker. A checkpoint costs 1 WCU more for each batch.",
}


def measure(leases: int, workers: int) -> list[dict[str, Any]]:
    """Return one result for each rate of `RATES`."""
    fleet = Fleet(leases, workers, clock=VirtualClock())
    leader = fleet.worker(LEADER, leads=True)
    leader.start_up()
    shared = leading(fleet, leader).meter
    shared.add(standbys(fleet, workers, 0.0))
    cases = []
    for rate in RATES:
        own, batches = _worker(leases // workers, rate)
        total = Meter()
        total.add(shared, 1 / leases)
        total.add(own, workers / leases)
        cases.append(
            {
                "leases": leases,
                "workers": workers,
                "target_batches_per_s": rate,
                "batches_per_s": round(batches, 2),
                "rcu_per_lease_s": round(total.total_rcu, 4),
                "wcu_per_lease_s": round(total.total_wcu, 4),
                "operations": total.by_operation(digits=5),
            }
        )
    return cases


def _worker(leases: int, rate: int) -> tuple[Meter, float]:
    """Return the requests and the batches of one worker per second."""
    kinesis = BusyKinesis(leases) if rate else None
    chosen = _SETTINGS[rate]
    fleet = Fleet(leases, 1, begun=True, kinesis=kinesis, clock=VirtualClock(), **chosen)
    worker = fleet.worker(LEADER)
    worker.start_up()
    reads = math.ceil(leases * min(READS_PER_SECOND / max(rate, 1), 1))
    step, meter, began, lease_due = 1.0 / max(rate, 1), Meter(), 0.0, 0.0
    warm = fleet.clock.monotonic() + 5.0
    end = warm + _SECONDS[rate]
    while (now := fleet.clock.monotonic()) < end:
        if now >= warm and not began:
            meter, began = fleet.meter(), now
            fleet.events.clear()
        if now >= lease_due:
            lease_due = now + worker.lease_tick()
        for _ in range(reads):
            worker.fetch_tick()
        worker.process_tick()
        fleet.clock.advance(step * (1 + 1e-6))  # two steps reach the next read
    seconds = fleet.clock.monotonic() - began
    batches = sum(isinstance(event, BatchCommitted) for event in fleet.events)
    result = Meter()
    result.add(meter, 1 / seconds)
    return result, batches / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results. The last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamodb_cost", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only one JSON line")
    parser.add_argument("--fast", action="store_true", help="10 leases only")
    options = parser.parse_args(arguments)
    cases = []
    for leases, workers in FAST_CASES if options.fast else CASES:
        cases += measure(leases, workers)
        print(f"{leases} leases done", file=sys.stderr)
    if not options.json:
        for case in cases:
            print(", ".join(f"{key} {value}" for key, value in case.items() if key != "operations"))
        print(f"Java KCL (recorded, not measured): {JAVA}")
    print(json.dumps({"cases": cases, "java": JAVA}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
