"""The lease table: every operation's condition and effect, on both twins (protocol §1.4, appendix
A).
"""

import pytest

from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.tables import create_lease
from tests.support.lease_tables import (
    END,
    FRESH,
    FRESH_ITEM,
    KEY,
    RANGE,
    aws_fixture,  # noqa: F401
    client_fixture,  # noqa: F401
    owned,
    row,
    twin_fixture,  # noqa: F401
)


def test_appendix_a1_to_a4_the_life_of_a_row(twin):
    table = twin.leases
    assert create_lease(table, FRESH)
    assert row(twin) == FRESH_ITEM

    lease = table.assign(FRESH, "w1")
    for _ in range(5):
        lease = table.renew(lease, 12.3456781)
    lease = table.update_checkpoint(lease, checkpoint=Position("4965", 3))
    a2 = FRESH_ITEM | {
        "leaseOwner": {"S": "w1"},
        "leaseCounter": {"N": "7"},
        "checkpoint": {"S": "4965"},
        "checkpointSubSequenceNumber": {"N": "3"},
        "throughputKBps": {"N": "12.345678"},
    }
    assert row(twin) == a2

    handoff = table.initiate_handoff(lease, "w2")
    assert row(twin) == a2 | {"leaseOwner": {"S": "w2"}, "checkpointOwner": {"S": "w1"}}
    assert (handoff.owner, handoff.checkpoint_owner, handoff.counter, handoff.actual_owner) == (
        "w2",
        "w1",
        7,
        "w1",
    )

    renewed = table.renew(lease)
    done = table.assign(renewed, "w2")
    assert row(twin) == a2 | {"leaseOwner": {"S": "w2"}, "leaseCounter": {"N": "9"}}
    assert done == table.get(KEY)


def test_appendix_a5_a6_children_and_the_end(twin):
    child = Lease(
        "shardId-000000000003",
        TRIM_HORIZON,
        parent_shard_ids=frozenset({KEY}),
        hash_key_range=HashKeyRange(0, 85070591730234615865843651857942052863),
    )
    create_lease(twin.leases, child)
    assert row(twin, child.lease_key) == FRESH_ITEM | {
        "leaseKey": {"S": child.lease_key},
        "parentShardId": {"SS": [KEY]},
        "endingHashKey": {"S": "85070591730234615865843651857942052863"},
    }
    lease = owned(twin)
    assert twin.leases.set_child_shard_ids(KEY, ["shardId-000000000004", "shardId-000000000003"])
    assert twin.leases.get(KEY).counter == lease.counter
    ended = twin.leases.update_checkpoint(lease, checkpoint=SHARD_END)
    assert ended.ended
    assert ended.child_shard_ids == {"shardId-000000000003", "shardId-000000000004"}
    assert row(twin)["childShardIds"] == {"SS": ["shardId-000000000003", "shardId-000000000004"]}
    assert row(twin)["checkpoint"] == {"S": "SHARD_END"}
    assert row(twin)["checkpointSubSequenceNumber"] == {"N": "0"}


def test_appendix_a7_a8_prepared_and_multi_stream(twin):
    key = f"123456789012:orders:1700000000:{KEY}"
    lease = owned_multi = Lease(
        key, TRIM_HORIZON, hash_key_range=RANGE, stream="123456789012:orders:1700000000"
    )
    create_lease(twin.leases, owned_multi)
    assert row(twin, key) == FRESH_ITEM | {
        "leaseKey": {"S": key},
        "streamName": {"S": "123456789012:orders:1700000000"},
        "shardId": {"S": KEY},
    }
    lease = twin.leases.assign(lease, "w1")
    prepared = twin.leases.update_checkpoint(
        lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2"
    )
    assert row(twin, key)["pendingCheckpoint"] == {"S": END.sequence_number}
    assert row(twin, key)["pendingCheckpointSubSequenceNumber"] == {"N": "0"}
    assert row(twin, key)["pendingCheckpointState"] == {"B": b"2"}
    assert (prepared.pending_checkpoint, prepared.pending_checkpoint_state, prepared.counter) == (
        END,
        b"2",
        2,
    )
    assert twin.leases.get(key) == prepared
    moved = twin.leases.update_checkpoint(prepared, checkpoint=END)
    assert moved.pending_checkpoint is None
    assert not {name for name in row(twin, key) if name.startswith("pending")}


def test_state_of_an_earlier_prepare_goes_when_the_next_has_none(twin):
    lease = owned(twin)
    lease = twin.leases.update_checkpoint(
        lease, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"2"
    )
    lease = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert lease.pending_checkpoint == END
    assert lease.pending_checkpoint_state is None
    assert "pendingCheckpointState" not in row(twin)


def test_create_does_not_touch_a_row_that_is_there(twin):
    lease = owned(twin)
    before = row(twin)
    assert not create_lease(twin.leases, FRESH)
    assert row(twin) == before
    assert twin.leases.get(KEY) == lease
    assert twin.leases.get("shardId-9") is None
    assert twin.leases.get(KEY, consistent=False) == lease


def test_writes_on_a_row_that_is_gone_make_no_row(twin):
    missing = FRESH.with_(owner="w1", counter=3)
    handoff = missing.with_(owner="w2", checkpoint_owner="w1")
    table = twin.leases
    assert table.renew(missing) is None
    assert table.renew(handoff) is None
    assert table.update_checkpoint(missing, checkpoint=END) is None
    assert table.assign(missing, "w2") is None
    assert table.assign(FRESH, "w2") is None
    assert table.initiate_handoff(missing, "w2") is None
    assert table.evict(missing) is None
    assert not table.set_child_shard_ids(KEY, ["shardId-1"])
    assert not table.set_hash_key_range(KEY, RANGE)
    assert table.delete(missing)
    assert twin.rows(table) == {}


def test_a_stale_counter_is_refused_everywhere_it_is_a_condition(twin):
    stale = owned(twin)
    twin.leases.renew(twin.leases.renew(stale))
    before = row(twin)
    assert twin.leases.renew(stale) is None
    assert twin.leases.update_checkpoint(stale, checkpoint=END) is None
    assert twin.leases.assign(stale, "w2", unrenewed=True) is None
    assert twin.leases.evict(stale) is None
    assert row(twin) == before


def test_a_checkpoint_is_refused_when_another_own_write_has_the_same_counter(twin):
    lease = owned(twin)
    twin.leases.renew(lease)
    assert twin.leases.update_checkpoint(lease, checkpoint=END) is None
    other = twin.leases.get(KEY)
    twin.leases.update_checkpoint(other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"3")
    assert (
        twin.leases.update_checkpoint(
            other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"4"
        )
        is None
    )
    assert (
        twin.leases.update_checkpoint(
            other, checkpoint=TRIM_HORIZON, pending=Position("7"), pending_state=b"3"
        )
        is None
    )
    assert twin.leases.get(KEY).pending_checkpoint_state == b"3"


def test_assign_depends_on_owners_not_on_the_counter(twin):
    lease = owned(twin)
    twin.leases.renew(lease)
    moved = twin.leases.assign(lease, "w2")
    assert (moved.owner, moved.counter, moved.owner_switches_since_checkpoint) == ("w2", 3, 1)
    assert twin.leases.assign(lease, "w3") is None
    assert twin.leases.assign(FRESH, "w3") is None
    assert twin.leases.get(KEY) == moved


@pytest.mark.parametrize(("target", "switches"), [("w2", 0), ("w1", 1), ("w3", 1)])
def test_owner_switches_of_a_handoff(twin, target, switches):
    """KCL does not count a handoff that ends as planned, but one that gives the lease back, or to a
    third worker.
    """
    handoff = twin.leases.initiate_handoff(owned(twin), "w2")
    done = twin.leases.assign(handoff, target)
    assert done.owner_switches_since_checkpoint == switches
    assert (done.owner, done.checkpoint_owner, done.counter) == (target, None, 2)


def test_the_same_owner_again_is_counted_once(twin):
    lease = owned(twin)
    again = twin.leases.assign(lease, "w1")
    assert (again.counter, again.owner_switches_since_checkpoint) == (2, 0)
    assert twin.leases.assign(lease, "w1").counter == 2


def test_initiate_handoff_conditions(twin):
    table = twin.leases
    create_lease(table, FRESH)
    assert table.initiate_handoff(FRESH, "w2") is None
    lease = table.assign(FRESH, "w1")
    assert table.initiate_handoff(lease, "w1") is None
    assert table.initiate_handoff(lease.with_(owner="w9"), "w2") is None
    table.renew(lease)
    handoff = table.initiate_handoff(lease, "w2")
    assert (handoff.owner, handoff.checkpoint_owner, handoff.counter) == ("w2", "w1", 2)
    assert table.initiate_handoff(lease, "w3") is None
    assert table.initiate_handoff(handoff, "w3") is None


def test_renewal_notices_a_handoff(twin):
    lease = owned(twin)
    twin.leases.initiate_handoff(lease, "w2")
    renewed = twin.leases.renew(lease, 1.0)
    assert (renewed.owner, renewed.checkpoint_owner, renewed.counter, renewed.throughput_kbps) == (
        "w2",
        "w1",
        2,
        1.0,
    )
    assert twin.leases.renew(renewed).counter == 3


def test_renewal_refuses_a_handoff_of_somebody_else(twin):
    lease = owned(twin)
    item = row(twin)
    twin.plant(twin.leases, item | {"leaseOwner": {"S": "w3"}, "checkpointOwner": {"S": "w2"}})
    assert twin.leases.renew(lease) is None
    twin.plant(twin.leases, item | {"leaseOwner": {"S": "w1"}, "checkpointOwner": {"S": "w1"}})
    assert twin.leases.renew(lease) is None
    assert row(twin)["leaseCounter"] == {"N": "1"}


def test_renewal_during_a_handoff_is_lost_with_the_counter(twin):
    lease = owned(twin)
    twin.leases.initiate_handoff(lease, "w2")
    handoff = twin.leases.renew(lease)
    twin.leases.assign(handoff, "w3")
    assert twin.leases.renew(handoff) is None
    assert twin.leases.update_checkpoint(handoff, checkpoint=END) is None


def test_renewal_takes_up_a_handoff_that_was_called_off(twin):
    lease = owned(twin)
    twin.leases.initiate_handoff(lease, "w2")
    handoff = twin.leases.renew(lease)
    twin.leases.assign(handoff, "w1")
    renewed = twin.leases.renew(handoff)
    assert (renewed.owner, renewed.checkpoint_owner, renewed.counter) == ("w1", None, 3)


def test_checkpoint_during_a_handoff_keeps_both_owners(twin):
    lease = owned(twin)
    twin.leases.initiate_handoff(lease, "w2")
    done = twin.leases.update_checkpoint(lease, checkpoint=END)
    assert (done.owner, done.checkpoint_owner, done.counter, done.checkpoint) == (
        "w2",
        "w1",
        2,
        END,
    )


def test_checkpoint_resets_owner_switches_and_prepare_does_not(twin):
    lease = twin.leases.assign(owned(twin), "w2")
    prepared = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert prepared.owner_switches_since_checkpoint == 1
    assert (
        twin.leases.update_checkpoint(prepared, checkpoint=END).owner_switches_since_checkpoint == 0
    )


def test_evict(twin):
    lease = owned(twin)
    assert twin.leases.evict(lease.with_(owner="w2")) is None
    free = twin.leases.evict(lease)
    assert (free.owner, free.counter) == (None, 2)
    assert "leaseOwner" not in row(twin)
    assert twin.leases.lease_keys_of("w1") == ()
    handoff = twin.leases.initiate_handoff(twin.leases.assign(free, "w1"), "w2")
    called_off = twin.leases.evict(handoff)
    assert (called_off.owner, called_off.checkpoint_owner, called_off.counter) == ("w2", None, 4)


def test_delete_only_while_the_checkpoint_stands(twin):
    lease = owned(twin)
    moved = twin.leases.update_checkpoint(lease, checkpoint=Position("5", 2))
    assert not twin.leases.delete(lease)
    assert not twin.leases.delete(lease.with_(checkpoint=Position("5", 0)))
    assert row(twin) is not None
    twin.leases.renew(moved)
    assert twin.leases.delete(moved)
    assert row(twin) is None


def test_listing_skips_other_entities_and_reports_broken_rows(twin):
    create_lease(twin.leases, FRESH)
    twin.plant(
        twin.leases,
        {name: value for name, value in FRESH_ITEM.items() if name != "entityType"}
        | {"leaseKey": {"S": "shardId-1"}},
    )
    twin.plant(
        twin.leases, FRESH_ITEM | {"leaseKey": {"S": "x"}, "entityType": {"S": "SOMETHING_NEW"}}
    )
    twin.plant(twin.leases, {"leaseKey": {"S": "broken"}, "leaseCounter": {"N": "1"}})
    twin.plant(twin.leases, FRESH_ITEM | {"leaseKey": {"S": "half"}, "endingHashKey": {"S": ""}})
    listing = twin.leases.list_leases()
    assert {lease.lease_key for lease in listing.leases} == {KEY, "shardId-1"}
    assert set(listing.unreadable) == {"broken", "half"}
    assert twin.leases.get("x") is None
    with pytest.raises(ValueError, match=r"broken.*checkpoint"):
        twin.leases.get("broken")


def test_index(twin):
    for number in range(5):
        lease = Lease(f"shardId-{number}", TRIM_HORIZON)
        create_lease(twin.leases, lease)
        if number:
            twin.leases.assign(lease, f"w{number % 2}")
    assert twin.leases.lease_keys_of("w0") == ("shardId-2", "shardId-4")
    assert twin.leases.lease_keys_of("w1") == ("shardId-1", "shardId-3")
    twin.leases.initiate_handoff(twin.leases.get("shardId-1"), "w0")
    assert twin.leases.lease_keys_of("w0") == ("shardId-1", "shardId-2", "shardId-4")
    assert twin.leases.lease_keys_of("nobody") == ()


def test_unknown_attributes_survive_every_write(twin):
    foreign = {
        "futureText": {"S": "x"},
        "futureMap": {"M": {"a": {"L": [{"N": "1"}]}}},
        "futureSet": {"SS": ["a", "b"]},
    }
    twin.plant(twin.leases, FRESH_ITEM | foreign)
    table = twin.leases
    lease = table.renew(table.assign(table.get(KEY), "w1"), 3.5)
    lease = table.update_checkpoint(
        lease, checkpoint=END, pending=Position("8"), pending_state=b"3"
    )
    lease = table.assign(lease, "w2", unrenewed=True)
    lease = table.renew(table.initiate_handoff(lease, "w3"))
    lease = table.evict(table.assign(lease, "w3"))
    table.set_child_shard_ids(KEY, ["shardId-1"])
    table.set_hash_key_range(KEY, HashKeyRange(1, 2))
    assert {name: row(twin)[name] for name in foreign} == foreign
    assert row(twin)["startingHashKey"] == {"S": "1"}


def test_numbers_are_compared_as_numbers(twin):
    twin.plant(twin.leases, FRESH_ITEM | {"leaseOwner": {"S": "w1"}, "leaseCounter": {"N": "7.0"}})
    assert twin.leases.renew(FRESH.with_(owner="w1", counter=7)).counter == 8
