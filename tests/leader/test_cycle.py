"""The leader itself, in virtual time: failover of the lock, stale leaders, failing cycles,
deadlines, the preview (protocol §5.1).
"""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import ThrottledError, UnavailableError
from kcl_pipeline.events import (
    CycleFailed,
    LeaderElected,
    LeadershipLost,
    LeaseMoved,
    MoveRefused,
    PlanMade,
)
from kcl_pipeline.leader.preview import preview
from kcl_pipeline.leases.coordinator import LeaderLock, MigrationState
from tests.support.leader_world import World, settled


def test_a_leader_that_dies_is_replaced_and_the_new_one_finds_the_dead_worker():
    world = settled(World(shards=4), "a", "b")
    del world.leaders["leader"]
    world.leader("standby")
    world.kill("b")
    seconds = world.run_until(lambda: set(world.owners().values()) == {"a"}, limit=120)
    assert 8 < seconds <= 26
    assert LeaderElected("standby", "leader") in world.events


def test_a_standby_that_watched_knows_at_once_which_leases_have_expired():
    """It has counted the renewals while the dead leader held the lock."""
    world = settled(World(shards=4), "a", "b")
    world.leaders.clear()
    world.leader("a")
    world.leader("b")
    world.run(40, tick=1)
    assert world.coordinator.read_lock().owner_name == "a"
    world.kill("a")
    del world.leaders["a"]
    began = world.clock.monotonic()
    while set(world.owners().values()) != {"b"}:
        world.run(1, tick=1)
        assert world.clock.monotonic() - began <= 13
    assert not [m for m in world.happened(LeaseMoved) if m.to_worker == "a" and not m.graceful][4:]


def test_leases_that_wait_for_a_worker_are_said_once():
    world = World(shards=5, assignment={"max_leases_for_worker": 2})
    world.leader()
    world.join("a")
    world.run(60)
    assert [plan.spilled for plan in world.happened(PlanMade)] == [3]
    world.join("b")
    world.run(60)
    assert [plan.spilled for plan in world.happened(PlanMade)] == [3, 1]
    world.join("c")
    world.run(60)
    assert [plan.spilled for plan in world.happened(PlanMade)] == [3, 1, 0]


def test_a_leader_that_is_reloaded_under_its_own_name_goes_on_without_a_pause():
    world = World(shards=4)
    world.leader("sensor", resume_own_name=True)
    settled(world, "a", "b")
    world.leader("sensor", resume_own_name=True)
    report = world.leaders["sensor"].run_once()
    assert report.led
    assert report.expired == ()
    world.kill("b")
    assert world.run_until(lambda: set(world.owners().values()) == {"a"}, limit=60) <= 26


def test_a_released_lock_is_taken_by_the_next_tick():
    world = settled(World(), "a")
    world.leader("other")
    world.leaders.pop("leader").release()
    world.run(6)
    assert world.reports[-1].led
    assert world.reports[-1].lock_owner == "other"


def test_a_follower_is_quick_and_writes_nothing():
    world = settled(World(), "a")
    other = world.leader("other")
    before = world.leases.rows(), world.coordinator.rows()
    calls = []
    world.leases.store.before_call = lambda operation, key: calls.append(operation)
    report = other.run_once()
    assert not report.led
    assert report.lock_owner == "leader"
    assert calls == ["Scan"], "the renewals of the others"
    world.clock.advance(1)
    other.run_once()
    assert calls == ["Scan"]
    assert (world.leases.rows(), world.coordinator.rows()) == before


def test_a_leader_that_lost_the_lock_while_it_planned_writes_nothing_more():
    world = World(shards=4)
    world.join("a")
    world.run(1)
    old = world.leader("old")
    world.leaders.pop("old")

    def pause(operation, key):
        """The lock is stolen while the old leader is paused in its scan."""
        lock = world.coordinator.read_lock()
        if operation == "Scan" and lock is not None:
            world.leases.store.before_call = lambda *_: None
            assert world.coordinator.put_lock(LeaderLock("new", 30_000, "v-new"), replacing=lock)

    world.leases.store.before_call = pause
    old.run_once()
    assert world.table() == {}
    world.clock.advance(5)
    assert not old.run_once().led
    assert LeadershipLost("old", "another process has acquired the lock") in world.events
    assert not world.happened(CycleFailed), "that is no failure"


def test_a_leader_that_slept_in_its_scan_assigns_no_lease():
    """The leases have no owner meanwhile, so no condition of a row refuses its moves."""
    world = settled(World(shards=4), "a", "b")
    old = world.leaders.pop("leader")
    world.workers["b"].stop()
    free = [key for key, owner in world.owners().items() if owner is None]
    assert len(free) == 2

    def sleep(operation, key):
        if operation == "Scan":
            world.leases.store.before_call = lambda *_: None
            lock = world.coordinator.read_lock()
            assert world.coordinator.put_lock(LeaderLock("new", 30_000, "v-new"), replacing=lock)

    world.leases.store.before_call = sleep
    assert not old.run_once().led
    assert [key for key, owner in world.owners().items() if owner is None] == free
    assert LeadershipLost("leader", "another process has acquired the lock") in world.events


def test_moves_planned_on_rows_that_changed_meanwhile_are_refused():
    world = settled(World(shards=2), "a", "b")
    (key,) = world.held()["b"]
    world.kill("b")

    def somebody_else_moves_it(operation, moved_key):
        if operation == "UpdateItem" and moved_key == key:
            world.leases.store.before_call = lambda *_: None
            assert world.leases.assign(world.table()[key], "elsewhere")

    world.leases.store.before_call = somebody_else_moves_it
    world.run_until(lambda: world.happened(MoveRefused), limit=30)
    assert world.owners()[key] == "elsewhere"
    assert len(world.happened(MoveRefused)) == 1
    assert not world.happened(CycleFailed)
    world.run_until(lambda: world.held()["a"] == sorted(world.table()), limit=60)


@pytest.mark.parametrize("error", [ThrottledError("slow down"), RuntimeError("a defect")])
def test_three_failures_in_a_row_give_the_lead_up(error):
    world = settled(World(), "a")
    world.events.clear()
    cycle = world.leaders["leader"]

    def fail(operation, _key):
        if operation == "Scan":
            raise error

    world.leases.store.before_call = fail
    for expected in (1, 2, 3):
        report = cycle.run_once()
        assert str(error) in report.error
        assert world.happened(CycleFailed)[-1].consecutive == expected
    assert world.coordinator.read_lock() is None
    assert LeadershipLost("leader", "too many cycles in a row failed") in world.events
    world.leases.store.before_call = lambda *_: None
    assert not cycle.run_once().led, "others go first"
    world.clock.advance(21)
    assert cycle.run_once().led


def test_failures_that_are_not_in_a_row_do_not_count_together():
    world = settled(World(), "a")
    cycle = world.leaders["leader"]
    for _ in range(5):
        world.leases.store.before_call = lambda operation, _key: (
            (_ for _ in ()).throw(ThrottledError("slow down")) if operation == "Scan" else None
        )
        assert cycle.run_once().error
        assert cycle.run_once().error
        world.leases.store.before_call = lambda *_: None
        assert cycle.run_once().led


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(error):
    world = settled(World(), "a")
    cycle = world.leaders["leader"]
    world.leases.store.before_call = lambda *_: (_ for _ in ()).throw(error)
    with pytest.raises(error):
        cycle.run_once()
    world.leases.store.before_call = lambda *_: None
    assert cycle.run_once().led, "and the next cycle is not locked out"


def test_one_failed_move_does_not_hold_up_the_others_but_counts():
    world = World(shards=4)
    world.join("a")
    world.run(1)
    cycle = world.leader()
    broken = "shardId-000000000001"

    def fail(operation, key):
        if operation == "UpdateItem" and key == broken:
            raise UnavailableError("no answer")

    world.leases.store.before_call = fail
    report = cycle.run_once()
    assert report.led
    assert "no answer" in report.error
    assert [key for key, owner in world.owners().items() if owner is None] == [broken]
    world.leases.store.before_call = lambda *_: None
    assert cycle.run_once().error is None
    assert None not in world.owners().values()


def test_a_cycle_with_a_lost_answer_for_a_move_finds_it_done():
    world = World(shards=2)
    world.join("a")
    world.run(1)
    lost = iter([True])

    def lose(operation, _key):
        if operation == "UpdateItem" and next(lost, False):
            raise UnavailableError("the answer was lost")

    world.leases.store.after_call = lose
    cycle = world.leader()
    cycle.run_once()
    report = cycle.run_once()
    assert report.error is None
    assert set(world.owners().values()) == {"a"}
    assert report.plan.moves == ()


def test_an_overlapping_tick_returns_at_once():
    world = settled(World(), "a")
    cycle = world.leaders["leader"]
    seen = []

    def overlap(operation, _key):
        if operation == "Scan" and not seen:
            seen.append(cycle.run_once())

    world.leases.store.before_call = overlap
    assert cycle.run_once().led
    assert not seen[0].led
    assert "still running" in seen[0].error


def test_past_the_deadline_no_phase_is_begun():
    world = World(shards=4)
    world.join("a")
    world.run(1)
    cycle = world.leader()
    cycle.run_once()
    world.leases.store.before_call = lambda operation, _key: (
        world.clock.advance(30) if operation == "Scan" else None
    )
    world.kill("a")
    world.join("b")
    world.run(1)
    before = world.owners()
    cycle.run_once(10.0)
    assert world.owners() == before


def test_before_the_tables_exist_the_leader_waits_without_failing():
    world = World(tables_exist=False)
    cycle = world.leader()
    for _ in range(5):
        report = cycle.run_once()
        assert not report.led
        assert "waiting for the first worker" in report.error
    assert not world.happened(CycleFailed)
    world.coordinator.ensure_exists()
    assert "waiting for the first worker" in cycle.run_once().error, "the lease table comes later"
    world.leases.ensure_exists()
    world.rows.ensure_exists()
    assert len(cycle.run_once().created) == 4


@pytest.mark.parametrize("version", ["CLIENT_VERSION_2X", "CLIENT_VERSION_UPGRADE_FROM_2X"])
def test_in_an_application_that_2x_may_run_the_leader_assigns_nothing(version):
    world = World()
    world.coordinator.put_migration(MigrationState(version, "java", 1), replacing=None)
    world.join("a")
    report = world.leader().run_once()
    assert report.led
    assert len(report.created) == 4
    world.run(60)
    assert set(world.owners().values()) == {None}


def test_an_application_of_an_unknown_version_is_not_led():
    world = World()
    world.coordinator.put_migration(MigrationState("CLIENT_VERSION_4X", "java", 1), replacing=None)
    report = world.leader().run_once()
    assert not report.led
    assert "CLIENT_VERSION_4X" in report.error
    assert world.coordinator.read_lock() is None
    assert world.table() == {}


def test_two_leaders_at_once_leave_a_sound_table():
    """Each believes to lead: what they write is conditional, so that every lease has one owner and
    nobody loses what it renews for ever.
    """
    world = World(shards=8)
    world.leader("sensor", resume_own_name=True)
    first = world.leaders["sensor"]
    world.join("a", "b", "c")
    world.run(20)
    world.leaders["again"] = world.leader("sensor", resume_own_name=True)
    world.leaders["sensor"] = first
    world.run(200)
    world.kill("c")
    world.run(60)
    assert sorted(len(v) for v in world.held().values()) == [4, 4]
    held = [key for keys in world.held().values() for key in keys]
    assert len(held) == len(set(held)) == 8


def test_the_preview_plans_as_the_leader_does_and_writes_nothing():
    world = World(shards=4)
    world.join("a", "b")
    world.run(1)
    tables = (world.leases, world.rows, world.coordinator)
    before = [t.rows() for t in tables]
    seen = preview(world.settings, world.leases, world.rows, world.kinesis, world.clock)
    assert [t.rows() for t in tables] == before
    assert len(seen.create) == 4
    assert not seen.coverage[0].complete
    report = world.leader().run_once()
    assert seen.plan.moves == report.plan.moves


def test_the_preview_sees_expired_leases_when_it_watches_long_enough():
    world = settled(World(shards=4), "a", "b")
    world.kill("b")
    short = preview(world.settings, world.leases, world.rows, world.kinesis, world.clock)
    assert short.expired == ()
    long = preview(
        world.settings, world.leases, world.rows, world.kinesis, world.clock, observe_seconds=21.0
    )
    assert len(long.expired) == 4, "nobody renewed while it slept"
    assert {m.to_worker for m in long.plan.moves} <= {"a"}


def test_release_without_the_lock_is_nothing():
    world = World()
    cycle = world.leader()
    cycle.release()
    cycle.run_once()
    cycle.release()
    cycle.release()
    assert world.coordinator.read_lock() is None
