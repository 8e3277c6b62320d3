"""`kcl-pipeline losses`: shows the number of losses, and acknowledges it (embedded AWS)."""

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
    loss = Loss.of(event, 1_000)
    fleet.tables.coordinator.change_losses(lambda losses: losses.with_losses([loss]))


def test_losses_are_shown_and_acknowledged(fleet):
    name = fleet.name
    assert run("losses", "-a", name).stdout == "no loss of records is recorded\n"
    ensure_client_version(fleet.tables.coordinator, "w-1", SystemClock())
    lose(fleet, "shardId-1")
    text = run("losses", "-a", name).stdout
    assert text.startswith("1 loss of records, 0 acknowledged; the last: orders shardId-1 (left_")
    assert "records_lost" not in text, "there are no others"
    assert "1 of 1 acknowledged" in run("losses", "-a", name, "--acknowledge").stdout
    lose(fleet, "shardId-2")
    assert "in the logs as records_lost" in run("losses", "-a", name).stdout
    shown = run_json("losses", "-a", name)
    assert (shown["count"], shown["acknowledged"], shown["unacknowledged"]) == (2, 1, 1)
    last = shown["last"]
    assert (last["shard"], last["after"], last["end"]) == ("orders shardId-2", "7", "before 9")
    shown = run_json("losses", "-a", name, "--acknowledge")
    assert (shown["acknowledged"], shown["unacknowledged"]) == (2, 0)
    assert run_json("losses", "-a", name, "--acknowledge") == shown


def test_a_loss_that_is_recorded_after_the_output_is_not_acknowledged(fleet, monkeypatch):
    ensure_client_version(fleet.tables.coordinator, "w-1", SystemClock())
    lose(fleet, "shardId-1")
    echo = show.echo

    def echo_and_lose(text):
        echo(text)
        lose(fleet, "shardId-2")

    monkeypatch.setattr(show, "echo", echo_and_lose)
    assert "1 of 2 acknowledged" in run("losses", "-a", fleet.name, "--acknowledge").stdout
