"""The policies of docs/iam.md: enough for each role, nothing unused, and what is missing is named;
and nothing of a credential ever comes out.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import AccessDeniedError
from kcl_pipeline.events import AwsTrouble, CycleFailed
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import LeaderLock, WorkerMetrics
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import Fault
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON
from tests.support.cli_fleet import run

ROOT = Path(__file__).parents[2]
POLICIES = dict(
    re.findall(r"```json (\w+)\n(.*?)```", (ROOT / "docs" / "iam.md").read_text(), re.DOTALL)
)
SECRETS = ("AKIDEXAMPLEACCESSKEY", "verySecretKeyThatNobodyMaySee", "sessionTokenThatNobodyMaySee")
WORKERS, STATE = "-WorkerMetricStats", "-CoordinatorState"
NAMES = itertools.count(1)


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


@pytest.fixture(scope="module", name="gate")
def gate_fixture() -> Gate:
    return Gate()


@pytest.fixture(scope="module", name="aws")
def aws_fixture(gate: Gate) -> Iterator[EmbeddedAws]:
    with EmbeddedAws(faults=gate) as aws:
        aws.warm_up()
        yield aws


@pytest.fixture(autouse=True)
def _open_again(gate: Gate) -> Iterator[None]:
    gate.allowed = None
    yield
    gate.allowed = None


class Application:
    """A stream with records and a pipeline on it, with credentials of its own."""

    def __init__(self, aws: EmbeddedAws, folder: Path) -> None:
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

        worker = self.pipeline.build_worker("w1", clients=self.clients, events=note)
        summary = worker.run(
            stop, mode="drain", on_progress=lambda _: stop.set(), progress_seconds=8.0
        )
        return summary.total.records

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
            return leader.run_once()
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

    def said(self) -> str:
        kinds = (AwsTrouble, CycleFailed)
        return "\n".join(str(event) for event in self.events if isinstance(event, kinds))


@pytest.fixture(name="application")
def application_fixture(aws: EmbeddedAws, tmp_path: Path) -> Iterator[Application]:
    application = Application(aws, tmp_path)
    yield application
    application.clients.close()
    application.kinesis.close()


def read(
    application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws, *, code: int = 0
) -> str:
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    said = [
        run(command, "-a", application.name, code=code).output
        for command in ("leases", "workers", "leader")
    ]
    return "\n".join(
        [*said, run("plan", "-a", application.name, "-s", application.name, code=code).output]
    )


def test_a_worker_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    gate.used.clear()
    gate.allowed = permissions("worker")
    assert application.drain() == 20
    gate.allowed = None
    used = set(gate.used)
    application.split()
    gate.used.clear()
    gate.allowed = permissions("worker")
    assert application.drain() == 20
    for _ in range(10):  # the lease of the shard that has ended goes with a cycle of the leader
        if ("dynamodb:DeleteItem", "") in gate.used:
            break
        application.drain()
    application.rare()["dynamodb:UpdateItem", WORKERS]()
    assert "AccessDenied" not in application.said()
    assert used | gate.used == gate.allowed


def test_a_leader_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    rare = application.rare()
    gate.used.clear()
    gate.allowed = permissions("leader")
    report = application.lead()
    assert report.led
    assert report.error is None
    assert len(report.leases) == 2
    for call in rare.values():
        call()
    assert gate.used == gate.allowed


def test_a_reader_has_what_it_needs(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    gate.used.clear()
    gate.allowed = permissions("reader")
    read(application, monkeypatch, aws)
    gate.allowed = None
    seen = set(gate.used)
    application.drain()
    gate.used.clear()
    gate.used |= seen
    gate.allowed = permissions("reader")
    assert "shardId-000000000001" in read(application, monkeypatch, aws)
    writing = re.compile(r":(Put|Update|Delete|Create|Register|Tag)")
    assert not any(writing.search(action) for action, _ in gate.allowed | gate.used)
    assert gate.allowed == gate.used


@pytest.mark.parametrize("lacking", sorted(permissions("leader")))
def test_what_a_leader_lacks_is_named(
    gate: Gate, application: Application, lacking: Permission
) -> None:
    rare = application.rare()
    gate.allowed = permissions("leader") - {lacking}
    try:
        report = application.lead()
        if lacking in rare:
            rare[lacking]()
        text = f"{report.error}\n{application.said()}"
    except AccessDeniedError as error:
        text = str(error)
    if lacking == ("dynamodb:DescribeTable", ""):
        assert "None" in text, "only the size of a table is asked, and it is not needed"
    else:
        assert is_named(lacking, application, text)
        assert "Traceback" not in text


@pytest.mark.parametrize("lacking", sorted(permissions("worker")))
def test_what_a_worker_lacks_is_named(
    gate: Gate, application: Application, lacking: Permission
) -> None:
    if lacking in BY_LATER_WORKERS:
        application.drain()
        application.split()
    rare = application.rare() if lacking == ("dynamodb:GetItem", WORKERS) else {}
    gate.allowed = permissions("worker") - {lacking}
    try:
        if lacking in rare:
            rare[lacking]()
        application.drain(*names_of(lacking, application))
        if lacking == ("dynamodb:DeleteItem", ""):
            application.drain(*names_of(lacking, application))
        text = application.said()
    except AccessDeniedError as error:
        text = str(error)
    assert is_named(lacking, application, text)


BY_LATER_WORKERS = {("dynamodb:GetItem", ""), ("dynamodb:DeleteItem", "")}
"""The first worker of an application does not ask for these."""


def names_of(lacking: Permission, application: Application) -> tuple[str, str]:
    action, place = lacking
    table = application.name + place.partition("/")[0]
    return action, application.name if place == "stream" else f"table {table}"


def is_named(lacking: Permission, application: Application, text: str) -> bool:
    return any(
        all(part in line for part in names_of(lacking, application)) for line in text.splitlines()
    )


def test_what_a_reader_lacks_is_one_sentence(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    gate.allowed = permissions("reader") - {("dynamodb:Scan", "")}
    said = run("leases", "-a", application.name, code=1)
    assert said.stderr.startswith("Error: Scan on table")
    assert "(the action is dynamodb:Scan)" in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1


def test_no_credential_comes_out(
    gate: Gate,
    application: Application,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not in events, logs, output, rows, the table or the text of any object, also when calls are
    denied.
    """
    caplog.set_level("INFO")
    application.drain()
    gate.allowed = set()
    with pytest.raises(AccessDeniedError) as denied:
        application.drain()
    with contextlib.suppress(AccessDeniedError):
        application.lead()
    gate.allowed = None
    rows = [
        application.clients.dynamodb.scan(TableName=f"{application.name}{suffix}")["Items"]
        for suffix in ("", "-WorkerMetricStats", "-CoordinatorState")
    ]
    files = [
        path.read_bytes().decode("latin-1")
        for path in application.table.rglob("*")
        if path.is_file()
    ]
    out = capfd.readouterr()
    texts = [
        str(application.events),
        caplog.text,
        out.out,
        out.err,
        str(rows),
        str(denied.value),
        repr(application.pipeline),
        *files,
    ]
    assert len(application.events) > 5
    assert files
    for secret in SECRETS[1:]:
        assert all(secret not in text for text in [*texts, repr(application.clients.options)])
    assert all(SECRETS[0] not in text for text in texts)


def test_nothing_that_is_read_is_run() -> None:
    """No pickle, eval, exec, marshal or unsafe YAML in the package: rows and records are data."""
    modules, calls = (
        {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"},
        {"eval", "exec", "compile", "__import__"},
    )
    seen = 0
    for path in (ROOT / "kcl_pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            seen += 1
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {name.split(".")[0] for name in names} & modules, path
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in calls), path
                unsafe = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in {
                    "yaml.load",
                    "yaml.unsafe_load",
                    "yaml.full_load",
                }
                assert not unsafe, path
    assert seen > 50_000
