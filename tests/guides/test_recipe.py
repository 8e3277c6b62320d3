"""The recipe of docs/functions.md is exactly once: crashes, repeats, and ranges that overlap.

`make test` runs it on SQLite, `make test-postgres` on a real PostgreSQL.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.recipe import Database, postgres, sqlite
from tests.support.worker_world import World

MakeDatabase = Callable[[], Database]
SHARDS = ("shardId-000000000000", "shardId-000000000001")


class CrashError(BaseException):
    """The process ends: nothing handles it."""


@pytest.fixture(scope="module")
def server() -> Iterator[MakeDatabase]:
    # A short path: it has the socket of the server.
    with tempfile.TemporaryDirectory(prefix="kcl-pg-") as folder, postgres(Path(folder)) as make:
        yield make


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeDatabase:
    if request.param == "postgres":
        made: MakeDatabase = request.getfixturevalue("server")
        return made
    numbers = itertools.count()

    def of_sqlite() -> Database:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return sqlite(folder)

    return of_sqlite


def batch(shard: str, first: int, last: int) -> pa.Table:
    """The records from `first` to `last` (inclusive). A record has two sub-sequence numbers."""
    numbers = range(first, last + 1)
    return pa.table(
        {
            "stream": ["orders"] * len(numbers),
            "shard_id": [shard] * len(numbers),
            # Positions are numbers: "99" < "100"
            "sequence_number": [str(95 + number // 2) for number in numbers],
            "sub_sequence_number": pa.array([number % 2 for number in numbers], pa.int64()),
            "data": [data_of(shard, number) for number in numbers],
        }
    )


def data_of(shard: str, number: int) -> bytes:
    return f"{shard}/{number}".encode()


def of(shard: str, count: int) -> list[bytes]:
    return sorted(data_of(shard, number) for number in range(count))


def test_a_repeated_batch_adds_nothing(make: MakeDatabase) -> None:
    database = make()
    for _ in range(2):
        database.write(batch(SHARDS[0], 0, 9))
    database.write(batch(SHARDS[0], 10, 12))
    assert database.data() == of(SHARDS[0], 13)


@pytest.mark.parametrize("taken", [(0, 3), (0, 12), (5, 6), (5, 12), (0, 9)])
def test_a_range_that_overlaps_adds_what_is_new(make: MakeDatabase, taken: tuple[int, int]) -> None:
    """The lease has moved; the new owner continues after the last checkpoint, in other batches."""
    database = make()
    database.write(batch(SHARDS[0], 0, 9))
    database.write(batch(SHARDS[0], *taken))
    database.write(batch(SHARDS[0], taken[1] + 1, 20))
    assert database.data() == of(SHARDS[0], 21)


def test_a_crash_at_each_step(make: MakeDatabase) -> None:
    both = pa.concat_tables([batch(SHARDS[0], 0, 4), batch(SHARDS[1], 0, 4)])
    later = pa.concat_tables([batch(SHARDS[0], 3, 7), batch(SHARDS[1], 0, 5)])
    outcomes = set()
    for number in itertools.count(1):
        database, left = make(), [number]

        def step(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise CrashError

        database.step = step
        try:
            database.write(both)
        except CrashError:
            pass
        else:
            break
        database.step = lambda: None
        outcomes.add(len(database.data()))
        database.write(both)
        database.write(later)
        assert database.data() == sorted(of(SHARDS[0], 8) + of(SHARDS[1], 6))
    assert outcomes == {0, 10}, "all shards of the batch, or none"


def test_two_owners_that_write_at_the_same_time(make: MakeDatabase) -> None:
    """A paused worker goes on while the next owner of its leases writes."""
    database, errors = make(), []

    def write(tables: list[pa.Table]) -> None:
        for table in tables:
            try:
                database.write(table)
            except Exception as error:  # noqa: BLE001 (the test shows it)
                errors.append(error)

    def tables(seed: int) -> list[pa.Table]:
        rng = random.Random(seed)
        edges = [0, *sorted(rng.sample(range(1, 60), 12)), 60]
        return [
            pa.concat_tables([batch(shard, first, last - 1) for shard in SHARDS[:: (-1) ** seed]])
            for first, last in itertools.pairwise(edges)
        ]

    threads = [threading.Thread(target=write, args=(tables(seed),)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert database.data() == sorted(of(SHARDS[0], 60) + of(SHARDS[1], 60))


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_that_is_killed(make: MakeDatabase, seed: int) -> None:
    """Workers are killed before and after the commit of the database; leases move meanwhile."""
    database, rng = make(), random.Random(seed)
    world = World(shards=3, buffered=True, function=database.write)
    workers, number = [world.worker], 1
    kill_at = 0

    def step() -> None:
        nonlocal kill_at
        kill_at -= 1
        if kill_at == 0:
            raise CrashError

    database.step = step
    for turn in range(200):
        if turn % 4 == 0:
            world.put(*(f"{turn:03}-{one}".encode() for one in range(4)))
        if turn % 20 == 10:
            kill_at = rng.randrange(1, 12)
        if len(workers) < 2:
            number += 1
            workers.append(world.make_worker(f"w-{number}"))
            workers[-1].start_up()
        tick(world, workers)
    kill_at = 0
    for _ in range(2_000):
        if len(database.data()) >= len(world.sent):
            break
        tick(world, workers)
    assert number > 3, "workers were killed"
    assert database.data() == sorted(world.sent)


def tick(world: World, workers: list) -> None:
    for worker in list(workers):
        try:
            worker.lease_tick()
            worker.lead_tick()
            worker.fetch_tick()
            worker.process_tick()
        except CrashError:
            workers.remove(worker)
    world.clock.advance(0.05)
