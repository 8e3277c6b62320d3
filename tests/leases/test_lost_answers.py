"""The lease table under lost requests, lost answers and races, on both kinds of tables."""

import threading

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.tables import create_lease

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    END,
    FRESH,
    KEY,
    aws_fixture,
    client_fixture,
    owned,
    row,
    tables_fixture,
)

WRITES = {
    "create": ("PutItem", lambda t: FRESH, lambda t, _: create_lease(t, FRESH)),
    "renew": ("UpdateItem", owned, lambda t, lease: t.renew(lease, 2.0)),
    "renew in handoff": (
        "UpdateItem",
        lambda t: t.leases.initiate_handoff(owned(t), "w2"),
        lambda t, lease: t.renew(lease),
    ),
    "checkpoint": (
        "UpdateItem",
        owned,
        lambda t, lease: t.update_checkpoint(lease, checkpoint=END),
    ),
    "prepare": (
        "UpdateItem",
        owned,
        lambda t, lease: t.update_checkpoint(
            lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2"
        ),
    ),
    "assign unrenewed": (
        "UpdateItem",
        owned,
        lambda t, lease: t.assign(lease, "w2", unrenewed=True),
    ),
    "assign": ("UpdateItem", owned, lambda t, lease: t.assign(lease, "w2")),
    "assign again": ("UpdateItem", owned, lambda t, lease: t.assign(lease, "w1")),
    "assign free": (
        "UpdateItem",
        lambda t: t.leases.evict(owned(t)),
        lambda t, lease: t.assign(lease, "w2"),
    ),
    "complete handoff": (
        "UpdateItem",
        lambda t: t.leases.initiate_handoff(owned(t), "w2"),
        lambda t, lease: t.assign(lease, "w2"),
    ),
    "initiate handoff": ("UpdateItem", owned, lambda t, lease: t.initiate_handoff(lease, "w2")),
    "evict": ("UpdateItem", owned, lambda t, lease: t.evict(lease)),
    "cancel handoff": (
        "UpdateItem",
        lambda t: t.leases.initiate_handoff(owned(t), "w2"),
        lambda t, lease: t.evict(lease),
    ),
    "children": ("UpdateItem", owned, lambda t, lease: t.set_child_shard_ids(KEY, ["shardId-1"])),
    "hash range": (
        "UpdateItem",
        owned,
        lambda t, lease: t.set_hash_key_range(KEY, HashKeyRange(3, 4)),
    ),
    "delete": ("DeleteItem", owned, lambda t, lease: t.delete(lease)),
}


OF_THE_OWNER = {"renew", "renew in handoff", "checkpoint", "prepare"}
"""A repetition is refused. What it means, only `HeldLeases` can say: `test_adoption.py`."""


@pytest.mark.parametrize("name", [name for name in WRITES if name not in OF_THE_OWNER])
def test_a_write_whose_answer_was_lost_is_true_when_repeated(tables, name):
    operation, prepare, write = WRITES[name]
    lease = prepare(tables)
    tables.lose_answer(operation)
    with pytest.raises(UnavailableError, match=operation):
        write(tables.leases, lease)
    after_loss = row(tables)
    answer = write(tables.leases, lease)
    assert answer
    assert row(tables) == after_loss
    if isinstance(answer, Lease):
        assert answer == tables.leases.get(KEY)


@pytest.mark.parametrize("name", sorted(OF_THE_OWNER))
def test_a_write_of_the_owner_whose_answer_was_lost_is_refused_when_repeated(tables, name):
    operation, prepare, write = WRITES[name]
    lease = prepare(tables)
    tables.lose_answer(operation)
    with pytest.raises(UnavailableError, match=operation):
        write(tables.leases, lease)
    after_loss = row(tables)
    assert write(tables.leases, lease) is None
    assert row(tables) == after_loss
    assert write(tables.leases, tables.leases.get(KEY))


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_never_arrived_is_made_when_repeated(tables, name):
    operation, prepare, write = WRITES[name]
    lease = prepare(tables)
    before = row(tables)
    tables.drop_request(operation)
    with pytest.raises(UnavailableError, match=operation):
        write(tables.leases, lease)
    assert row(tables) == before
    assert write(tables.leases, lease)
    assert row(tables) != before


def test_a_renewal_does_not_take_the_progress_of_another_process_for_its_own(tables):
    lease = owned(tables)
    assert tables.leases.update_checkpoint(
        lease, checkpoint=lease.checkpoint, pending=END, pending_state=b"2"
    )
    assert tables.leases.renew(lease) is None


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


def test_eight_threads_race_for_one_lease(tables):
    lease = owned(tables)
    for _ in range(6):
        results = race(
            [
                lambda w=w, lease=lease: tables.leases.assign(lease, f"racer{w}", unrenewed=True)
                for w in range(8)
            ]
        )
        winners = [r for r in results if r is not None]
        assert len(winners) == 1
        lease = tables.leases.get(KEY)
        assert lease == winners[0]


def test_eight_leaders_assign_one_lease_to_different_workers(tables):
    create_lease(tables.leases, FRESH)
    results = race([lambda w=w: tables.leases.assign(FRESH, f"w{w}") for w in range(8)])
    assert sum(r is not None for r in results) == 1
    assert tables.leases.get(KEY).counter == 1


def test_no_counter_is_used_twice(tables):
    """Eight threads prepare with numbers from their own counters: every acknowledged write has a
    counter of its own.
    """
    owned(tables)

    def prepare_five():
        made = []
        for _ in range(200):
            lease = tables.leases.get(KEY)
            state = f"{threading.get_ident()}-{len(made)}".encode()
            done = tables.leases.update_checkpoint(
                lease, checkpoint=TRIM_HORIZON, pending=END, pending_state=state
            )
            if done is not None:
                made.append(done.counter)
            if len(made) == 5:
                return made
        return made

    counters = [n for made in race([prepare_five] * 8) for n in made]
    assert len(counters) == 40
    assert sorted(counters) == list(range(2, 42))
