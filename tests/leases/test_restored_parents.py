"""The rows of parents that were deleted by hand: created at one instant at which the child's row
proves that no leader has deleted them.
"""

import pytest

from kcl_pipeline.errors import LeaseLostError, UnavailableError
from kcl_pipeline.leases.row import Lease, lease_to_item
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.tables import create_lease
from tests.support.held_world import SETTINGS, World

# fixtures
from tests.support.lease_tables import (  # noqa: F401
    KEY,
    aws_fixture,
    client_fixture,
    owned,
    row,
    tables_fixture,
)

PARENTS = tuple(
    Lease(f"shardId-00000000000{number}", TRIM_HORIZON, hash_key_range=HashKeyRange(number, 9))
    for number in (1, 2)
)
KEYS = tuple(parent.lease_key for parent in PARENTS)


def child_of(tables, **attributes):
    return owned(tables, checkpoint=TRIM_HORIZON, parent_shard_ids=frozenset(KEYS), **attributes)


def test_the_rows_are_created_and_the_child_stays_as_it_is(tables):
    child = child_of(tables)
    before = row(tables)
    assert tables.leases.restore_parents(child, PARENTS) == KEYS
    assert [row(tables, key) for key in KEYS] == [lease_to_item(parent) for parent in PARENTS]
    assert row(tables) == before
    assert tables.leases.renew(child) is not None


def test_a_parent_that_has_a_row_is_not_touched(tables):
    child = child_of(tables)
    create_lease(tables.leases, PARENTS[0].with_(checkpoint=Position("7"), counter=4, owner="w2"))
    found = row(tables, KEYS[0])
    assert tables.leases.restore_parents(child, PARENTS) == KEYS[1:]
    assert row(tables, KEYS[0]) == found
    assert tables.leases.restore_parents(child, PARENTS) == (), "again, all are there"


@pytest.mark.parametrize("child", ["begun", "in flight", "finished", "gone", "at LATEST"])
def test_a_child_that_proves_nothing_restores_nothing(tables, child):
    lease = child_of(tables)
    match child:
        case "begun":
            tables.leases.update_checkpoint(lease, checkpoint=Position("7"))
        case "in flight":
            tables.leases.update_checkpoint(
                lease, checkpoint=TRIM_HORIZON, pending=Position("7"), pending_state=b"2"
            )
        case "finished":
            tables.leases.update_checkpoint(lease, checkpoint=SHARD_END)
        case "gone":
            tables.leases.delete(lease)
        case "at LATEST":
            tables.plant(tables.leases, row(tables) | {"checkpoint": {"S": "LATEST"}})
    before = tables.rows(tables.leases)
    assert tables.leases.restore_parents(lease, PARENTS) is None
    assert tables.rows(tables.leases) == before


def test_another_owner_of_the_child_is_no_hindrance(tables):
    """The counter is no condition: the child of another worker proves the same."""
    child = child_of(tables)
    tables.leases.assign(child, "w2")
    assert tables.leases.restore_parents(child, PARENTS) == KEYS


def test_a_child_without_parents_is_an_error(tables):
    with pytest.raises(ValueError, match="set"):
        tables.leases.restore_parents(owned(tables, checkpoint=TRIM_HORIZON), PARENTS)


@pytest.mark.parametrize("arrives", [True, False], ids=["answer lost", "request lost"])
def test_a_transaction_without_an_answer_is_made_again(tables, arrives):
    child = child_of(tables)
    (tables.lose_answer if arrives else tables.drop_request)("TransactWriteItems")
    with pytest.raises(UnavailableError):
        tables.leases.restore_parents(child, PARENTS)
    assert tables.leases.restore_parents(child, PARENTS) == (() if arrives else KEYS)
    assert set(tables.rows(tables.leases)) == {KEY, *KEYS}


# -- through the worker that holds the child -----------------------------------------------------


def held_child(world):
    held = world.gain()
    item = world.table.rows()[held.lease_key] | {"parentShardId": {"SS": list(KEYS)}}
    world.table.plant(item)
    held.lease = held.lease.with_(parent_shard_ids=frozenset(KEYS))
    return held


def test_a_lease_whose_row_proves_nothing_is_lost():
    world = World()
    held = held_child(world)
    world.table.erase(held.lease_key)
    with pytest.raises(LeaseLostError):
        world.leases.restore_parents(held, PARENTS)
    assert world.leases.held() == ()
    assert world.table.rows() == {}


def test_an_expired_lease_restores_nothing():
    world = World()
    held = held_child(world)
    world.clock.advance(SETTINGS.failover_time_millis / 1000 + 1)
    with pytest.raises(LeaseLostError):
        world.leases.restore_parents(held, PARENTS)
    assert set(world.table.rows()) == {held.lease_key}


def test_renewals_leave_the_row_alone_while_its_transaction_is_under_way():
    """Each would make the other fail with a conflict."""
    world = World()
    held = held_child(world)
    renewed = []
    world.table.hook(lambda *_call: renewed.append(world.leases.renew_all()), None)
    assert world.leases.restore_parents(held, PARENTS) == KEYS
    assert renewed == [0]
