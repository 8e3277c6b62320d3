"""The capacity units are those of DynamoDB, and the scale benchmark prints what it should."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import dynamodb_cost, scale
from benchmarks.capacity import Meter, MeteredStore, size_of
from kcl_pipeline.leases.store import Absent, Changes, ConditionCheck, Equals, Put
from kcl_pipeline.testing.clock import VirtualClock

KB = 1_024


@pytest.fixture
def store() -> MeteredStore:
    return MeteredStore("leases", "leaseKey", VirtualClock(), is_indexed=True)


def row(key: str, size: int = 100, owner: str | None = None) -> dict[str, dict[str, str]]:
    """A row of `size` bytes."""
    item = {"leaseKey": {"S": key}} | ({"leaseOwner": {"S": owner}} if owner else {})
    return item | {"x": {"S": "x" * (size - size_of(item) - 1)}}


def used(store: MeteredStore) -> tuple[float, float]:
    meter, store.meter = store.meter, Meter()
    return meter.total_rcu, meter.total_wcu


def test_reads_are_counted_by_4_kb(store: MeteredStore) -> None:
    assert size_of(row("a", 5 * KB)) == 5 * KB
    store.plant(row("a", 5 * KB))
    store.get("a")
    assert used(store) == (2, 0)
    store.get("a", consistent=False)
    store.get("missing")
    assert used(store) == (2, 0)
    for number in range(7):
        store.plant(row(f"b{number}", KB))
    assert len(list(store.scan())) == 8
    assert used(store) == (1.5, 0)
    list(store.scan(consistent=True))
    store.keys_by_owner("w")
    assert used(store) == (3.5, 0)


def test_writes_are_counted_by_1_kb_of_the_larger_row(store: MeteredStore) -> None:
    store.put(row("a", 3 * KB), [])
    store.update("a", [], Changes(remove=("x",)))
    store.update("a", [], Changes({"n": {"N": "12"}}))
    assert used(store) == (0, 3 + 3 + 1)
    assert not store.update("a", [Equals("n", {"N": "13"})], Changes()).applied
    store.delete("a", [])
    assert used(store) == (0, 2)


def test_a_change_of_the_owner_writes_the_index(store: MeteredStore) -> None:
    store.put(row("a", owner="w1"), [])
    store.update("a", [], Changes({"leaseOwner": {"S": "w2"}}))
    store.update("a", [], Changes({"leaseOwner": {"S": "w2"}}))
    assert used(store) == (0, 2 + 3 + 1)
    assert store.keys_by_owner("w2") == ("a",)
    assert store.keys_by_owner("w1") == ()


def test_transactions_cost_twice_as_much(store: MeteredStore) -> None:
    lock = MeteredStore("coordinator", "key", VirtualClock())
    check = ConditionCheck(lock, "Leader", [Absent("key")])
    puts = [Put(row(key), [Absent("leaseKey")]) for key in "ab"]
    assert store.transact([check, *puts]) == frozenset()
    assert used(store) == (0, 6)


def test_the_scale_benchmark_prints_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--json", "--fast"]) == 0
    (case,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    wanted = {"leases", "workers", "cycle_s", "rcu_per_s", "wcu_per_s", "leader_mb", "worker_mb"}
    assert set(case) >= wanted
    assert (case["leases"], case["workers"]) == (500, 10)
    assert 0 < case["cycle_s"] < 5
    # 500 renewals in 3.33 s, and ten reports in 10 s
    assert case["wcu_per_s"] == pytest.approx(151, rel=0.02)
    assert 0 < case["rcu_per_s"] < case["wcu_per_s"]
    assert set(case["per_minute"]) == {"leader", "standbys", "workers"}


def test_a_batch_costs_no_write_of_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert dynamodb_cost.main(["--json", "--fast"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    idle, one, ten = result["cases"]
    assert idle["batches_per_s"] == 0
    # a renewal in 3.3 s, a report of each of two workers in 10 s, and 0.33 heartbeats per second
    assert idle["wcu_per_lease_s"] == pytest.approx(0.35, abs=0.02)
    assert one["batches_per_s"] == pytest.approx(1, rel=0.1)
    assert ten["batches_per_s"] == pytest.approx(10, rel=0.1)
    assert one["wcu_per_lease_s"] == pytest.approx(idle["wcu_per_lease_s"], rel=0.02)
    assert ten["wcu_per_lease_s"] == pytest.approx(idle["wcu_per_lease_s"], rel=0.02)
    assert set(idle["operations"]["UpdateItem"]) == {"requests", "rcu", "wcu"}
    assert result["java"]["measured"] is False
