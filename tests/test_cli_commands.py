"""The command line against the embedded AWS, in process."""

import itertools
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import boto3
import pytest
from typer.testing import CliRunner

from kcl_pipeline import clock as clock_module
from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis, open_tables
from kcl_pipeline.cli import app
from kcl_pipeline.cli import checks as checks_module
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import LeaderLock, MigrationState, WorkerMetrics
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.sequence import SHARD_END, TRIM_HORIZON, Position

NUMBERS = itertools.count(1)
ACCOUNT_VARIABLES = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_DYNAMODB", "AWS_ENDPOINT_URL_KINESIS", "AWS_CA_BUNDLE")


@pytest.fixture(scope="module")
def server():
    with EmbeddedAws() as aws:
        aws.warm_up()
        yield aws


@pytest.fixture(scope="module")
def java_home(tmp_path_factory):
    """A Java that only says its version, quickly."""
    home = tmp_path_factory.mktemp("java")
    (home / "bin").mkdir()
    command = home / "bin" / "java"
    command.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\" 2025-04-15' >&2\n")
    command.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def environment(server, java_home, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(java_home))
    for name in ACCOUNT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield
    server.fault_rules.replace([])


@pytest.fixture
def fleet(server):
    """An application with four shards, two workers and a leader, for one test."""
    return build_fleet(server)


@pytest.fixture(scope="module")
def shared(server):
    """The same for all tests that only look."""
    return build_fleet(server)


def build_fleet(server):
    name = f"app-{next(NUMBERS):03}"
    settings = ConsumerSettings(application_name=name, streams=(name,))
    clock = SystemClock()
    options = SessionOptions(region_name="us-east-1", endpoint_url=server.endpoint_url, aws_access_key_id="local", aws_secret_access_key="local")
    clients = AwsClients(settings, options)
    clients.kinesis.create_stream(StreamName=name, ShardCount=4)
    tables, kinesis = open_tables(settings, clients, clock), open_kinesis(settings, clients, clock)
    for table in (tables.lease, tables.workers, tables.coordinator):
        table.ensure_exists()
    shards = kinesis.list_shards(kinesis.resolve_stream(name, multi_stream=False))
    owners = ["blue-1", "blue-2", "blue-2", None]
    for number, (shard, owner) in enumerate(zip(shards, owners, strict=True)):
        checkpoint = TRIM_HORIZON if owner is None else Position("4965" + str(number))
        lease = Lease(
            shard.shard_id,
            checkpoint,
            counter=number,
            owner=owner,
            hash_key_range=shard.hash_key_range,
            throughput_kbps=None if owner is None else 10.5 * number,
        )
        assert tables.lease.create_lease(lease)
    tables.workers.report(WorkerMetrics("blue-1", int(clock.wall()), {"C": (10.0, 20.0)}, {"C": (100,)}, run_id="run-1"))
    tables.workers.report(WorkerMetrics("blue-2", int(clock.wall()) - 100, {"C": (50.0, -1.0)}, {"C": (90,)}))
    assert tables.coordinator.put_lock(LeaderLock("blue-1", 30_000, "v1"), replacing=None)
    assert tables.coordinator.put_migration(MigrationState("CLIENT_VERSION_3X", "blue-1", 1), replacing=None)
    return SimpleNamespace(name=name, tables=tables, settings=settings, clients=clients, kinesis=kinesis, keys=[s.shard_id for s in shards])


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    assert "Traceback" not in result.output + result.stderr
    return result


def run_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


# leases


def test_leases_table(shared):
    text = run("leases", "-a", shared.name).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("shardId-")}
    assert list(lines) == sorted(shared.keys)
    assert "blue-2" in lines[shared.keys[1]]
    assert "held" in lines[shared.keys[1]]
    assert "10.5" in lines[shared.keys[1]]
    assert "(nobody)" in lines[shared.keys[3]]
    assert "free" in lines[shared.keys[3]]
    assert "TRIM_HORIZON" in lines[shared.keys[3]]


def test_leases_json_says_everything(shared):
    rows = run_json("leases", "-a", shared.name)
    assert [row["lease_key"] for row in rows] == sorted(shared.keys)
    assert rows[1] == {
        "lease_key": shared.keys[1],
        "stream": None,
        "shard_id": shared.keys[1],
        "owner": "blue-2",
        "checkpoint_owner": None,
        "state": "held",
        "checkpoint": "49651",
        "pending_checkpoint": None,
        "counter": 1,
        "owner_switches_since_checkpoint": 0,
        "throughput_kbps": 10.5,
        "parent_shard_ids": [],
        "child_shard_ids": [],
        "hash_key_range": rows[1]["hash_key_range"],
    }
    assert int(rows[0]["hash_key_range"][1]) + 1 == int(rows[1]["hash_key_range"][0])


def test_leases_by_worker_and_by_group(shared):
    by_worker = {row["worker"]: row for row in run_json("leases", "-a", shared.name, "--by", "worker")}
    assert {name: row["leases"] for name, row in by_worker.items()} == {"blue-1": 1, "blue-2": 2, "(nobody)": 1}
    assert by_worker["blue-2"]["throughput_kbps"] == 31.5
    by_group = {row["group"]: row["leases"] for row in run_json("leases", "-a", shared.name, "--by", "group")}
    assert by_group == {"blue": 3, "(nobody)": 1}
    assert "Leases by group" in run("leases", "-a", shared.name, "--by", "group").stdout


def test_a_lease_in_handoff_counts_for_who_still_processes_it(fleet):
    lease = fleet.tables.lease.get(fleet.keys[0])
    assert fleet.tables.lease.initiate_handoff(lease, "blue-2")
    assert "handing over to blue-2" in run("leases", "-a", fleet.name).stdout
    assert run_json("leases", "-a", fleet.name)[0]["state"] == "handoff"
    rows = {row["worker"]: row for row in run_json("leases", "-a", fleet.name, "--by", "worker")}
    assert (rows["blue-1"]["leases"], rows["blue-1"]["handing_over"]) == (1, 1)


def test_ended_leases_are_told_apart(fleet):
    lease = fleet.tables.lease.get(fleet.keys[1])
    assert fleet.tables.lease.update_checkpoint(lease, checkpoint=SHARD_END)
    assert run_json("leases", "-a", fleet.name)[1]["state"] == "ended"
    rows = {row["worker"]: row for row in run_json("leases", "-a", fleet.name, "--by", "worker")}
    assert (rows["blue-2"]["leases"], rows["blue-2"]["ended"]) == (1, 1)


def test_rows_that_are_no_leases_are_named(fleet):
    fleet.clients.dynamodb.put_item(TableName=fleet.name, Item={"leaseKey": {"S": "shardId-odd"}, "checkpoint": {"S": "not a position"}})
    assert "1 rows are not readable as leases: shardId-odd" in run("leases", "-a", fleet.name).stderr


# workers


def test_workers_json(shared):
    one, two = run_json("workers", "-a", shared.name)
    assert (one["worker_id"], one["group"], one["leases"], one["run_id"]) == ("blue-1", "blue", 1, "run-1")
    assert one["stats"] == {"C": [10.0, 20.0]}
    assert (two["leases"], two["operating_range"]) == (2, {"C": [90]})
    assert two["seconds_since_report"] >= 99


def test_workers_table_shows_what_is_special(fleet):
    assert fleet.tables.workers.request_drain("blue-1")
    lines = run("workers", "-a", fleet.name).stdout.splitlines()
    one, two = (next(line for line in lines if line.startswith(name)) for name in ("blue-1", "blue-2"))
    assert "asked to drain" in one
    assert "20.0" in one
    assert "metrics failing" in two
    assert "50.0" in two, "the last average that was none of a failed interval"
    assert "1 min 4" in two


# leader


def test_leader_and_client_version(shared):
    text = run("leader", "-a", shared.name).stdout
    assert "blue-1 leads (lock of 30 s, version v1)" in text
    assert "client version: CLIENT_VERSION_3X, set by blue-1" in text
    assert run_json("leader", "-a", shared.name) == {
        "leader": "blue-1",
        "lease_duration_millis": 30_000,
        "version": "v1",
        "is_released": False,
        "alive": None,
        "client_version": "CLIENT_VERSION_3X",
    }


def test_a_silent_leader_is_told_from_a_living_one(fleet, monkeypatch):
    table = fleet.tables.coordinator
    old = table.read_lock()
    assert table.release_lock(old)
    lock = LeaderLock("blue-1", 1_000, "v2")
    assert table.put_lock(lock, replacing=None)
    assert "silent" in run("leader", "-a", fleet.name, "--wait", code=1).stdout

    def heartbeat(self, seconds):
        table.heartbeat_lock(table.read_lock(), "v3")

    monkeypatch.setattr(clock_module.SystemClock, "sleep", heartbeat)
    assert ", alive" in run("leader", "-a", fleet.name, "--wait").stdout


def test_nobody_leads(fleet):
    table = fleet.tables.coordinator
    assert table.release_lock(table.read_lock())
    assert "nobody leads: there is no lock" in run("leader", "-a", fleet.name).stdout
    run("leader", "-a", fleet.name, "--wait", code=1)


# what a person may get wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no application is named; write --application NAME, or --pipeline module:attribute"),
        (["-a", "x"], "application_name='x': String should have at least 3 characters"),
        (["-a", "one", "-s", "s", "-s", "s"], "names a stream twice"),
        (["-p", "nothing"], "'nothing' is not module:attribute"),
        (["-p", "no_such_module:x"], "there is no module 'no_such_module'"),
        (["-p", "json:no_such"], "json has no 'no_such'"),
        (["-p", "json:dumps"], "is a function; name a KinesisPipeline"),
        (["-p", "json:dumps", "-a", "app"], "leave --application and --stream out"),
        (["-a", "no-such-app"], "check the names, AWS_REGION and AWS_ENDPOINT_URL"),
    ],
)
def test_user_errors_are_one_sentence(arguments, sentence):
    result = run("leases", *arguments, code=1)
    assert sentence in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_pipeline_module_that_fails_is_named_with_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "broken_pipeline.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    assert "broken_pipeline fails with ZeroDivisionError: division by zero" in run("leases", "-p", "broken_pipeline:x", code=1).stderr


def test_a_pipeline_gives_its_settings(shared, tmp_path, monkeypatch):
    (tmp_path / "my_pipeline.py").write_text(
        "from types import SimpleNamespace\nfrom kcl_pipeline.config import ConsumerSettings\n"
        f"house = SimpleNamespace(pipeline=SimpleNamespace(settings=ConsumerSettings(application_name={shared.name!r}, streams=('s',))))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert len(run_json("leases", "-p", "my_pipeline:house.pipeline")) == 4


def test_no_credentials(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert "no AWS credentials were found; set AWS_ACCESS_KEY_ID" in run("leases", "-a", "some-app", code=1).stderr
    text = run("doctor", "-a", "some-app", "-s", "some", code=1).stdout
    assert "problem credentials: there are none" in text
    assert "tables and streams were not looked at" in text


def test_no_region(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert "no AWS region is set; set AWS_REGION" in run("leases", "-a", "some-app", code=1).stderr


def test_unknown_profile(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    assert "nobody-has-this" in run("leases", "-a", "some-app", code=1).stderr


def test_an_endpoint_where_nobody_listens(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "check AWS_ENDPOINT_URL" in run("workers", "-a", "some-app", code=1).stderr


def test_a_denied_action_is_named(server, shared):
    server.fault_rules.replace([FaultRule(service="dynamodb", operation="Scan", kind="deny")])
    assert "dynamodb:Scan" in run("leases", "-a", shared.name, code=1).stderr


def test_a_defect_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("kcl_pipeline.cli.target.ConsumerSettings", lambda **_: 1 / 0)
    result = CliRunner().invoke(app, ["leases", "-a", "some-app"])
    assert isinstance(result.exception, ZeroDivisionError)


# doctor


def findings(*arguments, code=0):
    return run_json("doctor", *arguments, code=code)


def texts(found, level):
    return [f"{f['subject']}: {f['text']}" for f in found if f["level"] == level]


def heal(fleet):
    """All leases held, no worker failing."""
    assert fleet.tables.lease.take(fleet.tables.lease.get(fleet.keys[3]), "blue-1")
    fleet.tables.workers.report(WorkerMetrics("blue-2", 2_000_000_000, {"C": (50.0,)}, {"C": (90,)}))


def renewing(fleet, monkeypatch, keys):
    """While doctor watches, these leases are renewed; no time passes."""

    def sleep(self, seconds):
        for key in keys:
            assert fleet.tables.lease.renew(fleet.tables.lease.get(key))

    monkeypatch.setattr(clock_module.SystemClock, "sleep", sleep)


def test_doctor_on_a_healthy_fleet(fleet, monkeypatch):
    heal(fleet)
    renewing(fleet, monkeypatch, fleet.keys)
    found = findings("-a", fleet.name, "-s", fleet.name)
    assert {f["level"] for f in found} == {"ok"}
    said = "\n".join(texts(found, "ok"))
    for part in (
        "allowed: dynamodb:GetItem, dynamodb:Scan, dynamodb:PutItem, dynamodb:UpdateItem, dynamodb:DeleteItem, dynamodb:Query",
        "allowed: kinesis:DescribeStreamSummary, kinesis:ListShards, kinesis:GetShardIterator, kinesis:GetRecords",
        "4 leases cover all hash keys",
        "all 4 unfinished leases were renewed",
        "blue-1 holds the lock",
        "three-table layout",
    ):
        assert part in said
    assert "no problem found" in run("doctor", "-a", fleet.name, "-s", fleet.name).stdout


def test_doctor_changes_nothing(shared, monkeypatch):
    tables = [shared.name, f"{shared.name}-WorkerMetricStats", f"{shared.name}-CoordinatorState"]

    def rows():
        return [sorted(map(str, shared.clients.dynamodb.scan(TableName=table)["Items"])) for table in tables]

    before = rows()
    run("doctor", "-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    assert rows() == before


@pytest.mark.parametrize("operation", ["GetItem", "Scan", "PutItem", "UpdateItem", "DeleteItem", "Query", "DescribeTable"])
def test_doctor_names_the_dynamodb_action_that_is_denied(server, shared, operation):
    server.fault_rules.replace([FaultRule(service="dynamodb", operation=operation, kind="deny")])
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    assert any(f"dynamodb:{operation}" in text for text in texts(found, "problem"))
    assert all(f["advice"] for f in found if f["level"] == "problem")


@pytest.mark.parametrize("operation", ["DescribeStreamSummary", "ListShards", "GetShardIterator", "GetRecords"])
def test_doctor_names_the_kinesis_action_that_is_denied(server, shared, operation):
    server.fault_rules.replace([FaultRule(service="kinesis", operation=operation, kind="deny")])
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    (bad,) = [f for f in found if f["level"] == "problem" and f["subject"].startswith("stream")]
    assert f"kinesis:{operation}" in bad["advice"]


def test_doctor_finds_leases_that_nobody_renews_or_has(fleet, monkeypatch):
    renewing(fleet, monkeypatch, fleet.keys[:2])
    found = findings("-a", fleet.name, "-s", fleet.name, code=1)
    (stuck, free) = [t for t in texts(found, "problem") if t.startswith("leases")]
    assert f"{fleet.keys[2]} of blue-2" in stuck
    assert fleet.keys[1] not in stuck
    assert fleet.keys[3] in free
    assert "workers: cannot measure their CPU and get no leases: blue-2" in texts(found, "problem")


def test_doctor_does_not_judge_leases_it_did_not_watch(shared):
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    assert any("not watched" in text for text in texts(found, "unknown"))


def test_doctor_finds_a_hole(fleet, monkeypatch):
    heal(fleet)
    renewing(fleet, monkeypatch, [key for key in fleet.keys if key != fleet.keys[1]])
    assert fleet.tables.lease.delete(fleet.tables.lease.get(fleet.keys[1]))
    found = findings("-a", fleet.name, "-s", fleet.name, code=1)
    assert any("no lease covers the hash keys" in text for text in texts(found, "problem"))


def test_doctor_finds_that_nobody_leads(fleet):
    heal(fleet)
    assert fleet.tables.coordinator.release_lock(fleet.tables.coordinator.read_lock())
    found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", 0, code=1)
    assert texts(found, "problem") == ["leader: nobody leads, although there are workers"]


def test_doctor_refuses_the_single_table_layout_and_a_2x_mode(fleet):
    fleet.clients.dynamodb.put_item(TableName=fleet.name, Item={"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}})
    state = fleet.tables.coordinator.read_migration()
    assert fleet.tables.coordinator.put_migration(MigrationState("CLIENT_VERSION_2X", "tool", 2), replacing=state)
    found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", 0, code=1)
    said = "\n".join(texts(found, "problem"))
    assert "single-table layout" in said
    assert "CLIENT_VERSION_2X, set by tool" in said


def test_doctor_before_the_first_worker(server):
    boto3.client("kinesis", region_name="us-east-1").create_stream(StreamName="fresh-app", ShardCount=1)
    found = findings("-a", "fresh-app", "-s", "fresh-app")
    assert sum("does not exist yet" in text for text in texts(found, "warning")) == 3
    assert texts(found, "problem") == []


def test_doctor_on_a_stream_that_is_not_there(shared):
    found = findings("-a", shared.name, "-s", "no-such-stream", "--watch-seconds", 0, code=1)
    assert any("no-such-stream" in text for text in texts(found, "problem"))


def test_doctor_on_a_table_that_belongs_to_something_else():
    client = boto3.client("dynamodb", region_name="us-east-1")
    client.create_table(
        TableName="foreign-app",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
    )
    found = findings("-a", "foreign-app", "-s", "no-such-stream", code=1)
    assert any("foreign-app: has the key" in text for text in texts(found, "problem"))


def test_doctor_needs_a_stream():
    assert "write --stream NAME" in run("doctor", "-a", "some-app", code=1).stderr


def test_doctor_for_a_human_says_what_to_do(shared):
    text = run("doctor", "-a", shared.name, "-s", "no-such-stream", "--watch-seconds", 0, code=1).stdout
    assert "problem stream no-such-stream" in text
    assert "→ check the stream's name" in text
    assert "problems found" in text


@pytest.mark.parametrize("needed", [True, False])
def test_java_that_is_missing_is_a_problem_only_for_a_pipeline_on_spark(needed, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/no/java/here")
    found = checks_module.check_java(needed=needed)
    assert found.level == ("problem" if needed else "warning")
    assert "Spark needs Java 17" in found.text
    assert found.advice.startswith("install one (Debian/Ubuntu: ")


def test_java_that_is_there():
    found = checks_module.check_java(needed=True, require=lambda: 21)
    assert (found.level, found.text, found.advice) == ("ok", "Java 21", "")


# plan


def test_plan_shows_moves_with_reasons_and_loads(fleet):
    fleet.tables.workers.report(WorkerMetrics("blue-2", int(time.time()), {"C": (50.0,)}, {"C": (90,)}))
    found = run_json("plan", "-a", fleet.name, "-s", fleet.name)
    (move,) = [m for m in found["moves"] if m["lease_key"] == fleet.keys[3]]
    assert (move["from_worker"], move["to_worker"]) == (None, "blue-1"), "the lease that nobody has goes to the worker with less CPU"
    assert move["reason"]
    loads = {load["worker"]: load for load in found["loads"]}
    assert {name: load["leases_before"] for name, load in loads.items()} == {"blue-1": 1, "blue-2": 2, "(nobody)": 1}
    assert loads["(nobody)"]["leases_after"] == 0
    assert sum(load["leases_after"] for load in loads.values()) == 4
    assert loads["blue-2"]["kbps_before"] == 31.5
    text = run("plan", "-a", fleet.name, "-s", fleet.name, "--dry-run").stdout
    assert move["reason"].split()[0] in text
    assert "Load before and after" in text
    assert "every owner was taken for alive" in text


def test_plan_writes_nothing(shared):
    before = sorted(shared.tables.lease.list_leases().leases, key=lambda lease: lease.lease_key)
    run("plan", "-a", shared.name, "-s", shared.name)
    assert sorted(shared.tables.lease.list_leases().leases, key=lambda lease: lease.lease_key) == before
    assert shared.tables.coordinator.read_lock().version == "v1"


def test_plan_for_a_stream_without_leases_would_create_them(fleet):
    for key in fleet.keys:
        assert fleet.tables.lease.delete(fleet.tables.lease.get(key))
    found = run_json("plan", "-a", fleet.name, "-s", fleet.name)
    assert [row["lease_key"] for row in found["create"]] == fleet.keys
    assert len(found["moves"]) == 4
    text = run("plan", "-a", fleet.name, "-s", fleet.name).stdout
    assert "Leases to create" in text
    assert "no lease covers any hash key" in text


def test_plan_needs_a_stream_and_a_table():
    assert "write --stream NAME" in run("plan", "-a", "some-app", code=1).stderr
    assert "check the names" in run("plan", "-a", "some-app", "-s", "none", code=1).stderr


# local, and the start


def test_local_serves_until_it_is_told_to_stop(tmp_path):
    command = [sys.executable, "-m", "kcl_pipeline.cli", "local", "--port", "0", "--create", "orders:3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            kinesis = boto3.Session("local", "local", region_name="us-east-1").client("kinesis", endpoint_url=url)
            assert len(kinesis.list_shards(StreamName="orders")["Shards"]) == 3
            process.terminate()
            assert process.wait(timeout=20) == 0
            assert f"export AWS_ENDPOINT_URL={url}" in process.stderr.read()
        finally:
            process.kill()


def test_local_on_a_port_that_is_taken(server):
    port = server.endpoint_url.rsplit(":", 1)[1]
    assert "choose another port, or 0" in run("local", "--port", port, code=1).stderr


@pytest.mark.parametrize("text", ["orders:0", "orders:x", ":3"])
def test_local_streams_that_cannot_be(text):
    assert "neither NAME nor NAME:SHARDS" in run("local", "--port", 0, "--create", text, code=1).stderr


def test_help_loads_nothing_heavy():
    program = (
        "import sys\nfrom kcl_pipeline.cli import app\n"
        "heavy = {'pyspark', 'dagster', 'boto3', 'moto', 'pyarrow', 'pandas', 'deltalake'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "app(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("local", "leases", "workers", "leader", "plan", "doctor"):
        assert command in done.stdout


def test_session_options_overrule_the_environment(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = SessionOptions(region_name="eu-west-1", endpoint_url=server.endpoint_url, aws_access_key_id="a", aws_secret_access_key="b")
    clients = AwsClients(ConsumerSettings(application_name="agent-app", streams=("s",)), options)
    assert clients.endpoint_url == server.endpoint_url
    assert clients.region_name == "eu-west-1"
    assert clients.dynamodb is clients.dynamodb
    assert clients.dynamodb.list_tables()["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert clients.dynamodb.meta.config.retries["total_max_attempts"] == 1
    assert "kcl-application/agent-app" in clients.kinesis.meta.config.user_agent_extra
    assert "secret" not in repr(options)
    first = clients.kinesis
    clients.close()
    assert clients.kinesis is not first


def test_a_call_that_fails_is_sent_once(server, shared):
    server.fault_rules.replace([FaultRule(service="dynamodb", operation="UpdateItem", kind="error500")])
    began = time.monotonic()
    run("leases", "-a", shared.name)
    with pytest.raises(Exception, match="UpdateItem"):
        shared.tables.lease.renew(shared.tables.lease.get(shared.keys[0]))
    assert server.fault_rules.rules[0].applied == 1
    assert time.monotonic() - began < 5
