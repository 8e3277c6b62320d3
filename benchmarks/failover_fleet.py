"""Fleet of `benchmarks.failover`: worker processes, a publisher, and the commits in the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq

from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.local.demo.processes import Processes
from kcl_pipeline.shards import MAX_HASH_KEY

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

MODULE: Final = "benchmarks.failover_pipeline:failover"
SHARDS: Final = 8
PER_SECOND: Final = 5
POLL_SECONDS: Final = 0.05
LIMIT_SECONDS: Final = 240.0


class TimedOutError(Exception):
    """A condition did not hold within the time limit."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The rows of one shard in one commit of a worker, at a monotonic second."""

    at: float
    shard_id: str
    worker: str
    rows: int = 1


class Commits:
    """The commits of a Delta table, read from its log as they appear."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._version = 0
        self.all: list[Commit] = []
        self.ids: Counter[str] = Counter()

    def poll(self) -> None:
        """Read the entries that are new."""
        while (entry := self._folder / "_delta_log" / f"{self._version:020}.json").exists():
            now = self._clock.monotonic()
            for line in entry.read_text().splitlines():
                action = json.loads(line)
                if "add" in action:
                    self._read(self._folder / action["add"]["path"], now)
            self._version += 1

    def _read(self, path: Path, now: float) -> None:
        table = pq.read_table(path, columns=["id", "shard_id", "worker"])
        self.ids.update(table["id"].to_pylist())
        rows = zip(table["shard_id"].to_pylist(), table["worker"].to_pylist(), strict=True)
        self.all += [Commit(now, *key, count) for key, count in sorted(Counter(rows).items())]

    def since(self, began: float) -> list[Commit]:
        """Return the commits from a time on."""
        return [commit for commit in self.all if commit.at >= began]

    def gaps(self, began: float, ended: float) -> dict[str, float]:
        """Return per shard the longest time within an interval without a commit."""
        times: dict[str, list[float]] = {commit.shard_id: [began] for commit in self.all}
        for commit in self.all:
            if began <= commit.at <= ended:
                times[commit.shard_id].append(commit.at)
        return {
            shard: max(after - before for before, after in pairwise([*found, ended]))
            for shard, found in times.items()
        }

    def losses(self, wanted: set[str]) -> tuple[int, int]:
        """Return how many ids are missing, and how many rows are repeated."""
        return len(wanted - self.ids.keys()), sum(count - 1 for count in self.ids.values())

    def longest_gap(self, began: float, ended: float) -> float:
        """Return the longest time within an interval in which any shard was not committed."""
        return max(self.gaps(began, ended).values(), default=0.0)


class Publisher:
    """Puts `per_second` records of `size` bytes per second into each shard, from a thread."""

    def __init__(
        self, kinesis: KinesisClient, clock: Clock, stream: str, size: int, per_second: int
    ) -> None:
        self._kinesis = kinesis
        self._clock = clock
        self._stream = stream
        self._size = size
        self._per_second = per_second
        self._stop = threading.Event()
        self._is_paused = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.acknowledged: list[str] = []
        self.hash_keys = [(2 * part + 1) * MAX_HASH_KEY // (2 * SHARDS) for part in range(SHARDS)]

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def pause(self, is_paused: bool) -> None:
        """Put nothing while paused."""
        self._is_paused = is_paused

    def stop(self) -> None:
        """Stop and wait for the thread."""
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        number, due = 0, self._clock.monotonic()
        while not self._stop.wait(max(due - self._clock.monotonic(), 0.0)):
            due += 1 / self._per_second
            if self._is_paused:
                continue
            ids = [f"{self._stream}-{number}-{part}" for part in range(SHARDS)]
            number += 1
            sent = self._kinesis.put_records(
                StreamName=self._stream,
                Records=[
                    {
                        "Data": f"{one} ".ljust(self._size, "x").encode(),
                        "PartitionKey": one,
                        "ExplicitHashKey": str(self.hash_keys[part]),
                    }
                    for part, one in enumerate(ids)
                ],
            )
            self.acknowledged += [
                one
                for one, result in zip(ids, sent["Records"], strict=True)
                if "SequenceNumber" in result
            ]


class FailoverFleet:
    """One application with its own stream, table and workers.

    Args:
        name: Name of application and stream.
        folder: Directory of table and logs.
        processes: Its environment has the address of the embedded AWS.
        kinesis: Client of the embedded AWS.
        clock: The clock.
        size: Bytes of a record.
        settings: Settings other than the defaults.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        processes: Processes,
        kinesis: KinesisClient,
        clock: Clock,
        *,
        size: int,
        settings: dict[str, dict[str, object]],
    ) -> None:
        self.name = name
        self.clock = clock
        self.kinesis = kinesis
        self._processes = processes
        self._table = folder / name
        self._settings = settings
        self.commits = Commits(self._table, clock)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.sensor: subprocess.Popen[bytes] | None = None
        kinesis.create_stream(StreamName=name, ShardCount=SHARDS)
        self.publisher = Publisher(kinesis, clock, name, size, PER_SECOND)
        self.limit_seconds = LIMIT_SECONDS
        self.open_tables()

    def open_tables(self) -> None:
        """Open the tables as a new process does."""
        session = SessionOptions(
            endpoint_url=self._processes.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="embedded",
            aws_secret_access_key="embedded",
        )
        consumer = ConsumerSettings(application_name=self.name, streams=(self.name,))
        self._tables = open_tables(consumer, AwsClients(consumer, session), self.clock)

    def start(self, *names: str, environment: Mapping[str, str] | None = None) -> None:
        """Start workers.

        Args:
            names: Their worker ids.
            environment: More variables of their environment.
        """
        for name in names:
            arguments = ["kcl_pipeline.cli", "worker", "-p", MODULE, "--worker-id", name]
            self.workers[name] = self._start(name, arguments, environment)

    def start_sensor(self) -> None:
        """Start the leader sensor, and wait until it leads."""
        self.sensor = self._start("sensor", ["benchmarks.failover_sensor"])
        self.wait("the sensor leads", lambda: self.leader() is not None)

    def _start(
        self, name: str, arguments: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {
            "FAILOVER_NAME": self.name,
            "FAILOVER_TABLE": str(self._table),
            "FAILOVER_WORKER": name,
            "FAILOVER_SETTINGS": json.dumps(self._settings),
            **(extra or {}),
        }
        return self._processes.start(f"{self.name}-{name}", ["-m", *arguments], environment)

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal that ends a worker."""
        self.workers.pop(name).send_signal(number)

    def stop(self) -> None:
        """Stop publisher and workers, and wait for the workers' ends."""
        self.publisher.stop()
        if self.sensor is not None:
            self.sensor.kill()
            self.sensor.wait()
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers.values():
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                os.kill(worker.pid, signal.SIGKILL)
        self.workers.clear()
        self.kinesis.delete_stream(StreamName=self.name)  # the account has a limit of shards

    def leader(self) -> str | None:
        """Return the owner of the leader lock."""
        try:
            lock = self._tables.coordinator.read_lock()
        except KclError:
            return None
        return None if lock is None or lock.is_released else lock.owner_name

    def owners(self) -> dict[str, str | None]:
        """Return the owner of each unfinished lease; none before there is a table."""
        try:
            leases = self._tables.lease.list_leases().leases
        except KclError:
            return {}
        return {lease.lease_key: lease.actual_owner for lease in leases if not lease.ended}

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Raises:
            TimedOutError: It did not hold within the time limit.
        """
        deadline = self.clock.monotonic() + self.limit_seconds
        while True:
            self.commits.poll()
            if condition():
                return
            if self.clock.monotonic() > deadline:
                raise TimedOutError(f"{self.name}: {what}: {self.owners()}")
            self.clock.sleep(POLL_SECONDS)

    def rest(self, seconds: float) -> None:
        """Let time pass while commits are read."""
        deadline = self.clock.monotonic() + seconds
        while self.clock.monotonic() < deadline:
            self.commits.poll()
            self.clock.sleep(POLL_SECONDS)

    def wait_settled(self) -> None:
        """Wait until each worker has its share of the leases and commits all of its shards.

        Leases may still move meanwhile. The commits count from the last move on.
        """
        share = [(SHARDS + i) // len(self.workers) for i in reversed(range(len(self.workers)))]
        owners, since = self.owners(), self.clock.monotonic()

        def is_settled() -> bool:
            nonlocal owners, since
            now = self.owners()
            if now != owners:
                owners, since = now, self.clock.monotonic()
            counts = Counter(owners.values())
            if sorted((counts[name] for name in self.workers), reverse=True) != share:
                return False
            return owners.items() <= {(c.shard_id, c.worker) for c in self.commits.since(since)}

        self.wait("commits of each worker's share", is_settled)

    def wait_taken_over(self, began: float, shards: Iterable[str], former: str) -> None:
        """Wait until others than `former` have committed all of these shards since `began`."""
        wanted = set(shards)
        self.wait(
            "commits of other workers",
            lambda: wanted <= {c.shard_id for c in self.commits.since(began) if c.worker != former},
        )

    def drain(self) -> tuple[int, int]:
        """Stop publishing, wait for the last record; return missing and duplicated ids."""
        self.publisher.stop()
        wanted = set(self.publisher.acknowledged)
        with suppress(TimedOutError):  # the counts show it
            self.wait("the last record", lambda: wanted <= self.commits.ids.keys())
        return self.commits.losses(wanted)
