"""Rows of others in the lease and worker-metrics tables: each costs no more than itself."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.events import CycleFailed, RowRejected
from kcl_pipeline.leader.preview import preview
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease, lease_to_item
from kcl_pipeline.position import TRIM_HORIZON
from tests.support.leader_world import World, settled

SHARD = "shardId-000000000000"
OTHER_STREAM = "123456789012:other:1700000000"
MULTI = lease_to_item(
    Lease(f"{OTHER_STREAM}:{SHARD}", TRIM_HORIZON, owner="w9", stream=OTHER_STREAM)
)
SINGLE = lease_to_item(Lease("shardId-000000000077", TRIM_HORIZON, owner="w9"))
GOOD = lease_to_item(Lease("shardId-000000000099", TRIM_HORIZON))
FOREIGN = {
    "a colon in the key": {**GOOD, "leaseKey": {"S": "a:b"}},
    "a stream's name": {**GOOD, "streamName": {"S": "orders"}},
    "a shard of ours behind a colon": {**GOOD, "leaseKey": {"S": f"x:{SHARD}"}},
    "a counter beyond its limit": {**GOOD, "leaseCounter": {"N": str(2**63 - 2)}},
    "a key that moves the cursor": {**GOOD, "leaseKey": {"S": "\x1b[2J"}},
}


@pytest.mark.parametrize("item", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_row_does_not_stop_the_leader_of_a_new_application(item: dict) -> None:
    world = World(shards=2)
    world.leases.plant(item)
    settled(world, "w1", "w2")
    assert len(world.table()) == 2
    assert not world.happened(CycleFailed)
    key = item["leaseKey"]["S"]
    assert world.leases.rows()[key] == item, "nothing is written for it"
    report = world.reports[-1]
    assert report.unreadable == (key,)
    assert [(row.table, row.key) for row in report.bad_rows] == [("leases", key)]
    rejected = world.happened(RowRejected)
    assert [(event.table, event.key) for event in rejected] == [("leases", key)], "told once"


def test_a_lease_of_a_multi_stream_application_is_left_alone() -> None:
    world = settled(World(shards=2), "w1", "w2")
    world.leases.plant(MULTI)
    world.run(60)
    assert not world.happened(CycleFailed)
    assert world.leases.rows()[MULTI["leaseKey"]["S"]] == MULTI
    assert world.reports[-1].unreadable == (MULTI["leaseKey"]["S"],)
    assert {lease.lease_key for lease in world.reports[-1].leases} == {
        SHARD,
        "shardId-000000000001",
    }
    (event,) = world.happened(RowRejected)
    assert "is of a multi-stream application" in event.reason
    found = preview(world.settings, world.leases, world.rows, world.kinesis, world.clock)
    assert [row.key for row in found.bad_rows] == [MULTI["leaseKey"]["S"]]
    assert not found.create


def test_a_lease_of_a_single_stream_application_is_left_alone() -> None:
    world = settled(World(shards=1, streams=("orders", "clicks")), "w1", "w2")
    world.leases.plant(SINGLE)
    world.run(60)
    assert not world.happened(CycleFailed)
    assert world.leases.rows()["shardId-000000000077"] == SINGLE
    (event,) = world.happened(RowRejected)
    assert "is of a single-stream application" in event.reason


@pytest.mark.parametrize(
    ("streams", "item", "words"),
    [
        (("orders",), MULTI, "has a stream in its key"),
        (("orders", "clicks"), SINGLE, "has no stream in its key"),
    ],
)
def test_a_table_of_the_other_form_alone_is_refused(streams, item: dict, words: str) -> None:
    """The setting `streams` has changed: new leases would read everything again."""
    world = World(shards=1, streams=streams)
    world.leases.plant(item)
    report = world.leader().run_once()
    assert words in report.error
    assert list(world.leases.rows()) == [item["leaseKey"]["S"]]


def test_an_unreadable_row_of_a_shard_is_no_new_stream() -> None:
    """With leases at LATEST, records between the lost lease and now would be skipped."""
    world = World(shards=2)
    world.leases.plant({"leaseKey": {"S": SHARD}, "checkpoint": {"S": "by hand"}})
    world.join("w1")
    world.leader()
    world.run(30)
    assert list(world.leases.rows()) == [SHARD]


def test_a_worker_row_that_cannot_be_read_is_told_of_and_repaired_by_its_worker() -> None:
    world = settled(World(shards=2), "w1", "w2")
    row = world.rows.rows()["w1"]
    world.rows.plant({**row, "kclpDrain": {"N": "1E+200"}})
    world.leaders["leader"].run_once()
    (event,) = world.happened(RowRejected)
    assert (event.table, event.key) == (world.rows.name, "w1")
    assert "kclpDrain is '1E+200'" in event.reason
    world.run(20)
    assert "kclpDrain" not in world.rows.rows()["w1"]
    assert world.reports[-1].bad_rows == ()
    assert set(world.owners().values()) == {"w1", "w2"}


def test_a_worker_whose_row_stays_unreadable_keeps_its_leases() -> None:
    world = settled(World(shards=4), "w1", "w2")
    held = world.owners()

    def report() -> None:
        now = {"N": str(int(world.clock.wall()))}
        world.rows.plant({"wid": {"S": "w1"}, "lut": now, "kclpDrain": {"N": "1E+200"}})

    world.workers["w1"].report = report
    report()
    world.run(120)
    assert world.owners() == held
    (event,) = world.happened(RowRejected)
    assert (event.table, event.key) == (world.rows.name, "w1"), "once, not in each cycle"


def test_a_worker_row_keeps_what_others_added() -> None:
    world = World(shards=1)
    world.rows.plant({"wid": {"S": "w1"}, "sup": {"N": "-7"}, "theirs": {"S": "kept"}})
    world.join("w1")
    world.run(1)
    row = world.rows.rows()["w1"]
    assert "sup" not in row
    assert row["theirs"] == {"S": "kept"}
    (listed,) = world.rows.scan_workers().workers
    assert listed.worker_id == "w1"


@pytest.mark.parametrize(("multi_stream", "item"), [(False, MULTI), (True, SINGLE)])
def test_a_worker_does_not_hold_a_lease_of_the_other_form(multi_stream: bool, item: dict) -> None:
    world = World(shards=1)
    world.leases.plant(item)
    held = HeldLeases(
        world.leases,
        "w9",
        LeaseSettings(),
        world.clock,
        world.events.append,
        multi_stream=multi_stream,
    )
    assert held.recover() == ()
    for _ in range(3):
        assert held.discover() == ()
    assert world.leases.rows()[item["leaseKey"]["S"]] == item
    assert len(world.happened(RowRejected)) == 1


def test_a_row_that_is_mended_is_taken_and_told_of_again_when_it_breaks() -> None:
    world = World(shards=1)
    key = GOOD["leaseKey"]["S"]
    broken = {**GOOD, "leaseOwner": {"S": "w1"}, "leaseCounter": {"S": "x"}}
    held = HeldLeases(world.leases, "w1", LeaseSettings(), world.clock, world.events.append)
    world.leases.plant(broken)
    assert held.discover() == held.discover() == ()
    world.leases.plant({**broken, "leaseCounter": {"N": "1"}})
    (one,) = held.discover()
    held.drop(one, "in this test")
    world.leases.plant(broken)
    assert held.discover() == ()
    assert [event.key for event in world.happened(RowRejected)] == [key, key]
