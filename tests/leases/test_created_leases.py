"""A leader creates leases in one transaction, whose condition is that it still has the lock."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.serialization import lease_to_item
from kcl_pipeline.leases.tables import LeaderLock
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.tables import create_lease

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    aws_fixture,
    client_fixture,
    row,
    twin_fixture,
)

LOCK = LeaderLock("leader", 45_000, "4b33b2a6-6a8c-4a9a-9d5b-000000000001")
LEASES = tuple(
    Lease(f"shardId-{number:012d}", TRIM_HORIZON, hash_key_range=HashKeyRange(number, 9))
    for number in range(3)
)
KEYS = tuple(lease.lease_key for lease in LEASES)


def proof_of(twin, lock=LOCK):
    assert twin.coordinator.put_lock(lock, replacing=None)
    return twin.coordinator.proof_of_lock(lock)


def test_the_holder_of_the_lock_creates_all(twin):
    proof = proof_of(twin)
    before = twin.rows(twin.coordinator)
    assert twin.leases.create_leases(LEASES, proof) == KEYS
    assert [row(twin, key) for key in KEYS] == [lease_to_item(lease) for lease in LEASES]
    assert twin.rows(twin.coordinator) == before


def test_a_lease_that_has_a_row_is_not_touched(twin):
    proof = proof_of(twin)
    create_lease(twin.leases, LEASES[1].with_(checkpoint=SHARD_END, counter=7, owner="w2"))
    found = row(twin, KEYS[1])
    assert twin.leases.create_leases(LEASES, proof) == (KEYS[0], KEYS[2])
    assert row(twin, KEYS[1]) == found
    assert twin.leases.create_leases(LEASES, proof) == (), "again, all are there"


@pytest.mark.parametrize("change", ["another owner", "another version", "released"])
def test_a_leader_without_the_lock_creates_nothing(twin, change):
    proof = proof_of(twin)
    if change == "another version":
        assert twin.coordinator.heartbeat_lock(LOCK, "4b33b2a6-6a8c-4a9a-9d5b-000000000002")
    else:
        assert twin.coordinator.release_lock(LOCK)
    if change == "another owner":
        other = LeaderLock("other", 45_000, LOCK.version)
        assert twin.coordinator.put_lock(other, replacing=None)
    assert twin.leases.create_leases(LEASES, proof) is None
    assert twin.rows(twin.leases) == {}


@pytest.mark.parametrize("arrives", [True, False], ids=["answer lost", "request lost"])
def test_a_transaction_without_an_answer_is_repeated(twin, arrives):
    proof = proof_of(twin)
    (twin.lose_answer if arrives else twin.drop_request)("TransactWriteItems")
    with pytest.raises(UnavailableError):
        twin.leases.create_leases(LEASES, proof)
    assert set(twin.rows(twin.leases)) == (set(KEYS) if arrives else set())
    assert twin.leases.create_leases(LEASES, proof) == (() if arrives else KEYS)
    assert set(twin.rows(twin.leases)) == set(KEYS)
