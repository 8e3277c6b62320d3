"""The policies of docs/iam.md: enough for each role, nothing unused, and what is missing is named;
and nothing of a credential ever comes out.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import AccessDeniedError
from kcl_pipeline.events import AwsTrouble, CycleFailed
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import Fault
from kcl_pipeline.pipeline import KinesisPipeline
from tests.support.cli_fleet import run

ROOT = Path(__file__).parents[2]
POLICIES = dict(
    re.findall(r"```json (\w+)\n(.*?)```", (ROOT / "docs" / "iam.md").read_text(), re.DOTALL)
)
SECRETS = ("AKIDEXAMPLEACCESSKEY", "verySecretKeyThatNobodyMaySee", "sessionTokenThatNobodyMaySee")
NAMES = itertools.count(1)


def actions(role: str) -> set[str]:
    policy = json.loads(POLICIES[role])
    assert all(statement["Effect"] == "Allow" for statement in policy["Statement"])
    return {action for statement in policy["Statement"] for action in statement["Action"]}


class Gate:
    """Denies what is not allowed to the caller that signs with the tested key; notes what was
    asked.
    """

    def __init__(self) -> None:
        self.allowed: set[str] | None = None
        self.used: set[str] = set()

    def __call__(self, service: str, operation: str, body: bytes) -> Fault | None:
        action = f"{service}:{operation}"
        self.used.add(action)
        return Fault("deny") if self.allowed is not None and action not in self.allowed else None


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
        }
        self.table = folder / self.name
        self.pipeline = KinesisPipeline(
            self.name, [self.name], DeltaSink(str(self.table)), settings_overrides=settings
        )
        self.clients = AwsClients(
            self.pipeline.settings, SessionOptions("us-east-1", None, aws.endpoint_url, *SECRETS)
        )
        kinesis = boto3.client(
            "kinesis",
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        kinesis.create_stream(StreamName=self.name, ShardCount=2)
        kinesis.put_records(
            StreamName=self.name,
            Records=[{"Data": b"x", "PartitionKey": str(n)} for n in range(20)],
        )
        kinesis.close()

    def drain(self, until_said: str | None = None) -> int:
        stop = SystemClock().signal()

        def note(event: object) -> None:
            self.events.append(event)
            if until_said is not None and until_said in self.said():
                stop.set()

        worker = self.pipeline.build_worker("w1", clients=self.clients, events=note)
        summary = worker.run(
            stop, mode="drain", on_progress=lambda _: stop.set(), progress_seconds=8.0
        )
        return summary.total.records

    def lead(self) -> object:
        leader = self.pipeline.build_leader(
            "sensor", clients=self.clients, events=self.events.append
        )
        report = leader.run_once()
        leader.release()
        return report

    def said(self) -> str:
        kinds = (AwsTrouble, CycleFailed)
        return "\n".join(str(event) for event in self.events if isinstance(event, kinds))


@pytest.fixture(name="application")
def application_fixture(aws: EmbeddedAws, tmp_path: Path) -> Iterator[Application]:
    application = Application(aws, tmp_path)
    yield application
    application.clients.close()


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
    gate.allowed = actions("worker")
    assert application.drain() == 20
    assert "AccessDenied" not in application.said()
    assert gate.used - gate.allowed == set()
    assert gate.allowed - gate.used == set()


def test_a_leader_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    gate.used.clear()
    gate.allowed = actions("leader")
    report = application.lead()
    assert report.led
    assert report.error is None
    assert len(report.leases) == 2
    assert gate.used - gate.allowed == set()
    assert gate.allowed - gate.used == set()


def test_a_reader_has_what_it_needs(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    gate.used.clear()
    gate.allowed = actions("reader")
    read(application, monkeypatch, aws)
    gate.allowed = None
    seen = set(gate.used)
    application.drain()
    gate.used.clear()
    gate.used |= seen
    gate.allowed = actions("reader")
    assert "shardId-000000000001" in read(application, monkeypatch, aws)
    assert gate.used <= gate.allowed
    writing = re.compile(r":(Put|Update|Delete|Create|Register|Tag)")
    assert not any(writing.search(action) for action in gate.allowed | gate.used)
    assert gate.allowed == gate.used


@pytest.mark.parametrize("action", sorted(actions("leader")))
def test_what_a_leader_lacks_is_named(gate: Gate, application: Application, action: str) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    gate.allowed = actions("leader") - {action}
    try:
        report = application.lead()
        text = f"{report.error}\n{application.said()}"
    except AccessDeniedError as error:
        text = str(error)
    if action == "dynamodb:DescribeTable":
        assert "None" in text, "only the size of a table is asked, and it is not needed"
    else:
        assert action in text
        assert "Traceback" not in text


@pytest.mark.parametrize("action", sorted(actions("worker") - actions("leader")))
def test_what_a_worker_lacks_is_named(gate: Gate, application: Application, action: str) -> None:
    gate.allowed = actions("worker") - {action}
    try:
        application.drain(until_said=action)
        text = application.said()
    except AccessDeniedError as error:
        text = str(error)
    assert action in text


def test_what_a_reader_lacks_is_one_sentence(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    gate.allowed = actions("reader") - {"dynamodb:Scan"}
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
