"""The migration from KCL 2.x: our workers beside workers of KCL 2.7, forward and back."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import InvalidRequestError, NotFoundError
from kcl_pipeline.events import LeaseMoved
from kcl_pipeline.leader import kcl2
from kcl_pipeline.leases import layout
from tests.support.java_fleet import COMPATIBLE, ROLLBACK, UPGRADE, V2, V3, Mixed
from tests.support.worker_world import numbered

READY, LOOK = 100.0, 10.0
"""Shorter than those of KCL, for the time that the tests take."""


def test_the_times_are_those_of_kcl():
    assert kcl2.READY_SECONDS == 600
    assert kcl2.CHECK_SECONDS == layout.LOOK_SECONDS == 60


@pytest.fixture
def short_times(monkeypatch):
    monkeypatch.setattr(kcl2, "READY_SECONDS", READY)
    monkeypatch.setattr(kcl2, "CHECK_SECONDS", LOOK)
    monkeypatch.setattr(layout, "LOOK_SECONDS", LOOK)


@pytest.fixture
def fleet(short_times) -> Mixed:
    """Our worker has joined two workers of KCL 2.7."""
    fleet = Mixed(shards=6)
    fleet.join_java("j-1", "j-2")
    fleet.run(40)
    return fleet


def test_our_worker_shares_leases_with_workers_of_2x(fleet):
    assert fleet.owners() == {"w-1": 2, "j-1": 2, "j-2": 2}
    assert fleet.version() == UPGRADE
    row = fleet.coordinator.store.get("Migration3.0")
    assert row["h"]["L"][0]["M"]["cv"] == {"S": "CLIENT_VERSION_INIT"}
    moved = fleet.of(LeaseMoved)
    fleet.run(60)
    assert fleet.of(LeaseMoved) == moved


def test_the_version_does_not_change_while_a_worker_of_2x_owns_a_lease(fleet):
    fleet.run(READY + 60)
    assert fleet.version() == UPGRADE


def test_the_whole_way_to_3x(fleet):
    del fleet.java["j-1"]
    fleet.join("w-2")
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "w-2": 2, "j-2": 2}
    del fleet.java["j-2"]
    fleet.run(60)
    assert fleet.owners() == {"w-1": 3, "w-2": 3}
    fleet.run(READY - 80)
    assert fleet.version() == UPGRADE, "ready for less than ten minutes"
    fleet.run(110)
    assert fleet.version() == ROLLBACK
    fleet.run(LOOK + 10)
    for worker in fleet.crew.values():
        assert not worker.coordination.version.is_leaderless
    assert fleet.coordinator.read_lock() is not None
    fleet.put(*numbered(30))
    third = fleet.make_worker("w-3")
    third.start_up()
    fleet.crew["w-3"] = third
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "w-2": 2, "w-3": 2}, "the leader assigns"
    assert fleet.data() == sorted(fleet.sent)
    assert (UPGRADE, ROLLBACK) in fleet.versions()
    fleet.settings = fleet.settings.model_copy(
        update={"client_version_config": "CLIENT_VERSION_CONFIG_3X"}
    )
    fleet.join("w-4")
    assert fleet.version() == V3, "a start with the setting 3X ends the migration"
    fleet.run(LOOK + 10)
    assert all(one.coordination.version.is_final for one in fleet.crew.values())


def test_a_rollback_and_the_way_forward_again(fleet):
    fleet.java.clear()
    fleet.run(60 + READY + 30)
    assert fleet.version() == ROLLBACK
    fleet.run(LOOK + 10)
    fleet.tool(ROLLBACK, V2, "rollback")

    def without_index(operation: str, _key: str) -> None:
        if operation == "Query":
            raise InvalidRequestError("no such index", code="x", operation="Query")

    def without_table(operation: str, _key: str) -> None:
        raise NotFoundError("no such table", code="x", operation=operation)

    fleet.leases.store.before_call = without_index
    fleet.run(LOOK + 10)
    fleet.rows.store.before_call = without_table
    fleet.join_java("j-1")
    fleet.put(*numbered(20))
    fleet.run(60)
    assert fleet.owners() == {"w-1": 3, "j-1": 3}
    fleet.java.clear()
    fleet.run(60)
    assert fleet.owners() == {"w-1": 6}
    assert fleet.data() == sorted(fleet.sent), "its leases are read without index and metrics"
    assert fleet.version() == V2, "it stays until an operator rolls forward"
    fleet.leases.store.before_call = fleet.rows.store.before_call = lambda _op, _key: None
    fleet.tool(V2, UPGRADE, "rollforward")
    fleet.run(LOOK + 10 + READY + 40)
    assert fleet.version() == ROLLBACK
    assert fleet.versions() == [(UPGRADE, ROLLBACK), (ROLLBACK, V2), (V2, UPGRADE)]


def test_our_worker_follows_a_version_that_a_java_leader_writes(fleet):
    fleet.java.clear()
    fleet.tool(UPGRADE, ROLLBACK, "java")  # the same row, by a Java worker
    fleet.run(LOOK + 10)
    assert not fleet.worker.coordination.version.is_leaderless
    fleet.run(30)
    assert fleet.owners() == {"w-1": 6}
    assert fleet.coordinator.read_lock().owner_name == "w-1"


def test_a_worker_that_is_configured_for_3x_follows_the_stored_version():
    fleet = Mixed(shards=2, client_version_config="CLIENT_VERSION_CONFIG_3X")
    assert fleet.version() == V3
    fleet.coordinator.store._rows.clear()
    compatible = fleet.settings.model_copy(update=COMPATIBLE)
    fleet.settings, ours = compatible, fleet.settings
    fleet.join("w-2")
    fleet.settings = ours
    third = fleet.join("w-3")
    assert fleet.version() == UPGRADE
    assert third.coordination.version.is_leaderless
