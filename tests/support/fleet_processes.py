"""Real workers as processes on the embedded AWS, and a publisher whose ledger is compared with the
Delta table.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import boto3

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.demo.table import CommittedRows, Comparison, compare

CLOCK = SystemClock()
ROOT = Path(__file__).parents[2]
PIPELINES = Path(__file__).parents[1] / "pipelines"


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait, and ask less often the longer it takes: most conditions ask a server."""
    deadline = CLOCK.monotonic() + seconds
    pause = 0.05
    while not condition():
        assert CLOCK.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        CLOCK.sleep(pause)
        pause = min(1.2 * pause, 0.3)


class Fleet:
    """Workers by name; every process started here is killed by its own pid at the end."""

    def __init__(
        self, aws: EmbeddedAws, folder: Path, *, defaults: bool = False, streams: str = "events"
    ) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            **aws.environment(),
            "FLEET_LAKE": str(folder),
            "FLEET_DEFAULTS": str(int(defaults)),
            "FLEET_STREAMS": streams,
            "PYTHONPATH": os.pathsep.join([str(PIPELINES), str(ROOT)]),
        }
        self.kinesis = boto3.client(
            "kinesis",
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.dynamodb = boto3.client(
            "dynamodb",
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.table = str(folder / "events")
        self.rows = CommittedRows(self.table)

    def start(self, name: str, pipeline: str = "fleet:events") -> None:
        self.workers[name] = self.spawn(name, "-p", pipeline, "--worker-id", name)

    def spawn(self, log: str, *options: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a worker with these options, in the command `inside`; the caller ends it."""
        command = [*inside, sys.executable, "-m", "kcl_pipeline.cli", "worker", *options]
        with (self.folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def send(self, name: str, number: int) -> None:
        self.workers[name].send_signal(number)

    def end(self, name: str, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        worker = self.workers.pop(name)
        worker.send_signal(number)
        return worker.wait(seconds)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait(10)

    def leases(self) -> dict[str, dict[str, object]]:
        items = self.dynamodb.scan(TableName="fleet", ConsistentRead=True)["Items"]
        return {
            item["leaseKey"]["S"]: {k: next(iter(v.values())) for k, v in item.items()}
            for item in items
        }

    def owners(self) -> dict[str, set[str]]:
        try:
            rows = self.leases()
        except self.dynamodb.exceptions.ResourceNotFoundException:
            return {}
        owners: dict[str, set[str]] = {}
        for key, row in rows.items():
            if row["checkpoint"] != "SHARD_END":
                owners.setdefault(
                    str(row.get("checkpointOwner") or row.get("leaseOwner") or "nobody"), set()
                ).add(key)
        return owners

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


class Publisher(threading.Thread):
    """Publishes numbered events until stopped; `ids` are those that Kinesis acknowledged, in order
    per key.
    """

    def __init__(
        self, fleet: Fleet, per_second: int = 600, streams: Sequence[str] = ("events",)
    ) -> None:
        super().__init__(daemon=True)
        self.streams = streams
        self.fleet = fleet
        self.per_second = per_second
        self.ids: list[str] = []
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stop.wait(100 / self.per_second):
                self.put(100)
        except BaseException as error:  # noqa: BLE001 (shown by finish)
            self.error = error

    def put(self, count: int) -> None:
        first = len(self.ids)
        ids = [f"e{number:07d}" for number in range(first, first + count)]
        records: list[Any] = [
            {"Data": json.dumps({"id": one}).encode(), "PartitionKey": f"k{hash(one) % 211}"}
            for one in ids
        ]
        stream = self.streams[first // 100 % len(self.streams)]
        answer = self.fleet.kinesis.put_records(StreamName=stream, Records=records)
        assert answer["FailedRecordCount"] == 0
        self.ids.extend(ids)

    def finish(self, seconds: float = 150) -> Comparison:
        """Stop, wait for the table to have everything, and compare."""
        self.stop.set()
        self.join(30)
        if self.error is not None:
            raise self.error
        wait_until(
            lambda: self.fleet.rows.count() >= len(self.ids),
            seconds,
            f"{len(self.ids)} rows in the table",
        )
        return compare(self.fleet.table, self.ids)
