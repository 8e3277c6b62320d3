"""Losses of records: shown by `status`, acknowledged by `do acknowledge` (embedded AWS)."""

from __future__ import annotations

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.leases.application import Loss
from kcl_pipeline.leases.layout import ensure_client_version
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

    def finding():
        found = run_json("status", "-a", name)["findings"]
        return next(one for one in found if one["check"] == "no_records_lost")

    assert finding()["sentence"] == "no loss of records is recorded"
    ensure_client_version(fleet.tables.coordinator, "w-1", SystemClock())
    lose(fleet, "shardId-1")
    text = finding()["sentence"]
    assert text.startswith("1 loss of records, 0 acknowledged; the last: orders shardId-1 (left_")
    assert "1 of 1 acknowledged" in run("do", "acknowledge", "-a", name).stdout
    assert finding()["level"] == "ok"
    lose(fleet, "shardId-2")
    assert (finding()["name"], finding()["numbers"]["losses"]) == ("records_lost", 2)
    shown = run_json("do", "acknowledge", "-a", name)
    assert (shown["count"], shown["acknowledged"], shown["unacknowledged"]) == (2, 2, 0)
    last = shown["last"]
    assert (last["shard"], last["after"], last["end"]) == ("orders shardId-2", "7", "before 9")
    assert run_json("do", "acknowledge", "-a", name) == shown
