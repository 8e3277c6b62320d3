"""The leader's lock (protocol §3.3): steal by unchanged version, heartbeat and release on
condition, stable names, lost answers.
"""

from __future__ import annotations

from random import Random

import pytest

from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS, ConsumerSettings, LeaderSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import LeaderElected, LeadershipLost, RowRejected
from kcl_pipeline.leader.lock import LeaderElection, lock_settings
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable


class Lost:
    """A hook that loses the answers of the next `times` calls of an operation."""

    def __init__(self, operation, times):
        self.operation, self.times = operation, times

    def __call__(self, operation, key):
        if operation == self.operation and self.times > 0:
            self.times -= 1
            raise UnavailableError("the answer was lost", operation=operation)


@pytest.fixture
def world():
    clock = VirtualClock()
    table = InMemoryCoordinatorStateTable(clock=clock)
    events = []

    def candidate(name, seed=None, **options):
        settings = LeaderSettings(leader_lease_duration_millis=options.pop("duration", 30_000))
        return LeaderElection(
            table, name, clock, events.append, settings, Random(seed or name), **options
        )

    return clock, table, events, candidate


def test_the_first_one_leads_and_the_second_one_does_not(world):
    _, table, events, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    assert not b.try_lead()
    assert b.seen_owner == "a"
    lock = table.read_lock()
    assert (lock.owner_name, lock.lease_duration_millis) == ("a", 30_000)
    assert events == [LeaderElected("a")]


def test_every_heartbeat_changes_the_version_and_keeps_others_away(world):
    clock, table, _, candidate = world
    a, b = candidate("a"), candidate("b")
    versions = set()
    for _ in range(20):
        assert a.try_lead()
        assert not b.try_lead()
        versions.add(table.read_lock().version)
        clock.advance(25)
    assert len(versions) == 20


def test_a_silent_leader_is_replaced_a_stored_duration_after_its_last_version_was_first_seen(
    world,
):
    clock, _, events, candidate = world
    a, b = candidate("a", duration=60_000), candidate("b", duration=30_000)
    assert a.try_lead()
    clock.advance(50)
    assert not b.try_lead(), "b sees the version for the first time"
    clock.advance(60)
    assert not b.try_lead(), "exactly the duration is not more than it"
    clock.advance(0.5)
    assert b.try_lead()
    assert events[-1] == LeaderElected("b", "a")
    assert not a.confirm()
    assert not a.try_lead()
    assert [e for e in events if isinstance(e, LeadershipLost)] == [
        LeadershipLost("a", "another process has acquired the lock")
    ]


def test_release_deletes_the_item_and_the_next_one_leads_at_once(world):
    _, table, events, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    a.release()
    assert table.read_lock() is None
    assert b.try_lead()
    a.release()
    assert table.read_lock().owner_name == "b", "what is not held is not released"
    assert LeadershipLost("a", "released") in events


def test_a_stale_holder_cannot_release_or_confirm_the_new_lock(world):
    clock, table, _, candidate = world
    a, b = candidate("a"), candidate("b")
    assert a.try_lead()
    b.try_lead()
    clock.advance(31)
    assert b.try_lead()
    a.release()
    assert table.read_lock().owner_name == "b"


def test_a_lock_that_a_peer_released_without_deleting_is_free(world):
    _, table, _, candidate = world
    table.put_lock(LeaderLock("java", 120_000, "v", is_released=True), replacing=None)
    assert candidate("a").try_lead()
    assert table.read_lock().owner_name == "a"


def test_its_own_name_is_taken_up_at_once_only_where_that_is_wanted(world):
    _, _, _, candidate = world
    first = candidate("sensor", seed=1, resume_own_name=True)
    assert first.try_lead()
    assert not candidate("sensor", seed=2).try_lead()
    second = candidate("sensor", seed=3, resume_own_name=True)
    assert second.try_lead()
    assert not first.confirm(), "the old instance finds out before it writes"
    assert second.confirm()


@pytest.mark.parametrize("moment", ["before_call", "after_call"])
def test_one_lost_heartbeat_answer_does_not_cost_the_lock(world, moment):
    _, table, events, candidate = world
    a = candidate("a")
    assert a.try_lead()
    setattr(table.store, moment, Lost("UpdateItem", 1))
    assert a.confirm()
    assert a.confirm()
    assert not [e for e in events if isinstance(e, LeadershipLost)]


@pytest.mark.parametrize("moment", ["before_call", "after_call"])
def test_a_heartbeat_whose_outcome_stays_unknown_is_asked_for_again_later(world, moment):
    _, table, events, candidate = world
    a = candidate("a")
    assert a.try_lead()
    setattr(table.store, moment, Lost("UpdateItem", 2))
    with pytest.raises(UnavailableError):
        a.confirm()
    assert a.held is not None
    assert a.try_lead()
    assert table.read_lock() == a.held
    assert not [e for e in events if isinstance(e, LeadershipLost)]


@pytest.mark.parametrize("moment", ["before_call", "after_call"])
def test_release_after_a_heartbeat_of_unknown_outcome_leaves_no_lock(world, moment):
    _, table, _, candidate = world
    a = candidate("a")
    assert a.try_lead()
    setattr(table.store, moment, Lost("UpdateItem", 2))
    with pytest.raises(UnavailableError):
        a.confirm()
    a.release()
    assert table.read_lock() is None


def test_an_acquisition_whose_answer_was_lost_is_recognised_by_its_version(world):
    _, table, events, candidate = world
    a = candidate("a")
    table.store.after_call = Lost("PutItem", 1)
    with pytest.raises(UnavailableError):
        a.try_lead()
    assert a.held is None
    assert a.try_lead(), "no waiting for its own lock to run out"
    assert a.confirm()
    assert events == [LeaderElected("a")]


def test_two_candidates_that_steal_at_the_same_time_do_not_both_lead(world):
    clock, table, _, candidate = world
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    a.try_lead()
    b.try_lead()
    c.try_lead()
    clock.advance(31)

    def c_is_faster(operation, key):
        if operation == "PutItem":
            table.store.before_call = lambda *_: None
            assert c.try_lead()

    table.store.before_call = c_is_faster
    assert not b.try_lead()
    assert c.confirm()
    assert table.read_lock().owner_name == "c"


# -- a lock row that cannot be read --------------------------------------------------------------

LONGEST_SECONDS = MAX_LOCK_DURATION_MILLIS / 1000
GARBAGE = {
    "a duration of 30 digits": {
        "ownerName": {"S": "w9"},
        "leaseDuration": {"S": "9" * 30},
        "recordVersionNumber": {"S": "v"},
    },
    "no duration": {"ownerName": {"S": "w9"}, "recordVersionNumber": {"S": "v"}},
    "no version": {"ownerName": {"S": "w9"}, "leaseDuration": {"S": "1000"}},
    "nothing": {},
    "wrong types": {
        "ownerName": {"N": "1.50"},
        "leaseDuration": {"L": [{"M": {"a": {"NULL": True}}}]},
        "recordVersionNumber": {"SS": ["a", "b"]},
        "isReleased": {"BOOL": True},
    },
    "an owner that moves the cursor": {
        "ownerName": {"S": "\x1b[2J"},
        "leaseDuration": {"S": "1000"},
        "recordVersionNumber": {"S": "v"},
    },
}


@pytest.mark.parametrize("attributes", GARBAGE.values(), ids=GARBAGE)
def test_a_lock_that_cannot_be_read_is_taken_over_when_it_does_not_change(world, attributes):
    clock, table, events, candidate = world
    table.plant({"key": {"S": "Leader"}, **attributes})
    before = table.rows()
    a = candidate("a")
    for _ in range(61):
        assert not a.try_lead()
        clock.advance(LONGEST_SECONDS / 60 - 0.001)
    assert table.rows() == before
    assert a.seen_owner == "(unknown: its row cannot be read)"
    assert a.unreadable.startswith("the row Leader ")
    clock.advance(1)
    assert a.try_lead()
    assert table.read_lock().owner_name == "a"
    assert [type(event) for event in events] == [RowRejected, LeaderElected]
    assert events[0] == RowRejected(table.name, "Leader", events[0].reason)
    assert a.unreadable is None


def test_a_heartbeat_keeps_a_lock_that_cannot_be_read(world):
    """A peer whose duration is beyond our limit still renews its lock."""
    clock, table, events, candidate = world
    lock = {"key": {"S": "Leader"}, "ownerName": {"S": "java"}, "leaseDuration": {"S": "3600000"}}
    a = candidate("a")
    for beat in range(20):
        table.plant({**lock, "recordVersionNumber": {"S": f"v{beat}"}})
        assert not a.try_lead()
        clock.advance(LONGEST_SECONDS)
        assert not a.try_lead()
    assert [type(event) for event in events] == [RowRejected], "told once"


def test_an_unreadable_lock_is_taken_over_only_as_it_was_read(world):
    clock, table, _, candidate = world
    table.plant({"key": {"S": "Leader"}, "ownerName": {"S": "w9"}})
    a, b = candidate("a"), candidate("b")
    assert not a.try_lead()
    assert not b.try_lead()
    clock.advance(LONGEST_SECONDS + 1)

    def change(operation, key):
        if operation == "PutItem":
            table.hook(None, None)
            table.plant({"key": {"S": "Leader"}, "ownerName": {"S": "w8"}})

    table.hook(change, None)
    assert not a.try_lead()
    assert table.rows()["Leader"]["ownerName"] == {"S": "w8"}
    table.plant({"key": {"S": "Leader"}, "ownerName": {"S": "w9"}})
    assert b.try_lead(), "as it was seen, an attribute that is no lock's does not matter"
    assert not a.try_lead()


def test_a_lost_answer_to_the_takeover_of_an_unreadable_lock(world):
    clock, table, _, candidate = world
    table.plant({"key": {"S": "Leader"}})
    a = candidate("a")
    assert not a.try_lead()
    clock.advance(LONGEST_SECONDS + 1)
    table.hook(None, Lost("PutItem", 1))
    with pytest.raises(UnavailableError):
        a.try_lead()
    assert a.try_lead()
    assert a.held is not None


def test_no_heartbeat_is_written_before_it_is_due(world):
    clock, table, _, candidate = world
    a = candidate("a")
    assert a.try_lead()
    version = table.read_lock().version
    clock.advance(2.4)
    assert a.try_lead()
    assert table.read_lock().version == version
    clock.advance(0.1)
    assert a.try_lead()
    assert table.read_lock().version != version


def test_a_check_before_writes_is_always_a_heartbeat(world):
    _, table, _, candidate = world
    a = candidate("a")
    assert a.try_lead()
    version = table.read_lock().version
    assert a.confirm()
    assert table.read_lock().version != version


@pytest.mark.parametrize(
    ("given", "is_sensor", "times"),
    [
        ({}, False, (8_000, 2_500)),
        ({}, True, (15_000, 4_687)),
        ({"lease": {"failover_time_millis": 3_000}}, False, (2_400, 750)),
        ({"lease": {"failover_time_millis": 120_000}}, False, (30_000, 9_375)),
        ({"leader": {"leader_heartbeat_period_millis": 10_000}}, False, (20_000, 10_000)),
        ({"leader": {"leader_lease_duration_millis": 6_000}}, True, (6_000, 2_500)),
    ],
)
def test_the_times_of_the_lock_follow_the_failover_time(given, is_sensor, times):
    settings = ConsumerSettings(application_name="orders", streams=("orders",), **given)
    found = lock_settings(settings, is_sensor=is_sensor)
    assert (found.leader_lease_duration_millis, found.leader_heartbeat_period_millis) == times


def test_a_lock_that_may_have_expired_is_renewed_whatever_the_heartbeat_period(world):
    """The stored duration may be shorter than the period in the settings."""
    clock, table, _, _ = world
    settings = LeaderSettings.model_construct(
        leader_lease_duration_millis=1_000, leader_heartbeat_period_millis=5_000
    )
    a = LeaderElection(table, "a", clock, lambda _: None, settings, Random("a"))
    assert a.try_lead()
    clock.advance(1.5)
    assert table.put_lock(LeaderLock("b", 1_000, "v"), replacing=table.read_lock())
    assert not a.try_lead()
