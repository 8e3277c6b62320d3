"""The tables of leases, moves and workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leases.state.worker_status import (
    HungState,
    LeaseLag,
    PausedLease,
    WorkerStatus,
    WorkerTotals,
)
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.reports.tables import (
    MAX_MOVES,
    CheckpointAges,
    MoveLog,
    lease_rows,
    lease_text,
    run_links,
    shard_text,
    worker_rows,
)
from kcl_pipeline.planning.model import Move, Plan
from kcl_pipeline.position import Position
from tests.support.dagster_fakes import leases, worker


@pytest.mark.parametrize(
    ("shard_id", "text"),
    [
        ("shardId-000000000012", "12"),
        ("shardId-000000000000", "0"),
        ("shardId-0000000000x1", "shardId-0000000000x1"),
        ("12", "12"),
    ],
)
def test_a_shard_is_shown_by_its_number(shard_id, text):
    assert shard_text(shard_id) == text


def test_a_lease_of_several_streams_is_shown_with_its_stream():
    assert lease_text("shardId-000000000012") == "12"
    assert lease_text("123456789012:orders:1700000000:shardId-000000000012") == "orders:12"


def test_leases_without_an_owner_come_first_then_the_largest_lag():
    rows = leases(5, ["a", "a", "b", None, "b"])
    rows[4] = rows[4].with_(checkpoint=Position("SHARD_END"))
    rows[2] = rows[2].with_(owner="c", checkpoint_owner="b")
    key = [row.lease_key for row in rows]
    first = WorkerStatus(9_000, lags=(LeaseLag(key[1], 9_000),), more_lags=1, more_lags_millis=10)
    second = WorkerStatus(90_000, lags=(LeaseLag(key[2], 90_000),))
    workers = [replace(worker("a"), status=first), replace(worker("b"), status=second)]
    found = lease_rows(rows, workers, {key[3]: 40.0}, {key[0]: "> 5 s", key[4]: "9 s"})
    assert [tuple(row.values()) for row in found] == [
        ("3", None, "no owner for 40 s", "unknown", "", "10.0"),
        ("2", "b", "handoff to c", "90.0 s", "", "10.0"),
        ("0", "a", "held", "≤ 9.0 s", "> 5 s", "10.0"),
        ("1", "a", "held", "9.0 s", "", "10.0"),
        ("4", "b", "finished", "", "", "10.0"),
    ]


def test_the_stream_is_shown_with_the_shard_and_only_if_there_are_several():
    one, two = leases(1, ["a"], "1:orders:5"), leases(1, ["a"], "1:clicks:5")
    assert [row["shard"] for row in lease_rows(one, [], {}, {})] == ["0"]
    assert [row["shard"] for row in lease_rows([*one, *two], [], {}, {})] == [
        "clicks:0",
        "orders:0",
    ]


def test_large_throughput_has_no_decimals():
    rows = [
        row.with_(throughput_kbps=kbps)
        for row, kbps in zip(leases(2, ["a"]), (99.9, 1234.5), strict=True)
    ]
    assert [row["KB/s"] for row in lease_rows(rows, [], {}, {})] == ["99.9", "1,234"]


def test_a_paused_lease_is_shown_as_paused():
    rows = leases(1, ["a"])
    status = WorkerStatus(paused=(PausedLease(rows[0].lease_key, "it fails", 3.0),))
    (found,) = lease_rows(rows, [replace(worker("a"), status=status)], {}, {})
    assert found["state"] == "paused"


def test_leases_of_a_hung_worker_and_leases_without_a_report_are_marked():
    rows = leases(2, ["a", "b"])
    hung = WorkerStatus(9_000, hung=HungState("writing", 90.0, 1))
    workers = [replace(worker("a"), status=hung), replace(worker("b"), status=WorkerStatus())]
    found = lease_rows(rows, workers, {}, {})
    assert [(row["state"], row["lag"]) for row in found] == [
        ("worker is hung", "not read yet"),
        ("held", "not read yet"),
    ]


def test_the_age_of_a_checkpoint_counts_from_its_last_observed_change():
    ages = CheckpointAges()
    (lease,) = leases(1, ["a"])
    key = lease.lease_key
    assert ages.observe([lease], 100.0) == {key: "> 0 s"}
    assert ages.observe([lease], 160.0) == {key: "> 60 s"}
    moved = lease.with_(checkpoint=Position("50"))
    assert ages.observe([moved], 165.0) == {key: "0 s"}
    assert ages.observe([moved], 365.0) == {key: "3 min"}
    ages.observe([], 370.0)
    assert not ages.since


def test_the_last_moves_have_a_reason_and_an_outcome():
    rows = leases(4, ["a"])
    key = [row.lease_key for row in rows]
    log = MoveLog()
    moves = tuple(Move(one, "a", "b", f"because {i}") for i, one in enumerate(key))
    after = [
        rows[0].with_(owner="b"),
        rows[1].with_(owner="b", checkpoint_owner="a"),
        rows[2],
    ]
    log.observe(Plan("balanced", moves), after, 100.0)
    assert list(log.rows(105.0)[0])[-2:] == ["outcome", "reason"], "the longest text is last"
    assert [(row["shard"], row["reason"], row["outcome"]) for row in log.rows(105.0)] == [
        ("3", "because 3", "the lease was deleted"),
        ("2", "because 2", "not done: the owner is a"),
        ("1", "because 1", "handoff from a"),
        ("0", "because 0", "done after 0 s"),
    ]
    assert {row["workers"] for row in log.rows(105.0)} == {"a → b"}
    log.observe(None, [rows[1].with_(owner="b")], 107.0)
    found = {row["shard"]: row["outcome"] for row in log.rows(110.0)}
    assert (found["1"], found["0"]) == ("done after 7 s", "done after 0 s")
    for _ in range(30):
        log.observe(Plan("balanced", moves), after, 120.0)
    assert len(log.rows(120.0)) == MAX_MOVES


def test_workers_and_runs_without_a_worker():
    totals = WorkerTotals(last_batch_seconds=4.0)
    rows = [
        replace(
            worker("orders-1", 30.0),
            status=WorkerStatus(1_500, totals=totals, dead_letters=2),
        ),
        replace(worker("orders-2"), drain_requested=True),
        replace(worker("orders-3"), status=WorkerStatus(hung=HungState("transform", 900.0, 4))),
    ]
    runs = [
        RunView("1" * 8, S.STARTED, "orders-1", continuous=True),
        RunView("4" * 8, S.QUEUED, "orders-4", continuous=True),
        RunView("5" * 8, S.STARTING, "orders-5", continuous=True),
    ]
    found = worker_rows(rows, leases(4, ["orders-1", "orders-2"]), runs)
    assert [(row["worker"], row["state"]) for row in found] == [
        ("orders-1", "running"),
        ("orders-2", "draining"),
        ("orders-3", "hung in transform for 15 min"),
        ("orders-4", "queued"),
        ("orders-5", "starting"),
    ]
    assert found[0] == {
        "worker": "orders-1",
        "state": "running",
        "leases": 2,
        "cpu": "30%",
        "KB/s": "20.0",
        "lag": "1.5 s",
        "batch": "4 s ago",
        "problems": "2 dead letters",
    }
    assert [row["problems"] for row in found[1:3]] == [None, "none"]
    mixed = [
        replace(worker(f"orders-{n}"), status=WorkerStatus(version=version))
        for n, version in enumerate(("0.2.0", "0.3.0", None))
    ]
    assert [row["state"] for row in worker_rows(mixed, [], [])] == [
        "running, version 0.2.0",
        "running, version 0.3.0",
        "running",
    ]
    assert "[orders-1](/runs/11111111)" in run_links(runs).value
