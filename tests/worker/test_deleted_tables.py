"""The DynamoDB tables are deleted while workers run and the output table exists."""

from itertools import product

import pytest

from kcl_pipeline.errors import AccessDeniedError, OtherApplicationError, ThrottledError
from kcl_pipeline.events import AwsTrouble, RecordsLost
from tests.support.shortened import shortened
from tests.support.worker_world import World, numbered

PARENT = "shardId-000000000000"
ALL = ("leases", "rows", "coordinator")


def world_at(position, shards=2, is_function=False):
    sync = {"initial_position_in_stream": position}
    if position == "AT_TIMESTAMP":
        sync["initial_timestamp"] = "2020-01-01T00:00:00Z"
    world = World(shards=shards, is_function=is_function, shard_sync=sync)
    world.run(5)
    world.put(*numbered(10))
    world.run(5)
    assert world.data() == sorted(world.sent)
    return world


def delete(world, *names):
    for name in names or ALL:
        getattr(world, name).store.drop()


def split(world):
    world.model.call(
        "SplitShard", StreamName="orders", ShardToSplit=PARENT, NewStartingHashKey=str(2**126)
    )
    world.clock.advance(60)


def created(world):
    return [
        event.error
        for event in world.of(AwsTrouble)
        if event.operation == "creation of deleted tables"
    ]


SHORT = {
    ("LATEST", "never"),
    ("TRIM_HORIZON", "before"),
    ("LATEST", "after"),
    ("AT_TIMESTAMP", "after"),
}
"""Each position and each time of the split; `make test-long` has every pair."""


@pytest.mark.parametrize(
    ("position", "split_when"),
    shortened(
        product(["TRIM_HORIZON", "LATEST", "AT_TIMESTAMP"], ["never", "before", "after"]),
        SHORT.__contains__,
    ),
)
def test_all_tables_are_deleted_under_load(position, split_when):
    world = world_at(position)
    if split_when == "before":
        world.put(*numbered(5, "before-"))
        split(world)
    delete(world)
    world.put(*numbered(5, "deleted-"))
    if split_when == "after":
        split(world)
    for part in range(8):
        world.put(*numbered(5, f"p{part}-"))
        world.run(3)
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert len(created(world)) == len(ALL)
    assert not world.of(RecordsLost)


@pytest.mark.parametrize(
    ("position", "again"),
    shortened(
        product(["TRIM_HORIZON", "LATEST"], range(4)),
        {("LATEST", 0), ("TRIM_HORIZON", 2)}.__contains__,
    ),
)
def test_tables_are_deleted_again_and_again(position, again):
    world = world_at(position)
    for part in range(3):
        delete(world)
        world.put(*numbered(5, f"a{part}-"))
        world.run(1 + 3 * again)
        if part == 1:
            split(world)
        world.put(*numbered(5, f"b{part}-"))
        world.run(25)
    world.run(40)
    assert world.data() == sorted(world.sent)
    assert not world.of(RecordsLost)


@pytest.mark.parametrize("name", ALL)
def test_one_table_is_deleted(name):
    world = world_at("LATEST")
    delete(world, name)
    world.put(*numbered(5, "deleted-"))
    world.run(60)
    assert world.data() == sorted(world.sent)
    assert len(created(world)) == 1
    assert world.coordinator.read_application() is not None


def test_a_function_gets_all_records_again_as_with_kcl():
    world = world_at("TRIM_HORIZON", is_function=True)
    delete(world)
    world.run(60)
    assert len(created(world)) == 3
    assert world.data() == sorted(2 * world.sent)


def test_a_table_that_cannot_be_created_now_is_created_later(monkeypatch):
    world = world_at("LATEST")
    delete(world)
    ensure, failures = world.leases.ensure_exists, [ThrottledError("not now")] * 2

    def throttled():
        if failures:
            raise failures.pop()
        return ensure()

    monkeypatch.setattr(world.leases, "ensure_exists", throttled)
    world.put(*numbered(5, "deleted-"))
    world.run(60)
    assert created(world)[:2] == ["not now"] * 2
    assert world.data() == sorted(world.sent)


def test_an_identity_that_cannot_be_recorded_now_is_recorded_later(monkeypatch):
    world = world_at("LATEST")
    record = world.coordinator.read_application().identity
    delete(world)
    put, failures = world.coordinator.put_application, [AccessDeniedError("not now")]

    def denied(*given, **named):
        if failures:
            raise failures.pop()
        return put(*given, **named)

    monkeypatch.setattr(world.coordinator, "put_application", denied)
    world.run(60)
    assert "not now" in created(world)
    assert world.coordinator.read_application().identity == record


def test_tables_that_another_application_has_now_are_refused():
    world = world_at("LATEST")
    record = world.coordinator.read_application()
    delete(world)
    for table in (world.leases, world.rows, world.coordinator):
        table.ensure_exists()
    other = World(shards=1)
    for key, row in other.coordinator.rows().items():
        if key != "Leader":
            world.coordinator.plant({**row, **_of_another_stream(row)})
    assert world.coordinator.read_application() != record
    world.worker.coordination._tables.note()
    with pytest.raises(OtherApplicationError):
        world.worker.lead_tick()


def _of_another_stream(row):
    text = {key: value for key, value in row.items() if "orders" in str(value)}
    return {
        key: {kind: _renamed(one) for kind, one in value.items()} for key, value in text.items()
    }


def _renamed(one):
    return (
        [_renamed(part) for part in one]
        if isinstance(one, list)
        else str(one).replace('"orders"', '"others"').replace("stream/orders", "stream/others")
    )
