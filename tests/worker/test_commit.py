"""The commit of batches: start, commit, end and checkpoint, on in-memory tables."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from kcl_pipeline.batch import Batch, Chunk
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    CommitStoppedError,
    LeaseLostError,
    SinkError,
    TableMismatchError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble, BatchRefused
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.position import (
    LATEST,
    NOTHING_STORED,
    SHARD_END,
    TRIM_HORIZON,
    Position,
    StoredPosition,
)
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import shard_key
from kcl_pipeline.testing.sink import InMemorySink, SinkFault
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import ShardConsumer
from tests.support import commit_world
from tests.support.commit_world import HUNDRED_KEYS, KEYS, NO_RECORDS, STREAM
from tests.support.memory_function import InMemoryFunction

KEY, CHILD = KEYS[0], KEYS[1]
NAME = shard_key(STREAM, KEY)


class World(commit_world.World):
    def stored(self, key: str = KEY) -> StoredPosition:
        return self.rows.stored(key)

    def taker(self, **settings: int):
        """Another worker with the same id and its own view of the rows, and its commit."""
        leases = HeldLeases(
            self.table.view(), "w", LeaseSettings(**settings), self.clock, self.events.append
        )
        return leases, self.committer_of(leases)

    def take(self, key: str = KEY, stream: StreamId = STREAM):
        """Take a lease and start its shard; return the consumer and the position or error."""
        leases, committer = self.taker()
        held = next(one for one in leases.discover() if one.lease_key == key)
        consumer = ShardConsumer(held, stream)
        return consumer, self.start({key: consumer}, committer)[key]

    def set_checkpoint(self, position: Position, key: str = KEY) -> None:
        row = self.table.get(key)
        assert row is not None
        assert self.table.update_checkpoint(row, checkpoint=position) is not None

    def rival(self, key: str, position: Position | None, *, ended: bool = False) -> None:
        """Let another worker set the position of a shard."""
        sink = InMemorySink(self.rows, clock=self.clock)
        found = sink.positions([shard_key(STREAM, key)])
        becomes = {name: old.moved(position, ended=ended) for name, old in found.shards.items()}
        written = self.writer.write(self.batch(0))
        assert sink.commit(
            found.table_id, written.files, found.shards, becomes, written.output_schema
        ).version


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World()


# -- start


def test_a_taker_continues_after_the_position_in_the_table(world: World) -> None:
    assert world.commit(5) is not None
    consumer, position = world.take()
    assert position == Position("5")
    assert (consumer.checkpointed, consumer.flush_needed) == (TRIM_HORIZON, True)
    assert consumer.stored == world.stored()


def test_a_taker_starts_at_a_checkpoint_of_a_java_worker_without_a_commit(world: World) -> None:
    assert world.commit(5) is not None
    version = world.rows.version
    world.set_checkpoint(Position("7"))
    consumer, position = world.take()
    assert position == Position("7")
    assert world.rows.version == version, "no commit before reading"
    assert consumer.stored == world.stored() == StoredPosition(1, Position("5"))


def test_a_hundred_shards_that_java_has_read_start_without_a_commit_and_move_in_one() -> None:
    """Their rows are renewed after the table was read: in a pool, not on the calling thread."""
    with ThreadPoolExecutor(4) as pool:
        world = World(lambda call, items: list(pool.map(call, items)), keys=HUNDRED_KEYS)
        assert world.commit(5) is not None
        for key in HUNDRED_KEYS:
            world.set_checkpoint(Position("7"), key)
        renewed: dict[str, int] = {}

        def note(called: str, key: str) -> None:
            if called == "UpdateItem":
                renewed[key] = threading.get_ident()

        table = world.table.view(before_call=note)
        leases = HeldLeases(table, "w", LeaseSettings(), world.clock, world.events.append)
        consumers = {held.lease_key: ShardConsumer(held, STREAM) for held in leases.discover()}
        committer, version = world.committer_of(leases), world.rows.version
        assert world.start(consumers, committer) == dict.fromkeys(HUNDRED_KEYS, Position("7"))
        assert renewed.keys() == set(HUNDRED_KEYS)
        assert threading.get_ident() not in renewed.values()
        assert world.rows.version == version, "no commit before the first batch"
        ranges = tuple(
            Chunk(key, NO_RECORDS, Position("7"), Position("9"), 0) for key in HUNDRED_KEYS
        )
        batch = Batch("b", ranges, NO_RECORDS)
        assert committer.advance(world.writer.write(batch), consumers).landed
        assert world.rows.version == version + 1
        assert all(world.stored(key) == StoredPosition(2, Position("9")) for key in HUNDRED_KEYS)


def test_after_the_first_commit_of_the_taker_a_paused_worker_is_refused(world: World) -> None:
    assert world.commit(5) is not None
    late = world.batch(8)
    written = world.writer.write(late)
    world.set_checkpoint(Position("7"))
    consumer, _ = world.take()
    batch = Batch("b", (Chunk(KEY, NO_RECORDS, Position("7"), Position("9"), 0),), NO_RECORDS)
    assert world.committer.advance(world.writer.write(batch), {KEY: consumer}).landed is False
    _, committer = world.taker()
    committer = world.committer_of(world.leases)
    consumer.held = world.consumers[KEY].held
    assert committer.advance(world.writer.write(batch), {KEY: consumer}).landed
    refused = world.committer.advance(written, world.consumers).refused
    assert list(refused) == [KEY]
    assert world.stored() == StoredPosition(2, Position("9"))


@pytest.mark.parametrize("checkpoint", [Position("7"), None])
def test_a_start_at_the_checkpoint_needs_the_row_again_after_the_table(
    world: World, checkpoint: Position | None
) -> None:
    """A seek may lie between the reads of the row and of the table."""
    if checkpoint is not None:
        assert world.commit(5) is not None
        world.set_checkpoint(checkpoint)
    leases, committer = world.taker()
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    item = world.table.rows()[KEY]
    world.table.plant({**item, "leaseCounter": {"N": "9"}, "checkpoint": {"S": "3"}})
    found = world.start({KEY: ShardConsumer(held, STREAM)}, committer)
    assert isinstance(found[KEY], LeaseLostError)


def test_a_start_after_the_position_in_the_table_writes_no_row(world: World) -> None:
    assert world.commit(5) is not None
    world.writes.clear()
    assert world.start()[KEY] == Position("5")
    assert world.writes == []


def test_a_shard_that_was_refused_reads_its_row_again(world: World) -> None:
    assert world.commit(5) is not None
    world.consumers[KEY].is_refused = True
    taken = world.table.view()
    taken.assign(taken.get(KEY), "other")
    assert isinstance(world.start()[KEY], LeaseLostError)


def test_an_ended_row_is_not_read(world: World) -> None:
    assert world.commit(5) is not None
    world.set_checkpoint(SHARD_END)
    _, position = world.take()
    assert position == SHARD_END


def test_a_shard_that_has_ended_in_the_table_is_not_read(world: World) -> None:
    assert world.commit(5) is not None
    assert world.committer.end(world.consumers[KEY])
    _, position = world.take()
    assert position == SHARD_END


@pytest.mark.parametrize("known", [True, False])
def test_a_child_at_latest_starts_at_the_beginning_if_the_table_knows_its_parent(
    world: World, known: bool
) -> None:
    world.lineage = {CHILD: [KEY]}
    world.sink.ensure(NO_RECORDS.schema)
    item = world.table.rows()[CHILD]
    world.table.plant({**item, "checkpoint": {"S": "LATEST"}})
    if known:
        world.rival(KEY, Position("5"))
    consumer, position = world.take(CHILD)
    assert position == (TRIM_HORIZON if known else LATEST)
    assert not consumer.flush_needed, "a checkpoint does not move back"


def test_a_shard_whose_position_cannot_be_read_does_not_stop_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions = world.sink.positions

    def unreadable(keys):
        if NAME in keys:
            raise TableMismatchError("a transaction is missing")
        return positions(keys)

    monkeypatch.setattr(world.sink, "positions", unreadable)
    found = world.start()
    assert isinstance(found.pop(KEY), TableMismatchError)
    assert set(found.values()) == {TRIM_HORIZON}


def test_a_stream_whose_description_failed_has_no_key(world: World) -> None:
    consumer, error = world.take(stream=StreamId("s", "1", 17))
    assert isinstance(error, SinkError)
    assert world.committer.look_up([consumer]) == {}


@pytest.mark.parametrize(
    ("stream", "key"),
    [
        (STREAM, f"{STREAM.arn}/17/{KEY}"),
        (StreamId("s", "1", 17, arn=STREAM.arn), f"{STREAM.arn}/17/{KEY}"),
        (StreamId("s", arn=STREAM.arn), f"{STREAM.arn}/0/{KEY}"),
        (StreamId("s"), f"s/0/{KEY}"),
    ],
)
def test_the_key_of_a_shard_has_the_stream_and_its_creation(stream: StreamId, key: str) -> None:
    assert shard_key(stream, KEY) == key


# -- commit


def test_no_row_is_written_before_or_after_a_commit(world: World) -> None:
    world.writes.clear()
    before = {key: world.table.get(key) for key in KEYS}
    assert world.commit(5) is not None
    assert world.commit(7) is not None
    assert world.writes == []
    assert {key: world.table.get(key) for key in KEYS} == before
    assert world.stored() == StoredPosition(2, Position("7"))
    assert world.consumers[KEY].stored == world.stored()


@pytest.mark.parametrize("fault", [SinkFault.LAND_AND_FAIL, SinkFault.LAND_LATE, SinkFault.FAIL])
def test_a_lost_answer_lands_the_batch_once(world: World, fault: SinkFault) -> None:
    faults = [fault]
    world.sink.faults = lambda op, _keys: faults.pop() if op == "commit" and faults else None
    assert world.commit(5) is not None
    world.rows.land_late()
    name = f"app/{NAME}"
    found = [entry.positions[name] for entry in world.rows.log if entry.positions]
    assert found == [StoredPosition(1, Position("5"))]


def test_a_refused_shard_is_left_out_and_the_others_land(world: World) -> None:
    assert world.commit(5) is not None
    world.rival(KEY, Position("6"))
    done = world.commit(9)
    assert done is not None
    assert done.lease_keys == KEYS[1:]
    assert {held.lease_key for held in world.leases.held()} == set(KEYS), "the lease is held"
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (KEY,)


def test_a_batch_of_another_table_is_refused(world: World) -> None:
    """Also if the other table has the same number and position."""
    assert world.commit(5) is not None
    world.rows.id = "table-1"
    batch = world.batch(8)
    result = world.committer.advance(world.writer.write(batch), world.consumers)
    assert sorted(result.refused) == sorted(KEYS)


def test_a_shard_whose_position_was_read_in_another_table_is_refused(world: World) -> None:
    assert world.commit(5) is not None
    world.rows.id = "table-1"
    world.start({KEY: world.consumers[KEY]})
    batch = world.batch(8)
    result = world.committer.advance(world.writer.write(batch), world.consumers)
    assert sorted(result.refused) == sorted(KEYS[1:])


def test_the_first_files_are_written_again_when_the_id_of_the_table_is_known() -> None:
    world = World()
    batch = replace(world.batch(5), records=pa.table({"shard_id": [KEY]}))
    written = world.writer.write(batch)
    assert world.consumers[KEY].table_id is None
    done = world.steps.run(written, world.consumers)
    assert done is not None
    assert world.consumers[KEY].table_id == "table-0"
    (first,), (committed,) = written.files, world.rows.files
    assert committed.path != first.path


def test_a_batch_that_is_not_written_is_not_committed(world: World) -> None:
    assert world.commit(1) is not None
    with pytest.raises(ValueError, match="the batch b5 is not written yet"):
        world.committer.advance(world.batch(5), world.consumers)
    assert world.stored() == StoredPosition(1, Position("1"))


def test_the_first_batch_is_refused_if_another_worker_was_faster() -> None:
    world = World()
    world.sink.ensure(NO_RECORDS.schema)
    world.rival(KEY, Position("2"))
    done = world.commit(5)
    assert done is not None
    assert set(done.lease_keys) == set(KEYS[1:])


def test_the_first_batch_is_refused_if_other_workers_began_all_of_its_shards() -> None:
    """It counted as landed, and its records were lost (simulation, seed 920044)."""
    world = World()
    world.sink.ensure(NO_RECORDS.schema)
    for key in KEYS:
        world.rival(key, Position("2"))
    versions = len(world.rows.log)
    assert world.commit(5) is None
    assert len(world.rows.log) == versions
    assert [world.stored(key).position for key in KEYS] == [Position("2")] * len(KEYS)
    assert all(consumer.committed != Position("5") for consumer in world.consumers.values())


def test_a_stop_ends_the_attempts_of_a_batch() -> None:
    """Without it a worker went on for 117 seconds, 60 attempts of the same failure."""
    world, stop = World(), threading.Event()

    class Refusing(InMemorySink):
        commits = 0

        def commit(self, table_id, files, expected, becomes, schema=None):
            self.commits += 1
            stop.set()
            raise SinkError("int too large to convert")

    sink = Refusing(world.rows, clock=world.clock)
    committer = world.committer_of(world.leases, sink, stop=stop)
    batch = world.batch(5)
    with pytest.raises(CommitStoppedError, match=r"batch b5.*; the worker stops"):
        world.steps_of(committer).run(batch, world.consumers)
    assert sink.commits == 1
    assert world.clock.monotonic() == 0.0
    assert set(world.consumers) == set(KEYS), "they are released in good order"


def test_a_table_that_takes_no_batch_is_not_tried_again_and_again(world: World) -> None:
    assert world.commit(1) is not None
    world.rows.schema = pa.schema([("other", pa.int64())])
    world.asked.clear()
    before = world.clock.monotonic()
    with pytest.raises(TableMismatchError, match="shard_id"):
        world.commit(2)
    assert [operation for operation, _ in world.asked] == ["commit"]
    assert world.clock.monotonic() - before < 1
    assert [event for event in world.events if isinstance(event, AwsTrouble)] == []


def failing_commit(world: World, *, landed: bool, lost: str) -> list[tuple[str, ...]]:
    """The first commit fails, after it has landed or not, and a lease is lost meanwhile; returns
    the keys of every attempt.
    """
    commit, attempts = world.sink.commit, list[tuple[str, ...]]()

    def fail_once(table_id, files, expected, becomes, schema=None):
        attempts.append(tuple(key.rsplit("/", 1)[-1] for key in expected))
        if len(attempts) > 1:
            return commit(table_id, files, expected, becomes, schema)
        if landed:
            commit(table_id, files, expected, becomes, schema)
        world.leases.drop(world.consumers[lost].held, "it was not renewed in time")
        raise SinkError("the answer was lost")

    world.sink.commit = fail_once
    return attempts


def test_a_batch_whose_lease_is_lost_is_not_committed_again_after_a_failure() -> None:
    """A function would get rows that the next owner has written (seed 61200145)."""
    world = World()
    attempts = failing_commit(world, landed=False, lost=KEY)
    done = world.commit(100)
    assert attempts == [KEYS, KEYS[1:]]
    assert done is not None
    assert done.lease_keys == KEYS[1:]
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert (refused.lease_keys, refused.reason) == ((KEY,), "the lease was lost before the commit")


# -- the ancestors of a child


def child_world(*, known: bool) -> World:
    """A world whose second shard is a grandchild of the first one, which another worker had."""
    world = World(lineage={CHILD: [KEY, KEYS[2]]})
    world.sink.ensure(NO_RECORDS.schema)
    if known:
        world.rival(KEY, Position("5"))
    world.consumers = {CHILD: world.consumers[CHILD]}
    world.start()
    return world


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("how", ["commit", "end"])
def test_the_first_commit_of_a_child_ends_its_ancestors(known: bool, how: str) -> None:
    """A Java worker has read them; a paused worker of this package may still have a batch."""
    world = child_world(known=known)
    if how == "commit":
        assert world.commit(9) is not None
    else:
        assert world.committer.end(world.consumers[CHILD])
    if known:
        assert world.stored(KEY) == StoredPosition(2, Position("5"), ended=True)
    else:
        assert world.stored(KEY) == StoredPosition(1, None, ended=True)
    assert world.stored(KEYS[2]) == StoredPosition(1, None, ended=True)
    before = world.rows.version
    if how == "commit":
        assert world.commit(11) is not None
        assert len(world.rows.log[before + 1].positions) == 1, "the ancestors are ended once"


@pytest.mark.parametrize("how", ["commit", "end"])
def test_a_child_that_started_before_there_was_a_table_ends_its_ancestors(how: str) -> None:
    """A paused worker may have a batch of the parent, which a Java worker has read."""
    world = World(lineage={CHILD: [KEY]})
    world.consumers = {CHILD: world.consumers[CHILD]}
    assert world.consumers[CHILD].table_id is None
    if how == "commit":
        assert world.commit(9) is not None
    else:
        world.sink.ensure(NO_RECORDS.schema)
        assert world.committer.end(world.consumers[CHILD])
    assert world.stored(KEY) == StoredPosition(1, None, ended=True)


def test_a_first_batch_whose_ancestors_cannot_be_listed_is_tried_again() -> None:
    def lineage(_consumer):
        raise UnavailableError("ListShards")

    world = World()
    committer = ProgressStore(
        world.leases, world.sink, lineage, world.clock, world.events.append, rng=random.Random(1)
    )
    batch = world.batch(5)
    with pytest.raises(SinkError, match="ListShards"):
        committer.advance(world.writer.write(batch), world.consumers)


def test_a_child_is_started_again_if_an_ancestor_has_moved() -> None:
    world = child_world(known=True)
    world.rival(KEY, Position("6"))
    assert world.commit(9) is None
    assert world.stored(CHILD) == NOTHING_STORED
    (refused,) = [event for event in world.events if isinstance(event, BatchRefused)]
    assert refused.lease_keys == (CHILD,)


def test_a_shard_and_its_ancestors_are_read_in_one_table() -> None:
    world = child_world(known=True)
    consumers = list(world.consumers.values())
    looked_up = world.committer.look_up(consumers)
    world.rows.id = "table-1"
    outcomes = world.committer.start(consumers, looked_up)
    assert isinstance(outcomes[CHILD], SinkError)
    assert world.start()[CHILD] == TRIM_HORIZON


def test_two_children_in_one_batch_share_the_entry_of_their_parent() -> None:
    world = World(lineage={CHILD: [KEY], KEYS[2]: [KEY]})
    world.sink.ensure(NO_RECORDS.schema)
    world.consumers = {key: world.consumers[key] for key in (CHILD, KEYS[2])}
    world.start()
    assert world.commit(9) is not None
    assert world.stored(KEY) == StoredPosition(1, None, ended=True)


def test_a_child_that_the_table_shows_as_begun_leaves_its_ancestors_alone() -> None:
    world = child_world(known=True)
    world.rival(CHILD, Position("7"))
    world.start()
    assert world.commit(9) is not None
    assert not world.stored(KEY).ended


def test_a_child_is_not_in_one_batch_with_its_ancestor() -> None:
    world = child_world(known=True)
    leases = {held.lease_key: held for held in world.leases.held()}
    world.consumers[KEY] = ShardConsumer(leases[KEY], STREAM)
    world.start({KEY: world.consumers[KEY]})
    batch = world.batch(9)
    result = world.committer.advance(world.writer.write(batch), world.consumers)
    assert list(result.refused) == [CHILD]


# -- end


def test_a_shard_ends_in_the_table_before_its_row(world: World) -> None:
    assert world.commit(5) is not None
    consumer = world.consumers[KEY]
    assert world.committer.end(consumer)
    ended = StoredPosition(2, Position("5"), ended=True)
    assert world.stored() == ended == consumer.stored
    assert world.committer.end(consumer)
    assert world.stored() == ended, "once"
    consumer.stored = StoredPosition(1, Position("5"))
    assert world.committer.end(consumer), "the answer was lost"
    assert world.stored() == ended


def test_a_shard_that_another_worker_continued_does_not_end(world: World) -> None:
    assert world.commit(5) is not None
    world.rival(KEY, Position("9"))
    assert not world.committer.end(world.consumers[KEY])
    assert not world.stored().ended


# -- checkpoint


def test_a_renewal_writes_the_checkpoint_in_the_same_write(world: World) -> None:
    assert world.commit(5) is not None
    world.clock.advance(3.4)
    row = world.table.get(KEY)
    assert row is not None
    world.leases.note_read_up_to(KEY, 99)
    world.writes.clear()
    assert world.leases.renew_all() == len(KEYS)
    assert sorted(world.writes) == sorted(KEYS)
    now = world.table.get(KEY)
    assert now is not None
    assert (now.checkpoint, now.counter) == (Position("5"), row.counter + 1)
    assert now.read_up_to_millis == 99
    assert not world.consumers[KEY].flush_needed
    world.committer.checkpoint(world.consumers[KEY])
    assert len(world.writes) == len(KEYS), "the row has it"


def test_a_checkpoint_removes_the_pending_checkpoint_of_a_java_worker(world: World) -> None:
    row = world.table.get(KEY)
    assert row is not None
    position = Position("3")
    assert world.table.update_checkpoint(
        row, checkpoint=position, pending=Position("4"), pending_state=b"x"
    )
    consumer, started = world.take()
    assert started == position
    now = world.table.get(KEY)
    assert now is not None
    assert (now.pending_checkpoint, now.pending_checkpoint_state) == (Position("4"), b"x")
    leases, committer = world.taker()
    consumer.held = next(one for one in leases.discover() if one.lease_key == KEY)
    consumer.committed = Position("5")
    committer.checkpoint(consumer)
    now = world.table.get(KEY)
    assert now is not None
    assert (now.checkpoint, now.pending_checkpoint) == (Position("5"), None)


def test_a_checkpoint_waits_for_its_lag(world: World) -> None:
    leases, committer = world.taker(checkpoint_lag_millis=10_000, failover_time_millis=9_000)
    world.consumers = {held.lease_key: ShardConsumer(held, STREAM) for held in leases.discover()}
    world.start(committer=committer)
    world.steps, world.leases = world.steps_of(committer), leases
    assert world.commit(5) is not None
    seen = []
    for _ in range(4):
        world.clock.advance(2.9)
        leases.renew_all()
        row = world.table.get(KEY)
        seen.append(row is not None and row.checkpoint == Position("5"))
    assert seen == [False, False, True, True]


def test_a_write_of_the_checkpoint_whose_answer_is_lost_is_repeated(world: World) -> None:
    assert world.commit(5) is not None
    world.clock.advance(3.4)
    world.trouble[KEY] = [UnavailableError("no answer")]
    assert world.leases.renew_all() == len(KEYS) - 1
    assert world.consumers[KEY].flush_needed
    assert world.leases.renew_all() == len(KEYS)
    row = world.table.get(KEY)
    assert row is not None
    assert row.checkpoint == Position("5")


def test_a_short_lag_is_flushed_between_renewals(world: World) -> None:
    committer = world.committer_of(world.leases, flush_seconds=0.5)
    consumer = world.consumers[KEY]
    now = consumer.held.checkpointed_at
    assert not committer.flush_due(consumer, now + 0.4)
    assert committer.flush_due(consumer, now + 0.6)
    assert not world.committer.flush_due(consumer, now + 99), "renewals write it"


def test_the_default_lag_is_the_renewal_interval() -> None:
    assert LeaseSettings().checkpoint_lag == LeaseSettings().renewal_interval_millis
    assert LeaseSettings(checkpoint_lag_millis=0).checkpoint_lag == 0


# -- a function as the sink


@pytest.fixture(name="function")
def function_fixture() -> World:
    world = World()
    sink = InMemoryFunction(world.rows, clock=world.clock)
    return World(sink=sink)


def test_the_checkpoint_of_a_function_follows_each_batch(function: World) -> None:
    assert function.commit(5) is not None
    consumer = function.consumers[KEY]
    assert function.committer.flush_due(consumer, function.clock.monotonic())
    function.committer.checkpoint(consumer)
    row = function.table.get(KEY)
    assert row is not None
    assert (row.checkpoint, row.table_mark) == (Position("5"), None)


def test_a_function_is_called_again_after_the_checkpoint_of_the_row(function: World) -> None:
    """Its memory begins when the lease is taken: a seek back is not undone by it."""
    assert function.commit(5) is not None
    assert function.start()[KEY] == Position("5"), "a batch that failed is read again"
    function.set_checkpoint(Position("3"))
    _, position = function.take()
    assert position == Position("3")
