"""The leases of the shards that follow a finished one: created at one instant, and only while their
parent's row proves that none of them was finished before.
"""

import threading

import botocore.exceptions as botocore
import pytest

from kcl_pipeline.aws_calls import translated
from kcl_pipeline.errors import (
    AccessDeniedError,
    InvalidRequestError,
    LeaseLostError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.dynamodb import TransactionRefused, refused_condition
from kcl_pipeline.leases.row import Lease, lease_to_item
from kcl_pipeline.leases.store import Differs
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.row_store import holds
from kcl_pipeline.testing.tables import create_lease
from tests.support.held_world import SETTINGS, World

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

LEFT, RIGHT = (
    Lease(
        f"shardId-00000000000{number}",
        TRIM_HORIZON,
        parent_shard_ids=frozenset({KEY}),
        hash_key_range=HashKeyRange(number, number + 5),
    )
    for number in (1, 2)
)


def rows_of(tables):
    return set(tables.rows(tables.leases))


def test_the_children_and_their_parents_note_of_them(tables):
    lease = owned(tables)
    assert tables.leases.create_successors(lease, [LEFT, RIGHT])
    assert row(tables, LEFT.lease_key) == lease_to_item(LEFT)
    assert row(tables, RIGHT.lease_key) == lease_to_item(RIGHT)
    assert row(tables)["childShardIds"] == {"SS": [LEFT.shard_id, RIGHT.shard_id]}
    assert tables.leases.get(KEY) == lease.with_(
        child_shard_ids=frozenset({LEFT.shard_id, RIGHT.shard_id})
    )


def test_leases_of_one_of_several_streams(tables):
    stream = "123456789012:orders:1700000000"
    lease = owned(tables, lease_key=f"{stream}:{KEY}", stream=stream)
    child = LEFT.with_(lease_key=f"{stream}:{LEFT.shard_id}", stream=stream)
    assert tables.leases.create_successors(lease, [child])
    assert tables.leases.get(child.lease_key) == child
    assert row(tables, lease.lease_key)["childShardIds"] == {"SS": [LEFT.shard_id]}


def test_a_child_that_is_there_is_not_touched_and_the_others_are_created(tables):
    lease = owned(tables)
    create_lease(tables.leases, LEFT)
    begun = tables.leases.update_checkpoint(tables.leases.assign(LEFT, "w2"), checkpoint=END)
    tables.plant(tables.leases, row(tables, LEFT.lease_key) | {"future": {"S": "kept"}})
    assert tables.leases.create_successors(lease, [LEFT, RIGHT])
    assert tables.leases.get(LEFT.lease_key) == begun
    assert row(tables, LEFT.lease_key)["future"] == {"S": "kept"}
    assert tables.leases.get(RIGHT.lease_key) == RIGHT
    assert tables.leases.create_successors(lease, [LEFT, RIGHT]), "again, all are there"
    assert row(tables)["childShardIds"] == {"SS": [LEFT.shard_id, RIGHT.shard_id]}


@pytest.mark.parametrize("parent", ["gone", "finished"])
def test_a_parent_that_proves_nothing_gets_no_children(tables, parent):
    lease = owned(tables)
    if parent == "gone":
        tables.leases.delete(lease)
    else:
        tables.leases.update_checkpoint(lease, checkpoint=SHARD_END)
    before = tables.rows(tables.leases)
    assert not tables.leases.create_successors(lease, [LEFT, RIGHT])
    assert tables.rows(tables.leases) == before


def test_another_owner_of_the_parent_is_no_hindrance(tables):
    """The counter is no condition: what is created is what the new owner would create."""
    lease = owned(tables)
    tables.leases.assign(lease, "w2")
    assert tables.leases.create_successors(lease, [LEFT])
    assert rows_of(tables) == {KEY, LEFT.lease_key}


def test_no_successors_are_an_error(tables):
    with pytest.raises(ValueError, match="set"):
        tables.leases.create_successors(owned(tables), [])


@pytest.mark.parametrize("arrives", [True, False], ids=["answer lost", "request lost"])
def test_a_transaction_without_an_answer_is_made_again(tables, arrives):
    lease = owned(tables)
    (tables.lose_answer if arrives else tables.drop_request)("TransactWriteItems")
    with pytest.raises(UnavailableError):
        tables.leases.create_successors(lease, [LEFT, RIGHT])
    assert rows_of(tables) == ({KEY, LEFT.lease_key, RIGHT.lease_key} if arrives else {KEY})
    assert tables.leases.create_successors(lease, [LEFT, RIGHT])
    assert rows_of(tables) == {KEY, LEFT.lease_key, RIGHT.lease_key}


def test_both_parents_of_a_merge_create_their_child_at_the_same_time(tables):
    parents = [owned(tables, lease_key=f"shardId-00000000000{number}") for number in (7, 8)]
    child = LEFT.with_(parent_shard_ids=frozenset(parent.shard_id for parent in parents))
    done = []

    def create(parent):
        done.append(tables.leases.create_successors(parent, [child]))

    threads = [threading.Thread(target=create, args=(parent,)) for parent in parents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [True, True]
    assert tables.leases.get(child.lease_key) == child
    for parent in parents:
        assert row(tables, parent.lease_key)["childShardIds"] == {"SS": [child.shard_id]}


def test_a_missing_attribute_does_not_differ():
    condition = Differs("checkpoint", {"S": "SHARD_END"})
    assert not holds(condition, None)
    assert not holds(condition, {})
    assert not holds(condition, {"checkpoint": {"S": "SHARD_END"}})
    assert holds(condition, {"checkpoint": {"S": "5"}})


def canceled(*codes):
    response = {
        "Error": {"Code": "TransactionCanceledException", "Message": "why"},
        "CancellationReasons": [{"Code": code} for code in codes],
    }
    error = botocore.ClientError(response, "TransactWriteItems")
    return translated(error, "dynamodb", "TransactWriteItems", "table t", refused_condition)


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (["None", "TransactionConflict"], ThrottledError),
        (["ConditionalCheckFailed", "TransactionConflict"], ThrottledError),
        (["ThrottlingError", "None"], ThrottledError),
        (["ProvisionedThroughputExceeded"], ThrottledError),
        (["ValidationError", "None"], InvalidRequestError),
        ([], InvalidRequestError),
    ],
)
def test_why_a_transaction_was_canceled(codes, kind):
    assert type(canceled(*codes)) is kind


def test_the_places_of_refused_writes():
    refused = canceled("None", "ConditionalCheckFailed", "None", "ConditionalCheckFailed")
    assert isinstance(refused, TransactionRefused)
    assert refused.indexes == {1, 3}


def test_a_denied_transaction_names_the_actions_that_it_needs():
    response = {"Error": {"Code": "AccessDeniedException", "Message": "no"}}
    error = translated(
        botocore.ClientError(response, "TransactWriteItems"),
        "dynamodb",
        "TransactWriteItems",
        "table t",
        refused_condition,
    )
    assert isinstance(error, AccessDeniedError)
    assert "dynamodb:PutItem and dynamodb:UpdateItem" in str(error)


# -- through the worker that holds the parent ----------------------------------------------------


def test_a_lease_whose_row_proves_nothing_is_lost():
    world = World()
    held = world.gain()
    world.table.erase(held.lease_key)
    with pytest.raises(LeaseLostError):
        world.leases.create_successors(held, [LEFT])
    assert world.leases.held() == ()
    assert world.table.rows() == {}


def test_an_expired_lease_creates_nothing():
    world = World()
    held = world.gain()
    world.clock.advance(SETTINGS.failover_time_millis / 1000 + 1)
    with pytest.raises(LeaseLostError):
        world.leases.create_successors(held, [LEFT])
    assert set(world.table.rows()) == {held.lease_key}


def test_renewals_leave_the_row_alone_while_its_transaction_is_under_way():
    """Each would make the other fail with a conflict."""
    world = World()
    held = world.gain()
    renewed = []
    world.table.hook(lambda *_call: renewed.append(world.leases.renew_all()), None)
    world.leases.create_successors(held, [LEFT])
    assert renewed == [0]
