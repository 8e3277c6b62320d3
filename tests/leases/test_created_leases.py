"""A leader creates leases in one transaction, whose condition is that it still has the lock."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.row import Lease, lease_to_item
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.tables import create_lease

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    aws_fixture,
    client_fixture,
    row,
    tables_fixture,
)

LOCK = LeaderLock("leader", 45_000, "4b33b2a6-6a8c-4a9a-9d5b-000000000001")
LEASES = tuple(
    Lease(f"shardId-{number:012d}", TRIM_HORIZON, hash_key_range=HashKeyRange(number, 9))
    for number in range(3)
)
KEYS = tuple(lease.lease_key for lease in LEASES)


def proof_of(tables, lock=LOCK):
    assert tables.coordinator.put_lock(lock, replacing=None)
    return tables.coordinator.proof_of_lock(lock)


def test_the_holder_of_the_lock_creates_all(tables):
    proof = proof_of(tables)
    before = tables.rows(tables.coordinator)
    assert tables.leases.create_leases(LEASES, proof) == KEYS
    assert [row(tables, key) for key in KEYS] == [lease_to_item(lease) for lease in LEASES]
    assert tables.rows(tables.coordinator) == before


def test_a_lease_that_has_a_row_is_not_touched(tables):
    proof = proof_of(tables)
    create_lease(tables.leases, LEASES[1].with_(checkpoint=SHARD_END, counter=7, owner="w2"))
    found = row(tables, KEYS[1])
    assert tables.leases.create_leases(LEASES, proof) == (KEYS[0], KEYS[2])
    assert row(tables, KEYS[1]) == found
    assert tables.leases.create_leases(LEASES, proof) == (), "again, all are there"


@pytest.mark.parametrize("change", ["another owner", "another version", "released"])
def test_a_leader_without_the_lock_creates_nothing(tables, change):
    proof = proof_of(tables)
    if change == "another version":
        assert tables.coordinator.heartbeat_lock(LOCK, "4b33b2a6-6a8c-4a9a-9d5b-000000000002")
    else:
        assert tables.coordinator.release_lock(LOCK)
    if change == "another owner":
        other = LeaderLock("other", 45_000, LOCK.version)
        assert tables.coordinator.put_lock(other, replacing=None)
    assert tables.leases.create_leases(LEASES, proof) is None
    assert tables.rows(tables.leases) == {}


@pytest.mark.parametrize("arrives", [True, False], ids=["answer lost", "request lost"])
def test_a_transaction_without_an_answer_is_repeated(tables, arrives):
    proof = proof_of(tables)
    (tables.lose_answer if arrives else tables.drop_request)("TransactWriteItems")
    with pytest.raises(UnavailableError):
        tables.leases.create_leases(LEASES, proof)
    assert set(tables.rows(tables.leases)) == (set(KEYS) if arrives else set())
    assert tables.leases.create_leases(LEASES, proof) == (() if arrives else KEYS)
    assert set(tables.rows(tables.leases)) == set(KEYS)
