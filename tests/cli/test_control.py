"""`kcl-pipeline do` with pause, resume, drain and seek (embedded AWS)."""

from __future__ import annotations

import pytest

from kcl_pipeline.cli.worker import POLL_SECONDS, run_between_pauses
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import ApplicationPausedError
from kcl_pipeline.leases.application import ApplicationIdentity, Pause
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.position import LATEST, TRIM_HORIZON
from kcl_pipeline.threads import StoppedWhileRetryingError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


def test_a_pause_is_stored_shown_and_removed(fleet):
    name, table = fleet.name, fleet.tables.coordinator
    text = run("do", "pause", "-a", name, "--reason", "a new table", "--wait", "0").stdout
    assert "paused since" in text
    assert "a new table" in text
    assert "1 lease still held by blue-1" in text
    assert "2 leases held by workers of the Java KCL" in text, "blue-2 has no run id"
    rows = {row.worker_id: row for row in fleet.tables.workers.scan_workers().workers}
    assert rows["blue-1"].drains_for_pause
    assert not rows["blue-2"].drain_requested
    assert run_json("status", "-a", name)["workers"][0]["states"] == ["pausing"]
    assert "pausing" in run("status", "-a", name).stdout
    found = run_json("do", "pause", "-a", name, "--wait", "0")
    assert (found["is_new"], found["pause"]["reason"]) == (False, "a new table")
    findings = run_json("doctor", "-a", name, "-s", name, "--watch-seconds", "0")
    (pause,) = [one for one in findings if one["name"] == "application_paused"]
    assert pause["level"] == "warning"
    assert "kcl-pipeline do resume" in pause["advice"]
    assert run_json("do", "resume", "-a", name)["was"]["reason"] == "a new table"
    assert table.read_control().pause is None
    assert "it was not paused" in run("do", "resume", "-a", name).stdout


def test_a_pause_whose_leases_stay_held_exits_with_1(fleet):
    found = run_json("do", "pause", "-a", fleet.name, "--wait", "0.5", code=1)
    assert list(found["held"].values()) == ["blue-1"]


def test_a_worker_is_drained(fleet):
    name, drain = fleet.name, ("do", "drain", "--worker", "blue-1", "-a", fleet.name)
    assert "would end and give up 1 lease" in run(*drain, "--dry-run").stdout
    assert "is requested to end" in run(*drain, "--wait", "0").stdout
    assert run_json(*drain, "--wait", "0.1", code=1)["ended"] is False
    fleet.tables.workers.deregister("blue-1")
    refused = run(*drain, code=1).stderr
    assert refused == ("Error: there is no worker blue-1; `kcl-pipeline status` lists them\n"), (
        "the tables exist: advice about the region and the endpoint does not fit"
    )
    assert "Java KCL" in run("do", "drain", "--worker", "blue-2", "-a", name, code=1).stderr


def test_positions_are_shown_and_then_written(fleet):
    name, key = fleet.name, fleet.keys[3]
    ensure_application(
        name,
        fleet.tables.coordinator,
        fleet.tables.lease,
        ApplicationIdentity.of(
            [fleet.kinesis.resolve_stream(name, multi_stream=False)], is_multi_stream=False
        ),
        lambda: (),
    )
    found = run_json("do", "seek", "-a", name, "--to", "LATEST", "--shard", key)
    assert (found["dry_run"], found["held"]) == (True, {})
    (change,) = found["changes"]
    assert (change["lease_key"], change["before"], change["after"]) == (
        key,
        "TRIM_HORIZON",
        "LATEST",
    )
    assert fleet.tables.lease.get(key).checkpoint == TRIM_HORIZON
    text = run("do", "seek", "-a", name, "--to", "LATEST").stdout
    assert "dry run: 4 positions would change" in text
    assert "3 leases held by blue-1, blue-2" in text
    refused = run("do", "seek", "-a", name, "--to", "LATEST", "--yes", code=1).stderr
    assert "3 leases are held" in refused
    for lease in fleet.tables.lease.list_leases().leases:
        assert lease.owner is None or fleet.tables.lease.evict(lease)
    found = run_json("do", "seek", "-a", name, "--to", "LATEST", "--shard", key, "--yes")
    assert (len(found["changes"]), found["refused"], found["is_paused"]) == (1, [], False)
    assert fleet.tables.lease.get(key).checkpoint == LATEST
    assert fleet.tables.coordinator.read_control().pause is None
    assert "is not a time" in run("do", "seek", "-a", name, "--to", "x", code=1).stderr


class FakePipeline:
    """Its tables are those of a fleet."""

    def __init__(self, fleet):
        self.settings = fleet.settings


def summary(reason):
    return WorkerSummary("w-1", reason, WorkerStatus(totals=WorkerTotals(1.0)))


def set_pause(table, pause):
    assert table.put_pause(pause, replacing=table.read_control())


class ResumingStop:
    """A stop signal that is never set. During the first wait, an operator resumes."""

    def __init__(self, table):
        self.table = table

    def is_set(self):
        return False

    def set(self):
        raise AssertionError("nobody stops the worker")

    def wait(self, timeout=None):
        assert timeout == POLL_SECONDS
        set_pause(self.table, None)
        return False


def test_a_worker_waits_for_the_end_of_the_pause_and_runs_again(fleet, capsys):
    table = fleet.tables.coordinator
    set_pause(table, Pause("ann", reason="later"))
    outcomes = iter([StopReason.APPLICATION_PAUSED, None, StopReason.DRAIN_REQUESTED])

    def run_once():
        reason = next(outcomes)
        if reason is None:
            assert table.read_control().pause is None
            set_pause(table, Pause("bob"))
            raise ApplicationPausedError("paused again")
        return summary(reason)

    stop = ResumingStop(table)
    last = run_between_pauses(run_once, FakePipeline(fleet), SystemClock(), stop)
    assert last.reason is StopReason.DRAIN_REQUESTED, "a drain ends the process"
    assert table.read_control().pause is None
    shown = capsys.readouterr().err
    assert "the worker has no leases and waits: paused by ann: later" in shown
    assert "waiting: paused again" in shown


def test_a_stop_ends_the_wait(fleet):
    table, clock = fleet.tables.coordinator, SystemClock()
    set_pause(table, Pause("ann"))
    stop = clock.signal()
    stop.set()
    paused = summary(StopReason.APPLICATION_PAUSED)
    found = run_between_pauses(lambda: paused, FakePipeline(fleet), clock, stop)
    assert found is paused

    def refuse():
        raise ApplicationPausedError("paused")

    with pytest.raises(StoppedWhileRetryingError, match="stopped while"):
        run_between_pauses(refuse, FakePipeline(fleet), clock, stop)


def test_deleted_tables_end_the_wait(fleet):
    clock = SystemClock()
    fleet.clients.dynamodb.delete_table(TableName=fleet.settings.coordinator_state_table_name)
    paused = summary(StopReason.APPLICATION_PAUSED)
    found = run_between_pauses(lambda: paused, FakePipeline(fleet), clock, clock.signal())
    assert found is paused
