"""The lease table: every operation's condition and effect, on both twins (protocol §1.4, appendix A)."""

import threading

import pytest
from lease_twins import aws_fixture, client_fixture, twin_fixture  # noqa: F401 (fixtures)

from kcl_pipeline.errors import Unavailable
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.sequence import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange

KEY = "shardId-000000000000"
HALF = 170141183460469231731687303715884105727
RANGE = HashKeyRange(0, HALF)
FRESH = Lease(KEY, TRIM_HORIZON, hash_key_range=RANGE)
FRESH_ITEM = {
    "leaseKey": {"S": KEY},
    "entityType": {"S": "LEASE"},
    "leaseCounter": {"N": "0"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "TRIM_HORIZON"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": str(HALF)},
}
END = Position("49650000000000000000000000000000000000000000000000000002", 0)


def row(twin, key=KEY):
    return twin.rows(twin.leases).get(key)


def owned(twin, owner="w1", **changes):
    """A lease in the table that `owner` holds."""
    twin.leases.create_lease(FRESH.with_(**changes))
    return twin.leases.assign(FRESH.with_(**changes), owner)


def test_appendix_a1_to_a4_the_life_of_a_row(twin):
    table = twin.leases
    assert table.create_lease(FRESH)
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
    assert (handoff.owner, handoff.checkpoint_owner, handoff.counter, handoff.actual_owner) == ("w2", "w1", 7, "w1")

    renewed = table.renew(lease)
    done = table.assign(renewed, "w2")
    assert row(twin) == a2 | {"leaseOwner": {"S": "w2"}, "leaseCounter": {"N": "9"}}
    assert done == table.get(KEY)


def test_appendix_a5_a6_children_and_the_end(twin):
    child = Lease(
        "shardId-000000000003", TRIM_HORIZON, parent_shard_ids=frozenset({KEY}), hash_key_range=HashKeyRange(0, 85070591730234615865843651857942052863)
    )
    twin.leases.create_lease(child)
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
    lease = owned_multi = Lease(key, TRIM_HORIZON, hash_key_range=RANGE, stream="123456789012:orders:1700000000")
    twin.leases.create_lease(owned_multi)
    assert row(twin, key) == FRESH_ITEM | {"leaseKey": {"S": key}, "streamName": {"S": "123456789012:orders:1700000000"}, "shardId": {"S": KEY}}
    lease = twin.leases.assign(lease, "w1")
    prepared = twin.leases.update_checkpoint(lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2")
    assert row(twin, key)["pendingCheckpoint"] == {"S": END.sequence_number}
    assert row(twin, key)["pendingCheckpointSubSequenceNumber"] == {"N": "0"}
    assert row(twin, key)["pendingCheckpointState"] == {"B": b"2"}
    assert (prepared.pending_checkpoint, prepared.pending_checkpoint_state, prepared.counter) == (END, b"2", 2)
    assert twin.leases.get(key) == prepared
    moved = twin.leases.update_checkpoint(prepared, checkpoint=END)
    assert moved.pending_checkpoint is None
    assert not {name for name in row(twin, key) if name.startswith("pending")}


def test_state_of_an_earlier_prepare_goes_when_the_next_has_none(twin):
    lease = owned(twin)
    lease = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"2")
    lease = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert lease.pending_checkpoint == END
    assert lease.pending_checkpoint_state is None
    assert "pendingCheckpointState" not in row(twin)


def test_create_does_not_touch_a_row_that_is_there(twin):
    lease = owned(twin)
    before = row(twin)
    assert not twin.leases.create_lease(FRESH)
    assert row(twin) == before
    assert twin.leases.get(KEY) == lease
    assert twin.leases.get("shardId-9") is None
    assert twin.leases.get(KEY, consistent=False) == lease


def test_writes_on_a_row_that_is_gone_make_no_row(twin):
    ghost = FRESH.with_(owner="w1", counter=3)
    handoff = ghost.with_(owner="w2", checkpoint_owner="w1")
    table = twin.leases
    assert table.renew(ghost) is None
    assert table.renew(handoff) is None
    assert table.update_checkpoint(ghost, checkpoint=END) is None
    assert table.take(ghost, "w2") is None
    assert table.assign(ghost, "w2") is None
    assert table.assign(FRESH, "w2") is None
    assert table.initiate_handoff(ghost, "w2") is None
    assert table.evict(ghost) is None
    assert not table.set_child_shard_ids(KEY, ["shardId-1"])
    assert not table.set_hash_key_range(KEY, RANGE)
    assert table.delete(ghost)
    assert twin.rows(table) == {}


def test_a_stale_counter_is_refused_everywhere_it_is_a_condition(twin):
    stale = owned(twin)
    twin.leases.renew(twin.leases.renew(stale))
    before = row(twin)
    assert twin.leases.renew(stale) is None
    assert twin.leases.update_checkpoint(stale, checkpoint=END) is None
    assert twin.leases.take(stale, "w2") is None
    assert twin.leases.evict(stale) is None
    assert row(twin) == before


def test_a_checkpoint_is_refused_when_another_own_write_has_the_same_counter(twin):
    lease = owned(twin)
    twin.leases.renew(lease)
    assert twin.leases.update_checkpoint(lease, checkpoint=END) is None
    other = twin.leases.get(KEY)
    twin.leases.update_checkpoint(other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"3")
    assert twin.leases.update_checkpoint(other, checkpoint=TRIM_HORIZON, pending=END, pending_state=b"4") is None
    assert twin.leases.update_checkpoint(other, checkpoint=TRIM_HORIZON, pending=Position("7"), pending_state=b"3") is None
    assert twin.leases.get(KEY).pending_checkpoint_state == b"3"


def test_take(twin):
    lease = owned(twin)
    taken = twin.leases.take(lease, "w2")
    assert (taken.owner, taken.counter, taken.owner_switches_since_checkpoint) == ("w2", 2, 1)
    handoff = twin.leases.initiate_handoff(taken, "w3")
    taken = twin.leases.take(handoff, "w4")
    assert (taken.owner, taken.checkpoint_owner, taken.counter, taken.owner_switches_since_checkpoint) == ("w4", None, 3, 2)
    assert "checkpointOwner" not in row(twin)


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
    """KCL does not count a handoff that ends as planned, but one that gives the lease back, or to a third worker."""
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
    table.create_lease(FRESH)
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
    assert (renewed.owner, renewed.checkpoint_owner, renewed.counter, renewed.throughput_kbps) == ("w2", "w1", 2, 1.0)
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
    assert (done.owner, done.checkpoint_owner, done.counter, done.checkpoint) == ("w2", "w1", 2, END)


def test_checkpoint_resets_owner_switches_and_prepare_does_not(twin):
    lease = twin.leases.assign(owned(twin), "w2")
    prepared = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END)
    assert prepared.owner_switches_since_checkpoint == 1
    assert twin.leases.update_checkpoint(prepared, checkpoint=END).owner_switches_since_checkpoint == 0


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
    twin.leases.create_lease(FRESH)
    twin.plant(twin.leases, {name: value for name, value in FRESH_ITEM.items() if name != "entityType"} | {"leaseKey": {"S": "shardId-1"}})
    twin.plant(twin.leases, FRESH_ITEM | {"leaseKey": {"S": "x"}, "entityType": {"S": "SOMETHING_NEW"}})
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
        twin.leases.create_lease(lease)
        if number:
            twin.leases.assign(lease, f"w{number % 2}")
    assert twin.leases.lease_keys_of("w0") == ("shardId-2", "shardId-4")
    assert twin.leases.lease_keys_of("w1") == ("shardId-1", "shardId-3")
    twin.leases.initiate_handoff(twin.leases.get("shardId-1"), "w0")
    assert twin.leases.lease_keys_of("w0") == ("shardId-1", "shardId-2", "shardId-4")
    assert twin.leases.lease_keys_of("nobody") == ()


def test_unknown_attributes_survive_every_write(twin):
    foreign = {"futureText": {"S": "x"}, "futureMap": {"M": {"a": {"L": [{"N": "1"}]}}}, "futureSet": {"SS": ["a", "b"]}}
    twin.plant(twin.leases, FRESH_ITEM | foreign)
    table = twin.leases
    lease = table.renew(table.assign(table.get(KEY), "w1"), 3.5)
    lease = table.update_checkpoint(lease, checkpoint=END, pending=Position("8"), pending_state=b"3")
    lease = table.take(lease, "w2")
    lease = table.renew(table.initiate_handoff(lease, "w3"))
    lease = table.evict(table.assign(lease, "w3"))
    table.set_child_shard_ids(KEY, ["shardId-1"])
    table.set_hash_key_range(KEY, HashKeyRange(1, 2))
    assert {name: row(twin)[name] for name in foreign} == foreign
    assert row(twin)["startingHashKey"] == {"S": "1"}


WRITES = {
    "create": ("PutItem", lambda t: FRESH, lambda t, _: t.create_lease(FRESH)),
    "renew": ("UpdateItem", owned, lambda t, lease: t.renew(lease, 2.0)),
    "renew in handoff": ("UpdateItem", lambda t: t.leases.initiate_handoff(owned(t), "w2"), lambda t, lease: t.renew(lease)),
    "checkpoint": ("UpdateItem", owned, lambda t, lease: t.update_checkpoint(lease, checkpoint=END)),
    "prepare": ("UpdateItem", owned, lambda t, lease: t.update_checkpoint(lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2")),
    "take": ("UpdateItem", owned, lambda t, lease: t.take(lease, "w2")),
    "assign": ("UpdateItem", owned, lambda t, lease: t.assign(lease, "w2")),
    "assign again": ("UpdateItem", owned, lambda t, lease: t.assign(lease, "w1")),
    "assign free": ("UpdateItem", lambda t: t.leases.evict(owned(t)), lambda t, lease: t.assign(lease, "w2")),
    "complete handoff": ("UpdateItem", lambda t: t.leases.initiate_handoff(owned(t), "w2"), lambda t, lease: t.assign(lease, "w2")),
    "initiate handoff": ("UpdateItem", owned, lambda t, lease: t.initiate_handoff(lease, "w2")),
    "evict": ("UpdateItem", owned, lambda t, lease: t.evict(lease)),
    "cancel handoff": ("UpdateItem", lambda t: t.leases.initiate_handoff(owned(t), "w2"), lambda t, lease: t.evict(lease)),
    "children": ("UpdateItem", owned, lambda t, lease: t.set_child_shard_ids(KEY, ["shardId-1"])),
    "hash range": ("UpdateItem", owned, lambda t, lease: t.set_hash_key_range(KEY, HashKeyRange(3, 4))),
    "delete": ("DeleteItem", owned, lambda t, lease: t.delete(lease)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_whose_answer_was_lost_is_true_when_repeated(twin, name):
    operation, prepare, write = WRITES[name]
    lease = prepare(twin)
    twin.lose_answer(operation)
    with pytest.raises(Unavailable, match=operation):
        write(twin.leases, lease)
    after_loss = row(twin)
    answer = write(twin.leases, lease)
    assert answer
    assert row(twin) == after_loss
    if isinstance(answer, Lease):
        assert answer == twin.leases.get(KEY)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_never_arrived_is_made_when_repeated(twin, name):
    operation, prepare, write = WRITES[name]
    lease = prepare(twin)
    before = row(twin)
    twin.drop_request(operation)
    with pytest.raises(Unavailable, match=operation):
        write(twin.leases, lease)
    assert row(twin) == before
    assert write(twin.leases, lease)
    assert row(twin) != before


def test_renewal_adopts_a_prepare_and_a_handoff_behind_lost_answers(twin):
    lease = owned(twin)
    twin.lose_answer("UpdateItem")
    with pytest.raises(Unavailable):
        twin.leases.update_checkpoint(lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2")
    twin.leases.initiate_handoff(lease, "w2")
    adopted = twin.leases.renew(lease)
    assert adopted == twin.leases.get(KEY)
    assert (adopted.counter, adopted.pending_checkpoint, adopted.owner, adopted.checkpoint_owner) == (2, END, "w2", "w1")


def race(calls):
    start = threading.Barrier(len(calls))
    results = [None] * len(calls)

    def run(index):
        start.wait(10)
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_eight_threads_race_for_one_lease(twin):
    lease = owned(twin)
    for _ in range(6):
        results = race([lambda w=w, lease=lease: twin.leases.take(lease, f"racer{w}") for w in range(8)])
        winners = [r for r in results if r is not None]
        assert len(winners) == 1
        lease = twin.leases.get(KEY)
        assert lease == winners[0]


def test_eight_leaders_assign_one_lease_to_different_workers(twin):
    twin.leases.create_lease(FRESH)
    results = race([lambda w=w: twin.leases.assign(FRESH, f"w{w}") for w in range(8)])
    assert sum(r is not None for r in results) == 1
    assert twin.leases.get(KEY).counter == 1


def test_no_counter_is_used_twice(twin):
    """Eight threads prepare with numbers from their own counters: every acknowledged write has a counter of its own."""
    owned(twin)

    def prepare_five():
        made = []
        for _ in range(200):
            lease = twin.leases.get(KEY)
            state = f"{threading.get_ident()}-{len(made)}".encode()
            done = twin.leases.update_checkpoint(lease, checkpoint=TRIM_HORIZON, pending=END, pending_state=state)
            if done is not None:
                made.append(done.counter)
            if len(made) == 5:
                return made
        return made

    counters = [n for made in race([prepare_five] * 8) for n in made]
    assert len(counters) == 40
    assert sorted(counters) == list(range(2, 42))
