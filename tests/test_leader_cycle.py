"""Leader cycles over in-memory tables in virtual time: protocol §5, §7, §8, and what design §3 adds."""

from __future__ import annotations

import pytest
from leader_world import World

from kcl_pipeline.errors import Throttled, Unavailable
from kcl_pipeline.events import CycleFailed, HoleFound, LeaderElected, LeadershipLost, LeaseDeleted, LeaseMoved, LeasesCreated, MoveRefused
from kcl_pipeline.leader.listing import missing_leases
from kcl_pipeline.leader.moves import how_to_move
from kcl_pipeline.leader.preview import preview
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import LeaderLock, MigrationState, WorkerMetrics
from kcl_pipeline.planning.state import Observation
from kcl_pipeline.sequence import LATEST, SHARD_END, TRIM_HORIZON, Position


def settled(world, *workers):
    """A fleet at work: every lease held by a living worker, evenly."""
    world.join(*workers)
    if not world.leaders:
        world.leader()
    world.run_until(lambda: all(world.held().values()) and sum(map(len, world.held().values())) == len(world.table()))
    return world


def test_a_new_application_is_at_work_within_a_discovery_interval():
    world = World(shards=4)
    world.join("a", "b")
    report = world.leader().run_once()
    assert report.led
    assert len(report.created) == 4
    assert report.error is None
    assert all(c.complete for c in report.coverage)
    world.run(1)
    assert sorted(world.owners().values()) == ["a", "a", "b", "b"]
    assert world.run_until(lambda: [len(v) for v in world.held().values()] == [2, 2]) <= 12
    (created,) = world.happened(LeasesCreated)
    assert "no leases" in created.reason
    assert all(lease.checkpoint == TRIM_HORIZON for lease in world.table().values())


def test_initial_leases_cut_off_by_the_deadline_are_finished_by_the_next_cycle():
    world = World(shards=200)
    cycle = world.leader()
    world.leases.store.before_call = lambda operation, _key: world.clock.advance(0.1) if operation == "PutItem" else None
    first = cycle.run_once(5.0)
    assert 0 < len(first.created) < 200
    for _ in range(4):
        cycle.run_once(5.0)
    assert len(world.table()) == 200


def test_several_streams_each_get_their_leases_and_a_missing_one_does_not_hold_up_the_others():
    world = World(shards=2, streams=("orders", "clicks"))
    world.model.call("DeleteStream", StreamName="orders")
    world.join("a")
    report = world.leader().run_once()
    assert "orders" in report.error
    assert len(report.created) == 2
    assert all(key.split(":")[1] == "clicks" and key.count(":") == 3 for key in report.created)
    world.model.create_stream("orders", 3)
    world.run(30)
    assert {lease.stream.split(":")[1] for lease in world.table().values()} == {"orders", "clicks"}
    assert None not in world.owners().values()


def test_rows_of_the_other_form_are_refused_before_anything_is_written():
    world = World(streams=("orders", "clicks"))
    world.leases.create_lease(Lease("shardId-000000000000", LATEST))
    report = world.leader().run_once()
    assert "single-stream application" in report.error
    assert len(world.table()) == 1


def test_a_dead_workers_leases_go_to_the_living_within_the_failover_time():
    world = settled(World(shards=6), "a", "b", "c")
    world.kill("c")
    seconds = world.run_until(lambda: "c" not in world.owners().values(), limit=30)
    assert 6 <= seconds <= 16
    moves = [m for m in world.happened(LeaseMoved) if m.from_worker == "c"]
    assert len(moves) == 2
    assert not any(m.graceful for m in moves)
    world.run(120)
    assert set(world.owners().values()) == {"a", "b"}, "the row of c was still fresh, yet it got nothing back"


def test_a_stopped_worker_costs_one_tick():
    world = settled(World(shards=4), "a", "b")
    world.workers["b"].stop()
    assert world.run_until(lambda: set(world.owners().values()) == {"a"}, limit=30) <= 6


def test_a_paused_worker_loses_its_leases_and_takes_part_again_when_it_wakes():
    world = settled(World(shards=4), "a", "b")
    world.workers["b"].paused = True
    world.run(20)
    assert set(world.owners().values()) == {"a"}
    world.workers["b"].paused = False
    world.run_until(lambda: [len(v) for v in world.held().values()] == [2, 2], limit=120)


def test_a_worker_that_reports_but_never_renews_is_given_less_and_less():
    world = settled(World(shards=4, assignment={"variance_balancing_frequency": 1}), "a", "b")
    world.workers["b"].renews = False
    world.run(600)
    world.events.clear()
    world.run(600)
    assert len([m for m in world.happened(LeaseMoved) if m.to_worker == "b"]) <= 4, "two leases, every five minutes"


def test_the_only_worker_gets_its_expired_leases_back():
    world = settled(World(shards=2), "a")
    worker = world.workers["a"]
    worker.renews = False
    world.run(25)
    worker.held.clear()
    worker.renews = True
    assert world.run_until(lambda: len(worker.held) == 2, limit=60) <= 45


def test_a_joining_worker_gets_its_share_by_handoff_and_nobody_ever_holds_a_lease_twice():
    world = settled(World(shards=6), "a", "b")
    world.join("c")
    for _ in range(150):
        world.run(1)
        held = [key for keys in world.held().values() for key in keys]
        assert len(held) == len(set(held))
    assert [len(v) for v in world.held().values()] == [2, 2, 2]
    assert all(m.graceful for m in world.happened(LeaseMoved) if m.to_worker == "c")
    before = world.owners()
    world.events.clear()
    world.run(300)
    assert world.owners() == before
    assert world.happened(LeaseMoved) == []


def test_without_graceful_handoff_leases_are_assigned_at_once():
    world = settled(World(shards=4, lease={"is_graceful_lease_handoff_enabled": False}), "a")
    world.join("b")
    world.run_until(lambda: [len(v) for v in world.held().values()] == [2, 2], limit=120)
    assert not any(m.graceful for m in world.happened(LeaseMoved))


def test_balance_waits_for_its_interval_while_placement_does_not():
    world = settled(World(shards=4), "a")
    world.run(70 - int(world.clock.monotonic()) % 5)
    world.join("b")
    world.events.clear()
    seconds = world.run_until(lambda: world.happened(LeaseMoved), limit=120)
    assert 10 < seconds <= 65
    world.events.clear()
    world.run(30)
    assert world.happened(LeaseMoved) == []


def test_a_new_leader_moves_nothing_to_a_worker_that_has_only_left_its_row():
    world = World(shards=4)
    world.join("a")
    world.rows.report(WorkerMetrics("ghost", int(world.clock.wall())))
    for key in ("shardId-000000000000", "shardId-000000000001"):
        world.leases.create_lease(Lease(key, LATEST, owner="a"))
    world.run(12)
    world.leader()
    world.run(120)
    assert world.happened(LeaseMoved) == []


def test_a_worker_asked_to_drain_gets_nothing_and_hands_over_what_it_has():
    world = settled(World(shards=4), "a", "b")
    world.rows.request_drain("b")
    world.run_until(lambda: len(world.held()["a"]) == 4, limit=60)
    moves = [m for m in world.happened(LeaseMoved) if m.from_worker == "b"]
    assert len(moves) == 2
    assert all(m.graceful for m in moves)
    world.run(120)
    assert world.held()["b"] == []


@pytest.mark.parametrize(
    ("lease", "seen", "options", "how"),
    [
        (Lease("s", LATEST), Observation(), {}, "assign"),
        (Lease("s", LATEST, owner="a"), Observation(), {}, "hand off"),
        (Lease("s", LATEST, owner="a"), Observation(), {"graceful_enabled": False}, "assign"),
        (Lease("s", SHARD_END, owner="a"), Observation(), {}, "assign"),
        (Lease("s", LATEST, owner="a"), Observation(expired=frozenset("s")), {}, "assign"),
        (Lease("s", LATEST, owner="b"), Observation(), {}, "leave"),
        (Lease("s", LATEST, owner="b"), Observation(expired=frozenset("s")), {}, "assign"),
        (Lease("s", LATEST, owner="b", checkpoint_owner="a"), Observation(), {}, "leave"),
        (Lease("s", LATEST, owner="c", checkpoint_owner="a"), Observation(), {}, "leave"),
        (Lease("s", LATEST, owner="c", checkpoint_owner="a"), Observation(), {"has_to_move": True}, "assign"),
        (Lease("s", LATEST, owner="b", checkpoint_owner="a"), Observation(overdue_handoffs=frozenset("s")), {}, "assign"),
        (Lease("s", LATEST, owner="b", checkpoint_owner="a"), Observation(expired=frozenset("s")), {}, "assign"),
    ],
)
def test_how_a_lease_goes_to_b(lease, seen, options, how):
    assert how_to_move(lease, "b", seen, **{"graceful_enabled": True, "has_to_move": False, **options}) == how


def test_an_old_owner_that_dies_in_the_handoff_is_replaced_by_the_destination():
    world = settled(World(shards=2), "a")
    world.workers["a"].slow_handoff = 1e9
    world.join("b")
    world.run_until(lambda: any(le.in_handoff for le in world.table().values()), limit=120)
    (key,) = [k for k, le in world.table().items() if le.in_handoff]
    world.kill("a")
    world.run_until(lambda: world.held()["b"] == sorted(world.table()), limit=60)
    assert any(m.lease_key == key and m.to_worker == "b" and "during the handoff" in m.reason for m in world.happened(LeaseMoved))


def test_an_overdue_handoff_is_finished_by_force_and_a_running_one_is_left_alone():
    world = settled(World(shards=2), "a")
    world.workers["a"].slow_handoff = 1e9
    world.join("b")
    world.run_until(lambda: any(le.in_handoff for le in world.table().values()), limit=120)
    world.events.clear()
    world.run(38)
    assert world.happened(LeaseMoved) == []
    world.run_until(lambda: len(world.held()["b"]) == 1, limit=30)
    assert any("is overdue" in m.reason for m in world.happened(LeaseMoved))


def test_a_handoff_to_a_worker_that_died_goes_elsewhere():
    world = settled(World(shards=2), "a")
    world.workers["a"].slow_handoff = 1e9
    world.join("b")
    world.run_until(lambda: any(le.in_handoff for le in world.table().values()), limit=120)
    (key,) = [k for k, le in world.table().items() if le.in_handoff]
    world.kill("b")
    world.rows.deregister("b")
    world.run_until(lambda: world.table()[key].owner == "a" and not world.table()[key].in_handoff, limit=30)
    world.run_until(lambda: len(world.held()["a"]) == 2, limit=60)


def test_a_leader_that_dies_is_replaced_and_the_new_one_finds_the_dead_worker():
    world = settled(World(shards=4), "a", "b")
    del world.leaders["leader"]
    world.leader("standby")
    world.kill("b")
    seconds = world.run_until(lambda: set(world.owners().values()) == {"a"}, limit=120)
    assert 30 < seconds <= 70
    assert LeaderElected("standby", "leader") in world.events


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
    assert calls == []
    assert (world.leases.rows(), world.coordinator.rows()) == before


def test_a_leader_that_lost_the_lock_while_it_planned_writes_nothing_more():
    world = World(shards=4)
    world.join("a")
    world.run(1)
    old = world.leader("old")
    world.leaders.pop("old")

    def pause(operation, key):
        """The lock is stolen while the old leader is paused in its scan."""
        if operation == "Scan":
            world.leases.store.before_call = lambda *_: None
            lock = world.coordinator.read_lock()
            assert world.coordinator.put_lock(LeaderLock("new", 30_000, "v-new"), replacing=lock)

    world.leases.store.before_call = pause
    report = old.run_once()
    assert not report.led
    assert world.table() == {}
    assert LeadershipLost("old", "the lock was taken over") in world.events
    assert not world.happened(CycleFailed), "that is no failure"


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
    assert sum(report.failed_moves for report in world.reports) == 1
    assert not world.happened(CycleFailed)
    world.run_until(lambda: world.held()["a"] == sorted(world.table()), limit=60)


def test_split_and_merge_end_with_the_children_and_without_the_parents():
    world = settled(World(shards=3), "a", "b")
    first, second, third = sorted(world.table())
    world.model.split("orders", first)
    world.model.merge("orders", second, third)
    for worker in world.workers.values():
        worker.start_reading()
        for key in list(worker.held):
            worker.finish(key)
    world.run(20)
    children = [le for le in world.table().values() if not le.ended]
    assert len(children) == 3
    assert all(le.owner is not None for le in children)
    world.run(300)
    assert {first, second, third} <= set(world.table()), "kept while the children have not begun"
    for worker in world.workers.values():
        worker.start_reading()
    world.run(10)
    assert sorted(world.table()) == sorted(le.lease_key for le in children)
    assert {e.lease_key for e in world.happened(LeaseDeleted)} == {first, second, third}
    assert world.reports[-1].coverage[0].complete
    assert not world.happened(HoleFound)


def test_finished_parents_stay_when_cleanup_is_switched_off():
    world = World(shards=1, shard_sync={"cleanup_leases_upon_shard_completion": False})
    settled(world, "a")
    (parent,) = world.table()
    world.model.split("orders", parent)
    worker = world.workers["a"]
    worker.start_reading()
    worker.finish(parent)
    world.run(20)
    worker.start_reading()
    world.run(600)
    assert parent in world.table()


def test_a_hole_is_filled_when_three_audits_have_seen_the_same_one():
    world = settled(World(shards=4), "a")
    lost = sorted(world.table())[2]
    world.leases.delete(world.table()[lost])
    began = world.clock.monotonic()
    world.run_until(lambda: lost in world.table(), limit=500)
    assert [e.times for e in world.happened(HoleFound)] == [1, 2, 3]
    assert 240 <= world.clock.monotonic() - began <= 370
    assert world.table()[lost].checkpoint == TRIM_HORIZON
    world.run(20)
    assert lost in world.workers["a"].held
    assert world.reports[-1].coverage[0].complete


def test_a_row_that_cannot_be_read_is_reported_and_not_created_again():
    world = settled(World(shards=4), "a")
    keys = sorted(world.table())
    item = world.leases.rows()[keys[0]]
    world.leases.delete(world.table()[keys[0]])
    world.run(130)
    world.leases.plant({name: value for name, value in item.items() if name not in ("checkpoint", "leaseOwner")})
    world.run(500)
    assert world.reports[-1].unreadable == (keys[0],)
    assert "checkpoint" not in world.leases.rows()[keys[0]]
    assert not world.reports[-1].coverage[0].complete


def test_a_stream_of_which_no_row_can_be_read_is_not_taken_for_a_new_one():
    world = World(shards=2)
    world.leases.plant({"leaseKey": {"S": "shardId-000000000000"}, "leaseCounter": {"N": "5"}})
    world.leader()
    world.run(200)
    assert world.table() == {}
    world.run(60)
    assert list(world.table()) == ["shardId-000000000001"], "after three audits"


def test_the_children_of_a_row_that_cannot_be_read_are_left_to_it():
    world = World(shards=1)
    (parent,) = world.model.open_shard_ids("orders")
    world.model.split("orders", parent)
    stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    shards = world.kinesis.list_shards(stream)
    assert missing_leases(world.settings.shard_sync, [], [parent], shards, stream) == ()
    assert [lease.lease_key for lease in missing_leases(world.settings.shard_sync, [], [], shards, stream)] == [parent]


def test_another_hole_begins_the_count_anew():
    world = settled(World(shards=4), "a")
    keys = sorted(world.table())
    world.leases.delete(world.table()[keys[2]])
    world.run_until(lambda: len(world.happened(HoleFound)) == 2, limit=400)
    world.leases.delete(world.table()[keys[1]])
    world.run_until(lambda: len(world.happened(HoleFound)) == 4, limit=400)
    assert [e.times for e in world.happened(HoleFound)] == [1, 2, 1, 2]


def test_missing_hash_ranges_are_filled_in():
    world = settled(World(shards=2), "a")
    key = min(world.table())
    item = world.leases.rows()[key]
    world.leases.plant({name: value for name, value in item.items() if name not in ("startingHashKey", "endingHashKey")})
    world.run(130)
    assert world.table()[key].hash_key_range is not None
    assert not world.happened(HoleFound)


def test_garbage_goes_when_the_shard_has_left_the_stream():
    world = settled(World(shards=2), "a")
    world.leases.create_lease(Lease("shardId-000000000099", SHARD_END))
    world.run(1700)
    assert "shardId-000000000099" in world.table()
    world.run(300)
    assert "shardId-000000000099" not in world.table()


@pytest.mark.parametrize("error", [Throttled("slow down"), RuntimeError("a defect")])
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
        world.leases.store.before_call = lambda operation, _key: (_ for _ in ()).throw(Throttled("slow down")) if operation == "Scan" else None
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
            raise Unavailable("no answer")

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
            raise Unavailable("the answer was lost")

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
    world.leases.store.before_call = lambda operation, _key: world.clock.advance(30) if operation == "Scan" else None
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
def test_an_application_of_2x_is_not_led(version):
    world = World()
    world.coordinator.put_migration(MigrationState(version, "java", 1), replacing=None)
    report = world.leader().run_once()
    assert not report.led
    assert version in report.error
    assert world.coordinator.read_lock() is None
    assert world.table() == {}


def test_a_fleet_with_java_peers():
    """Rows of a Java 3.x: default-metric and CPU workers, reports every 30 s, no extra attributes; a lease without our fields."""
    world = World(shards=6)
    world.join("python", cpu=30.0)
    world.join("java", report_seconds=30)
    world.leader()
    world.run(120)
    assert [len(v) for v in world.held().values()] == [3, 3]
    for report in world.reports[1:]:
        assert [w.worker_id for w in report.workers] == ["java", "python"]
    world.rows.report(WorkerMetrics("broken", 5, {"C": (3.0,)}, {"C": (0,)}))
    world.rows.report(WorkerMetrics("failing", 5, {"C": (3.0, -1.0)}, {"C": (100,)}))
    world.leases.create_lease(Lease("shardId-000000000077", Position("5")))
    world.run(30)
    assert set(world.owners().values()) == {"python", "java"}


def test_rows_of_workers_long_gone_are_deleted():
    world = settled(World(assignment={"stale_worker_metrics_entry_cleanup_millis": 60_000}), "a", "b")
    world.kill("b")
    world.run(50)
    assert {w.worker_id for w in world.rows.list_workers()} == {"a", "b"}
    world.run(30)
    assert {w.worker_id for w in world.rows.list_workers()} == {"a"}


def test_two_leaders_at_once_leave_a_sound_table():
    """Each believes to lead: what they write is conditional, so that every lease has one owner and nobody loses what it renews for ever."""
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


def test_the_utilization_strategy_runs_the_same_fleet():
    world = World(shards=9, assignment={"lease_assignment_strategy": "worker_utilization_aware"})
    settled(world, "a", "b")
    world.join("c")
    world.run_until(lambda: [len(v) for v in world.held().values()] == [3, 3, 3], limit=300)
    world.events.clear()
    world.run(200)
    assert world.happened(LeaseMoved) == []


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
    assert seen.plan == report.plan


def test_the_preview_sees_expired_leases_when_it_watches_long_enough():
    world = settled(World(shards=4), "a", "b")
    world.kill("b")
    short = preview(world.settings, world.leases, world.rows, world.kinesis, world.clock)
    assert short.expired == ()
    long = preview(world.settings, world.leases, world.rows, world.kinesis, world.clock, observe_seconds=21.0)
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
