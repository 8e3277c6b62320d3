"""Set positions: what is read again, what is skipped, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.control.seek import Seeking, seek_target
from kcl_pipeline.errors import ApplicationInUseError, SettingsError, UnavailableError
from kcl_pipeline.leases.writes import LeaseSeek
from kcl_pipeline.position import LATEST, TRIM_HORIZON, Position
from tests.support.operator_world import OperatorWorld


def batch(world, name, count=12):
    values = [f"{name}-{n}".encode() for n in range(count)]
    world.put(*values)
    world.work_until(lambda: set(values) <= set(world.data()))
    world.work(2)
    return values


def seeking(world, *, to=None, ago=None, after=None, **options):
    wanted = seek_target(to, ago, after, world.clock.wall())
    return Seeking(world.app, world.kinesis, wanted, sink=world.make_sink(), **options)


def sought(world, **options):
    return seeking(world, **options).write("token", pause=True, wait_seconds=60)


def counts(world):
    return Counter(world.data())


def three_batches(**options):
    """Records of three times, ten minutes apart."""
    world = OperatorWorld(**options)
    old = batch(world, "old")
    world.work(30)
    begin = world.clock.wall()
    world.work(2)
    new = batch(world, "new")
    world.work(30)
    return world, begin, old, new


def test_each_record_after_the_time_lands_once_more():
    world, begin, old, new = three_batches(shards=3, workers=("w-1", "w-2"))
    done = sought(world, ago=f"{world.clock.wall() - begin:.3f}s")
    assert (len(done.written), done.refused, done.is_paused) == (3, (), False)
    assert counts(world) == Counter(old + new), "nothing runs yet"
    world.start("w-3")
    late = batch(world, "late")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in new))
    world.work(5)
    assert counts(world) == Counter(old + new + new + late)


def test_the_oldest_records_and_the_newest_position():
    world, _, old, new = three_batches()
    sought(world, to="TRIM_HORIZON")
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in old + new))
    world.work(5)
    assert counts(world) == Counter((old + new) * 2)
    world.crash("w-2")
    Pausing(world.app).pause()
    world.put(b"skipped")
    sought(world, to="latest")
    Pausing(world.app).resume()
    world.start("w-3")
    world.work(10)
    late = batch(world, "late")
    assert b"skipped" not in world.data()
    assert all(counts(world)[one] == 1 for one in late)


def test_a_seek_after_one_record_of_one_shard():
    world, _, old, new = three_batches(shards=2)
    rows = world.table.rows().to_pylist()
    shard = rows[0]["shard_id"]
    mine = sorted((r for r in rows if r["shard_id"] == shard), key=lambda r: r["sequence_number"])
    third = mine[2]["sequence_number"]
    done = sought(world, after=third, shards=[shard])
    assert [one.note for one in done.written] == ["repeats"]
    world.start("w-2")
    again = [r["data"] for r in mine[3:]]
    world.work_until(lambda: all(counts(world)[one] == 2 for one in again))
    world.work(5)
    assert counts(world) == Counter(old + new + again)


def test_a_shard_that_has_ended_and_its_children_are_read_again():
    world, begin, old, new = three_batches(shards=1)
    (lease,) = world.leases.list_leases().leases
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit=lease.shard_id,
        NewStartingHashKey=str(2**127),
    )
    world.clock.advance(60)
    children = batch(world, "child")
    world.work_until(
        lambda: world.leases.row(lease.lease_key) is None or world.leases.row(lease.lease_key).ended
    )
    if world.leases.row(lease.lease_key) is not None:
        world.leases.erase(lease.lease_key)  # as the leader does after a while
    done = sought(world, ago=f"{world.clock.wall() - begin:.3f}s")
    positions = {one.lease_key: str(one.seek.position) for one in done.written}
    assert positions.pop(lease.lease_key) == "AT_TIMESTAMP"
    assert set(positions.values()) == {"TRIM_HORIZON"}
    assert len(positions) == 2
    world.start("w-2")
    world.work_until(lambda: all(counts(world)[one] == 2 for one in new + children))
    world.work(10)
    assert counts(world) == Counter(old + (new + children) * 2)


@pytest.mark.parametrize("landed", [True, False])
def test_a_batch_of_a_paused_worker_lands_before_a_seek_or_never(landed):
    """A worker crashed with a batch that was written: its commit may still arrive."""
    world, _, old, new = three_batches(shards=1)
    late = []
    sink = world.running["w-1"]._dependencies.sink
    commit = sink.commit

    def stop(*given):
        late.append(given)
        if landed:
            commit(*given)
        raise SystemExit

    sink.commit = stop
    world.put(b"late")
    with pytest.raises(SystemExit):
        world.work(20)
    world.crash("w-1")
    done = sought(world, to="TRIM_HORIZON")
    assert len(done.written) == 1
    assert commit(*late[0]).version is None, "the commit of the former worker is refused"
    world.start("w-2")
    everything = [*old, *new, b"late"]
    world.work_until(lambda: all(counts(world)[one] >= 1 for one in everything))
    world.work(10)
    wanted = Counter([*old, *new] * 2 + [b"late"] * (2 if landed else 1))
    assert counts(world) == wanted


def test_a_write_of_the_former_owner_is_refused_after_a_seek():
    world, _, _, _ = three_batches(shards=1)
    before = world.leases.list_leases().leases[0]
    Pausing(world.app).pause()
    writes = []
    world.leases.hook(None, lambda called, key: writes.append((called, key)))
    sought(world, to="TRIM_HORIZON")
    written = [key for called, key in writes if called == "TransactWriteItems"]
    assert [before.lease_key in key for key in written] == [True] * 2, "before and after the commit"
    row = world.leases.row(before.lease_key)
    assert row.checkpoint == TRIM_HORIZON
    assert world.leases.update_checkpoint(before, checkpoint=Position("9" * 56)) is None


def test_a_plan_changes_nothing():
    world, _, _, _ = three_batches()
    before = world.leases.rows()
    world.running.clear()
    found = seeking(world, ago="60s").plan()
    assert len(found.changes) == 2
    assert set(found.held.values()) == {"w-1"}
    assert world.leases.rows() == before
    assert "kclpPause" not in world.coordinator.rows()["Migration3.0"]


def test_it_is_refused_while_a_lease_is_held():
    world, _, _, _ = three_batches()
    with pytest.raises(ApplicationInUseError, match="2 leases are held"):
        seeking(world, to="LATEST").write("t", pause=False, wait_seconds=5)
    world.app.clock.sleep = world.clock.advance
    for lease in world.leases.list_leases().leases:
        world.leases.assign(lease, "java-1")
    world.app.clock.sleep = lambda seconds: (
        world.clock.advance(seconds),
        [world.leases.renew(one) for one in world.leases.list_leases().leases],
    )
    with pytest.raises(ApplicationInUseError, match="java-1"):
        seeking(world, to="LATEST").write("t", pause=True, wait_seconds=5)
    assert world.coordinator.read_control().pause is None, "its own pause ends with it"


def test_the_pause_of_another_operator_stays():
    world, _, _, _ = three_batches()
    Pausing(world.app).pause("mine")
    done = sought(world, to="TRIM_HORIZON")
    assert done.is_paused
    assert world.coordinator.read_control().pause.reason == "mine"


def proof_of(world):
    return world.coordinator.proof_of_pause(world.coordinator.read_control())


def test_nothing_is_written_after_the_end_of_the_pause():
    world, _, _, _ = three_batches(shards=1)
    Pausing(world.app).pause()
    proof = proof_of(world)
    Pausing(world.app).resume()
    (lease,) = world.leases.list_leases().leases
    before = world.leases.rows()
    assert world.leases.seek([LeaseSeek(lease, LATEST)], "t", proof) is None
    assert world.leases.rows() == before


def test_a_deletion_that_was_decided_before_a_seek_is_refused():
    """Seed 5174600224: a leader was paused, and the shard was read to its end again meanwhile."""
    world, _, _, _ = three_batches(shards=1)
    Pausing(world.app).pause()
    key = min(world.leases.rows())

    def at_its_end():
        world.leases.plant(world.leases.rows()[key] | {"checkpoint": {"S": "SHARD_END"}})
        return world.leases.row(key)

    decided = at_its_end()
    assert world.leases.seek([LeaseSeek(decided, TRIM_HORIZON)], "t", proof_of(world)) == ()
    assert not world.leases.delete(decided)
    again = at_its_end()
    assert not world.leases.delete(decided)
    assert world.leases.delete(again)


@pytest.mark.parametrize("change", ["owner", "counter", "checkpoint"])
def test_a_row_that_changed_is_not_written(change):
    world, _, _, _ = three_batches(shards=2)
    Pausing(world.app).pause()
    one, other = sorted(world.leases.list_leases().leases, key=lambda row: row.lease_key)
    row = world.leases.rows()[one.lease_key]
    value = {
        "owner": {"leaseOwner": {"S": "w-9"}},
        "counter": {"leaseCounter": {"N": str(one.counter + 7)}},
        "checkpoint": {"checkpoint": {"S": "1"}},
    }[change]
    world.leases.plant(row | value)
    seeks = [LeaseSeek(one, LATEST), LeaseSeek(other, LATEST)]
    assert world.leases.seek(seeks, "t", proof_of(world)) == (one.lease_key,)
    assert world.leases.rows()[one.lease_key] == row | value
    assert world.leases.row(other.lease_key).checkpoint == LATEST


def test_a_lost_answer_is_recognised_and_unknown_attributes_stay():
    world, _, _, _ = three_batches(shards=2)
    Pausing(world.app).pause()
    for key, row in world.leases.rows().items():
        world.leases.plant(row | {"foreign": {"S": key}})
    seeks = [LeaseSeek(one, LATEST) for one in world.leases.list_leases().leases]
    lost = []

    def lose(operation, key):
        if operation == "TransactWriteItems" and not lost:
            lost.append(key)
            raise UnavailableError("lost", operation=operation)

    world.leases.hook(None, lose)
    with pytest.raises(UnavailableError):
        world.leases.seek(seeks, "t", proof_of(world))
    assert world.leases.seek(seeks, "t", proof_of(world)) == ()
    assert world.leases.seek(seeks, "another", proof_of(world)) == tuple(
        one.lease.lease_key for one in seeks
    )
    for key, row in world.leases.rows().items():
        assert row["foreign"] == {"S": key}
        assert "kclpReadUpTo" not in row


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "missing, or given twice"),
        ({"to": "LATEST", "ago": "1s"}, "given twice"),
        ({"to": "yesterday"}, "is not a time; write one of --to TRIM_HORIZON"),
        ({"to": "2026-01-01T00:00:00"}, "no time zone; write 2026-01-01T00:00:00Z for UTC"),
        ({"to": "2026-11-23"}, "no time zone; write 2026-11-23T00:00:00Z for UTC"),
        ({"to": "20261123"}, "no time zone; write 2026-11-23T00:00:00Z for UTC"),
        ({"to": "2999-01-01T00:00:00Z"}, "in the future"),
        ({"ago": "ten minutes"}, "write 30s, 10m, 2h or 1d"),
        ({"after": "LATEST"}, "is not a sequence number"),
        ({"after": "x"}, "--after:"),
    ],
)
def test_a_position_that_cannot_be_meant(arguments, text):
    given = {"to": None, "ago": None, "after": None} | arguments
    with pytest.raises(SettingsError, match=text):
        seek_target(**given, now_seconds=1_800_000_000)


def test_streams_and_shards_that_do_not_exist():
    world, _, _, _ = three_batches()
    with pytest.raises(SettingsError, match="reads no stream clicks"):
        seeking(world, to="LATEST", stream="clicks").plan()
    with pytest.raises(SettingsError, match="no lease of the shard shardId-9"):
        seeking(world, to="LATEST", shards=["shardId-9"]).plan()
    with pytest.raises(SettingsError, match="belongs to one shard"):
        seeking(world, after="5")
    shard = world.leases.list_leases().leases[0].shard_id
    with pytest.raises(SettingsError, match="is not a sequence number of the shard"):
        seeking(world, after="5", shards=[shard]).plan()
