"""An application whose permissions an embedded AWS enforces."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from _pytest.mark import ParameterSet

from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import AwsTrouble, CycleFailed
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import Fault
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON

ROOT = Path(__file__).parents[2]


POLICIES = dict(
    re.findall(r"```json (\w+)\n(.*?)```", (ROOT / "docs" / "iam.md").read_text(), re.DOTALL)
)


SECRETS = ("AKIDEXAMPLEACCESSKEY", "verySecretKeyThatNobodyMaySee", "sessionTokenThatNobodyMaySee")


WORKERS, STATE = "-WorkerMetricStats", "-CoordinatorState"
NAMES = itertools.count(1)
DRAIN_SECONDS = 60.0
"""A drain that does not end is stopped after this time."""


Permission = tuple[str, str]
"""An action, and what is behind the name of the application in the resource: nothing (the lease
table), `-WorkerMetricStats`, `-CoordinatorState` or the index; `stream`."""


def permissions(role: str) -> set[Permission]:
    policy = json.loads(POLICIES[role])
    found: set[Permission] = set()
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        assert isinstance(statement["Resource"], str), "one table each"
        kind, _, name = statement["Resource"].rpartition(":")[2].partition("/")
        place = name.removeprefix("APPLICATION") if kind == "table" else "stream"
        found |= {(action, place) for action in statement["Action"]}
    return found


def denied(role: str) -> list[ParameterSet]:
    """The permissions of a role, each to be denied: every fifth by `make test`, all by
    `make test-long`.
    """
    return [
        pytest.param(one, marks=[pytest.mark.long] if number % 5 else [])
        for number, one in enumerate(sorted(permissions(role)))
    ]


def asked(service: str, operation: str, body: bytes) -> set[Permission]:
    """What IAM asks for such a call."""
    if service == "kinesis":
        return {(f"kinesis:{operation}", "stream")}
    request = json.loads(body)
    writes = [
        (f"{kind}Item", write["TableName"])
        for item in request.get("TransactItems", ())
        for kind, write in item.items()
    ]
    index = f"/index/{request['IndexName']}" if "IndexName" in request else ""
    calls = writes or [(operation, request["TableName"] + index)]
    return {(f"dynamodb:{action}", re.sub(r"^iam-[0-9]+", "", table)) for action, table in calls}


CALLS = re.compile(r"(lease|commit|leave)-\d+")
"""Names of the threads that make a worker's calls."""


class Gate:
    """Denies what is not allowed; notes what was asked."""

    def __init__(self) -> None:
        self.allowed: set[Permission] | None = None
        self.used: set[Permission] = set()

    def __call__(self, service: str, operation: str, body: bytes) -> Fault | None:
        wanted = asked(service, operation, body)
        self.used |= wanted
        lacking = sorted(wanted - self.allowed) if self.allowed is not None else []
        if not lacking:
            return None
        action, place = lacking[0]
        return Fault("deny", message=f"not authorized to perform: {action} on resource: {place}")


@pytest.fixture(autouse=True)
def _open_again(gate: Gate) -> Iterator[None]:
    gate.allowed = None
    yield
    gate.allowed = None


class Application:
    """A stream with records and a pipeline on it, with credentials of its own."""

    def __init__(self, aws: EmbeddedAws, folder: Path, **more: object) -> None:
        self.name = f"iam-{next(NAMES):03}"
        self.events: list[object] = []
        settings = {
            "lease": {"failover_time_millis": 2_000, "lease_discovery_interval_millis": 100},
            "assignment": {"lease_assignment_interval_millis": 200},
            "leader": {
                "leader_lease_duration_millis": 1_000,
                "leader_heartbeat_period_millis": 200,
            },
            "worker": {"worker_metrics_reporter_freq_in_millis": 200},
            "batch": {"min_batch_interval_millis": 50},
            "shard_sync": {"completed_lease_cleanup_interval_millis": 0},
            **more,
        }
        self.table = folder / self.name
        self.pipeline = KinesisPipeline(
            self.name, [self.name], DeltaSink(str(self.table)), settings_overrides=settings
        )
        self.clients = AwsClients(
            self.pipeline.settings, SessionOptions("us-east-1", None, aws.endpoint_url, *SECRETS)
        )
        self.kinesis = boto3.client(
            "kinesis",
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.kinesis.create_stream(StreamName=self.name, ShardCount=2)
        self.publish(20)

    def drain(self, *until_said: str) -> int:
        stop = SystemClock().signal()

        def note(event: object) -> None:
            self.events.append(event)
            if until_said and all(part in self.said() for part in until_said):
                stop.set()

        before = set(threading.enumerate())
        worker = self.pipeline.build_worker("w1", clients=self.clients, events=note)
        summary = worker.run(
            stop, mode="drain", on_progress=lambda _: stop.set(), progress_seconds=DRAIN_SECONDS
        )
        # A worker does not wait for its calls in flight, which another policy would refuse
        for thread in set(threading.enumerate()) - before:
            if CALLS.fullmatch(thread.name):
                thread.join(DRAIN_SECONDS)
        return summary.total.records

    def work_until(self, done: Callable[[], bool]) -> None:
        """Run a worker until something has happened, or `DRAIN_SECONDS` have passed."""
        clock = SystemClock()
        stop, deadline = clock.signal(), clock.monotonic() + DRAIN_SECONDS

        def look(_: object) -> None:
            if done() or clock.monotonic() > deadline:
                stop.set()

        worker = self.pipeline.build_worker("w1", clients=self.clients, events=self.events.append)
        worker.run(stop, mode="continuous", on_progress=look, progress_seconds=0.2)
        assert done(), "it did not happen"

    def publish(self, count: int) -> None:
        records = [{"Data": b"x", "PartitionKey": str(n)} for n in range(count)]
        self.kinesis.put_records(StreamName=self.name, Records=records)

    def split(self) -> None:
        """Split a shard in the middle, and publish to its children."""
        shard = self.kinesis.list_shards(StreamName=self.name)["Shards"][0]
        keys = shard["HashKeyRange"]
        middle = (int(keys["StartingHashKey"]) + int(keys["EndingHashKey"])) // 2
        self.kinesis.split_shard(
            StreamName=self.name, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle)
        )
        self.publish(20)

    def lead(self) -> CycleReport:
        leader = self.pipeline.build_leader(
            "sensor", clients=self.clients, events=self.events.append
        )
        try:
            leader.run_once()
            leader.wait_for_sync(20)
            return leader.run_once()  # with the results of `sync`
        finally:
            leader.release()

    def rare(self) -> dict[Permission, Callable[[], object]]:
        """What a leader does now and then, as the same call of the same object."""
        self.pipeline.ensure_tables(clients=self.clients)
        tables = open_tables(self.pipeline.settings, self.clients, SystemClock())
        lease = Lease("shardId-rare", TRIM_HORIZON)
        gone = WorkerMetrics("nobody", 1)
        return {
            ("dynamodb:GetItem", ""): lambda: tables.lease.get(lease.lease_key),
            ("dynamodb:UpdateItem", ""): lambda: tables.lease.assign(lease, "w1"),
            ("dynamodb:DeleteItem", ""): lambda: tables.lease.delete(lease),
            ("dynamodb:GetItem", WORKERS): lambda: tables.workers.request_drain("nobody"),
            ("dynamodb:UpdateItem", WORKERS): lambda: tables.workers.request_drain("nobody"),
            ("dynamodb:DeleteItem", WORKERS): lambda: tables.workers.delete(gone),
            ("dynamodb:UpdateItem", STATE): lambda: tables.coordinator.heartbeat_lock(
                LeaderLock("nobody", 1_000, "v1"), "v2"
            ),
        }

    def create_lease_table_without_index(self) -> None:
        """As Java creates it, which adds the index afterwards."""
        self.clients.dynamodb.create_table(
            TableName=self.name,
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )

    def said(self) -> str:
        kinds = (AwsTrouble, CycleFailed)
        return "\n".join(str(event) for event in self.events if isinstance(event, kinds))


@pytest.fixture(scope="module", name="gate")
def gate_fixture() -> Gate:
    return Gate()


@pytest.fixture(scope="module", name="aws")
def aws_fixture(gate: Gate) -> Iterator[EmbeddedAws]:
    with EmbeddedAws(faults=gate) as aws:
        aws.warm_up()
        yield aws


@pytest.fixture(name="application")
def application_fixture(aws: EmbeddedAws, tmp_path: Path) -> Iterator[Application]:
    application = Application(aws, tmp_path)
    yield application
    application.clients.close()
    application.kinesis.close()
