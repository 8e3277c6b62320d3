"""The command line against the embedded AWS, in process."""

import time

import pytest

from kcl_pipeline import clock as clock_module
from kcl_pipeline.cli.running import progress_line
from kcl_pipeline.leases.state.worker_status import MAX_LAGS, LeaseLag, PausedLease, WorkerStatus
from kcl_pipeline.leases.tables import LeaderLock, WorkerMetrics
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.worker.summary import WorkerProgress
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]


pytestmark = pytest.mark.usefixtures("environment")


def test_leases_table(shared):
    text = run("leases", "-a", shared.name).stdout
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("shardId-")}
    assert list(lines) == sorted(shared.keys)
    assert "blue-2" in lines[shared.keys[1]]
    assert "held" in lines[shared.keys[1]]
    assert "10.5" in lines[shared.keys[1]]
    assert "(no owner)" in lines[shared.keys[3]]
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
        "paused_because": None,
        "checkpoint": "49651",
        "pending_checkpoint": None,
        "counter": 1,
        "owner_switches_since_checkpoint": 0,
        "throughput_kbps": 10.5,
        "parent_shard_ids": [],
        "child_shard_ids": [],
        "hash_key_range": rows[1]["hash_key_range"],
        "lag_millis": None,
        "lag_is_upper_bound": False,
        "lag_age_seconds": None,
    }
    assert int(rows[0]["hash_key_range"][1]) + 1 == int(rows[1]["hash_key_range"][0])


def test_leases_by_worker_and_by_group(shared):
    by_worker = {
        row["worker"]: row for row in run_json("leases", "-a", shared.name, "--by", "worker")
    }
    assert {name: row["leases"] for name, row in by_worker.items()} == {
        "blue-1": 1,
        "blue-2": 2,
        "(no owner)": 1,
    }
    assert by_worker["blue-2"]["throughput_kbps"] == 31.5
    by_group = {
        row["group"]: row["leases"]
        for row in run_json("leases", "-a", shared.name, "--by", "group")
    }
    assert by_group == {"blue": 3, "(no owner)": 1}
    assert "Leases by group" in run("leases", "-a", shared.name, "--by", "group").stdout


def test_a_lease_in_handoff_counts_for_who_still_processes_it(fleet):
    lease = fleet.tables.lease.get(fleet.keys[0])
    assert fleet.tables.lease.initiate_handoff(lease, "blue-2")
    assert "handoff to blue-2" in run("leases", "-a", fleet.name).stdout
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
    fleet.clients.dynamodb.put_item(
        TableName=fleet.name,
        Item={"leaseKey": {"S": "shardId-odd"}, "checkpoint": {"S": "not a position"}},
    )
    said = run("leases", "-a", fleet.name).stderr
    assert f"table {fleet.name}: the row shardId-odd is not a lease that can be read: " in said


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
    said = run("leases", "-a", fleet.name)
    assert "[/x]" in said.stdout
    assert "\\x1b[2J\\nforged" in said.stderr
    assert "\x1b" not in said.stdout + said.stderr
    assert "[/x]" in run("leases", "-a", fleet.name, "--by", "worker").stdout
    workers = run("workers", "-a", fleet.name).stdout
    assert "[/x]" in workers
    assert "[red]:boom:" in workers
    assert "[/x]" in run("plan", "-a", fleet.name, "-s", fleet.name).stdout
    bad = run_json("plan", "-a", fleet.name, "-s", fleet.name)["bad_rows"]
    assert [row["key"] for row in bad] == ["shardId-odd"]


def test_workers_json(shared):
    one, two = run_json("workers", "-a", shared.name)
    assert (one["worker_id"], one["group"], one["leases"], one["run_id"]) == (
        "blue-1",
        "blue",
        1,
        "run-1",
    )
    assert one["stats"] == {"C": [10.0, 20.0]}
    assert (two["leases"], two["operating_range"]) == (2, {"C": [90]})
    assert two["seconds_since_report"] >= 99


def test_a_paused_shard_is_shown_with_its_reason(fleet):
    pause = PausedLease(fleet.keys[0], "16 of 16 records fail", 40.0)
    lags = (LeaseLag(fleet.keys[0], 61_250),)
    status = WorkerStatus(61_250, 2, (pause,), 1, lags, 12, 3, "SinkError: no such table")
    fleet.tables.workers.report(WorkerMetrics("blue-1", int(time.time()) - 7, status=status))
    lines = run("leases", "-a", fleet.name).stdout.splitlines()
    assert "paused" in next(line for line in lines if fleet.keys[0] in line)
    assert sum("paused" in line for line in lines) == 1
    rows = run_json("leases", "-a", fleet.name)
    assert [row["paused_because"] for row in rows] == ["16 of 16 records fail", None, None, None]
    first = next(
        line for line in run("workers", "-a", fleet.name).stdout.splitlines() if "blue-1" in line
    )
    assert "1 shard paused" in first
    assert "the sink refused the last 3 batches" in first
    assert "61.2 s (2 shards unknown)" in first
    assert " 12 " in first
    (one, _) = run_json("workers", "-a", fleet.name)
    assert {name: one[name] for name in one if name in EXPECTED} == EXPECTED | {
        "paused": {fleet.keys[0]: "16 of 16 records fail"}
    }


EXPECTED = {
    "lag_millis": 61_250,
    "unknown_lags": 2,
    "paused": {},
    "dead_letters": 12,
    "failed_batches": 3,
    "failure": "SinkError: no such table",
}


def test_leases_show_the_lag_of_committed_data_and_its_age(fleet):
    owned = [fleet.keys[1], fleet.keys[2]]
    worst = [LeaseLag(f"other-{n}", 90_000 - n) for n in range(MAX_LAGS - 1)]
    status = WorkerStatus(90_000, lags=(*worst, LeaseLag(owned[0], 12_500)))
    fleet.tables.workers.report(WorkerMetrics("blue-2", int(time.time()) - 65, status=status))
    rows = {row["lease_key"]: row for row in run_json("leases", "-a", fleet.name)}
    assert (rows[owned[0]]["lag_millis"], rows[owned[0]]["lag_is_upper_bound"]) == (12_500, False)
    assert (rows[owned[1]]["lag_millis"], rows[owned[1]]["lag_is_upper_bound"]) == (12_500, True)
    assert 65 <= rows[owned[0]]["lag_age_seconds"] < 90
    assert rows[fleet.keys[0]]["lag_millis"] is None, "its worker has reported none"
    lines = {line.split()[0]: line for line in run("leases", "-a", fleet.name).stdout.splitlines()}
    assert "12.5 s (1 min" in lines[owned[0]]
    assert "<= 12.5 s (1 min" in lines[owned[1]]
    assert lines[fleet.keys[0]].rstrip().endswith("unknown")
    assert lines[fleet.keys[3]].rstrip().endswith("-"), "nobody has it"


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (WorkerProgress("w", 10.0), "0 records, 0.0 MB in 10 s; lag unknown; 0 leases"),
        (
            WorkerProgress(
                "w",
                10.0,
                records=1_200,
                bytes=2_000_000,
                leases=("s-0", "s-1"),
                millis_behind_latest={"s-0": 0},
                lag_unknown=("s-1",),
                paused={"s-0": "why"},
            ),
            "1,200 records, 2.0 MB in 10 s; lag 0 ms (1 shard not read yet); 2 leases; 1 paused",
        ),
    ],
)
def test_the_progress_line_does_not_take_what_is_unknown_for_zero(progress, line):
    assert progress_line(progress) == line


def test_workers_table_shows_what_is_special(fleet):
    assert fleet.tables.workers.request_drain("blue-1")
    lines = run("workers", "-a", fleet.name).stdout.splitlines()
    one, two = (
        next(line for line in lines if line.startswith(name)) for name in ("blue-1", "blue-2")
    )
    assert "drain requested" in one
    assert "20.0" in one
    assert "metrics failing" in two
    assert "50.0" in two, "the last average that was none of a failed interval"
    assert "1 min 4" in two


def test_leader_and_client_version(shared):
    text = run("leader", "-a", shared.name).stdout
    assert "leader blue-1 (lock of 30 s, version v1)" in text
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
    assert "not renewed" in run("leader", "-a", fleet.name, "--wait", code=1).stdout

    def heartbeat(self, seconds):
        table.heartbeat_lock(table.read_lock(), "v3")

    monkeypatch.setattr(clock_module.SystemClock, "sleep", heartbeat)
    assert ", alive" in run("leader", "-a", fleet.name, "--wait").stdout


def test_nobody_leads(fleet):
    table = fleet.tables.coordinator
    assert table.release_lock(table.read_lock())
    assert "no leader: there is no lock" in run("leader", "-a", fleet.name).stdout
    run("leader", "-a", fleet.name, "--wait", code=1)


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
    text = run("plan", "-a", fleet.name, "-s", fleet.name, "--dry-run").stdout
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
