"""`kcl-pipeline losses`: shows lost records, and acknowledges them (embedded AWS)."""

from __future__ import annotations

import pytest

from kcl_pipeline.cli import show
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.leases.application.losses import Loss
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.position import Position
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


def lose(fleet, key):
    event = RecordsLost(
        "w-1", key, LossReason.LEFT_RETENTION, Position("7"), stream="orders", before=Position("9")
    )
    fleet.tables.coordinator.change_losses(lambda log: log.with_losses([Loss.of(event, 1_000)]))


def test_losses_are_shown_until_they_are_acknowledged(fleet):
    name = fleet.name
    assert "0 losses not acknowledged" in run("losses", "-a", name).stdout
    ensure_client_version(fleet.tables.coordinator, "w-1", SystemClock())
    lose(fleet, "shardId-1")
    text = run("losses", "-a", name).stdout
    for part in ("orders shardId-1", "left_retention", "7", "9", "by w-1", "1970-01-01T00:00:01"):
        assert part in text
    found = run_json("losses", "-a", name)
    assert (found["unacknowledged"], found["marked"]) == (1, None)
    assert found["losses"][0]["lease_key"] == "shardId-1"
    assert "1 loss acknowledged; 0 not" in run("losses", "-a", name, "--acknowledge").stdout
    lose(fleet, "shardId-2")
    found = run_json("losses", "-a", name, "--acknowledge")
    assert (found["marked"], found["unacknowledged"], found["acknowledged"]) == (1, 0, 2)
    assert run_json("losses", "-a", name, "--acknowledge")["marked"] == 0


def test_a_loss_that_comes_after_the_look_is_not_acknowledged(fleet, monkeypatch):
    ensure_client_version(fleet.tables.coordinator, "w-1", SystemClock())
    lose(fleet, "shardId-1")
    monkeypatch.setattr(show, "print_table", lambda *_: lose(fleet, "shardId-2"))
    text = run("losses", "-a", fleet.name, "--acknowledge").stdout
    assert "1 loss acknowledged; 1 not acknowledged" in text
    (left,) = fleet.tables.coordinator.read_losses().log.waiting
    assert left.lease_key == "shardId-2"


def test_what_another_process_acknowledges_meanwhile_is_not_counted(fleet, monkeypatch):
    table = fleet.tables.coordinator
    ensure_client_version(table, "w-1", SystemClock())
    lose(fleet, "shardId-1")

    def acknowledge(*_):
        table.change_losses(lambda log: log.with_acknowledged(log, 2_000))

    monkeypatch.setattr(show, "print_table", acknowledge)
    text = run("losses", "-a", fleet.name, "--acknowledge").stdout
    assert "0 losses acknowledged; 0 not acknowledged" in text
    assert table.read_losses().log.acknowledged == 1
