"""The tables of leases, moves and workers in the Dagster UI."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.leader import CheckpointAges
from kcl_pipeline.orchestration.reports import (
    lease_table,
    lease_text,
    move_table,
    run_links,
    worker_table,
)
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.position import Position
from kcl_pipeline.status.rows import MAX_MOVES, OwnerChanges
from kcl_pipeline.status.snapshot import LifeObservation, Snapshot
from kcl_pipeline.worker_status import HungState, LeaseLag, PausedLease, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import leases, worker


def snapshot(rows, workers, waits=None, unchanged=None) -> Snapshot:
    observed = LifeObservation(9.0, 30.0, waits=waits or {}, unchanged=unchanged or {})
    return Snapshot(
        application="orders",
        at=1_000.0,
        leases=tuple(rows),
        workers=tuple(workers),
        observed=observed,
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("shardId-000000000012", "12"),
        ("shardId-000000000000", "0"),
        ("shardId-0000000000x1", "shardId-0000000000x1"),
        ("12", "12"),
        ("123456789012:orders:1700000000:shardId-000000000012", "orders:12"),
    ],
)
def test_a_shard_is_shown_by_its_number(key, text):
    assert lease_text(key) == text


def test_leases_without_an_owner_come_first_then_the_largest_lag():
    rows = leases(5, ["a", "a", "b", None, "b"])
    rows[4] = rows[4].with_(checkpoint=Position("SHARD_END"))
    rows[2] = rows[2].with_(owner="c", checkpoint_owner="b")
    key = [row.lease_key for row in rows]
    first = WorkerStatus(9_000, lags=(LeaseLag(key[1], 9_000),), more_lags=1, more_lags_millis=10)
    second = WorkerStatus(90_000, lags=(LeaseLag(key[2], 90_000),))
    workers = [replace(worker("a"), status=first), replace(worker("b"), status=second)]
    found = lease_table(snapshot(rows, workers, {key[3]: 40.0}, {key[0]: 5.0, key[4]: 9.0}))
    assert [tuple(row.values()) for row in found] == [
        ("3", None, "no owner", "unknown", "", "10.0"),
        ("2", "b", "handoff to c", "90.0 s", "", "10.0"),
        ("0", "a", "held", "≤ 9.0 s", "5 s old", "10.0"),
        ("1", "a", "held", "9.0 s", "", "10.0"),
        ("4", "b", "ended", "", "", "10.0"),
    ]


def test_large_throughput_has_no_decimals():
    rows = [
        row.with_(throughput_kbps=kbps)
        for row, kbps in zip(leases(2, ["a"]), (99.9, 1234.5), strict=True)
    ]
    table = lease_table(snapshot(rows, [worker("a")]))
    assert [row["KB/s"] for row in table] == ["99.9", "1,234"]


def test_paused_leases_and_those_of_a_hung_worker_are_marked():
    rows = leases(2, ["a", "b"])
    paused = WorkerStatus(paused=(PausedLease(rows[1].lease_key, "it fails", 3.0),))
    hung = WorkerStatus(9_000, hung=HungState("writing", 90.0, 1))
    workers = [replace(worker("a"), status=hung), replace(worker("b"), status=paused)]
    found = lease_table(snapshot(rows, workers))
    assert [(row["state"], row["lag"]) for row in found] == [
        ("worker is hung", "not read yet"),
        ("paused", "not read yet"),
    ]


def test_the_age_of_a_checkpoint_counts_from_its_last_observed_change():
    ages = CheckpointAges()
    (lease,) = leases(1, ["a"])
    key = lease.lease_key
    assert ages.observe([lease], 100.0) == {key: 0.0}
    assert ages.observe([lease], 160.0) == {key: 60.0}
    moved = lease.with_(checkpoint=Position("50"))
    assert ages.observe([moved], 165.0) == {key: 0.0}
    assert ages.observe([moved], 365.0) == {key: 200.0}
    assert ages.observe([], 370.0) == {}


def test_the_last_moves_have_the_reason_of_the_leader():
    rows = leases(2, ["a"])
    key = [row.lease_key for row in rows]
    changes = OwnerChanges()
    assert changes.observe(snapshot(rows, []), {key[0]: "a has too much"}) == []
    handoff = [rows[0].with_(owner="b", checkpoint_owner="a"), rows[1]]
    assert changes.observe(snapshot(handoff, [])) == [], "the owner has not changed yet"
    moved = [rows[0].with_(owner="b"), rows[1].with_(owner=None)]
    found = move_table(changes.observe(snapshot(moved, [])), 1_005.0)
    assert [tuple(row.values()) for row in found] == [
        ("5 s", "0", "a → b", "a has too much"),
        ("5 s", "1", "a → nobody", ""),
    ]
    assert list(found[0])[-1] == "reason", "the longest text is last"
    for number in range(30):
        changes.observe(snapshot([rows[0].with_(owner=f"w-{number}")], []))
    assert len(changes.observe(snapshot(rows, []))) == MAX_MOVES


def test_workers_and_runs_without_a_worker():
    totals = WorkerTotals(dead_letters=2)
    rows = [
        replace(
            worker("orders-1", 30.0),
            status=WorkerStatus(1_500, totals=totals, last_batch_seconds=4.0),
        ),
        replace(worker("orders-2", 10.0), drain_requested=True),
        replace(
            worker("orders-3", 10.0), status=WorkerStatus(hung=HungState("transform", 900.0, 4))
        ),
    ]
    runs = [
        RunView("1" * 8, S.STARTED, "orders-1", continuous=True),
        RunView("4" * 8, S.QUEUED, "orders-4", continuous=True),
        RunView("5" * 8, S.STARTING, "orders-5", continuous=True),
    ]
    found = worker_table(snapshot(leases(4, ["orders-1", "orders-2"]), rows), "-", runs)
    assert [(row["worker"], row["state"]) for row in found] == [
        ("orders-1", "working"),
        ("orders-2", "draining"),
        ("orders-3", "hung in transform for 15 min"),
        ("orders-4", "queued"),
        ("orders-5", "starting"),
    ]
    assert found[0] == {
        "worker": "orders-1",
        "state": "working",
        "leases": 2,
        "cpu": "30%",
        "KB/s": "20.0",
        "lag": "1.5 s",
        "batch": "4 s ago",
        "dead letters": 2,
    }
    mixed = [
        replace(worker(f"orders-{n}", 1.0), status=WorkerStatus(version=version))
        for n, version in enumerate(("0.2.0", "0.3.0", None))
    ]
    assert [row["state"] for row in worker_table(snapshot([], mixed), "-", [])] == [
        "working, version 0.2.0",
        "working, version 0.3.0",
        "working",
    ]
    assert "[orders-1](/runs/11111111)" in run_links(runs).value
