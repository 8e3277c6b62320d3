"""One application with workers of both kinds, and what a case may do with it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from benchmarks.failover_fleet import Commits
from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.local.demo.processes import Processes

from .java import JavaKcl
from .journal import Count, JavaLog, count, lost_leases
from .stand_in import StandIn
from .traffic import Traffic

MODULE = "tests.interop.pipeline:interop"
PROCESSOR_MODULE = "tests.interop.processor:interop"
POLL_SECONDS = 0.2
LIMIT_SECONDS = 120.0
SIDES = ("ours", "java")
OUR_SHORT_TIMES: dict[str, dict[str, object]] = {"lease": {"failover_time_millis": 4_000}}


class CaseFailedError(Exception):
    """Something that must be true is not; the message is a sentence of the report."""


@dataclass(frozen=True, slots=True)
class Application:
    """How one application is set up.

    Attributes:
        name: Name of the KCL application; streams begin with it.
        java: The Java KCL.
        first: The side whose worker starts first.
        shards: Shards of each stream.
        streams: Number of streams.
        settings: Our settings, other than short times.
        java_settings: Java's settings, other than short times.
        defaults: Whether both sides have their default times.
        leaderless: Whether nobody assigns leases: workers take them, as in the Java KCL 2.x.
        fan_out: Whether both sides read with the same consumer of enhanced fan-out.
        processor: Whether our workers run a record processor, which prints the lines of Java's.
    """

    name: str
    java: JavaKcl
    first: str
    shards: int = 4
    streams: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    java_settings: Mapping[str, str] = field(default_factory=dict)
    defaults: bool = False
    leaderless: bool = False
    fan_out: bool = False
    processor: bool = False


class InteropFleet:
    """The workers of one application.

    Args:
        application: How it is set up.
        processes: Starts processes; its environment has the address of the embedded AWS.
        clock: The clock.
    """

    def __init__(self, application: Application, processes: Processes, clock: Clock) -> None:
        self.application = application
        self.clock = clock
        self._processes = processes
        self._folder = processes.folder
        self.url = processes.environment["AWS_ENDPOINT_URL"]
        self.kinesis = self._client("kinesis")
        self.dynamodb = self._client("dynamodb")
        self.streams = [f"{application.name}-{one}" for one in range(application.streams)]
        for stream in self.streams:
            self.kinesis.create_stream(StreamName=stream, ShardCount=application.shards)
        self.stand_in = StandIn(self.dynamodb, f"{application.name}-WorkerMetricStats", clock)
        self.traffic = Traffic(self.kinesis, self.streams, clock, random.Random(application.name))
        self.commits = Commits(self._folder / "table", clock)
        self.logs: dict[str, JavaLog] = {}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: set[str] = set()
        self._numbers = dict.fromkeys(SIDES, 0)
        self.tables = self.open()

    def _client(self, service: str) -> Any:
        keys = {"aws_access_key_id": "embedded", "aws_secret_access_key": "embedded"}
        return boto3.client(service, endpoint_url=self.url, region_name="us-east-1", **keys)

    def open(self) -> Any:
        """Open the tables as a new process does."""
        session = SessionOptions(
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="embedded",
            aws_secret_access_key="embedded",
        )
        consumer = ConsumerSettings(
            application_name=self.application.name, streams=tuple(self.streams)
        )
        return open_tables(consumer, AwsClients(consumer, session), self.clock)

    def start(self, side: str, **extra: str) -> str:
        """Start a worker and return its id. `extra` are settings of this worker alone."""
        self._numbers[side] += 1
        name = f"{side}-{self._numbers[side]}"
        if side == "ours":
            self._start_ours(name, extra)
        else:
            self._start_java(name, extra)
        return name

    def _start_ours(self, name: str, extra: Mapping[str, str]) -> None:
        times = {} if self.application.defaults else OUR_SHORT_TIMES
        settings: dict[str, Any] = {**times, **self.application.settings}
        if self.application.fan_out:
            settings["retrieval"] = {"retrieval_mode": "fan_out", "consumer_name": "shared"}
        if "layout" in extra:
            settings["table_layout"] = extra["layout"]
        module = PROCESSOR_MODULE if self.application.processor else MODULE
        if "batch_records" in extra:
            settings["batch"] = {"max_batch_records": int(extra["batch_records"])}
        self.workers[name] = self._processes.start(
            name,
            ["-m", "kcl_pipeline.cli", "worker", "-p", module, "--worker-id", name],
            {
                "INTEROP_NAME": self.application.name,
                "INTEROP_STREAMS": ",".join(self.streams),
                "INTEROP_TABLE": str(self._folder / "table"),
                "INTEROP_WORKER": name,
                "INTEROP_SETTINGS": json.dumps(settings),
                "INTEROP_PAUSE": extra.get("pause", "0"),
                "INTEROP_CHECKPOINT": extra.get("checkpoint", "each"),
            },
        )
        if self.application.processor:
            self.logs[name] = JavaLog(self._folder / f"{name}.log")

    def _start_java(self, name: str, extra: Mapping[str, str]) -> None:
        application = self.application
        java = application.java
        arguments = {
            "application": application.name,
            "streams": ",".join(self.stream_ids()),
            "endpoint": self.url,
            "worker": name,
            **({} if application.defaults else java.short_times()),
            **({"consumer": "shared"} if application.fan_out else {}),
            **application.java_settings,
            **extra,
        }
        self.workers[name] = self._processes.start_program(name, java.command(arguments))
        self.logs[name] = JavaLog(self._folder / f"{name}.log")

    def stream_ids(self) -> list[str]:
        """Return the streams as Java names them: several with account and creation time."""
        if len(self.streams) == 1:
            return self.streams
        found = []
        for stream in self.streams:
            summary = self.kinesis.describe_stream_summary(StreamName=stream)
            described = summary["StreamDescriptionSummary"]
            account = described["StreamARN"].split(":")[4]
            created = int(described["StreamCreationTimestamp"].timestamp())
            found.append(f"{account}:{stream}:{created}")
        return found

    def side(self, worker: str | None) -> str | None:
        """Return the side of a worker."""
        return worker.partition("-")[0] if worker else None

    def of(self, side: str) -> list[str]:
        """Return the living workers of a side."""
        return [one for one, it in self.workers.items() if it.poll() is None and one[:4] == side]

    def stop(self, worker: str) -> None:
        """Stop a worker with SIGTERM and wait for its end."""
        process = self.workers.pop(worker)
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise CaseFailedError(f"{worker} did not stop within 60 s") from None

    def kill(self, worker: str) -> None:
        """End a worker with SIGKILL."""
        process = self.workers.pop(worker)
        self.killed.add(worker)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def leader(self) -> str | None:
        """Return the living worker that has the leader lock."""
        with suppress(KclError):
            lock = self.tables.coordinator.read_lock()
            if lock is not None and not lock.is_released and lock.owner_name in self.workers:
                return str(lock.owner_name)
        return None

    def leases(self) -> dict[str, Lease]:
        """Return the unfinished leases; none before there is a table."""
        try:
            listed = self.tables.lease.list_leases()
        except KclError:
            return {}
        if listed.bad_rows:
            raise CaseFailedError(f"a row cannot be read here: {listed.bad_rows[0]}")
        return {one.lease_key: one for one in listed.leases if not one.ended}

    def held_by(self, side: str) -> list[str]:
        """Return the leases whose owner is a living worker of a side, without handoffs."""
        living = self.of(side)
        return sorted(
            key
            for key, one in self.leases().items()
            if one.owner in living and one.checkpoint_owner is None
        )

    def hand_off(self, lease_key: str, worker: str) -> None:
        """Ask for a handoff, with the write that every leader makes."""

        def asked() -> bool:
            lease = self.leases()[lease_key]
            return self.tables.lease.initiate_handoff(lease, worker) is not None

        self.wait(f"the request to hand {lease_key} off", asked, 10)

    def poll(self) -> None:
        """Read what all workers have written since the last time."""
        self.commits.poll()
        for log in self.logs.values():
            log.poll(self.clock.monotonic())

    def wait(
        self, what: str, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS
    ) -> float:
        """Wait until a condition holds, and return how long it took, in seconds.

        Raises:
            CaseFailedError: It did not hold in time, or a worker ended by itself.
        """
        began = self.clock.monotonic()
        while True:
            self.poll()
            if condition():
                return self.clock.monotonic() - began
            for name, worker in self.workers.items():
                if worker.poll() is not None:
                    raise CaseFailedError(f"{name} ended with exit code {worker.returncode}")
            if self.clock.monotonic() - began > seconds:
                raise CaseFailedError(f"waited {seconds:.0f} s in vain for {what}")
            self.clock.sleep(POLL_SECONDS)

    def counted(self) -> Count:
        """Compare what was sent with what was processed."""
        self.poll()
        sent = self.traffic.sent.copy()
        return count(sent, self.commits.ids, self.logs.values())

    def lost(self) -> Counter[str]:
        """Return how often our workers have lost each lease without a handoff."""
        return sum(
            (lost_leases(one.read_text()) for one in self._folder.glob("ours-*.log")), Counter()
        )

    def shard_of(self, record: str) -> str | None:
        """Return the lease from which a Java worker has read a record."""
        found = (
            one.lease
            for log in self.logs.values()
            for one in log.seen("record")
            if one.words[2] == record
        )
        return next(found, None)

    def is_delivered(self, ids: Sequence[str]) -> bool:
        """Return whether each id was processed by a worker."""
        logs = [log.delivered() for log in self.logs.values()]
        return all(
            one in self.commits.ids or any(one in delivered for delivered in logs) for one in ids
        )

    @property
    def folder(self) -> Path:
        """Directory of the table and the logs."""
        return self._folder
