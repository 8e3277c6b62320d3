"""The check of the leader."""

from __future__ import annotations

import dagster as dg
import pytest

from kcl_pipeline.leases.tables import LeaderLock
from kcl_pipeline.orchestration.assets.checks.leadership import (
    LEADER_ADVICE,
    LeaderAbsence,
    observe_leader,
)
from kcl_pipeline.testing.tables import InMemoryCoordinatorStateTable
from tests.support.dagster_fakes import ManualClock


def test_an_absence_counts_from_the_first_cycle_without_a_leader():
    seen = LeaderAbsence()
    seen.observe(led=True, owner="me", problem=None, now=100.0)
    assert seen.health("me", 100.0, 60.0).description == "me leads"
    for now in (105.0, 110.0, 165.0):
        seen.observe(led=False, owner=None, problem="throttled.", now=now)
    assert seen.health(None, 165.0, 60.0).passed
    verdict = seen.health(None, 165.1, 60.0)
    assert not verdict.passed
    assert verdict.severity is dg.AssetCheckSeverity.ERROR
    assert verdict.description == f"nobody has led for 60 s: throttled. {LEADER_ADVICE}"
    seen.observe(led=False, owner="w-1", problem=None, now=170.0)
    assert seen.health("w-1", 999.0, 60.0).description == "w-1 leads"


def test_an_owner_that_is_only_remembered_is_no_leader():
    seen = LeaderAbsence()
    seen.observe(led=False, owner="w-1", problem="the table does not answer", now=0.0)
    assert not seen.health("w-1", 61.0, 60.0).passed


def lock(version: str, **more: bool) -> LeaderLock:
    return LeaderLock("w-1", 10_000, version, **more)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (None, "there is no leader lock; no worker has started yet"),
        (lock("a"), "w-1 does not renew its leader lock"),
        (lock("a", is_released=True), "the leader lock is released"),
    ],
)
def test_an_execution_fails_if_the_lock_does_not_change(first, reason):
    table, clock = InMemoryCoordinatorStateTable(), ManualClock()
    if first is not None:
        assert table.put_lock(first, replacing=None)
    verdict = observe_leader(table, 60.0, clock)
    assert not verdict.passed
    assert verdict.description == f"nobody has led for 61 s: {reason}. {LEADER_ADVICE}"


def test_an_execution_passes_at_the_first_heartbeat():
    table, clock = InMemoryCoordinatorStateTable(), ManualClock()
    assert table.put_lock(lock("a"), replacing=None)
    began = clock.now

    def heartbeat() -> None:
        if clock.now - began == 5:
            assert table.put_lock(lock("b"), replacing=lock("a"))

    clock.on_sleep = heartbeat
    verdict = observe_leader(table, 60.0, clock)
    assert verdict.passed
    assert verdict.description == "w-1 leads"
    assert clock.now - began == 5
