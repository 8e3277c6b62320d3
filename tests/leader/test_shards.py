"""What the leader does with shards, in virtual time: initial sync, reshards, holes, cleanup
(protocol §7, §8).
"""

from __future__ import annotations

from kcl_pipeline.events import HoleFound, LeaseDeleted
from kcl_pipeline.leader.sync import missing_leases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World, settled


def test_several_streams_each_get_their_leases_and_a_missing_one_does_not_hold_up_the_others():
    world = World(shards=2, streams=("orders", "clicks"))
    world.model.call("DeleteStream", StreamName="orders")
    world.join("a")
    report = world.leader().run_once()
    assert "orders" in report.error
    assert len(report.created) == 2
    assert all(key.split(":")[1] == "clicks" and key.count(":") == 3 for key in report.created)
    world.model.create_stream("orders", 3)
    world.run(30)
    assert {lease.stream.split(":")[1] for lease in world.table().values()} == {"orders", "clicks"}
    assert None not in world.owners().values()


def test_rows_of_the_other_form_are_refused_before_anything_is_written():
    world = World(streams=("orders", "clicks"))
    create_lease(world.leases, Lease("shardId-000000000000", LATEST))
    report = world.leader().run_once()
    assert "has no stream in its key" in report.error
    assert len(world.table()) == 1


def test_split_and_merge_end_with_the_children_and_without_the_parents():
    world = settled(World(shards=3), "a", "b")
    first, second, third = sorted(world.table())
    world.model.split("orders", first)
    world.model.merge("orders", second, third)
    for worker in world.workers.values():
        worker.start_reading()
        for key in list(worker.held):
            worker.finish(key)
    world.run(20)
    children = [le for le in world.table().values() if not le.ended]
    assert len(children) == 3
    assert all(le.owner is not None for le in children)
    world.run(300)
    assert {first, second, third} <= set(world.table()), "kept while the children have not begun"
    for worker in world.workers.values():
        worker.start_reading()
    world.run(10)
    assert sorted(world.table()) == sorted(le.lease_key for le in children)
    assert {e.lease_key for e in world.happened(LeaseDeleted)} == {first, second, third}
    assert world.reports[-1].coverage[0].complete
    assert not world.happened(HoleFound)


def test_finished_parents_stay_when_cleanup_is_switched_off():
    world = World(shards=1, shard_sync={"cleanup_leases_upon_shard_completion": False})
    settled(world, "a")
    (parent,) = world.table()
    world.model.split("orders", parent)
    worker = world.workers["a"]
    worker.start_reading()
    worker.finish(parent)
    world.run(20)
    worker.start_reading()
    world.run(600)
    assert parent in world.table()


def test_a_hole_is_filled_when_three_audits_have_seen_the_same_one():
    world = settled(World(shards=4), "a")
    lost = sorted(world.table())[2]
    world.leases.delete(world.table()[lost])
    began = world.clock.monotonic()
    world.run_until(lambda: lost in world.table(), limit=500)
    assert [e.times for e in world.happened(HoleFound)] == [1, 2, 3]
    assert 240 <= world.clock.monotonic() - began <= 370
    assert world.table()[lost].checkpoint == TRIM_HORIZON
    world.run(20)
    assert lost in world.workers["a"].held
    assert world.reports[-1].coverage[0].complete


def test_a_row_that_cannot_be_read_is_reported_and_not_created_again():
    world = settled(World(shards=4), "a")
    keys = sorted(world.table())
    item = world.leases.rows()[keys[0]]
    world.leases.delete(world.table()[keys[0]])
    world.run(130)
    world.leases.plant(
        {name: value for name, value in item.items() if name not in ("checkpoint", "leaseOwner")}
    )
    world.run(500)
    assert world.reports[-1].unreadable == (keys[0],)
    assert "checkpoint" not in world.leases.rows()[keys[0]]
    assert not world.reports[-1].coverage[0].complete


def test_a_stream_of_which_no_row_can_be_read_is_not_taken_for_a_new_one():
    world = World(shards=2)
    world.leases.plant({"leaseKey": {"S": "shardId-000000000000"}, "leaseCounter": {"N": "5"}})
    world.leader()
    world.run(200)
    assert world.table() == {}
    world.run(60)
    assert list(world.table()) == ["shardId-000000000001"], "after three audits"


def test_the_children_of_a_row_that_cannot_be_read_are_left_to_it():
    world = World(shards=1)
    (parent,) = world.model.open_shard_ids("orders")
    world.model.split("orders", parent)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    shards = world.kinesis.list_shards(stream)
    assert missing_leases(world.settings.shard_sync, [], [parent], shards, stream) == ()
    assert [
        lease.lease_key
        for lease in missing_leases(world.settings.shard_sync, [], [], shards, stream)
    ] == [parent]


def test_another_hole_begins_the_count_anew():
    world = settled(World(shards=4), "a")
    keys = sorted(world.table())
    world.leases.delete(world.table()[keys[2]])
    world.run_until(lambda: len(world.happened(HoleFound)) == 2, limit=400)
    world.leases.delete(world.table()[keys[1]])
    world.run_until(lambda: len(world.happened(HoleFound)) == 4, limit=400)
    assert [e.times for e in world.happened(HoleFound)] == [1, 2, 1, 2]


def test_missing_hash_ranges_are_filled_in():
    world = settled(World(shards=2), "a")
    key = min(world.table())
    item = world.leases.rows()[key]
    world.leases.plant(
        {
            name: value
            for name, value in item.items()
            if name not in ("startingHashKey", "endingHashKey")
        }
    )
    world.run(130)
    assert world.table()[key].hash_key_range is not None
    assert not world.happened(HoleFound)


def test_garbage_goes_when_the_shard_has_left_the_stream():
    world = settled(World(shards=2), "a")
    create_lease(world.leases, Lease("shardId-000000000099", SHARD_END))
    world.run(1700)
    assert "shardId-000000000099" in world.table()
    world.run(300)
    assert "shardId-000000000099" not in world.table()
