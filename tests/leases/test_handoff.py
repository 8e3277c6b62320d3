"""HeldLeases on a virtual clock: handing over and releasing."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import HandoffCompleted, HandoffStarted, LeaseReleased
from kcl_pipeline.events import LeaseLost as LeaseLostEvent
from tests.support.held_world import END, World, world_fixture  # noqa: F401 (a fixture)


def test_a_handoff_is_noticed_once_and_completed(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.clock.advance(3)
    world.leases.renew_all()
    world.leases.renew_all()
    assert world.of(HandoffStarted) == [HandoffStarted("s0", "w1", "w2")]
    assert world.leases.handoffs() == (held,)
    assert held.handoff_deadline == world.clock.monotonic() + 30
    world.clock.advance(2)
    world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.complete_handoff(held)
    row = world.leader.get("s0")
    assert (row.owner, row.checkpoint_owner, row.checkpoint) == ("w2", None, END)
    assert world.of(HandoffCompleted) == [HandoffCompleted("s0", "w1", "w2", 2.0)]
    assert world.leases.held() == ()
    assert world.of(LeaseLostEvent) == []
    assert not world.leases.complete_handoff(held)


def test_a_handoff_writes_the_position_that_the_next_renewal_would_write(world):
    """The worker has forgotten the shard, because the lease had expired during a slow renewal."""
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.renew_all()
    world.leases.note_processed(held, END, in_table=True)
    assert world.leases.complete_handoff(held)
    row = world.leader.get("s0")
    assert (row.owner, row.checkpoint) == ("w2", END)


def test_a_checkpoint_notices_a_handoff_too(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.checkpoint(held, checkpoint=END)
    assert world.leases.handoffs() == (held,)


def test_a_handoff_is_overdue_at_its_deadline(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.renew_all()
    for _ in range(9):
        assert world.leases.overdue_handoffs() == ()
        world.clock.advance(3.3)
        world.leases.renew_all()
    world.clock.advance(0.3)
    assert world.leases.overdue_handoffs() == (held,)
    assert world.leases.complete_handoff(held, forced=True)
    assert world.of(HandoffCompleted)[0].forced


def test_a_handoff_that_is_called_off_ends(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.renew_all()
    world.leader.assign(world.leader.get("s0"), "w1")
    assert world.leases.renew_all() == 1
    assert world.leases.handoffs() == ()
    assert held.handoff_deadline is None
    assert not world.leases.complete_handoff(held)
    assert world.leases.get("s0") is held


def test_a_handoff_overtaken_by_the_leader_is_lost(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.renew_all()
    world.leader.assign(world.leader.get("s0"), "w3")
    assert not world.leases.complete_handoff(held)
    assert world.leader.get("s0").owner == "w3"
    assert len(world.of(LeaseLostEvent)) == 1


def test_a_lost_answer_to_the_transfer(world):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    world.leases.renew_all()
    world.lose_answer()
    with pytest.raises(UnavailableError):
        world.leases.complete_handoff(held)
    assert world.leases.complete_handoff(held)
    assert world.leader.get("s0").counter == 3


def test_release_makes_the_row_ownerless(world):
    held = world.gain()
    assert world.leases.release(held)
    row = world.leader.get("s0")
    assert (row.owner, row.counter) == (None, 2)
    assert world.of(LeaseReleased) == [LeaseReleased("w1", "s0")]
    assert world.leases.held() == ()
    assert not world.leases.release(held)


@pytest.mark.parametrize("noticed", [True, False])
def test_release_in_a_handoff_completes_it(world, noticed):
    held = world.gain()
    world.leader.initiate_handoff(held.lease, "w2")
    if noticed:
        world.leases.renew_all()
    assert world.leases.release(held)
    row = world.leader.get("s0")
    assert (row.owner, row.checkpoint_owner) == ("w2", None)
    assert len(world.of(HandoffCompleted)) == 1
    assert world.of(LeaseReleased) == []


@pytest.mark.parametrize("lost", ["renewal", "release"])
def test_release_after_a_lost_answer(world, lost):
    held = world.gain()
    world.lose_answer()
    if lost == "renewal":
        world.leases.renew_all()
    else:
        with pytest.raises(UnavailableError):
            world.leases.release(held)
    assert world.leases.release(held)
    assert world.leader.get("s0").owner is None
    assert world.of(LeaseLostEvent) == []


def test_release_of_a_lease_that_is_gone(world):
    held = world.gain()
    world.leader.assign(held.lease, "w2")
    assert not world.leases.release(held)
    assert world.leader.get("s0").owner == "w2"
    assert len(world.of(LeaseLostEvent)) == 1
