"""Worker processes with default settings: throttled tables, shard counts up and down, many streams.

`make test` has a short form of the second one. Whole fleets do the other two there in virtual time:
`verification/test_simulation_streams.py` throttles, `worker/test_many_streams.py` has 200 streams.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from tests.support.fleet_processes import CLOCK, Fleet, Publisher, wait_until

pytestmark = [pytest.mark.processes]

NAMES = ("w-1", "w-2", "w-3")
LONG = pytest.mark.long
READS = ("Scan", "Query", "GetItem", "BatchGetItem", "TransactGetItems", "DescribeTable")


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as made:
        yield made


@pytest.fixture
def fleet(aws: EmbeddedAws, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(aws, tmp_path, defaults=True)
    try:
        yield fleet
    finally:
        fleet.close()


def unfinished(fleet: Fleet) -> int:
    return sum(row["checkpoint"] != "SHARD_END" for row in fleet.leases().values())


class Killer(threading.Thread):
    """Kills a worker now and then, and starts it again."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        super().__init__(daemon=True)
        self.fleet = fleet
        self.seconds = seconds
        self.rng = random.Random(5)
        self.kills = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(self.rng.uniform(0.8, 1.4) * self.seconds):
            name = self.rng.choice(NAMES)
            self.fleet.end(name, signal.SIGKILL)
            self.kills += 1
            self.stop.wait(self.rng.uniform(0.0, 4.0))
            self.fleet.start(name)

    def finish(self) -> int:
        self.stop.set()
        self.join(30)
        return self.kills


@pytest.mark.parametrize(
    ("seconds", "between_kills"),
    [
        pytest.param(12, 6, marks=[LONG, pytest.mark.timeout(360)]),
        pytest.param(300, 45, marks=[LONG, pytest.mark.timeout(600)]),
    ],
)
def test_half_of_all_reads_of_dynamodb_are_throttled(
    aws: EmbeddedAws, fleet: Fleet, seconds: float, between_kills: float
) -> None:
    fleet.kinesis.create_stream(StreamName="events", ShardCount=6)
    rules = [
        FaultRule(service="dynamodb", operation=read, kind="throttle", probability=0.5)
        for read in READS
    ]
    aws.fault_rules.replace(rules)
    for name in NAMES:
        fleet.start(name)
    publisher, killer = Publisher(fleet, 300), Killer(fleet, between_kills)
    publisher.start()
    wait_until(lambda: fleet.rows.count() > 0, 120, "the first rows")
    killer.start()
    until = CLOCK.monotonic() + seconds
    while CLOCK.monotonic() < until:
        before = fleet.rows.count()
        wait_until(lambda before=before: fleet.rows.count() > before, 30, "the fleet to go on")
        CLOCK.sleep(1)
    assert killer.finish()
    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    assert all(worker.poll() is None for worker in fleet.workers.values()), fleet.logs()
    assert sum(rule.applied for rule in aws.fault_rules.rules) > seconds


@pytest.mark.parametrize(
    ("top", "hold_seconds"),
    [
        pytest.param(4, 2, marks=[LONG, pytest.mark.timeout(600)]),
        pytest.param(64, 6, marks=[LONG, pytest.mark.timeout(900)]),
    ],
)
def test_shard_counts_go_up_and_down_while_workers_are_killed(
    fleet: Fleet, top: int, hold_seconds: float
) -> None:
    fleet.kinesis.create_stream(StreamName="events", ShardCount=1)
    for name in NAMES:
        fleet.start(name)
    publisher, killer = Publisher(fleet, 300), Killer(fleet, min(8.0, 2 * hold_seconds))
    publisher.start()
    wait_until(lambda: fleet.rows.count() > 0, 120, "the first rows")
    killer.start()
    up = [2**power for power in range(1, top.bit_length())]
    for count in [*up, *up[-2::-1], 1]:
        fleet.kinesis.update_shard_count(
            StreamName="events", TargetShardCount=count, ScalingType="UNIFORM_SCALING"
        )
        CLOCK.sleep(hold_seconds)
    assert killer.finish()
    comparison = publisher.finish(300)
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    wait_until(lambda: unfinished(fleet) == 1, 60, "the ends of all shards but the last one")


@pytest.mark.timeout(420)
@pytest.mark.long
@pytest.mark.parametrize(("count", "shards"), [(8, 2), (20, 4)])
def test_many_streams(aws: EmbeddedAws, tmp_path: Path, count: int, shards: int) -> None:
    streams = [f"s{number:02}" for number in range(count)]
    fleet = Fleet(aws, tmp_path, defaults=True, streams=",".join(streams))
    try:
        for stream in streams:
            fleet.kinesis.create_stream(StreamName=stream, ShardCount=shards)
        for name in NAMES[:2]:
            fleet.start(name)
        publisher = Publisher(fleet, 600, streams)
        publisher.start()
        wait_until(lambda: len(publisher.ids) > 200 * count, 60, "two rounds over the streams")
        comparison = publisher.finish()
        assert comparison.exact, f"{comparison}\n{fleet.logs()}"
        assert {key.split(":")[1] for key in fleet.leases()} == set(streams)
        wait_until(lambda: set(fleet.owners()) == set(NAMES[:2]), 60, "both workers to own leases")
        assert sum(map(len, fleet.owners().values())) == shards * count
    finally:
        fleet.close()
