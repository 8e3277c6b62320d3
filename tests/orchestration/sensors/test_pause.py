"""A pause in the leader sensor: no worker starts, and every place shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import dagster as dg
import pytest

from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.leases.layout import ensure_client_version
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

PAUSE = Pause("ann@desk", 1_700_000_000_000, "a new table")
TEXT = "paused since 2023-11-14 22:13:20 UTC by ann@desk: a new table"


def state_of(result: dg.SensorResult) -> object:
    (event,) = [
        event
        for event in result.asset_events
        if isinstance(event, dg.AssetObservation) and event.asset_key.path[-1] == "fleet"
    ]
    return event.metadata["state"].value


@pytest.mark.parametrize("leads", [True, False])
def test_no_worker_is_started_in_a_pause(instance, leads):
    report = led(leases(2, ["w-1"]), [worker("w-1")]) if leads else CycleReport(led=False)
    pipeline = FakePipeline(cycle=FakeCycle([replace(report, pause=PAUSE if leads else None)]))
    stage = Stage(instance, pipeline)
    ensure_client_version(stage.coordinator, "w-1", stage.clock)
    assert stage.coordinator.put_pause(PAUSE, replacing=stage.coordinator.read_control())
    result = stage()
    assert not result.run_requests
    assert result.skip_reason.skip_message.startswith(TEXT)
    assert json.loads(result.cursor)["tick"].startswith(TEXT)
    assert state_of(result) == TEXT
    assert stage.coordinator.put_pause(None, replacing=stage.coordinator.read_control())
    stage.pipeline.cycle.reports = [report]
    result = stage(20.0)
    assert len(result.run_requests) == 2
    assert state_of(result) == ("working" if leads else "no worker")


def test_a_pause_that_cannot_be_read_now_stays_as_it_was(instance):
    stage = Stage(instance)
    ensure_client_version(stage.coordinator, "w-1", stage.clock)
    assert stage.coordinator.put_pause(PAUSE, replacing=stage.coordinator.read_control())
    assert not stage().run_requests
    read = stage.coordinator.read_control

    def refuse():
        raise ThrottledError("busy")

    stage.coordinator.read_control = refuse
    assert not stage().run_requests
    stage.coordinator.read_control = read
    assert stage.coordinator.put_pause(None, replacing=read())
    assert stage().run_requests
