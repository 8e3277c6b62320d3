"""Deleted tables: all three DynamoDB tables are deleted under load, again and again.

Three worker processes with positions in the table consume 8 shards of the embedded AWS, 5 records
per second each. Each round deletes the three tables, then kills a worker or splits or merges
shards, and waits until the whole fleet commits again. At the end the output is counted.

    python -m benchmarks.deleted_tables [--rounds 10] [--position LATEST] [--seed 1] [--json]

Records are sent after the leases exist, so that all of them are promised at LATEST, too.

The last line of the output is JSON: `rounds`, `sent`, `missing`, `duplicated`, and `recovered_s`
with `{"p50", "p99", "n"}`, the seconds from a deletion until every open shard was committed again.
The exit code is 1 if a record is missing or duplicated, or a round does not recover in 240 s.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3

from benchmarks.embedded import ProcessBenchmark, working_folder
from benchmarks.failover import NORMAL_BYTES, summary
from benchmarks.failover_fleet import FailoverFleet, TimedOutError
from kcl_pipeline.config import ConsumerSettings

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

WORKERS: Final = 3
REST_SECONDS: Final = (1.0, 8.0)
"""Time between two rounds, and between a deletion and the fault that follows it (half of it)."""


class DeletedTables(ProcessBenchmark):
    """Runs the rounds on one embedded AWS."""

    def __init__(self, folder: Path, seed: int, position: str) -> None:
        super().__init__(folder)
        self._rng = random.Random(seed)
        self._position = position
        self._started = 0
        self.sent = self.missing = self.duplicated = 0
        self.seconds: list[float] = []

    def run(self, rounds: int) -> None:
        """Run all rounds and count the output."""
        fleet = FailoverFleet(
            f"deleted-{self._position.lower().replace('_', '-')}",
            self._folder,
            self._processes,
            self._kinesis,
            self.clock,
            size=NORMAL_BYTES,
            settings={
                "shard_sync": {"initial_position_in_stream": self._position},
            },
        )
        try:
            for _ in range(WORKERS):
                self._start(fleet)
            fleet.wait("leases", lambda: bool(fleet.owners()))
            fleet.publisher.start()
            fleet.wait_settled()
            for number in range(rounds):
                fleet.rest(self._rng.uniform(*REST_SECONDS))
                self._round(fleet, number)
            self.missing, self.duplicated = fleet.drain()
            self.sent = len(fleet.publisher.acknowledged)
        finally:
            fleet.stop()

    def _start(self, fleet: FailoverFleet) -> None:
        self._started += 1
        fleet.start(f"worker-{self._started}")

    def _round(self, fleet: FailoverFleet, number: int) -> None:
        began = self.clock.monotonic()
        self._delete(fleet)
        fleet.rest(self._rng.uniform(*REST_SECONDS) / 2)
        fault = self._rng.choice([self._kill, self._split, self._merge])
        fault(fleet)
        ranges = [(_keys(shard), shard["ShardId"]) for shard in self._open(fleet)]
        # Only shards that get records are committed.
        wanted = {
            shard_id
            for (first, last), shard_id in ranges
            if any(first <= key <= last for key in fleet.publisher.hash_keys)
        }
        since = self.clock.monotonic()
        fleet.wait("commits of all shards", lambda: wanted <= _committed(fleet, since))
        self.seconds.append(self.clock.monotonic() - began)
        print(
            f"round {number}: {fault.__name__.strip('_')}, {self.seconds[-1]:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    def _delete(self, fleet: FailoverFleet) -> None:
        dynamodb: DynamoDBClient = boto3.client(
            "dynamodb",
            endpoint_url=self._processes.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="k",
            aws_secret_access_key="s",
        )
        settings = ConsumerSettings(application_name=fleet.name, streams=(fleet.name,))
        for name in (
            settings.lease_table_name,
            settings.worker_metrics_table_name,
            settings.coordinator_state_table_name,
        ):
            with suppress(dynamodb.exceptions.ResourceNotFoundException):
                dynamodb.delete_table(TableName=name)

    def _kill(self, fleet: FailoverFleet) -> None:
        fleet.end(self._rng.choice(sorted(fleet.workers)), signal.SIGKILL)
        self._start(fleet)

    def _split(self, fleet: FailoverFleet) -> None:
        shard = self._rng.choice(self._open(fleet))
        first, last = _keys(shard)
        self._kinesis.split_shard(
            StreamName=fleet.name,
            ShardToSplit=shard["ShardId"],
            NewStartingHashKey=str((first + last) // 2),
        )

    def _merge(self, fleet: FailoverFleet) -> None:
        shards = sorted(self._open(fleet), key=_keys)
        at = self._rng.randrange(len(shards) - 1)
        self._kinesis.merge_shards(
            StreamName=fleet.name,
            ShardToMerge=shards[at]["ShardId"],
            AdjacentShardToMerge=shards[at + 1]["ShardId"],
        )

    def _open(self, fleet: FailoverFleet) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._kinesis.list_shards(
            StreamName=fleet.name, ShardFilter={"Type": "AT_LATEST"}
        )["Shards"]
        return found


def _keys(shard: dict[str, Any]) -> tuple[int, int]:
    keys = shard["HashKeyRange"]
    return int(keys["StartingHashKey"]), int(keys["EndingHashKey"])


def _committed(fleet: FailoverFleet, since: float) -> set[str]:
    return {commit.shard_id for commit in fleet.commits.since(since)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--position", choices=("TRIM_HORIZON", "LATEST"), default="TRIM_HORIZON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with working_folder(options.folder, "deleted-tables-") as folder:
        benchmark = DeletedTables(folder, options.seed, options.position)
        try:
            benchmark.start()
            benchmark.run(options.rounds)
        except TimedOutError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            benchmark.stop()
    report = {
        "rounds": len(benchmark.seconds),
        "sent": benchmark.sent,
        "missing": benchmark.missing,
        "duplicated": benchmark.duplicated,
        "recovered_s": summary(benchmark.seconds) if benchmark.seconds else None,
    }
    if not options.json:
        for key, value in report.items():
            print(f"{key}: {value}")
    print(json.dumps(report))
    is_complete = len(benchmark.seconds) == options.rounds and benchmark.sent > 0
    return int(not is_complete or bool(benchmark.missing or benchmark.duplicated))


if __name__ == "__main__":
    sys.exit(main())
