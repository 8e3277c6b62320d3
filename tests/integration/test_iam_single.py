"""The permissions of docs/iam.md for a single table: enough for a worker and a leader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    STATE,
    WORKERS,
    Application,
    Gate,
    Permission,
    _open_again,
    aws_fixture,
    gate_fixture,
    permissions,
)

TABLES = ("", WORKERS, STATE)


def on_one_table(role: str) -> set[Permission]:
    """The actions of a role, all on the single table, and the question for a second one."""
    wanted = {(action, "" if place in TABLES else place) for action, place in permissions(role)}
    return wanted | {("dynamodb:GetItem", STATE), ("dynamodb:Scan", WORKERS)}


@pytest.mark.parametrize("is_named", [True, False], ids=["single", "auto"])
def test_a_worker_and_a_leader_work_on_one_table(
    gate: Gate, aws: EmbeddedAws, tmp_path: Path, *, is_named: bool
) -> None:
    application = Application(aws, tmp_path, table_layout="single")
    gate.used.clear()
    application.pipeline.ensure_tables(clients=application.clients)
    questions = {("dynamodb:GetItem", STATE), ("dynamodb:Scan", WORKERS)}
    gate.allowed = on_one_table("worker") - questions
    assert application.drain() == 20
    if not is_named:
        settings = {**application.pipeline.settings_overrides, "table_layout": "auto"}
        application.pipeline = replace(application.pipeline, settings_overrides=settings)
        gate.allowed = None
        application.publish(5)
        gate.allowed = on_one_table("worker")
        assert application.drain() == 5
    gate.allowed = on_one_table("leader") - (questions if is_named else set())
    report = application.lead()
    assert report.led
    assert report.error is None
    assert len(report.leases) == 2
    assert "AccessDenied" not in application.said()
    created = {place for action, place in gate.used if action == "dynamodb:CreateTable"}
    assert created == {""}
    application.clients.close()
    application.kinesis.close()
