"""The commit protocol whose positions are in the table, on in-memory tables."""

from __future__ import annotations

import pytest

from kcl_pipeline.batch import Batch, CommitEntry, ShardRange, TxnVersions, shard_key
from kcl_pipeline.config import ConsumerSettings, LeaseSettings
from kcl_pipeline.errors import LeaseLostError, SinkError, UnavailableError
from kcl_pipeline.events import AwsTrouble, PendingResolved
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.sink import InMemorySink, SinkFault
from kcl_pipeline.worker.commit.positions import PositionsCommit
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from tests.support import commit_world
from tests.support.commit_world import KEYS, NO_RECORDS, STREAM

KEY = KEYS[0]
NAME = shard_key(KEY, f"{STREAM.arn}/17/{KEY}")


class World(commit_world.World):
    protocol = PositionsCommit

    def stored(self) -> TxnVersions:
        return self.rows.txn_versions(NAME)

    def taker(self, **settings: int) -> tuple[HeldLeases, PositionsCommit]:
        leases = HeldLeases(
            self.table.view(), "w", LeaseSettings(**settings), self.clock, self.events.append
        )
        return leases, PositionsCommit(leases, self.sink, self.clock, self.events.append, "w")

    def take(self) -> tuple[ShardConsumer, Position]:
        leases, protocol = self.taker()
        held = next(one for one in leases.discover() if one.lease_key == KEY)
        consumer = ShardConsumer(held, STREAM)
        return consumer, protocol.resolve(consumer)


@pytest.fixture(name="world")
def world_fixture() -> World:
    return World()


def test_no_row_is_written_before_or_after_a_commit(world: World) -> None:
    before = {key: world.table.get(key) for key in KEYS}
    assert world.commit(5) is not None
    assert world.commit(7) is not None
    assert world.writes == []
    assert {key: world.table.get(key) for key in KEYS} == before
    assert world.stored() == TxnVersions(None, 1, 2, Position("7"))
    assert world.consumers[KEY].versions == world.stored()


def test_a_renewal_writes_the_checkpoint_in_the_same_write(world: World) -> None:
    assert world.commit(5) is not None
    world.clock.advance(3.4)
    row = world.table.get(KEY)
    assert row is not None
    world.leases.note_read_up_to(KEY, 99)
    assert world.leases.renew_all() == len(KEYS)
    assert sorted(world.writes) == sorted(KEYS)
    now = world.table.get(KEY)
    assert now is not None
    assert (now.checkpoint, now.counter) == (Position("5"), row.counter + 1)
    assert now.read_up_to_millis == 99
    assert not world.consumers[KEY].flush_needed
    world.committer.checkpoint(world.consumers[KEY])
    assert len(world.writes) == len(KEYS), "the row has it"
    later = world.table.update_checkpoint(now, checkpoint=Position("6"), throughput_kbps=2.5)
    assert later is not None
    assert later.throughput_kbps == 2.5


def test_a_checkpoint_waits_for_its_lag(world: World) -> None:
    leases, protocol = world.taker(checkpoint_lag_millis=10_000, failover_time_millis=9_000)
    consumers = {held.lease_key: ShardConsumer(held, STREAM) for held in leases.discover()}
    for consumer in consumers.values():
        protocol.resolve(consumer)
    world.consumers = consumers
    world.steps, world.leases = world.steps_of(protocol), leases
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
    protocol = PositionsCommit(
        world.leases, world.sink, world.clock, world.events.append, "w", flush_seconds=0.5
    )
    consumer = world.consumers[KEY]
    now = world.clock.monotonic()
    assert not protocol.flush_due(consumer, now + 0.4, idle=True)
    assert protocol.flush_due(consumer, now + 0.6, idle=False)
    assert not world.committer.flush_due(consumer, now + 99, idle=True), "renewals write it"
    assert world.commit(5) is not None
    protocol.checkpoint(consumer)
    row = world.table.get(KEY)
    assert row is not None
    assert row.checkpoint == Position("5")


def test_a_taker_continues_after_the_position_in_the_table(world: World) -> None:
    assert world.commit(5) is not None
    consumer, position = world.take()
    assert position == Position("5")
    assert (consumer.checkpointed, consumer.flush_needed) == (TRIM_HORIZON, True)
    assert consumer.versions == world.stored()


def test_a_taker_moves_the_position_to_a_checkpoint_of_a_java_worker(world: World) -> None:
    assert world.commit(5) is not None
    batch = world.batch(8)
    paused = world.writer.write(batch)
    row = world.table.get(KEY)
    assert row is not None
    assert world.table.update_checkpoint(row, checkpoint=Position("7")) is not None
    consumer, position = world.take()
    assert position == Position("7")
    assert world.stored() == TxnVersions(None, 1, 2, Position("7")) == consumer.versions
    result = world.committer.commit(batch, world.consumers, paused)
    assert list(result.lost) == [KEY], "a paused writer cannot commit what Java has processed"


def test_a_position_of_the_row_needs_the_row_again_after_the_table(world: World) -> None:
    """A seek, or a two-phase commit, may lie between the reads of the row and of the table."""
    assert world.commit(5) is not None
    row = world.table.get(KEY)
    assert row is not None
    ahead = world.table.update_checkpoint(row, checkpoint=Position("7"))
    assert ahead is not None
    leases, protocol = world.taker()
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    item = world.table.rows()[KEY]
    world.table.plant({**item, "leaseCounter": {"N": "9"}, "checkpoint": {"S": "3"}})
    before = world.stored()
    with pytest.raises(LeaseLostError):
        protocol.resolve(ShardConsumer(held, STREAM))
    assert world.stored() == before


def test_after_two_phase_commits_every_taker_reads_the_row_again(world: World) -> None:
    rival = InMemorySink(world.rows, clock=world.clock)
    rival.ensure_table(NO_RECORDS.schema)
    entry = CommitEntry(KEY, 5, TxnVersions())
    assert rival.commit(world.writer.write(world.batch(1)), [entry]).version
    leases, protocol = world.taker()
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    row = world.table.get(KEY)
    assert row is not None
    assert world.table.update_checkpoint(row, checkpoint=Position("1")) is not None
    with pytest.raises(LeaseLostError):
        protocol.resolve(ShardConsumer(held, STREAM))


@pytest.mark.parametrize("known", [True, False])
def test_a_child_begins_after_the_table_shows_the_ends_of_its_parents(
    world: World, known: bool
) -> None:
    """A Java worker has ended the parent: a paused writer of the parent must be refused."""
    parent, child = world.consumers[KEY], world.consumers[KEYS[1]]
    if known:
        assert world.commit(5) is not None
        child.versions = TxnVersions()
    else:
        world.sink.ensure_table(NO_RECORDS.schema)
    late = world.batch(8)
    written = world.writer.write(late)
    before = world.stored()
    world.committer.begin(child, [KEY], child.versions)
    assert world.stored() == before.moved_to(before.position, ended=True)
    world.committer.begin(child, [KEY], child.versions)
    assert world.stored() == before.moved_to(before.position, ended=True), "once"
    world.committer._schema = written.schema
    assert KEY in world.committer.commit(late, world.consumers, written).lost
    assert parent.versions == before


def test_a_shard_that_the_table_knows_leaves_its_parents_alone(world: World) -> None:
    world.sink.ensure_table(NO_RECORDS.schema)
    world.committer.begin(world.consumers[KEYS[1]], [KEY], TxnVersions(number=1))
    assert world.stored() == TxnVersions()


def test_a_parent_that_moves_meanwhile_is_read_again(world: World, monkeypatch) -> None:
    world.sink.ensure_table(NO_RECORDS.schema)
    monkeypatch.setattr(world.sink, "move", lambda *_given, **_named: None)
    with pytest.raises(SinkError, match="has moved"):
        world.committer.begin(world.consumers[KEYS[1]], [KEY], None)


def test_a_refused_move_reads_the_table_again(world: World, monkeypatch) -> None:
    assert world.commit(5) is not None
    row = world.table.get(KEY)
    assert row is not None
    assert world.table.update_checkpoint(row, checkpoint=Position("7")) is not None
    stale = world.stored()
    rival = InMemorySink(world.rows, clock=world.clock)
    assert rival.commit(
        world.writer.write(world.batch(9)), [CommitEntry.to(NAME, stale, Position("9"))]
    )
    leases, protocol = world.taker()
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    assert protocol.resolve(ShardConsumer(held, STREAM), stale) == Position("9")


@pytest.mark.parametrize("landed", [True, False])
def test_a_pending_batch_of_the_two_phase_protocol_is_settled_first(
    world: World, landed: bool
) -> None:
    leases, _ = world.taker()
    old = TwoPhaseCommit(leases, world.sink, world.clock, world.events.append, "w")
    held = next(one for one in leases.discover() if one.lease_key == KEY)
    before = ShardConsumer(held, STREAM)
    old.resolve(before)
    batch = Batch("b", (ShardRange(KEY, TRIM_HORIZON, Position("6")),), NO_RECORDS)
    written = world.writer.write(batch)
    assert old.prepare(batch, {KEY: before}, written) == {}
    if landed:
        assert old.commit(batch, {KEY: before}, written).landed
    _, position = world.take()
    assert position == (Position("6") if landed else TRIM_HORIZON)
    assert [e.landed for e in world.events if isinstance(e, PendingResolved)] == [landed]
    if not landed:
        assert (
            not InMemorySink(world.rows)
            .commit(written, [CommitEntry(KEY, before.prepared[1], before.versions)])
            .version
        )


@pytest.mark.parametrize("fault", [SinkFault.LAND_AND_FAIL, SinkFault.LAND_LATE, SinkFault.FAIL])
def test_a_lost_answer_lands_the_batch_once(world: World, fault: SinkFault) -> None:
    faults = [fault]
    world.sink.faults = lambda op, _keys: faults.pop() if op == "commit" and faults else None
    assert world.commit(5) is not None
    world.rows.land_late()
    assert [entry.positions[NAME] for entry in world.rows.log if entry.positions] == [
        TxnVersions(None, 1, 1, Position("5"))
    ]
    assert any(isinstance(event, AwsTrouble) for event in world.events)


def test_a_shard_ends_in_the_table_before_its_row(world: World) -> None:
    assert world.commit(5) is not None
    consumer = world.consumers[KEY]
    world.committer.end(consumer)
    ended = TxnVersions(None, 1, 2, Position("5"), ended=True)
    assert world.stored() == ended == consumer.versions
    world.committer.end(consumer)
    assert world.stored() == ended, "once"
    _, position = world.take()
    assert position == Position("5"), "read again to its end, which is not a record"
    stale = world.consumers[KEY]
    stale.versions = TxnVersions(None, 1, 1, Position("5"))
    world.committer.end(stale)
    assert world.stored() == ended, "the answer was lost"


def test_a_shard_that_another_worker_continued_does_not_end(world: World) -> None:
    assert world.commit(5) is not None
    rival = InMemorySink(world.rows, clock=world.clock)
    entry = CommitEntry.to(NAME, world.stored(), Position("9"))
    assert rival.commit(world.writer.write(world.batch(9)), [entry]).version
    with pytest.raises(LeaseLostError):
        world.committer.end(world.consumers[KEY])
    assert not world.stored().ended


def test_a_stream_without_a_known_creation_has_no_position(world: World) -> None:
    unknown = ShardConsumer(world.consumers[KEY].held, StreamId("s", arn="arn:s"))
    with pytest.raises(SinkError, match="creation time"):
        world.committer.resolve(unknown)
    assert world.committer.look_up([unknown]) == {}


@pytest.mark.parametrize(
    ("stream", "name"),
    [
        (STREAM, f"{STREAM.arn}/17/{KEY}"),
        (StreamId("s", "1", 17, arn=STREAM.arn), f"{STREAM.arn}/17/{KEY}"),
        (StreamId("s"), None),
    ],
)
def test_the_name_of_a_position_has_the_stream_and_its_creation(
    world: World, stream: StreamId, name: str | None
) -> None:
    key = ShardConsumer(world.consumers[KEY].held, stream).shard_key
    assert key == (None if name is None else shard_key(KEY, name))


def test_an_ended_lease_is_not_moved(world: World) -> None:
    row = world.table.get(KEY)
    assert row is not None
    assert world.table.update_checkpoint(row, checkpoint=SHARD_END) is not None
    assert world.commit(5) is not None
    consumer, position = world.take()
    assert position == SHARD_END
    assert consumer.state is ConsumerState.BLOCKED
    assert world.stored().number == 1


def test_the_default_lag_is_the_renewal_interval() -> None:
    assert LeaseSettings().checkpoint_lag == LeaseSettings().renewal_interval_millis
    assert LeaseSettings(checkpoint_lag_millis=0).checkpoint_lag == 0
    settings = ConsumerSettings(application_name="app", streams=("s",))
    assert settings.batch.commit_protocol is None, "as recorded"


def child_of(world: World, *, checkpoint: Position, owner: str = "w") -> ShardConsumer:
    """A child of the first shard, whose row this worker holds."""
    key = KEYS[1]
    item = world.table.rows()[key]
    world.table.plant(
        {**item, "checkpoint": {"S": str(checkpoint)}, "parentShardId": {"SS": [KEY]}}
    )
    leases, _ = world.taker()
    return ShardConsumer(next(one for one in leases.discover() if one.lease_key == key), STREAM)


@pytest.mark.parametrize("known", [True, False])
def test_the_taker_of_a_begun_child_ends_a_parent_whose_row_was_cleaned_up(
    world: World, known: bool
) -> None:
    world.sink.ensure_table(NO_RECORDS.schema)
    if known:
        assert world.commit(5) is not None
    child = child_of(world, checkpoint=Position("7"))
    world.committer.begin(child, [], TxnVersions())
    assert world.stored().ended == known


def test_the_taker_of_a_child_that_has_not_begun_leaves_a_parent_without_a_row_alone(
    world: World,
) -> None:
    assert world.commit(5) is not None
    child = child_of(world, checkpoint=LATEST)
    world.committer.begin(child, [], TxnVersions())
    assert not world.stored().ended


@pytest.mark.parametrize("known", [True, False])
def test_a_child_at_latest_starts_at_the_beginning_if_the_table_knows_its_parent(
    world: World, known: bool
) -> None:
    child = child_of(world, checkpoint=LATEST)
    if known:
        parent = ShardRange(KEY, TRIM_HORIZON, Position("5"))
        world.consumers = {KEY: world.consumers[KEY]}
        batch = Batch("b", (parent,), NO_RECORDS)
        assert world.steps.run(batch, world.consumers, world.writer.write(batch)) is not None
    assert world.committer.resolve(child) == (TRIM_HORIZON if known else LATEST)
    assert not child.flush_needed, "a checkpoint does not move back"


def test_a_sink_says_which_shards_it_knows(world: World) -> None:
    assert world.commit(5) is not None
    world.committer.end(world.consumers[KEY])
    ask = world.committer.stored
    assert ask is not None
    assert ask(STREAM, ["shardId-9", KEY, KEYS[1]]) == {KEY: True, KEYS[1]: False}
    assert ask(STREAM, []) == {}
    with pytest.raises(SinkError, match="creation time"):
        ask(StreamId("s", arn="arn:s"), [KEY])
