"""The command line against the embedded AWS, in process."""

import threading
import time

import pytest

from kcl_pipeline import clock as clock_module
from kcl_pipeline.cli.running import progress_line
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.worker_status import MAX_LAGS, LeaseLag, PausedLease, WorkerStatus, WorkerTotals
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]


pytestmark = pytest.mark.usefixtures("environment")


def status(name, *arguments):
    found = run_json("status", "-a", name, *arguments)
    rows = {row["lease_key"]: row for row in found["leases"]}
    return found | {"leases": rows, "workers": {w["worker_id"]: w for w in found["workers"]}}


def lines_of(text):
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


def test_status_shows_findings_workers_and_leases(fleet):
    text = run("status", "-a", fleet.name).stdout
    lines = lines_of(text)
    assert text.startswith(f"{fleet.name} at ")
    assert "2 workers, 4 leases and 0 ended, 31.5 KiB/s, lag unknown" in text
    assert "blue-2" in lines[fleet.keys[2]]
    assert "10.5" in lines[fleet.keys[1]]
    assert "(no owner)" in lines[fleet.keys[3]]
    assert "no owner" in lines[fleet.keys[3]]
    assert "TRIM_HORIZON" in lines[fleet.keys[3]]
    assert "blue-2 for" in text.partition("(by their own clocks): ")[2].splitlines()[0]
    assert "lease_without_worker: " in text
    assert "20.0" in lines["blue-1"]
    assert "silent for" in lines["blue-2"]


def test_status_json_says_everything(fleet):
    found = status(fleet.name)
    assert (found["application"], found["leader"]) == (fleet.name, "blue-1")
    row = found["leases"][fleet.keys[1]]
    keys = row.pop("hash_keys")
    assert row == {
        "lease_key": fleet.keys[1],
        "worker": "blue-2",
        "owner": "blue-2",
        "state": "owner is gone",
        "why": None,
        "lag_seconds": None,
        "lag_is_upper_bound": False,
        "kbps": 10.5,
        "checkpoint": "49651",
        "checkpoint_age": None,
        "counter": 1,
        "parents": [],
    }
    assert int(found["leases"][fleet.keys[0]]["hash_keys"][1]) + 1 == int(keys[0])
    worker = found["workers"]["blue-1"]
    assert (worker["group"], worker["leases"], worker["run_id"]) == ("blue", 1, "run-1")
    assert (worker["cpu_percent"], worker["cpu_limit"], worker["states"]) == (20.0, 100, [])
    assert found["workers"]["blue-2"]["report_seconds"] >= 99
    assert {one["name"]: one for one in found["findings"]}["worker_silent"]["advice"]


def test_status_by_worker_and_by_group(shared):
    by_worker = {row["name"]: row for row in status(shared.name, "--by", "worker")["by"]}
    assert {name: row["leases"] for name, row in by_worker.items()} == {
        "blue-1": 1,
        "blue-2": 2,
        "(no owner)": 1,
    }
    assert by_worker["blue-2"]["kbps"] == 31.5
    by_group = {row["name"]: row["leases"] for row in status(shared.name, "--by", "group")["by"]}
    assert by_group == {"blue": 3, "(no owner)": 1}
    assert "Leases by group" in run("status", "-a", shared.name, "--by", "group").stdout


def test_a_lease_in_handoff_counts_for_who_still_processes_it(fleet):
    lease = fleet.tables.lease.get(fleet.keys[0])
    assert fleet.tables.lease.initiate_handoff(lease, "blue-2")
    assert "handoff to blue-2" in run("status", "-a", fleet.name).stdout
    found = status(fleet.name, "--by", "worker")
    assert found["leases"][fleet.keys[0]]["state"] == "handoff to blue-2"
    rows = {row["name"]: row for row in found["by"]}
    assert (rows["blue-1"]["leases"], rows["blue-1"]["in_handoff"]) == (1, 1)


def test_ended_leases_are_told_apart(fleet):
    lease = fleet.tables.lease.get(fleet.keys[1])
    assert fleet.tables.lease.update_checkpoint(lease, checkpoint=SHARD_END)
    found = status(fleet.name, "--by", "worker")
    assert found["leases"][fleet.keys[1]]["state"] == "ended"
    rows = {row["name"]: row for row in found["by"]}
    assert (rows["blue-2"]["leases"], rows["blue-2"]["ended"]) == (1, 1)
    assert fleet.keys[1] not in lines_of(run("status", "-a", fleet.name).stdout)


def test_what_others_wrote_is_shown_as_it_is_and_moves_no_cursor(fleet):
    key = fleet.keys[0]
    fleet.clients.dynamodb.update_item(
        TableName=fleet.name,
        Key={"leaseKey": {"S": key}},
        UpdateExpression="SET leaseOwner = :o",
        ExpressionAttributeValues={":o": {"S": "[/x]"}},
    )
    fleet.tables.workers.report(WorkerMetrics("[/x]", 1, run_id="[red]:boom:"))
    fleet.clients.dynamodb.put_item(
        TableName=fleet.name,
        Item={"leaseKey": {"S": "shardId-odd"}, "checkpoint": {"S": "\x1b[2J\nforged"}},
    )
    said = run("status", "-a", fleet.name).stdout
    assert "[/x]" in said
    assert "the row shardId-odd is not a lease that can be read: " in said
    assert "\\x1b[2J\\nforged" in said
    assert "\x1b" not in said
    assert "[/x]" in run("status", "-a", fleet.name, "--by", "worker").stdout
    assert status(fleet.name)["workers"]["[/x]"]["run_id"] == "[red]:boom:"
    assert "[/x]" in run("plan", "-a", fleet.name, "-s", fleet.name).stdout
    bad = run_json("plan", "-a", fleet.name, "-s", fleet.name)["bad_rows"]
    assert [row["key"] for row in bad] == ["shardId-odd"]


def test_a_paused_shard_is_shown_with_its_reason_and_its_lag(fleet):
    pause = PausedLease(fleet.keys[0], "16 of 16 records fail", 40.0)
    lags = (LeaseLag(fleet.keys[0], 61_250),)
    state = WorkerStatus(
        61_250,
        2,
        (pause,),
        1,
        lags,
        3,
        "SinkError: no such table",
        totals=WorkerTotals(dead_letters=12),
    )
    fleet.tables.workers.report(
        WorkerMetrics("blue-1", int(time.time()) - 7, status=state, run_id="run-1")
    )
    text = run("status", "-a", fleet.name).stdout
    lines = lines_of(text)
    assert "paused: 16 of 16 records fail" in lines[fleet.keys[0]]
    assert "61.2 s" in lines[fleet.keys[0]]
    assert "shard_paused: 1 shard is paused" in text
    assert "1 shard paused, the last 3 batches refused" in text
    assert "61.2 s (2 shards unknown)" in text
    found = status(fleet.name)
    assert found["leases"][fleet.keys[0]]["why"] == "16 of 16 records fail"
    assert found["workers"]["blue-1"]["dead_letters"] == 12


def test_a_lag_that_the_worker_does_not_list_has_an_upper_bound(fleet):
    listed = [LeaseLag(f"other-{n}", 90_000 - n) for n in range(MAX_LAGS - 1)]
    state = WorkerStatus(
        90_000, lags=(*listed, LeaseLag(fleet.keys[1], 12_500)), more_lags=1, more_lags_millis=9
    )
    fleet.tables.workers.report(WorkerMetrics("blue-2", int(time.time()) - 65, status=state))
    rows = status(fleet.name)["leases"]
    assert (rows[fleet.keys[1]]["lag_seconds"], rows[fleet.keys[1]]["lag_is_upper_bound"]) == (
        12.5,
        False,
    )
    assert (rows[fleet.keys[2]]["lag_seconds"], rows[fleet.keys[2]]["lag_is_upper_bound"]) == (
        12.5,
        True,
    )
    lines = lines_of(run("status", "-a", fleet.name).stdout)
    assert "≤ 12.5 s" in lines[fleet.keys[2]]
    assert "not read yet" in lines[fleet.keys[0]]


def test_watch_looks_again_and_shows_moves(fleet, monkeypatch):
    looks = []

    def sleep(self, seconds):
        if threading.current_thread() is not threading.main_thread():
            return
        looks.append(seconds)
        if len(looks) > 1:
            raise KeyboardInterrupt
        assert fleet.tables.lease.assign(fleet.tables.lease.get(fleet.keys[3]), "blue-1")

    monkeypatch.setattr(clock_module.SystemClock, "sleep", sleep)
    result = run("status", "-a", fleet.name, "--watch", "--seconds", "2", code=130)
    assert looks == [2.0, 2.0]
    assert f"{fleet.keys[3]}" in result.stdout.rpartition("Moves")[2]


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (
            WorkerStatus(totals=WorkerTotals(10.0)),
            "0 records, 0.0 MB in 10 s; lag unknown; 0 leases",
        ),
        (
            WorkerStatus(
                lag_millis=0,
                lags=(LeaseLag("s-0", 0),),
                unknown_lags=1,
                paused=(PausedLease("s-0", "why", 1.0),),
                positions={"s-0": "1", "s-1": "1"},
                totals=WorkerTotals(10.0, records=1_200, bytes=2_000_000),
            ),
            "1,200 records, 2.0 MB in 10 s; lag 0 ms (1 shard not read yet); 2 leases; 1 paused",
        ),
    ],
)
def test_the_progress_line_does_not_take_what_is_unknown_for_zero(progress, line):
    assert progress_line(progress) == line


def test_plan_shows_moves_with_reasons_and_loads(fleet):
    fleet.tables.workers.report(
        WorkerMetrics("blue-2", int(time.time()), {"C": (50.0,)}, {"C": (90,)})
    )
    found = run_json("plan", "-a", fleet.name, "-s", fleet.name)
    (move,) = [m for m in found["moves"] if m["lease_key"] == fleet.keys[3]]
    assert (move["from_worker"], move["to_worker"]) == (None, "blue-1"), (
        "the lease that nobody has goes to the worker with less CPU"
    )
    assert move["reason"]
    loads = {load["name"]: load for load in found["workers"]}
    assert {name: load["leases_before"] for name, load in loads.items()} == {
        "blue-1": 1,
        "blue-2": 2,
    }
    assert sum(load["leases_after"] for load in loads.values()) == 4
    assert loads["blue-2"]["kbps_before"] >= 31.5
    assert [group["name"] for group in found["groups"]] == ["blue"]
    text = run("plan", "-a", fleet.name, "-s", fleet.name).stdout
    assert move["reason"].split()[0] in text
    assert "Load per worker" in text
    assert "every owner counts as alive" in text


def test_plan_writes_nothing(shared):
    before = sorted(shared.tables.lease.list_leases().leases, key=lambda lease: lease.lease_key)
    run("plan", "-a", shared.name, "-s", shared.name)
    assert (
        sorted(shared.tables.lease.list_leases().leases, key=lambda lease: lease.lease_key)
        == before
    )
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
