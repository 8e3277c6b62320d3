"""Real workers under real kills: what was published is exactly what the table holds."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.fleet_processes import CLOCK, Fleet, Publisher, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with EmbeddedAws() as aws:
        fleet = Fleet(aws, tmp_path)
        try:
            yield fleet
        finally:
            fleet.close()


def held_by_all(fleet: Fleet, names: list[str]) -> bool:
    owners = fleet.owners()
    return set(names) <= owners.keys() and "nobody" not in owners


def test_kill_pause_and_stop_in_mid_batch_with_a_reshard(fleet: Fleet):
    fleet.kinesis.create_stream(StreamName="events", ShardCount=6)
    names = ["a-1", "a-2", "a-3"]
    for name in names:
        fleet.start(name)
    publisher = Publisher(fleet, per_second=300)
    publisher.start()
    wait_until(lambda: held_by_all(fleet, names), 90, "three workers to share all leases")
    wait_until(lambda: fleet.rows.count() > 200, 60, "the first rows")

    fleet.end(names[0], signal.SIGKILL)
    wait_until(
        lambda: names[0] not in fleet.owners(), 60, "the killed worker's leases to go to others"
    )

    fleet.send(names[1], signal.SIGSTOP)
    fleet.kinesis.split_shard(
        StreamName="events",
        ShardToSplit="shardId-000000000002",
        NewStartingHashKey=str(2**128 // 6 * 2 + 2**124),
    )
    wait_until(
        lambda: names[1] not in fleet.owners(),
        60,
        "the paused worker's leases to go to the last one",
    )
    before = fleet.rows.count()
    wait_until(lambda: fleet.rows.count() > before + 500, 60, "the last worker to go on")
    fleet.send(names[1], signal.SIGCONT)
    fleet.start(names[0])
    wait_until(lambda: held_by_all(fleet, names), 90, "all three to share the leases again")

    assert fleet.workers[names[1]].poll() is None, "the paused worker is to go on after it woke up"

    # A graceful stop leaves no gap and no trace
    leaving = fleet.owners()[names[2]]

    began = CLOCK.monotonic()
    assert fleet.end(names[2]) == 0
    rows = fleet.leases()
    assert all(rows[key].get("leaseOwner") != names[2] for key in leaving if key in rows)
    assert names[2] not in {
        item["wid"]["S"]
        for item in fleet.dynamodb.scan(TableName="fleet-WorkerMetricStats")["Items"]
    }
    wait_until(lambda: held_by_all(fleet, names[:2]), 30, "the others to take over")
    assert CLOCK.monotonic() - began < 30

    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"
    for name in names[:2]:
        assert fleet.end(name) == 0
    assert all("leaseOwner" not in row for row in fleet.leases().values())
    assert (
        fleet.dynamodb.scan(TableName="fleet-CoordinatorState").get("Count") == 1
    )  # the client-version row; the lock is gone
