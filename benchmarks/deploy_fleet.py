"""Fleet of `benchmarks.deploy`: a module of a user, `dagster dev`, a publisher and the commits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
import psutil
import requests

from benchmarks.failover_fleet import SHARDS, Commit, Commits, Publisher, TimedOutError
from kcl_pipeline.clock import Clock
from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from kcl_pipeline.local.demo.processes import Processes, free_port, session_members

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

PER_SECOND: Final = 5
RECORD_BYTES: Final = 2_000
WORKERS: Final = 2
POLL_SECONDS: Final = 0.05
MOVES_SECONDS: Final = 0.25
START_LIMIT_SECONDS: Final = 240.0
STOP_LIMIT_SECONDS: Final = 45.0

HEAD: Final = '''\
"""A pipeline in a project of a user. The benchmark writes other values into `VERSION`."""

import os

import pyarrow as pa

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline

VERSION = "@VERSION@"
FAULT = "@FAULT@"

if FAULT == "import":
    raise RuntimeError(f"version {VERSION} cannot be imported")
'''
ARROW: Final = """


def ids(records: pa.Table) -> pa.Table:
    if FAULT == "raise":
        raise ValueError(f"version {VERSION} cannot parse this")
    if FAULT == "exit":
        os._exit(1)
    data = records["data"].to_pylist()
    columns = {
        "id": pa.array([one.partition(b" ")[0].decode() for one in data], pa.string()),
        "shard_id": records["shard_id"].cast(pa.string()),
        "worker": pa.array([VERSION] * len(data), pa.string()),
    }
    if FAULT == "columns":
        columns["added"] = columns["id"]
    return pa.table(columns)


chosen = {"transform_arrow": ids}
"""
SPARK: Final = """


def ids(records):
    from pyspark.sql import functions as f

    if FAULT == "raise":
        raise ValueError(f"version {VERSION} cannot parse this")
    text = f.split(records["data"].cast("string"), " ")[0]
    return records.select(
        text.alias("id"), "shard_id", f.lit(VERSION).alias("worker")
    )


chosen = {"transform": ids}
"""
TAIL: Final = """
pipeline = KinesisPipeline(
    name="@NAME@",
    streams=["@NAME@"],
    **chosen,
    sink=DeltaSink("@TABLE@"),
    workers=@FLEET@,
)
defs = pipeline.definitions()
"""

RELOAD: Final = """mutation Reload($location: String!) { reloadRepositoryLocation(
  repositoryLocationName: $location) { __typename ... on PythonError { message }
  ... on WorkspaceLocationEntry { locationOrLoadError { __typename
  ... on PythonError { message } } } } }"""
START_SENSOR: Final = """mutation Start($selector: SensorSelector!) { startSensor(sensorSelector:
  $selector) { __typename ... on PythonError { message } } }"""
TICKS: Final = """query Ticks($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector)
  { ... on Sensor { sensorState { ticks(limit: 2) { timestamp status skipReason cursor } } } } }"""


DEPLOYED: Final = f"Fleet(min={WORKERS}, max=4, code_version=VERSION)"


class OperatorClient(DagsterClient):
    """What a person does in the Dagster UI for a deploy."""

    def reload(self, location: str) -> str | None:
        """Reload the code location. Returns why it cannot be loaded; None if it can."""
        answer = self.ask(RELOAD, location=location)["reloadRepositoryLocation"]
        found = answer.get("locationOrLoadError") or answer
        return str(found["message"]).strip() if found["__typename"] == "PythonError" else None

    def start_sensor(self, location: str, repository: str, sensor: str) -> None:
        """Switch a sensor on."""
        answer = self.ask(START_SENSOR, selector=_sensor(location, repository, sensor))
        if answer["startSensor"]["__typename"] != "Sensor":
            raise RuntimeError(f"Dagster did not start the sensor {sensor}: {answer}")

    def sentence(self, location: str, repository: str, sensor: str) -> str:
        """Return what the newest finished tick of a sensor says."""
        answer = self.ask(TICKS, selector=_sensor(location, repository, sensor))
        for tick in answer["sensorOrError"].get("sensorState", {}).get("ticks", ()):
            if tick["status"] != "STARTED" and tick["cursor"]:
                return str(json.loads(tick["cursor"])["tick"])
        return ""


def _sensor(location: str, repository: str, sensor: str) -> dict[str, Any]:
    return {
        "repositoryLocationName": location,
        "repositoryName": repository,
        "sensorName": sensor,
    }


class Moves(threading.Thread):
    """Count the changes of owner of the leases, as the lease table shows them."""

    def __init__(self, table: str, endpoint_url: str, ended: threading.Event) -> None:
        super().__init__(name="moves", daemon=True)
        self.number = 0
        self._dynamodb = boto3.client(
            "dynamodb",
            endpoint_url=endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self._table = table
        self._owners: dict[str, str] = {}
        self._ended = ended
        self.start()

    def run(self) -> None:
        """Look until the fleet ends. An owner that holds a lease for less is not seen."""
        while not self._ended.wait(MOVES_SECONDS):
            with suppress(self._dynamodb.exceptions.ResourceNotFoundException):
                for row in self._dynamodb.scan(TableName=self._table)["Items"]:
                    owner = row.get("checkpointOwner", row.get("leaseOwner", {})).get("S")
                    key = row["leaseKey"]["S"]
                    if owner is not None:
                        self.number += self._owners.get(key, owner) != owner
                        self._owners[key] = owner


class DeployFleet:
    """One project with a stream and a table of its own, and its `dagster dev`.

    Args:
        name: Name of application, stream and module.
        folder: Directory of the project.
        processes: Its environment has the address of the embedded AWS.
        kinesis: Client of the embedded AWS.
        clock: The clock.
        transform: Source of the transform, `ARROW` or `SPARK`.
        fleet: Source of the argument `workers`.
        shards: Number of shards.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        processes: Processes,
        kinesis: KinesisClient,
        clock: Clock,
        *,
        transform: str = ARROW,
        fleet: str = DEPLOYED,
        shards: int = SHARDS,
    ) -> None:
        self.name = name
        self.clock = clock
        self._folder = folder / name
        self._processes = processes
        self._module = (HEAD + transform + TAIL).replace("@FLEET@", fleet)
        self._shards = shards
        (self._folder / "home").mkdir(parents=True)
        self.commits = Commits(self._folder / "table", clock)
        kinesis.create_stream(StreamName=name, ShardCount=shards)
        self.publisher = Publisher(kinesis, clock, name, RECORD_BYTES, PER_SECOND)
        self._dagster: subprocess.Popen[bytes] | None = None
        self._pids: dict[str, int] = {}
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="commits", daemon=True)
        self._reader.start()
        self.moves = Moves(name, kinesis.meta.endpoint_url, self._ended)
        self.said: list[str] = []
        """What the ticks of the sensor said, without repetitions."""

    def _read(self) -> None:
        """Read the commits as they appear, also while Dagster answers slowly."""
        while not self._ended.wait(POLL_SECONDS):
            self.commits.poll()

    def write(self, version: str, fault: str = "") -> None:
        """Write a version of the user's module."""
        text = self._module
        for name, value in {
            "NAME": self.name,
            "TABLE": str(self._folder / "table"),
            "VERSION": version,
            "FAULT": fault,
        }.items():
            text = text.replace(f"@{name}@", value)
        path = self._folder / f"{self.name}.py"
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)  # a code server never reads one half

    def start(self) -> None:
        """Start `dagster dev` with an empty `DAGSTER_HOME`, and switch the sensor on."""
        port = free_port(0)
        arguments = f"-m dagster dev -m {self.name} -h 127.0.0.1 -p {port} -d".split()
        self._dagster = self._processes.start(
            f"{self.name}-dagster",
            [*arguments, str(self._folder)],
            {
                "DAGSTER_HOME": str(self._folder / "home"),
                "DAGSTER_DISABLE_TELEMETRY": "1",
                "DAGSTER_NUX_ENABLED": "false",
            },
        )
        self.client = OperatorClient(f"http://127.0.0.1:{port}")
        self.wait("the code location", self._is_loaded, START_LIMIT_SECONDS)
        found = self.client.loaded()
        assert found is not None
        self.location, self.repository = found
        self.client.start_sensor(*self.sensor)

    @property
    def sensor(self) -> tuple[str, str, str]:
        """The leader sensor: code location, repository and name."""
        return self.location, self.repository, f"{self.name}_leader"

    def _is_loaded(self) -> bool:
        if self._dagster is not None and self._dagster.poll() is not None:
            raise RuntimeError(self._processes.log_text(f"{self.name}-dagster")[-2_000:])
        try:
            return self.client.loaded() is not None
        except requests.RequestException:
            return False

    def deploy(self, version: str, fault: str = "") -> str | None:
        """Write another version and reload the code location. Returns the error of the load."""
        self.write(version, fault)
        return self.client.reload(self.location)

    def poll(self) -> None:
        """Read what the sensor says."""
        with suppress(requests.RequestException):
            said = self.client.sentence(*self.sensor)
            _, _, state = said.partition(" ms; ")  # numbers of the cycle differ at each tick
            if state and state not in self.said[-1:]:
                self.said.append(state)

    def runs(self) -> list[Run]:
        """Return the active worker runs."""
        ended = {"SUCCESS", "FAILURE", "CANCELED"}
        runs = [run for run in self.client.runs(f"{self.name}_consume") if run.status not in ended]
        for run in runs:
            if run.run_id not in self._pids and (pid := self.client.pid_of(run.run_id)):
                self._pids[run.run_id] = pid
        return runs

    def run_counts(self) -> dict[str, int]:
        """Return the number of worker runs by status."""
        return dict(Counter(run.status for run in self.client.runs(f"{self.name}_consume")))

    def wait(self, what: str, condition: Callable[[], bool], limit_seconds: float) -> None:
        """Wait until a condition holds.

        Raises:
            TimedOutError: It did not hold within the time limit.
        """
        deadline = self.clock.monotonic() + limit_seconds
        while not condition():
            if self.clock.monotonic() > deadline:
                raise TimedOutError(f"{self.name}: {what} within {limit_seconds:g} s: {self.said}")
            self.clock.sleep(POLL_SECONDS)

    def wait_steady(self, began: float, version: str, limit_seconds: float) -> None:
        """Wait until every shard is committed by this version alone for some seconds."""

        def steady() -> bool:
            self.poll()
            recent = self.commits.since(max(began, self.clock.monotonic() - 5.0))
            return len({one.shard_id for one in recent}) == self._shards and {
                one.worker for one in recent
            } == {version}

        self.wait(f"commits of version {version} alone", steady, limit_seconds)

    def wait_workers(self, number: int, limit_seconds: float) -> None:
        """Wait until so many worker runs are active, and all have started."""

        def settled() -> bool:
            self.poll()
            return [run.status for run in self.runs()] == ["STARTED"] * number

        self.wait(f"{number} started workers", settled, limit_seconds)

    def drain(self, limit_seconds: float) -> tuple[int, int]:
        """Stop publishing, wait for the last record; return missing and duplicated ids."""
        self.publisher.stop()
        wanted = set(self.publisher.acknowledged)

        with suppress(TimedOutError):  # the counts show it
            self.wait("the last record", lambda: wanted <= self.commits.ids.keys(), limit_seconds)
        self._end_reader()
        return self.commits.losses(wanted)

    def _have_ended(self) -> bool:
        return not any(map(psutil.pid_exists, self._pids.values()))

    def _end_reader(self) -> None:
        self._ended.set()
        self._reader.join(30)

    def stop(self) -> None:
        """Stop publisher, workers and `dagster dev`, each by its process id."""
        self.publisher.stop()
        self._end_reader()
        with suppress(requests.RequestException, RuntimeError, KeyError, AttributeError):
            self.client.stop_sensor(*self.sensor)
        with suppress(requests.RequestException, RuntimeError, AttributeError):
            self.runs()
        for pid in self._pids.values():
            _signal(pid, signal.SIGTERM)
        with suppress(TimedOutError):
            self.wait("the ends of the workers", self._have_ended, STOP_LIMIT_SECONDS)
        if self._dagster is None:
            return
        if self._dagster.poll() is None:
            self._dagster.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._dagster.wait(STOP_LIMIT_SECONDS)
        for process in session_members(self._dagster.pid):
            _signal(process.pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def rows_by_version(
    commits: list[Commit], began: float, seconds: float
) -> list[tuple[int, dict[str, int]]]:
    """Count rows by version in intervals of some seconds that begin at `began`."""
    found: dict[int, Counter[str]] = {}
    for one in commits:
        begin = int((one.at - began) // seconds * seconds)
        found.setdefault(begin, Counter())[one.worker] += one.rows
    return [(begin, dict(sorted(counts.items()))) for begin, counts in sorted(found.items())]
