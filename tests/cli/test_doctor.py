"""`kcl-pipeline doctor` against the embedded AWS: what it finds, and that it changes nothing."""

import threading
import time
from dataclasses import replace

import boto3
import pytest

from kcl_pipeline import clock as clock_module
from kcl_pipeline.cli.doctor import setup as checks_module
from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.application import ApplicationIdentity, Loss
from kcl_pipeline.leases.coordinator import MigrationState
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.position import Position
from kcl_pipeline.worker_status import PausedLease, WorkerStatus, WorkerTotals
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")

LONG = pytest.mark.long
"""Actions that are asked for in the same way as those of `make test`."""


def findings(*arguments, code=0):
    return run_json("doctor", *arguments, code=code)


def texts(found, level):
    return [f"{f['name']}: {f['sentence']}" for f in found if f["level"] == level]


def repair(fleet):
    """All leases held, no worker failing."""
    assert fleet.tables.lease.assign(fleet.tables.lease.get(fleet.keys[3]), "blue-1")
    fleet.tables.workers.report(
        WorkerMetrics("blue-2", 2_000_000_000, {"C": (50.0,)}, {"C": (90,)})
    )


def renewing(fleet, monkeypatch, keys):
    """While doctor watches, these leases and the lock are renewed; no time passes."""
    doctor, sleep_really = threading.current_thread(), clock_module.SystemClock.sleep

    def sleep(self, seconds):
        if threading.current_thread() is not doctor:  # that of the deadlines of responses
            sleep_really(self, seconds)
            return
        lock = fleet.tables.coordinator.read_lock()
        if lock is not None:
            assert fleet.tables.coordinator.heartbeat_lock(lock, f"{lock.version}+")
        for row in fleet.tables.workers.scan_workers().workers:
            fleet.tables.workers.report(
                replace(row, last_update_seconds=row.last_update_seconds + 1)
            )
        for key in keys:
            assert fleet.tables.lease.renew(fleet.tables.lease.get(key))

    monkeypatch.setattr(clock_module.SystemClock, "sleep", sleep)


def test_doctor_on_a_healthy_fleet(fleet, monkeypatch):
    repair(fleet)
    renewing(fleet, monkeypatch, fleet.keys)
    found = findings("-a", fleet.name, "-s", fleet.name)
    assert {f["name"] for f in found if f["level"] != "ok"} == {"lag_unknown", "retention_unknown"}
    assert not any(f["advice"] for f in found)
    said = "\n".join(texts(found, "ok"))
    for part in (
        (
            "allowed: dynamodb:GetItem, dynamodb:Scan, dynamodb:PutItem, dynamodb:UpdateItem, "
            "dynamodb:DeleteItem, dynamodb:Query"
        ),
        (
            "allowed: kinesis:DescribeStreamSummary, kinesis:ListShards, "
            "kinesis:GetShardIterator, kinesis:GetRecords"
        ),
        "-WorkerMetricStats: allowed: dynamodb:GetItem, dynamodb:Scan, dynamodb:UpdateItem,",
        (
            "-CoordinatorState: allowed: dynamodb:GetItem, dynamodb:ConditionCheckItem, "
            "dynamodb:PutItem, dynamodb:UpdateItem,"
        ),
        "4 open shards, 0 closed within the retention period",
        "4 leases cover all hash keys",
        "4 unfinished shards are read",
        "blue-1 leads",
        "three-table layout",
    ):
        assert part in said
    assert "\n0 problems, 0 warnings\n" in run("doctor", "-a", fleet.name, "-s", fleet.name).stdout


def test_doctor_changes_nothing(shared, monkeypatch):
    tables = [shared.name, f"{shared.name}-WorkerMetricStats", f"{shared.name}-CoordinatorState"]

    def rows():
        return [
            sorted(map(str, shared.clients.dynamodb.scan(TableName=table)["Items"]))
            for table in tables
        ]

    before = rows()
    run("doctor", "-a", shared.name, "-s", shared.name, "--watch-seconds", 0)
    assert rows() == before


@pytest.mark.parametrize(
    "operation",
    [
        "GetItem", "PutItem", "DescribeTable",
        *(pytest.param(o, marks=LONG) for o in ("Scan", "UpdateItem", "DeleteItem", "Query")),
    ],
)  # fmt: skip
def test_doctor_names_the_dynamodb_action_that_is_denied(server, shared, operation):
    server.fault_rules.replace([FaultRule(service="dynamodb", operation=operation, kind="deny")])
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    assert any(f"dynamodb:{operation}" in text for text in texts(found, "problem"))
    assert all(f["advice"] for f in found if f["level"] == "problem")


def test_doctor_names_the_denied_action_of_a_transaction(server, shared):
    server.fault_rules.replace(
        [FaultRule(service="dynamodb", operation="TransactWriteItems", kind="deny")]
    )
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    assert any("dynamodb:ConditionCheckItem is denied" in text for text in texts(found, "problem"))


@pytest.mark.parametrize(
    "operation",
    [
        "DescribeStreamSummary", "GetRecords",
        *(pytest.param(o, marks=LONG) for o in ("ListShards", "GetShardIterator")),
    ],
)  # fmt: skip
def test_doctor_names_the_kinesis_action_that_is_denied(server, shared, operation):
    server.fault_rules.replace([FaultRule(service="kinesis", operation=operation, kind="deny")])
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0, code=1)
    (bad,) = [f for f in found if f["level"] == "problem" and f["name"].startswith("stream ")]
    assert f"kinesis:{operation}" in bad["advice"]


def test_doctor_finds_leases_that_nobody_renews_or_has(fleet, monkeypatch):
    renewing(fleet, monkeypatch, fleet.keys[:2])
    found = findings("-a", fleet.name, "-s", fleet.name, code=1)
    (text,) = [t for t in texts(found, "problem") if t.startswith("lease_without_worker")]
    assert f"{fleet.keys[2]} of blue-2" in text
    assert fleet.keys[1] not in text
    assert f"{fleet.keys[3]} of none" in text
    assert "cpu_not_measured: cannot measure their CPU and get no leases: blue-2" in texts(
        found, "problem"
    )


def test_doctor_says_that_one_look_has_the_clocks_of_the_writers(shared):
    found = findings("-a", shared.name, "-s", shared.name, "--watch-seconds", 0)
    (text,) = [t for t in texts(found, "warning") if t.startswith("worker_silent")]
    assert "(by their own clocks): " in text
    assert "blue-2 for" in text


def test_doctor_finds_a_hole(fleet, monkeypatch):
    repair(fleet)
    renewing(fleet, monkeypatch, [key for key in fleet.keys if key != fleet.keys[1]])
    assert fleet.tables.lease.delete(fleet.tables.lease.get(fleet.keys[1]))
    found = findings("-a", fleet.name, "-s", fleet.name, code=1)
    assert any("no lease covers the hash keys" in text for text in texts(found, "problem"))


def test_doctor_finds_paused_shards(fleet):
    pauses = tuple(PausedLease(f"shardId-{n}", "16 of 16 records fail", 40.0) for n in range(7))
    status = WorkerStatus(paused=pauses, paused_leases=7)
    fleet.tables.workers.report(WorkerMetrics("blue-1", 1_800_000_000, status=status))
    found = run_json("doctor", "-a", fleet.name, "-s", fleet.name, "--watch-seconds", "0", code=1)
    (paused,) = [f for f in found if f["name"] == "shard_paused"]
    assert paused["level"] == "problem"
    assert "7 shards are paused: shardId-0 of worker blue-1 for 40 s, 16 of" in paused["sentence"]
    assert paused["sentence"].endswith("and 2 more")
    assert "docs/dead-letters.md" in paused["advice"]


def test_doctor_finds_what_failed_without_a_pipeline(fleet):
    status = WorkerStatus(totals=WorkerTotals(dead_letters=200))
    fleet.tables.workers.report(WorkerMetrics("blue-1", int(time.time()), status=status))
    found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", "0")
    (letters,) = [f for f in found if f["name"] == "dead_letters"]
    assert (letters["level"], "200 records failed" in letters["sentence"]) == ("warning", True)
    assert "docs/dead-letters.md" in letters["advice"]


def test_doctor_names_lost_records_until_they_are_acknowledged(fleet):
    def finding(code):
        found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", "0", code=code)
        return next(f for f in found if f["check"] == "no_records_lost")

    repair(fleet)
    assert finding(0)["sentence"] == "no loss of records is recorded"
    lost = [
        RecordsLost("w-1", key, LossReason.LEFT_RETENTION, Position("7"), before=Position("9"))
        for key in ("shardId-1", "shardId-2")
    ]
    fleet.tables.coordinator.change_losses(
        lambda losses: losses.with_losses(Loss.of(event, 1_000) for event in lost)
    )
    found = finding(1)
    assert found["level"] == "problem"
    assert found["sentence"] == (
        "2 losses of records, 0 acknowledged; the last: shardId-2 (left_retention, after 7, "
        "before 9), recorded 1970-01-01T00:00:01+00:00 by w-1"
    )
    assert "kcl-pipeline do acknowledge" in found["advice"]
    assert "2 of 2 acknowledged" in run("do", "acknowledge", "-a", fleet.name).stdout
    assert finding(0)["sentence"].startswith("2 losses of records, 2 acknowledged at ")
    restore = Loss.of(
        TableRestored(58, "the version of 2026-11-26T10:00:00.000+00:00", "t-1"), 1_000
    )
    fleet.tables.coordinator.change_losses(lambda losses: losses.with_losses([restore]))
    found = finding(1)
    assert "RESTORE in version 58 of the table t-1 to the version of 2026-11" in found["sentence"]
    assert (
        "are not read again; `kcl-pipeline do seek -p PIPELINE --to TIME --pause"
        in found["sentence"]
    )


def test_doctor_finds_that_nobody_leads(fleet):
    repair(fleet)
    assert fleet.tables.coordinator.release_lock(fleet.tables.coordinator.read_lock())
    found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", 0, code=1)
    assert texts(found, "problem") == ["no_leader: there is no leader"]


def test_doctor_refuses_the_single_table_layout_and_names_a_2x_mode(fleet):
    fleet.clients.dynamodb.put_item(
        TableName=fleet.name, Item={"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}}
    )
    state = fleet.tables.coordinator.read_migration()
    assert fleet.tables.coordinator.put_migration(
        MigrationState("CLIENT_VERSION_2X", "tool", 2), replacing=state
    )
    found = findings("-a", fleet.name, "-s", fleet.name, "--watch-seconds", 0, code=1)
    said = "\n".join(texts(found, "problem"))
    assert "single-table layout" in said
    said = "\n".join(texts(found, "warning"))
    assert "CLIENT_VERSION_2X, set by tool" in said


def test_doctor_before_the_first_worker(server):
    boto3.client("kinesis", region_name="us-east-1").create_stream(
        StreamName="fresh-app", ShardCount=1
    )
    found = findings("-a", "fresh-app", "-s", "fresh-app")
    assert sum("does not exist yet" in text for text in texts(found, "unknown")) == 3
    (missing,) = {f["name"] for f in found if f["level"] == "warning"}
    assert missing == "table_missing"
    assert texts(found, "problem") == []
    shown = run("doctor", "-a", "fresh-app", "-s", "fresh-app").stdout
    assert shown.count("there is no table yet") == 4
    assert shown.count("the first worker creates the tables") == 1, "the same advice is said once"


def test_doctor_on_a_stream_that_is_not_there(shared):
    found = findings("-a", shared.name, "-s", "no-such-stream", "--watch-seconds", 0, code=1)
    assert any("no-such-stream" in text for text in texts(found, "problem"))


def test_doctor_names_the_one_missing_stream_of_several(fleet):
    other = f"{fleet.name}-other"
    fleet.clients.kinesis.create_stream(StreamName=other, ShardCount=1)

    def of_streams(code, *names):
        options = [part for name in names for part in ("-s", name)]
        found = findings("-a", fleet.name, *options, "--watch-seconds", 0, code=code)
        return {name: [f for f in found if f["name"] == f"stream {name}"] for name in names}

    healthy = of_streams(1, fleet.name, other)
    assert {f["level"] for found in healthy.values() for f in found} == {"ok"}
    with_missing = of_streams(1, fleet.name, "no-such-stream", other)
    (missing,) = with_missing.pop("no-such-stream")
    assert with_missing == healthy
    assert missing["level"] == "problem"
    assert "no-such-stream" in missing["sentence"]
    assert "create the stream; the other streams are read on" in missing["advice"]


def test_doctor_checks_streams_that_other_workers_have_recorded(fleet):
    other, gone = f"{fleet.name}-other", f"{fleet.name}-gone"
    ids = []
    for name in (fleet.name, other, gone):
        if name != fleet.name:
            fleet.clients.kinesis.create_stream(StreamName=name, ShardCount=1)
        ids.append(fleet.kinesis.resolve_stream(name, multi_stream=True))
    identity = ApplicationIdentity.of(ids, is_multi_stream=True)
    assert fleet.tables.coordinator.put_application(identity, replacing=None)
    fleet.clients.kinesis.delete_stream(StreamName=gone)
    found = findings("-a", fleet.name, "-s", fleet.name, "-s", other, "--watch-seconds", 0, code=1)
    (missing,) = [f for f in found if f["name"] == f"stream {ids[2].arn}"]
    assert (missing["level"], gone in missing["sentence"]) == ("problem", True)


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
    text = run(
        "doctor", "-a", shared.name, "-s", "no-such-stream", "--watch-seconds", 0, code=1
    ).stdout
    assert "problem stream no-such-stream" in text
    assert "→ check the stream's name" in text
    assert text.rstrip().splitlines()[-1].split(", ")[0].endswith("problems")


@pytest.mark.parametrize("needed", [True, False])
def test_java_that_is_missing_is_a_problem_only_for_a_pipeline_on_spark(needed, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/no/java/here")
    found = checks_module.check_java(needed=needed)
    assert found.level == ("problem" if needed else "warning")
    assert "Spark needs Java 17" in found.sentence
    assert found.advice.startswith("install one (Debian/Ubuntu: ")


def test_java_that_is_there():
    found = checks_module.check_java(needed=True, require=lambda: 21)
    assert (found.level, found.sentence, found.advice) == ("ok", "Java 21", "")
