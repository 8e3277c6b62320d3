"""L7: the simulation fails on a shard that stands still without an event."""

import pytest

from kcl_pipeline.events import (
    BatchCommitted,
    HandoffCompleted,
    LeaseGained,
    LeaseLost,
    LeaseReleased,
    ShardStalled,
    StallStep,
    WorkerStarted,
    WorkerStopped,
)
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.worker.watchdog import Watchdog
from verification.simulation import StormOptions, world
from verification.simulation.checks.stillness import (
    GRACE_SECONDS,
    LOOK_SECONDS,
    Holder,
    Renewals,
    owned_by_others,
)
from verification.simulation.incidents.storm import Storm
from verification.simulation.run import simulate
from verification.simulation.scenario import FAILOVER_SECONDS, STALLED_SECONDS

KEY, OTHER = "shardId-000000000000", "shardId-000000000001"
NOTHING: frozenset[str] = frozenset()
BUSY = frozenset({KEY, OTHER})
LATE = STALLED_SECONDS + GRACE_SECONDS + 0.1


def holder(*keys, at=0.0):
    found = Holder()
    for key in keys:
        found.take(LeaseGained("w", key, 1), at)
    return found


def test_a_held_and_busy_shard_that_says_nothing_is_found():
    held = holder(KEY)
    held.take(LeaseGained("w", OTHER, 1), 5.0)
    assert held.silent(LATE - 0.2, NOTHING, BUSY) == []
    assert held.silent(LATE, NOTHING, BUSY) == [KEY]


def test_a_shard_without_anything_to_do_is_not_still():
    held = holder(KEY)
    assert held.silent(LATE, NOTHING, frozenset()) == []
    assert held.silent(2 * LATE - 1, NOTHING, BUSY) == [], "its time begins with its records"
    assert held.silent(2 * LATE + 1, NOTHING, BUSY) == [KEY]


@pytest.mark.parametrize(
    "event",
    [
        ShardStalled("w", KEY, StallStep.READING, 4.0),
        BatchCommitted("w", "b", 1, 1, (KEY,), {}),
        LeaseGained("w", KEY, 9),
        LeaseLost("w", KEY, "taken"),
        LeaseReleased("w", KEY),
        HandoffCompleted(KEY, "w", "w2", 1.0),
        WorkerStarted("w"),
        WorkerStopped("w", "failed"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_is_a_sign_of_life_or_the_end_of_holding(event):
    held = holder(KEY)
    held.take(event, 1.0)
    assert held.silent(LATE, NOTHING, BUSY) == []


@pytest.mark.parametrize(
    "event",
    [
        ShardStalled("w", OTHER, StallStep.READING, 4.0),
        BatchCommitted("w", "b", 1, 1, (OTHER,), {}),
        LeaseLost("w", OTHER, "taken"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_another_shard_does_is_no_sign(event):
    held = holder(KEY)
    held.take(event, 1.0)
    assert held.silent(LATE, NOTHING, BUSY) == [KEY]
    assert OTHER not in held.seen_at


def test_a_row_that_moves_and_a_pause_of_the_host_begin_anew():
    held = holder(KEY)
    assert held.silent(LATE, frozenset({KEY}), BUSY) == []
    held.disturbed(LATE + 5.0)
    assert held.silent(LATE + 5.0 + STALLED_SECONDS, NOTHING, BUSY) == []
    assert held.silent(2 * LATE + 5.0, NOTHING, BUSY) == [KEY]


def test_a_lease_that_another_worker_owns_is_not_held():
    owners = {KEY: "other", OTHER: "w"}
    assert owned_by_others([KEY, OTHER], owners, "w") == {KEY}
    assert owned_by_others([KEY, OTHER], {KEY: None}, "w") == set()


def test_a_lease_that_is_not_renewed_is_not_held():
    renewals = Renewals()
    still, renewed = Lease(KEY, TRIM_HORIZON, counter=3), Lease(OTHER, TRIM_HORIZON, counter=3)
    assert renewals.lapsed([still, renewed], 10.0) == set()
    renewed = renewed.with_(counter=4)
    assert renewals.lapsed([still, renewed], 10.0 + FAILOVER_SECONDS - 0.1) == set()
    assert renewals.lapsed([still, renewed], 10.0 + FAILOVER_SECONDS) == {KEY}
    assert renewals.lapsed([still.with_(counter=4), renewed], 20.0) == {OTHER}
    assert renewals.lapsed([], 21.0) == set()


CALM = StormOptions(call_fault_chance=0.0, steer=False)


@pytest.fixture
def hanging_transform(monkeypatch):
    """One incident and no fault: for 4 s each transform that begins takes longer than `LATE`."""
    monkeypatch.setattr(Storm, "_plan", lambda _storm: [(3.0, "slow_transform")])
    monkeypatch.setattr(world, "SLOW_TRANSFORM_SECONDS", LATE + 2 * LOOK_SECONDS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fleet_whose_transform_hangs_reports_it(hanging_transform, seed):
    outcome = simulate(seed, CALM)
    assert outcome.violations == ()
    assert any("ShardStalled" in text and "processing" in text for _, text in outcome.lines)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fleet_whose_transform_hangs_fails_when_it_reports_nothing(
    hanging_transform, monkeypatch, seed
):
    monkeypatch.setattr(Watchdog, "look", lambda _watch, _errors: None)
    (violation,) = simulate(seed, CALM).violations
    assert violation.startswith("L7: ")
