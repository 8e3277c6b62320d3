"""The lease table: every operation's condition and effect, on both kinds of tables.

See protocol §1.4 and appendix A.
"""

import pytest

from kcl_pipeline.leases.row import Lease
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
    tables_fixture,  # noqa: F401
)


def test_appendix_a1_to_a4_the_life_of_a_row(tables):
    table = tables.leases
    assert create_lease(table, FRESH)
    assert row(tables) == FRESH_ITEM

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
    assert row(tables) == a2

    handoff = table.initiate_handoff(lease, "w2")
    assert row(tables) == a2 | {"leaseOwner": {"S": "w2"}, "checkpointOwner": {"S": "w1"}}
    assert (handoff.owner, handoff.checkpoint_owner, handoff.counter, handoff.actual_owner) == (
        "w2",
        "w1",
        7,
        "w1",
    )

    renewed = table.renew(lease)
    done = table.assign(renewed, "w2")
    assert row(tables) == a2 | {"leaseOwner": {"S": "w2"}, "leaseCounter": {"N": "9"}}
    assert done == table.get(KEY)


def test_appendix_a5_a6_children_and_the_end(tables):
    child = Lease(
        "shardId-000000000003",
        TRIM_HORIZON,
        parent_shard_ids=frozenset({KEY}),
        hash_key_range=HashKeyRange(0, 85070591730234615865843651857942052863),
    )
    create_lease(tables.leases, child)
    assert row(tables, child.lease_key) == FRESH_ITEM | {
        "leaseKey": {"S": child.lease_key},
        "parentShardId": {"SS": [KEY]},
        "endingHashKey": {"S": "85070591730234615865843651857942052863"},
    }
    lease = owned(tables)
    assert tables.leases.set_child_shard_ids(KEY, ["shardId-000000000004", "shardId-000000000003"])
    assert tables.leases.get(KEY).counter == lease.counter
    ended = tables.leases.update_checkpoint(lease, checkpoint=SHARD_END)
    assert ended.ended
    assert ended.child_shard_ids == {"shardId-000000000003", "shardId-000000000004"}
    assert row(tables)["childShardIds"] == {"SS": ["shardId-000000000003", "shardId-000000000004"]}
    assert row(tables)["checkpoint"] == {"S": "SHARD_END"}
    assert row(tables)["checkpointSubSequenceNumber"] == {"N": "0"}


def test_appendix_a7_a8_prepared_and_multi_stream(tables):
    key = f"123456789012:orders:1700000000:{KEY}"
    lease = owned_multi = Lease(
        key, TRIM_HORIZON, hash_key_range=RANGE, stream="123456789012:orders:1700000000"
    )
    create_lease(tables.leases, owned_multi)
    assert row(tables, key) == FRESH_ITEM | {
        "leaseKey": {"S": key},
        "streamName": {"S": "123456789012:orders:1700000000"},
        "shardId": {"S": KEY},
    }
    lease = tables.leases.assign(lease, "w1")
    prepared = tables.leases.update_checkpoint(
        lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2"
    )
    assert row(tables, key)["pendingCheckpoint"] == {"S": END.sequence_number}
    assert row(tables, key)["pendingCheckpointSubSequenceNumber"] == {"N": "0"}
    assert row(tables, key)["pendingCheckpointState"] == {"B": b"2"}
    assert (prepared.pending_checkpoint, prepared.pending_checkpoint_state, prepared.counter) == (
        END,
        b"2",
        2,
    )
    assert tables.leases.get(key) == prepared
    moved = tables.leases.update_checkpoint(prepared, checkpoint=END)
    assert moved.pending_checkpoint is None
    assert not {name for name in row(tables, key) if name.startswith("pending")}


def test_state_of_an_earlier_prepare_goes_when_the_next_has_none(tables):
    lease = owned(tables)
    lease = tables.leases.update_checkpoint(
        lease, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"2"
    )
    lease = tables.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert lease.pending_checkpoint == END
    assert lease.pending_checkpoint_state is None
    assert "pendingCheckpointState" not in row(tables)


def test_create_does_not_touch_a_row_that_is_there(tables):
    lease = owned(tables)
    before = row(tables)
    assert not create_lease(tables.leases, FRESH)
    assert row(tables) == before
    assert tables.leases.get(KEY) == lease
    assert tables.leases.get("shardId-9") is None
    assert tables.leases.get(KEY, consistent=False) == lease


def test_writes_on_a_row_that_is_gone_make_no_row(tables):
    missing = FRESH.with_(owner="w1", counter=3)
    handoff = missing.with_(owner="w2", checkpoint_owner="w1")
    table = tables.leases
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
    assert tables.rows(table) == {}


def test_a_stale_counter_is_refused_everywhere_it_is_a_condition(tables):
    stale = owned(tables)
    tables.leases.renew(tables.leases.renew(stale))
    before = row(tables)
    assert tables.leases.renew(stale) is None
    assert tables.leases.update_checkpoint(stale, checkpoint=END) is None
    assert tables.leases.assign(stale, "w2", unrenewed=True) is None
    assert tables.leases.evict(stale) is None
    assert row(tables) == before


def test_a_checkpoint_is_refused_when_another_own_write_has_the_same_counter(tables):
    lease = owned(tables)
    tables.leases.renew(lease)
    assert tables.leases.update_checkpoint(lease, checkpoint=END) is None
    other = tables.leases.get(KEY)
    tables.leases.update_checkpoint(other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"3")
    assert (
        tables.leases.update_checkpoint(
            other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"4"
        )
        is None
    )
    assert (
        tables.leases.update_checkpoint(
            other, checkpoint=TRIM_HORIZON, pending=Position("7"), pending_state=b"3"
        )
        is None
    )
    assert tables.leases.get(KEY).pending_checkpoint_state == b"3"


def test_assign_depends_on_owners_not_on_the_counter(tables):
    lease = owned(tables)
    tables.leases.renew(lease)
    moved = tables.leases.assign(lease, "w2")
    assert (moved.owner, moved.counter, moved.owner_switches_since_checkpoint) == ("w2", 3, 1)
    assert tables.leases.assign(lease, "w3") is None
    assert tables.leases.assign(FRESH, "w3") is None
    assert tables.leases.get(KEY) == moved


@pytest.mark.parametrize(("target", "switches"), [("w2", 0), ("w1", 1), ("w3", 1)])
def test_owner_switches_of_a_handoff(tables, target, switches):
    """KCL does not count a handoff that ends as planned, but one that gives the lease back, or to a
    third worker.
    """
    handoff = tables.leases.initiate_handoff(owned(tables), "w2")
    done = tables.leases.assign(handoff, target)
    assert done.owner_switches_since_checkpoint == switches
    assert (done.owner, done.checkpoint_owner, done.counter) == (target, None, 2)


def test_the_same_owner_again_is_counted_once(tables):
    lease = owned(tables)
    again = tables.leases.assign(lease, "w1")
    assert (again.counter, again.owner_switches_since_checkpoint) == (2, 0)
    assert tables.leases.assign(lease, "w1").counter == 2


def test_initiate_handoff_conditions(tables):
    table = tables.leases
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


def test_renewal_notices_a_handoff(tables):
    lease = owned(tables)
    tables.leases.initiate_handoff(lease, "w2")
    renewed = tables.leases.renew(lease, 1.0)
    assert (renewed.owner, renewed.checkpoint_owner, renewed.counter, renewed.throughput_kbps) == (
        "w2",
        "w1",
        2,
        1.0,
    )
    assert tables.leases.renew(renewed).counter == 3


def test_renewal_refuses_a_handoff_of_somebody_else(tables):
    lease = owned(tables)
    item = row(tables)
    tables.plant(tables.leases, item | {"leaseOwner": {"S": "w3"}, "checkpointOwner": {"S": "w2"}})
    assert tables.leases.renew(lease) is None
    tables.plant(tables.leases, item | {"leaseOwner": {"S": "w1"}, "checkpointOwner": {"S": "w1"}})
    assert tables.leases.renew(lease) is None
    assert row(tables)["leaseCounter"] == {"N": "1"}


def test_renewal_during_a_handoff_is_lost_with_the_counter(tables):
    lease = owned(tables)
    tables.leases.initiate_handoff(lease, "w2")
    handoff = tables.leases.renew(lease)
    tables.leases.assign(handoff, "w3")
    assert tables.leases.renew(handoff) is None
    assert tables.leases.update_checkpoint(handoff, checkpoint=END) is None


def test_a_renewal_after_a_handoff_was_called_off_needs_the_row_again(tables):
    lease = owned(tables)
    tables.leases.initiate_handoff(lease, "w2")
    handoff = tables.leases.renew(lease)
    back = tables.leases.assign(handoff, "w1")
    assert tables.leases.renew(handoff) is None
    renewed = tables.leases.renew(back)
    assert (renewed.owner, renewed.checkpoint_owner, renewed.counter) == ("w1", None, 4)


def test_checkpoint_during_a_handoff_keeps_both_owners(tables):
    lease = owned(tables)
    tables.leases.initiate_handoff(lease, "w2")
    done = tables.leases.update_checkpoint(lease, checkpoint=END)
    assert (done.owner, done.checkpoint_owner, done.counter, done.checkpoint) == (
        "w2",
        "w1",
        2,
        END,
    )


def test_checkpoint_resets_owner_switches_and_prepare_does_not(tables):
    lease = tables.leases.assign(owned(tables), "w2")
    prepared = tables.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert prepared.owner_switches_since_checkpoint == 1
    assert (
        tables.leases.update_checkpoint(prepared, checkpoint=END).owner_switches_since_checkpoint
        == 0
    )


def test_evict(tables):
    lease = owned(tables)
    assert tables.leases.evict(lease.with_(owner="w2")) is None
    free = tables.leases.evict(lease)
    assert (free.owner, free.counter) == (None, 2)
    assert "leaseOwner" not in row(tables)
    assert tables.leases.lease_keys_of("w1") == ()
    handoff = tables.leases.initiate_handoff(tables.leases.assign(free, "w1"), "w2")
    called_off = tables.leases.evict(handoff)
    assert (called_off.owner, called_off.checkpoint_owner, called_off.counter) == ("w2", None, 4)


def test_delete_only_while_the_checkpoint_stands(tables):
    lease = owned(tables)
    moved = tables.leases.update_checkpoint(lease, checkpoint=Position("5", 2))
    assert not tables.leases.delete(lease)
    assert not tables.leases.delete(lease.with_(checkpoint=Position("5", 0)))
    assert row(tables) is not None
    tables.leases.renew(moved)
    assert tables.leases.delete(moved)
    assert row(tables) is None


def test_listing_skips_other_entities_and_reports_broken_rows(tables):
    create_lease(tables.leases, FRESH)
    tables.plant(
        tables.leases,
        {name: value for name, value in FRESH_ITEM.items() if name != "entityType"}
        | {"leaseKey": {"S": "shardId-1"}},
    )
    tables.plant(
        tables.leases, FRESH_ITEM | {"leaseKey": {"S": "x"}, "entityType": {"S": "SOMETHING_NEW"}}
    )
    tables.plant(tables.leases, {"leaseKey": {"S": "broken"}, "leaseCounter": {"N": "1"}})
    tables.plant(
        tables.leases, FRESH_ITEM | {"leaseKey": {"S": "half"}, "endingHashKey": {"S": ""}}
    )
    listing = tables.leases.list_leases()
    assert {lease.lease_key for lease in listing.leases} == {KEY, "shardId-1"}
    assert set(listing.unreadable) == {"broken", "half"}
    assert tables.leases.get("x") is None
    with pytest.raises(ValueError, match=r"broken.*checkpoint"):
        tables.leases.get("broken")


def test_index(tables):
    for number in range(5):
        lease = Lease(f"shardId-{number}", TRIM_HORIZON)
        create_lease(tables.leases, lease)
        if number:
            tables.leases.assign(lease, f"w{number % 2}")
    assert tables.leases.lease_keys_of("w0") == ("shardId-2", "shardId-4")
    assert tables.leases.lease_keys_of("w1") == ("shardId-1", "shardId-3")
    tables.leases.initiate_handoff(tables.leases.get("shardId-1"), "w0")
    assert tables.leases.lease_keys_of("w0") == ("shardId-1", "shardId-2", "shardId-4")
    assert tables.leases.lease_keys_of("nobody") == ()


def test_unknown_attributes_survive_every_write(tables):
    foreign = {
        "futureText": {"S": "x"},
        "futureMap": {"M": {"a": {"L": [{"N": "1"}]}}},
        "futureSet": {"SS": ["a", "b"]},
    }
    tables.plant(tables.leases, FRESH_ITEM | foreign)
    table = tables.leases
    lease = table.renew(table.assign(table.get(KEY), "w1"), 3.5)
    lease = table.update_checkpoint(
        lease, checkpoint=END, pending=Position("8"), pending_state=b"3"
    )
    lease = table.assign(lease, "w2", unrenewed=True)
    lease = table.renew(table.initiate_handoff(lease, "w3"))
    lease = table.evict(table.assign(lease, "w3"))
    table.set_child_shard_ids(KEY, ["shardId-1"])
    table.set_hash_key_range(KEY, HashKeyRange(1, 2))
    assert {name: row(tables)[name] for name in foreign} == foreign
    assert row(tables)["startingHashKey"] == {"S": "1"}


def test_numbers_are_compared_as_numbers(tables):
    tables.plant(
        tables.leases, FRESH_ITEM | {"leaseOwner": {"S": "w1"}, "leaseCounter": {"N": "7.0"}}
    )
    assert tables.leases.renew(FRESH.with_(owner="w1", counter=7)).counter == 8
