"""What the leader does with workers, in virtual time: placement, failover, balance, drains,
handoffs (protocol §5).
"""

from __future__ import annotations

import pytest

from kcl_pipeline.events import LeaseMoved, LeasesCreated
from kcl_pipeline.leader.assign import how_to_move
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.planning.state import Observation
from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease
from tests.support.leader_world import World, settled


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


def test_a_dead_workers_leases_go_to_the_living_within_the_failover_time():
    world = settled(World(shards=6), "a", "b", "c")
    world.kill("c")
    seconds = world.run_until(lambda: "c" not in world.owners().values(), limit=30)
    assert 6 <= seconds <= 16
    moves = [m for m in world.happened(LeaseMoved) if m.from_worker == "c"]
    assert len(moves) == 2
    assert not any(m.graceful for m in moves)
    world.run(120)
    assert set(world.owners().values()) == {"a", "b"}, (
        "the row of c was still fresh, yet it got nothing back"
    )


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
    assert len([m for m in world.happened(LeaseMoved) if m.to_worker == "b"]) <= 6, (
        "one lease, every ten failover times"
    )


@pytest.mark.parametrize("strategy", ["lease_count_based", "balanced"])
def test_a_hung_worker_keeps_its_leases_and_gets_no_other_ones(strategy):
    world = settled(
        World(shards=6, assignment={"lease_assignment_strategy": strategy}), "a", "b", "c"
    )
    hung = world.workers["b"]
    hung.hung = True
    kept = list(hung.held)
    world.run(15)  # until its next report
    world.events.clear()
    world.kill("c")
    world.run_until(lambda: "c" not in world.owners().values(), limit=60)
    world.join("d")
    world.run(300)
    assert list(hung.held) == kept
    assert not [m for m in world.happened(LeaseMoved) if "b" in (m.from_worker, m.to_worker)]
    assert [len(held) for held in world.held().values()] == [2, 2, 2]
    hung.hung = False
    world.workers["a"].stop()
    world.run_until(lambda: len(hung.held) == 3, limit=120)


def test_a_hung_worker_that_is_asked_to_drain_loses_its_leases_after_the_handoff_time():
    world = settled(World(shards=4), "a", "b")
    world.workers["b"].hung = True
    world.run(15)
    assert world.rows.request_drain("b")
    world.run_until(lambda: set(world.owners().values()) == {"a"}, limit=90)


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


@pytest.mark.parametrize("strategy", ["lease_count_based", "balanced"])
def test_a_joining_worker_does_not_wait_for_an_interval(strategy):
    world = settled(World(shards=8, assignment={"lease_assignment_strategy": strategy}), "a")
    world.run(70 - int(world.clock.monotonic()) % 5)
    for name, shares in (("b", [4, 4]), ("c", [3, 3, 2])):
        world.join(name)
        world.run_until(
            lambda s=shares: sorted((len(v) for v in world.held().values()), reverse=True) == s,
            limit=30,
        )
        world.run(2)
    world.events.clear()
    world.run(200)
    assert world.happened(LeaseMoved) == []


def test_balance_without_a_join_waits_for_its_interval():
    world = settled(World(shards=4), "a", "b")
    world.run(100)
    leases = [lease for lease in world.table().values() if lease.owner == "a"]
    world.leases.initiate_handoff(leases[0], "b")
    world.run_until(lambda: len(world.held()["b"]) == 3, limit=30)
    world.events.clear()
    seconds = world.run_until(lambda: world.happened(LeaseMoved), limit=120)
    assert 10 < seconds <= 65


def test_a_new_leader_moves_nothing_to_a_worker_that_has_only_left_its_row():
    world = World(shards=4)
    world.join("a")
    world.rows.report(WorkerMetrics("silent", int(world.clock.wall())))
    for key in ("shardId-000000000000", "shardId-000000000001"):
        create_lease(world.leases, Lease(key, LATEST, owner="a"))
    world.run(12)
    world.leader()
    world.run(120)
    assert world.happened(LeaseMoved) == []


def with_silent(world, *names):
    """Rows of workers that died some time ago; their leases have been given to others."""
    for name in names:
        world.rows.report(WorkerMetrics(name, int(world.clock.wall())))
    world.run(60)
    return world


def replace_leader(world, name, **options):
    """The leader stops in good order; another process leads from now on."""
    for cycle in world.leaders.values():
        cycle.release()
    world.leaders.clear()
    return world.leader(name, **options)


@pytest.mark.parametrize("strategy", ["lease_count_based", "kcl_variance", "balanced"])
@pytest.mark.parametrize("successor", ["dagster/sensor", "a"])
def test_a_new_leader_places_free_leases_on_the_living_at_once(strategy, successor):
    """Seeds 7002910, 9003150 and 9007265: two dead workers got a free lease one after the other."""
    world = settled(World(shards=6, assignment={"lease_assignment_strategy": strategy}), *"abc")
    with_silent(world, "0-silent", "1-silent")
    replace_leader(world, successor)
    world.workers["c"].stop()
    world.events.clear()
    assert world.run_until(lambda: set(world.owners().values()) == {"a", "b"}, limit=30) <= 6
    assert {m.to_worker for m in world.happened(LeaseMoved)} == {"a", "b"}
    world.run(120)
    assert sorted(map(len, world.held().values())) == [3, 3]
    assert not {m.to_worker for m in world.happened(LeaseMoved)} & {"0-silent", "1-silent"}


def test_a_lone_worker_that_leads_gets_all_its_leases_at_once_with_silent_workers():
    world = settled(World(shards=4), "a")
    with_silent(world, "0-silent", "1-silent")
    world.workers["a"].stop()
    world.join("b")
    world.events.clear()
    replace_leader(world, "b")
    assert world.run_until(lambda: set(world.owners().values()) == {"b"}, limit=30) <= 6
    assert {m.to_worker for m in world.happened(LeaseMoved)} == {"b"}


def test_with_silent_workers_a_leader_that_is_no_worker_waits_for_the_first_sign_of_life():
    world = settled(World(shards=4), "a")
    with_silent(world, "0-silent", "1-silent")
    world.workers["a"].stop()
    world.leaders["leader"].release()
    world.leaders.clear()
    world.join("b")
    world.run(3)
    world.events.clear()
    world.leader("dagster/new")
    assert world.run_until(lambda: set(world.owners().values()) == {"b"}, limit=30) <= 16
    assert {m.to_worker for m in world.happened(LeaseMoved)} == {"b"}


def test_silent_workers_get_nothing_when_leases_expire_either():
    world = settled(World(shards=6), "a", "b", "c")
    with_silent(world, "0-silent", "1-silent")
    world.leaders.clear()
    world.kill("c")
    world.events.clear()
    world.leader("a")
    world.run_until(lambda: set(world.owners().values()) == {"a", "b"}, limit=90)
    assert {m.to_worker for m in world.happened(LeaseMoved)} <= {"a", "b"}


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
        (
            Lease("s", LATEST, owner="c", checkpoint_owner="a"),
            Observation(),
            {"has_to_move": True},
            "assign",
        ),
        (
            Lease("s", LATEST, owner="b", checkpoint_owner="a"),
            Observation(overdue_handoffs=frozenset("s")),
            {},
            "assign",
        ),
        (
            Lease("s", LATEST, owner="b", checkpoint_owner="a"),
            Observation(expired=frozenset("s")),
            {},
            "assign",
        ),
    ],
)
def test_how_a_lease_goes_to_b(lease, seen, options, how):
    assert (
        how_to_move(lease, "b", seen, **{"graceful_enabled": True, "has_to_move": False, **options})
        == how
    )


def test_an_old_owner_that_dies_in_the_handoff_is_replaced_by_the_destination():
    world = settled(World(shards=2), "a")
    world.workers["a"].slow_handoff = 1e9
    world.join("b")
    world.run_until(lambda: any(le.in_handoff for le in world.table().values()), limit=120)
    (key,) = [k for k, le in world.table().items() if le.in_handoff]
    world.kill("a")
    world.run_until(lambda: world.held()["b"] == sorted(world.table()), limit=60)
    assert any(
        m.lease_key == key and m.to_worker == "b" and "during the handoff" in m.reason
        for m in world.happened(LeaseMoved)
    )


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
    world.run_until(
        lambda: world.table()[key].owner == "a" and not world.table()[key].in_handoff, limit=30
    )
    world.run_until(lambda: len(world.held()["a"]) == 2, limit=60)


def test_a_fleet_with_java_peers():
    """Rows of a Java 3.x: default-metric and CPU workers, reports every 30 s, no extra attributes;
    a lease without our fields.
    """
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
    create_lease(world.leases, Lease("shardId-000000000077", Position("5")))
    world.run(30)
    assert set(world.owners().values()) == {"python", "java"}


def test_rows_of_workers_long_gone_are_deleted():
    world = settled(
        World(assignment={"stale_worker_metrics_entry_cleanup_millis": 60_000}), "a", "b"
    )
    world.kill("b")
    world.run(50)
    assert {w.worker_id for w in world.rows.scan_workers().workers} == {"a", "b"}
    world.run(30)
    assert {w.worker_id for w in world.rows.scan_workers().workers} == {"a"}


def test_rows_of_workers_long_gone_are_deleted_although_leaders_change():
    world = settled(
        World(assignment={"stale_worker_metrics_entry_cleanup_millis": 60_000}), "a", "b", "c"
    )
    world.leader("a")
    world.kill("c")
    world.run(40)
    world.leaders.pop("leader").release()
    assert world.run_until(lambda: len(world.rows.scan_workers().workers) == 2, limit=60) <= 40
    assert world.coordinator.read_lock().owner_name == "a"


def test_the_utilization_strategy_runs_the_same_fleet():
    world = World(shards=9, assignment={"lease_assignment_strategy": "kcl_variance"})
    settled(world, "a", "b")
    world.join("c")
    world.run_until(lambda: [len(v) for v in world.held().values()] == [3, 3, 3], limit=300)
    world.events.clear()
    world.run(200)
    assert world.happened(LeaseMoved) == []


@pytest.mark.parametrize("strategy", ["lease_count_based", "worker_utilization_aware"])
def test_a_successor_gets_the_leases_of_the_worker_that_it_replaces_and_no_others(strategy):
    world = settled(
        World(shards=12, assignment={"lease_assignment_strategy": strategy}), "a", "b", "c"
    )
    before = world.owners()
    world.events.clear()
    world.join("d", replaces="b")
    world.run_until(lambda: "b" not in world.owners().values(), limit=60)
    world.run(60)
    moves = world.happened(LeaseMoved)
    assert [(m.from_worker, m.to_worker, m.graceful) for m in moves] == [("b", "d", True)] * 4
    assert {m.reason for m in moves} == {"d replaces b"}
    world.workers.pop("b")
    world.rows.deregister("b")
    world.events.clear()
    world.run(180)
    assert world.happened(LeaseMoved) == [], "the end of the former worker moves nothing"
    expected = {key: "d" if owner == "b" else owner for key, owner in before.items()}
    assert world.owners() == expected


def test_a_successor_that_is_killed_gives_the_leases_back_to_the_worker_that_still_runs():
    world = settled(World(shards=4), "a", "b")
    world.join("d", replaces="b")
    world.run_until(lambda: "b" not in world.owners().values(), limit=60)
    world.kill("d")
    world.run_until(lambda: [len(v) for v in world.held().values()] == [2, 2], limit=180)
    assert set(world.owners().values()) == {"a", "b"}


def test_a_successor_that_drains_gives_the_leases_back():
    world = settled(World(shards=4), "a", "b")
    world.join("d", replaces="b")
    world.run_until(lambda: "b" not in world.owners().values(), limit=60)
    world.rows.request_drain("d")
    world.run_until(lambda: "d" not in world.owners().values(), limit=120)
    assert set(world.owners().values()) == {"a", "b"}
