"""The sentence of a tick, and the cursor that shows it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.orchestration.leader import (
    LeaderSince,
    cursor_text,
    leading_text,
    runs_text,
)
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import AutoscalerMemory, ScalingDecision
from kcl_pipeline.planning.model import Move, Plan
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

NOON = 1_700_049_600.0 - 1_700_049_600.0 % 86_400 + 43_200


def run(status: S) -> RunView:
    return RunView("1", status, "w", continuous=True)


def test_what_a_leading_tick_did():
    plan = Plan(
        "balanced", (Move("shardId-007", "w", "v", "too much"), Move("b", None, "v", "why"))
    )
    report = led(leases(100, ["w"]), [worker(f"w-{i}") for i in range(8)], plan=plan, seconds=0.34)
    assert leading_text(report, None, LeaderSince()) == (
        "led: 100 leases, 8 workers, moved 7 w → v (too much); b nobody → v (why), 340 ms"
    )
    assert leading_text(report, "throttled", LeaderSince()).endswith("340 ms; throttled")
    many = replace(report, plan=Plan("balanced", tuple(Move(k, "w", "v", "x") for k in "abcde")))
    assert "c w → v (x) and 2 more, " in leading_text(many, None, LeaderSince())


def test_who_leads_instead_and_since_when():
    since = LeaderSince()
    report = CycleReport(led=False, lock_owner="orders-7f")
    assert leading_text(report, None, since) == "did not lead: nobody leads"
    since.observe("dagster/x", NOON)
    assert since.text() == "sensor dagster/x leads since 12:00 UTC or earlier"
    since.observe("orders-7f", NOON + 180)
    since.observe("orders-7f", NOON + 600)
    expected = "did not lead: worker orders-7f leads since 12:03 UTC"
    assert leading_text(report, None, since) == expected
    assert leading_text(report, "throttled", since) == "did not lead: throttled"


@pytest.mark.parametrize(
    ("statuses", "reason", "text"),
    [
        ([S.STARTED, S.STARTED], "2 workers, 2 desired", "2 of 2 workers run"),
        ([S.STARTED, S.QUEUED], "2 workers, 2 desired", "1 of 2 workers runs, 1 is queued"),
        (
            [S.STARTING, S.NOT_STARTED, S.CANCELING],
            "3 workers, 2 desired: draining 1",
            "0 of 2 workers run, 2 are starting, 1 is stopping: draining 1",
        ),
        ([], "0 workers, 2 desired: starting 2", "0 of 2 workers run: starting 2"),
        # A person has started one more, or fewer are needed now.
        ([S.STARTED] * 3, "3 workers, 2 desired", "3 workers run, 2 are needed"),
    ],
)
def test_runs_that_wait_are_told_apart(statuses, reason, text):
    decision = ScalingDecision(memory=AutoscalerMemory(desired=2), reason=reason)
    runs = [run(status) for status in statuses]
    assert runs_text(runs, decision) == text
    assert runs_text(runs, decision, ["one is late"]) == f"{text}; one is late"


def test_the_cursor_begins_with_the_sentence_and_keeps_the_memory():
    memory = AutoscalerMemory(desired=2, retry_at=1_700_000_000.4, last_death="r")
    text = cursor_text("led: 8 leases", memory)
    assert text == (
        '{"tick": "led: 8 leases", "desired": 2, "last_death": "r", "retry_at": 1700000000}'
    )
    read = AutoscalerMemory.parse(text)
    assert read == memory.model_copy(update={"retry_at": 1_700_000_000.0})
    assert cursor_text("x", AutoscalerMemory()) == '{"tick": "x", "desired": 0}'


def test_cursors_of_older_and_newer_versions_are_read():
    older = AutoscalerMemory(desired=3, scaled_at=5.5).model_dump_json()
    assert AutoscalerMemory.parse(older).desired == 3
    assert AutoscalerMemory.parse('{"tick": "x", "desired": 3, "new": [1]}').desired == 3


def test_every_tick_has_its_sentence_in_the_cursor_and_as_skip_reason(instance):
    pipeline = FakePipeline(cycle=FakeCycle([led(leases(4, ["w"]), [worker("w")])]))
    stage = Stage(instance, pipeline)
    stage.cursor = None
    first = stage()
    assert json.loads(first.cursor)["tick"] == (
        "led: 4 leases, 1 worker, no move, 0 ms; 0 of 2 workers run: starting 2"
    )
    stage.run(S.STARTED)
    stage.run(S.STARTING)
    second = stage()
    sentence = "led: 4 leases, 1 worker, no move, 0 ms; 1 of 2 workers runs, 1 is starting"
    assert second.skip_reason.skip_message == sentence
    assert json.loads(second.cursor) == {"tick": sentence, "desired": 2, "open_shards": 4}
