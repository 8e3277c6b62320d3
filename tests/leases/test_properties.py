"""Random sequences of operations give the same answers and rows on both kinds of tables.

The invariants of a lease row hold.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.row import Lease, is_lease, lease_from_item, lease_to_item
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from kcl_pipeline.testing.tables import create_lease
from tests.support.examples import examples
from tests.support.lease_tables import (
    DynamoTables,
    MemoryTables,
    aws_fixture,  # noqa: F401
    client_fixture,  # noqa: F401
)

KEYS = ("shardId-0", "shardId-1")
WORKERS = ("w1", "w2", "w3")
PLACES = (TRIM_HORIZON, Position("5"), Position("5", 2), Position("9"), SHARD_END)


def step(rng, views):
    """One operation as (name, function of table), on a lease as some worker once saw it: perhaps
    stale.
    """
    key = rng.choice(KEYS)
    seen = views.get(key) or [Lease(key, TRIM_HORIZON)]
    lease = seen[-1] if rng.random() < 0.7 else rng.choice(seen)
    worker = rng.choice(WORKERS)
    place = rng.choice(PLACES)
    pending = rng.choice((None, *PLACES))
    state = rng.choice((None, b"1", str(lease.counter + 1).encode()))
    operations = {
        "create": lambda t: create_lease(
            t,
            Lease(
                key,
                TRIM_HORIZON,
                parent_shard_ids=frozenset({"shardId-p"}),
                hash_key_range=HashKeyRange(0, 9),
            ),
        ),
        "renew": lambda t: t.renew(lease, rng_value),
        "checkpoint": lambda t: t.update_checkpoint(
            lease, checkpoint=place, pending=pending, pending_state=state
        ),
        "assign unrenewed": lambda t: t.assign(lease, worker, unrenewed=True),
        "assign": lambda t: t.assign(lease, worker),
        "handoff": lambda t: t.initiate_handoff(lease, worker),
        "evict": lambda t: t.evict(lease),
        "children": lambda t: t.set_child_shard_ids(key, ["shardId-7", "shardId-8"]),
        "range": lambda t: t.set_hash_key_range(key, HashKeyRange(1, 7)),
        "delete": lambda t: t.delete(lease),
        "get": lambda t: t.get(key),
        "list": lambda t: sorted(t.list_leases().leases, key=lambda r: r.lease_key),
        "index": lambda t: t.lease_keys_of(worker),
    }
    rng_value = rng.choice((None, 0.0, 1.23456789, 250.5))
    weights = [1 if name == "delete" else 4 for name in operations]
    name = rng.choices(list(operations), weights)[0]
    return key, name, operations[name]


def answered(tables, call, lost):
    """The answer, or the refusal of a step back; with `lost` the first attempt's answer is lost,
    and the call is made again.
    """
    try:
        if lost:
            tables.lose_answer(lost)
            try:
                call(tables.leases)
            except UnavailableError:
                return call(tables.leases)
        return call(tables.leases)
    except ValueError as error:
        return str(error)


LOSABLE = {"create": "PutItem", "delete": "DeleteItem"}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 8))]
)
def test_both_kinds_of_tables_do_the_same(aws, client, seed):
    rng = random.Random(seed)
    memory, dynamo = MemoryTables(), DynamoTables(aws, client)
    views = {}
    done = set()
    for number in range(300):
        key, name, call = step(rng, views)
        lost = (
            LOSABLE.get(name, "UpdateItem")
            if name not in ("get", "list", "index") and rng.random() < 0.15
            else None
        )
        before = memory.rows(memory.leases)
        mine, theirs = answered(memory, call, lost), answered(dynamo, call, lost)
        aws.fault_rules.replace([])
        memory.leases.hook(None, None)
        assert mine == theirs, f"seed {seed}, step {number}: {name} on {key}"
        rows = memory.rows(memory.leases)
        assert rows == dynamo.rows(dynamo.leases), f"seed {seed}, step {number}: {name} on {key}"
        check_rows(before, rows, name)
        if isinstance(mine, Lease):
            views.setdefault(key, []).append(mine)
            done.add(name)
    assert done >= {"renew", "checkpoint", "assign", "handoff", "evict", "get"}


def check_rows(before, rows, name):
    for key, item in rows.items():
        lease = lease_from_item(item)
        assert lease.checkpoint_owner is None or lease.checkpoint_owner != lease.owner
        assert not any("NULL" in value or value.get("S") == "" for value in item.values())
        if key not in before:
            continue
        old = lease_from_item(before[key])
        assert lease.checkpoint >= old.checkpoint
        if name in ("handoff", "children", "range", "get", "list", "index", "create"):
            assert lease.counter == old.counter
        else:
            assert lease.counter in (old.counter, old.counter + 1)
        if lease.actual_owner != old.actual_owner:
            assert lease.counter == old.counter + 1


names = st.text("abcdefghijklmnopqrstuvwxyz-0123456789", min_size=1, max_size=12)
positions = st.one_of(
    st.sampled_from([TRIM_HORIZON, LATEST, AT_TIMESTAMP, SHARD_END]),
    st.builds(lambda n, s: Position(str(n), s), st.integers(0, 2**186), st.integers(0, 1000)),
)
ranges = (
    st.tuples(st.integers(0, MAX_HASH_KEY), st.integers(0, MAX_HASH_KEY))
    .filter(lambda p: p[0] < p[1])
    .map(lambda p: HashKeyRange(*p))
)


@st.composite
def leases(draw):
    stream = draw(
        st.none()
        | st.builds(
            lambda a, n, e: f"{a}:{n}:{e}", st.integers(1, 10**12), names, st.integers(1, 2**33)
        )
    )
    shard_id = draw(names)
    pending = draw(st.none() | positions)
    return Lease(
        lease_key=shard_id if stream is None else f"{stream}:{shard_id}",
        checkpoint=draw(positions),
        counter=draw(st.integers(0, 2**62)),
        owner=draw(st.none() | names),
        checkpoint_owner=draw(st.none() | names),
        owner_switches_since_checkpoint=draw(st.integers(0, 2**31)),
        pending_checkpoint=pending,
        pending_checkpoint_state=draw(st.none() | st.binary(min_size=1, max_size=30))
        if pending is not None
        else None,
        parent_shard_ids=draw(st.frozensets(names, max_size=2)),
        child_shard_ids=draw(st.frozensets(names, max_size=2)),
        hash_key_range=draw(st.none() | ranges),
        throughput_kbps=draw(st.none() | st.integers(0, 10**9).map(lambda n: n / 1000)),
        stream=stream,
    )


@given(leases())
@examples(200)
def test_a_lease_survives_its_row(lease):
    item = lease_to_item(lease)
    assert is_lease(item)
    assert lease_from_item(item) == lease
    assert lease_from_item(item | {"future": {"BOOL": True}}) == lease


def test_rows_that_java_writes_oddly_can_be_read():
    item = lease_to_item(Lease("s", TRIM_HORIZON, hash_key_range=HashKeyRange(0, 1)))
    odd = item | {
        "pendingCheckpoint": {"S": ""},
        "pendingCheckpointState": {"N": "0"},
        "leaseOwner": {"NULL": True},
        "parentShardId": {"NULL": True},
        "leaseCounter": {"N": "7.0"},
    }
    del odd["checkpointSubSequenceNumber"]
    assert lease_from_item(odd) == Lease(
        "s", TRIM_HORIZON, counter=7, hash_key_range=HashKeyRange(0, 1)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("leaseCounter", None),
        ("leaseCounter", {"S": "1"}),
        ("leaseCounter", {"N": "1.5"}),
        ("ownerSwitchesSinceCheckpoint", None),
        ("checkpoint", None),
        ("checkpoint", {"S": "NOWHERE"}),
        ("startingHashKey", None),
        ("endingHashKey", {"S": "0"}),
        ("endingHashKey", {"S": "ten"}),
    ],
)
def test_rows_that_cannot_be_read_say_why(name, value):
    item = lease_to_item(Lease("s", TRIM_HORIZON, hash_key_range=HashKeyRange(0, 1)))
    del item[name]
    if value is not None:
        item[name] = value
    with pytest.raises(ValueError, match="the row s is not a lease that can be read"):
        lease_from_item(item)
