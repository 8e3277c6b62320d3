"""HeldLeases on a virtual clock: gaining, renewing, expiring, writing."""

import threading

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import AccessDeniedError, LeaseLostError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, DefectFound, LeaseGained
from kcl_pipeline.events import LeaseLost as LeaseLostEvent
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.testing.row_store import no_hook
from kcl_pipeline.testing.tables import create_lease
from tests.support.held_world import END, SETTINGS, World, world_fixture  # noqa: F401 (a fixture)


def test_discovery_gains_what_is_assigned_and_nothing_else(world):
    world.assign("a", "b")
    world.assign("c", owner="w2")
    create_lease(world.leader, Lease("d", TRIM_HORIZON))
    gained = world.leases.discover()
    assert [h.lease_key for h in gained] == ["a", "b"]
    assert world.leases.held() == gained
    assert world.of(LeaseGained) == [LeaseGained("w1", "a", 1), LeaseGained("w1", "b", 1)]
    assert world.leases.discover() == ()
    assert world.leader.get("a").counter == 1


def test_discovery_leaves_a_pending_handoff_to_its_old_owner(world):
    world.assign("a", owner="w2")
    world.leader.initiate_handoff(world.leader.get("a"), "w1")
    assert world.leases.discover() == ()
    world.leader.assign(world.leader.get("a"), "w1")
    assert len(world.leases.discover()) == 1


def test_discovery_does_not_trust_a_lagging_index(world):
    world.assign("a")
    world.clock.advance(5)
    world.leader.assign(world.leader.get("a"), "w2")
    world.table.store.index_lag_seconds = 2.0
    assert world.table.lease_keys_of("w1") == ("a",)
    assert world.leases.discover() == ()


def test_discovery_survives_one_bad_row_and_finds_it_the_next_time(world):
    world.assign("a", "b", "c")
    world.fail_once("GetItem", ThrottledError("slow down"), applied=False)
    assert [h.lease_key for h in world.leases.discover()] == ["b", "c"]
    assert len(world.of(AwsTrouble)) == 1
    assert [h.lease_key for h in world.leases.discover()] == ["a"]
    world.fail_once("Query", ThrottledError("slow down"), applied=False)
    with pytest.raises(ThrottledError):
        world.leases.discover()


def test_only_named_leases_that_are_its_own_are_found_among_them(world):
    world.assign("a", "b")
    world.assign("c", owner="w2")
    assert [h.lease_key for h in world.leases.discover(["b", "c", "gone"])] == ["b"]


def test_recovery_renews_even_what_has_long_expired_and_skips_handoffs(world):
    world.assign("a", "b")
    world.assign("c", owner="w2")
    world.leader.initiate_handoff(world.leader.get("b"), "w2")
    world.clock.advance(3600)
    (held,) = world.leases.recover()
    assert (held.lease_key, held.lease.counter) == ("a", 2)
    assert world.leader.get("a").counter == 2
    assert world.leader.get("b").counter == 1
    assert world.leases.recover() == ()


def test_recovery_reads_through_a_lagging_scan(world):
    world.assign("a")
    world.clock.advance(1)
    world.leader.renew(world.leader.renew(world.leader.get("a")))
    world.table.store.scan_lag_seconds = 0.5
    (held,) = world.leases.recover()
    assert held.lease.counter == 4


def test_recovery_goes_on_after_trouble(world):
    world.assign("a", "b")
    world.lose_answer()
    assert [h.lease_key for h in world.leases.recover()] == ["b"]
    world.fail_once("Scan", UnavailableError("x"), applied=False)
    assert world.leases.recover() == ()
    world.fail_once("Scan", AccessDeniedError("dynamodb:Scan"), applied=False)
    with pytest.raises(AccessDeniedError):
        world.leases.recover()
    assert len(world.of(AwsTrouble)) == 2


def test_renewal_keeps_a_lease_for_ever(world):
    held = world.gain()
    for _ in range(20):
        world.clock.advance(3.3)
        assert world.leases.renew_all() == 1
    assert world.leases.get("s0") is held
    assert world.leader.get("s0").counter == 21


def test_an_expired_lease_is_hidden_at_once_and_lost_without_a_write(world):
    held = world.gain()
    world.clock.advance(9.9)
    assert world.leases.held() == (held,)
    world.clock.advance(0.1)
    assert world.leases.held() == ()
    assert world.leases.get("s0") is None
    with pytest.raises(LeaseLostError, match="not renewed in time"):
        world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.renew_all() == 0
    assert world.of(LeaseLostEvent) == [LeaseLostEvent("w1", "s0", "it was not renewed in time")]
    assert world.leader.get("s0").counter == 1
    (again,) = world.leases.discover()
    assert again is not held


def test_a_slow_renewal_counts_from_when_it_was_sent(world):
    world.gain()
    world.clock.advance(5)
    world.table.hook(lambda operation, key: world.clock.advance(4), None)
    assert world.leases.renew_all() == 1
    world.table.hook(None, None)
    world.clock.advance(5.9)
    assert world.leases.get("s0") is not None
    world.clock.advance(0.2)
    assert world.leases.get("s0") is None


def test_a_lease_taken_by_another_worker_is_lost_at_the_next_renewal(world):
    held = world.gain()
    world.leader.assign(held.lease, "w2")
    assert world.leases.renew_all() == 0
    assert world.leases.held() == ()
    assert len(world.of(LeaseLostEvent)) == 1
    world.leases.drop(held, "again")
    assert len(world.of(LeaseLostEvent)) == 1


def test_trouble_keeps_a_lease_until_it_expires(world):
    world.gain()
    for _ in range(3):
        world.clock.advance(3)
        world.fail_once("UpdateItem", ThrottledError("slow down"), applied=False)
        assert world.leases.renew_all() == 0
    assert len(world.of(AwsTrouble)) == 3
    assert len(world.leases.held()) == 1
    world.clock.advance(1)
    world.leases.renew_all()
    assert world.leases.held() == ()


def test_a_defect_does_not_look_like_trouble_with_aws(world):
    held = world.gain()
    world.fail_once("UpdateItem", ValueError("a defect"), applied=False)
    assert world.leases.renew_all() == 0
    world.assign("s1", "s2")
    world.fail_once("GetItem", ValueError("a defect"), applied=False)
    assert [one.lease_key for one in world.leases.discover()] == ["s2"]
    world.fail_once("GetItem", ValueError("a defect"), applied=False)
    assert world.leases.recover() == ()
    assert [one.operation for one in world.of(DefectFound)] == [
        "renewal of s0",
        "discovery of s1",
        "recovery of s1",
    ]
    assert {one.error for one in world.of(DefectFound)} == {"ValueError: a defect"}
    assert world.of(AwsTrouble) == []
    assert held in world.leases.held()


def test_a_renewal_whose_answer_was_lost_is_found_by_the_next(world):
    held = world.gain()
    world.lose_answer()
    world.leases.renew_all()
    assert world.leader.get("s0").counter == 2
    assert world.leases.renew_all() == 1
    assert held.lease == world.leader.get("s0")
    assert held.lease.counter == 3


def test_renewals_are_started_by_the_caller(world):
    world.assign("a", "b", "c")
    world.leases.discover()
    keys = []

    def start(held):
        keys.append(held.lease_key)
        return held.lease_key != "b"

    assert world.leases.renew_all(start=start) == 2, "one could not be started"
    assert keys == ["a", "b", "c"]


def test_a_checkpoint_is_a_renewal(world):
    held = world.gain()
    world.clock.advance(9)
    lease = world.leases.checkpoint(held, checkpoint=END)
    assert lease == held.lease == world.leader.get("s0")
    assert lease.checkpoint == END
    world.clock.advance(9)
    assert world.leases.get("s0") is held


def test_a_checkpoint_on_a_lost_lease_drops_it(world):
    held = world.gain()
    world.leader.assign(held.lease, "w2")
    with pytest.raises(LeaseLostError):
        world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.held() == ()
    assert world.leader.get("s0").checkpoint == TRIM_HORIZON


def test_an_earlier_incarnation_is_refused(world):
    old = world.gain()
    world.leases.drop(old, "tested")
    (new,) = world.leases.discover()
    with pytest.raises(LeaseLostError, match="not held any more"):
        world.leases.checkpoint(old, checkpoint=END)
    with pytest.raises(LeaseLostError):
        world.leases.renew(old)
    assert not world.leases.release(old)
    assert not world.leases.complete_handoff(old)
    world.leases.drop(old, "tested again")
    assert world.leases.held() == (new,)
    assert world.leader.get("s0").counter == 1


def test_a_lost_answer_to_a_renewal_does_not_cost_the_checkpoint(world):
    held = world.gain()
    world.lose_answer()
    world.leases.renew_all()
    assert world.leases.checkpoint(held, checkpoint=END).checkpoint == END
    assert world.leases.get("s0") is held


def test_the_deletion_of_a_finished_lease_is_no_loss(world):
    held = world.gain()
    world.leases.checkpoint(held, checkpoint=SHARD_END)
    assert world.leader.delete(world.leader.get("s0"))
    world.leases.renew_all()
    assert world.leases.held() == ()
    assert world.of(LeaseLostEvent) == []


def test_throughput_is_seeded_averaged_and_written(world):
    create_lease(world.leader, Lease("s0", TRIM_HORIZON, throughput_kbps=100.0))
    world.leader.assign(world.leader.get("s0"), "w1")
    (held,) = world.leases.discover()
    world.clock.advance(4)
    world.leases.renew_all()
    assert held.lease.throughput_kbps == 100.0
    world.leases.record_bytes("s0", 4 * 50 * 1024)
    world.leases.record_bytes("unknown", 1)
    world.clock.advance(4)
    world.leases.renew_all()
    assert world.leader.get("s0").throughput_kbps == 75.0
    world.clock.advance(4)
    world.leases.renew_all()
    assert world.leader.get("s0").throughput_kbps == 37.5


def test_throughput_is_absent_until_the_first_record(world):
    held = world.gain()
    world.clock.advance(4)
    world.leases.renew_all()
    assert "throughputKBps" not in world.table.rows()["s0"]
    world.leases.record_bytes("s0", 4096)
    world.clock.advance(4)
    world.leases.renew_all()
    assert held.lease.throughput_kbps == 1.0


def test_a_seed_of_a_silent_shard_decays_in_the_end(world):
    create_lease(world.leader, Lease("s0", TRIM_HORIZON, throughput_kbps=64.0))
    world.leader.assign(world.leader.get("s0"), "w1")
    world.leases.discover()
    for _ in range(12):
        world.clock.advance(3)
        world.leases.renew_all()
    assert world.leader.get("s0").throughput_kbps == pytest.approx(64.0 / 8)


def test_a_renewal_leaves_a_lease_that_is_being_written():
    """Real threads: the checkpoint hangs in its call; the renewal neither waits for it nor writes
    at the same time.
    """
    world = World(SystemClock())
    held = world.gain()
    entered, proceed = threading.Event(), threading.Event()

    def hang(operation, key):
        world.table.hook(no_hook, no_hook)
        entered.set()
        assert proceed.wait(10)

    world.table.hook(hang, None)
    thread = threading.Thread(
        target=world.leases.checkpoint, args=(held,), kwargs={"checkpoint": END}
    )
    thread.start()
    assert entered.wait(10)
    assert world.leases.renew_all() == 0
    assert world.leader.get("s0").counter == 1
    proceed.set()
    thread.join(10)
    assert (held.lease.counter, held.lease.checkpoint) == (2, END)
    assert world.leases.renew_all() == 1


def test_a_lease_that_expires_during_a_write_is_refused_afterwards(world):
    held = world.gain()

    def pause(operation, key):
        world.table.hook(None, None)
        world.clock.advance(11)
        world.leases.renew_all()

    world.table.hook(None, pause)
    with pytest.raises(LeaseLostError, match="given up"):
        world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.held() == ()


def test_renewals_and_checkpoints_side_by_side_never_lose_the_lease():
    world = World(SystemClock())
    held = world.gain()
    stop = threading.Event()
    errors = []

    def renew():
        while not stop.is_set():
            world.leases.renew_all()

    def write():
        try:
            for _ in range(300):
                world.leases.checkpoint(held, checkpoint=Position("7"))
        except LeaseLostError as error:
            errors.append(error)

    renewer, writers = (
        threading.Thread(target=renew),
        [threading.Thread(target=write) for _ in range(3)],
    )
    for thread in [renewer, *writers]:
        thread.start()
    for thread in writers:
        thread.join(30)
    stop.set()
    renewer.join(30)
    assert errors == []
    assert world.leases.get("s0") is held
    assert held.lease == world.leader.get("s0")
    assert held.lease.counter > 900
