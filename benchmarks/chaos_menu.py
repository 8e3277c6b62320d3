"""Faults from which `benchmarks.chaos` chooses."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import requests
from botocore.exceptions import ClientError

from benchmarks.chaos_fleet import DagsterHost, Workers
from benchmarks.chaos_watch import Watch
from kcl_pipeline.local.demo.dagster_client import Run
from kcl_pipeline.local.demo.publisher import ORDERS
from kcl_pipeline.orchestration.names import worker_id_of

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

FEWEST_SHARDS: Final = 3
MOST_SHARDS: Final = 10
BEHIND: Final = 3
"""With more missing kills than this, a worker that is still starting can be hit too."""
LEASE_SECONDS: Final = 3.0
TROUBLES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("tables_throttled", {"service": "dynamodb", "kind": "throttle", "probability": 0.5}),
    ("tables_failing", {"service": "dynamodb", "kind": "error500", "probability": 0.3}),
    (
        "writes_unanswered",
        {
            "service": "dynamodb",
            "operation": "UpdateItem",
            "kind": "drop_after",
            "probability": 0.3,
        },
    ),
    (
        "reads_unanswered",
        {"service": "dynamodb", "operation": "Scan", "kind": "drop_before", "probability": 0.5},
    ),
    (
        "shards_throttled",
        {"service": "kinesis", "operation": "GetRecords", "kind": "throttle", "probability": 0.7},
    ),
    (
        "stream_failing",
        {"service": "kinesis", "operation": "GetRecords", "kind": "error500", "probability": 0.5},
    ),
)


@dataclass
class Menu:
    """Generator of faults, called step by step.

    `by_kind` counts signals that ended or paused a process. `others` counts all other faults.
    """

    rng: random.Random
    workers: Workers
    dagster: DagsterHost
    kinesis: KinesisClient
    watch: Watch
    aws_url: str
    say: Callable[[str], None]
    spark: bool = False
    by_kind: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        now = self.watch.clock.monotonic()
        self._trouble_ends: float | None = None
        self._trouble_begins = now + self.rng.uniform(5, 15)
        self._reshard_at = now + self.rng.uniform(5, 15)
        self._daemon_at = now + self.rng.uniform(40, 70)

    @property
    def kills(self) -> int:
        """Number of signals so far."""
        return self.by_kind.total()

    def step(self, *, kills_due: int) -> None:
        """Inject the faults that are due.

        Args:
            kills_due: How many process faults are due since the start.
        """
        now = self.watch.clock.monotonic()
        if self._trouble_ends is not None and now >= self._trouble_ends:
            self._post([])
            self._trouble_ends, self._trouble_begins = None, now + self.rng.uniform(6, 15)
        elif self._trouble_ends is None and now >= self._trouble_begins:
            name, rule = self.rng.choice(TROUBLES)
            self._post([rule])
            self._trouble_ends = now + self.rng.uniform(2, 6)
            self.others[name] += 1
            self.say(f"{name} for {self._trouble_ends - now:.1f} s")
        if now >= self._reshard_at:
            self._reshard_at = now + self.rng.uniform(10, 25)
            self._reshard()
        if now >= self._daemon_at and self.dagster.loaded() and self.dagster.kill_daemon():
            self._daemon_at = now + self.rng.uniform(60, 100)
            self.by_kind["kill_dagster_daemon"] += 1
            self.say("kill -9 of Dagster's daemon")
        elif kills_due > self.kills:
            self._kill(behind=kills_due - self.kills > BEHIND)

    def end(self) -> None:
        """Remove the fault rules of the embedded AWS."""
        self._post([])

    def _post(self, rules: list[dict[str, Any]]) -> None:
        requests.post(f"{self.aws_url}/_local/faults", json=rules, timeout=30).raise_for_status()

    def _standing(self) -> set[str | None]:
        """Return the workers that held leases at the last read and are not affected by a fault."""
        up: set[str | None] = {worker.name for worker in self.workers.up()}
        up |= {worker_id_of("chaos", run.run_id) for run in self._runs()}
        return up & {lease.actual_owner for lease in self.watch.leases.values() if not lease.ended}

    def _runs(self) -> list[Run]:
        return [run for run in self.dagster.live_runs() if run.status == "STARTED"]

    def _kill(self, *, behind: bool) -> None:
        """Inject one process fault.

        Faults hit workers with leases only while another worker with leases is running. The commit
        gap therefore measures takeovers, not an empty fleet.
        """
        kinds = {
            "kill_worker": 4,
            "pause_worker": 4,
            "stop_worker": 3,
            "kill_run": 2,
            "terminate_run": 1,
        }
        if self.spark:
            # A JVM starts slowly. A paused worker keeps its JVM, so pauses are more frequent here.
            kinds |= {"kill_jvm": 4, "pause_worker": 8}
        kind = self.rng.choices(list(kinds), weights=list(kinds.values()))[0]
        standing = self._standing()
        if not standing:
            return
        targets = standing if len(standing) > 1 else set()
        if behind and not targets:
            targets = {worker.name for worker in self.workers.up() if worker.name not in standing}
        done = (
            self._on_run(kind, targets) if kind.endswith("_run") else self._on_worker(kind, targets)
        )
        if done:
            self.by_kind[kind] += 1

    def _on_worker(self, kind: str, targets: set[str | None]) -> bool:
        up = [worker for worker in self.workers.up() if worker.name in targets]
        if not up:
            return False
        worker = self.rng.choice(up)
        if kind == "kill_jvm":
            done = self.workers.kill_jvm(worker)
            if done:
                self.say(f"kill -9 of the JVM of {worker.name}")
                self.watch.hit(kind, worker.name, over=False)
            return done
        if kind == "pause_worker":
            seconds = LEASE_SECONDS * self.rng.uniform(1.2, 4.0)
            self.say(f"pause {worker.name} for {seconds:.1f} s")
            self.workers.pause(worker, seconds)
        else:
            self.say(f"{'kill -9 of' if kind == 'kill_worker' else 'SIGTERM to'} {worker.name}")
            self.workers.end(worker, signal.SIGKILL if kind == "kill_worker" else signal.SIGTERM)
        self.watch.hit(kind, worker.name, over=kind != "stop_worker")
        return True

    def _on_run(self, kind: str, targets: set[str | None]) -> bool:
        runs = [run for run in self._runs() if worker_id_of("chaos", run.run_id) in targets]
        if not runs:
            return False
        run = self.rng.choice(runs)
        worker_id = worker_id_of("chaos", run.run_id)
        done = self.dagster.kill_run(run) if kind == "kill_run" else self.dagster.terminate_run(run)
        if done:
            self.say(
                f"{'kill -9 of' if kind == 'kill_run' else 'Terminate in Dagster:'} run "
                f"{run.run_id[:8]}"
            )
            # A run id is used once, so every other owner of the lease shows a takeover.
            self.watch.hit(kind, worker_id, over=kind == "kill_run")
        return done

    def _reshard(self) -> None:
        shards = self.kinesis.list_shards(StreamName=ORDERS, ShardFilter={"Type": "AT_LATEST"})[
            "Shards"
        ]
        shards.sort(key=lambda s: int(s["HashKeyRange"]["StartingHashKey"]))
        kinds = (
            ["update_shard_count"]
            + ["split"] * (len(shards) < MOST_SHARDS)
            + ["merge"] * (len(shards) > FEWEST_SHARDS)
        )
        kind = self.rng.choice(kinds)
        try:
            self._reshard_by(kind, shards)
        except ClientError as error:
            self.say(f"{kind} was refused: {error}")
            self.others[f"{kind}_refused"] += 1
            return
        self.others[kind] += 1

    def _reshard_by(self, kind: str, shards: list[Any]) -> None:
        if kind == "split":
            shard = self.rng.choice(shards)
            low, high = (
                int(shard["HashKeyRange"][end]) for end in ("StartingHashKey", "EndingHashKey")
            )
            self.say(f"split {shard['ShardId']}")
            self.kinesis.split_shard(
                StreamName=ORDERS,
                ShardToSplit=shard["ShardId"],
                NewStartingHashKey=str((low + high) // 2),
            )
        elif kind == "merge":
            first = self.rng.randrange(len(shards) - 1)
            left, right = shards[first]["ShardId"], shards[first + 1]["ShardId"]
            self.say(f"merge {left} and {right}")
            self.kinesis.merge_shards(
                StreamName=ORDERS, ShardToMerge=left, AdjacentShardToMerge=right
            )
        else:
            # Kinesis accepts from half to twice the current shard count.
            least, most = (
                max(FEWEST_SHARDS, (len(shards) + 1) // 2),
                min(MOST_SHARDS, 2 * len(shards)),
            )
            target = self.rng.choice([n for n in range(least, most + 1) if n != len(shards)])
            self.say(f"update_shard_count from {len(shards)} to {target}")
            self.kinesis.update_shard_count(
                StreamName=ORDERS, TargetShardCount=target, ScalingType="UNIFORM_SCALING"
            )
