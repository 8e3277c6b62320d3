"""The policies of docs/iam.md: enough for each role, nothing unused, and what is missing is named;
and nothing of a credential ever comes out.
"""

from __future__ import annotations

import re

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.cli_fleet import run
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    WORKERS,
    Application,
    Gate,
    _open_again,
    application_fixture,
    aws_fixture,
    gate_fixture,
    permissions,
)


def read(
    application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws, *, code: int = 0
) -> str:
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    said = [run(command, "-a", application.name, code=code).output for command in ("status",)]
    return "\n".join(
        [*said, run("plan", "-a", application.name, "-s", application.name, code=code).output]
    )


def test_a_worker_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    gate.used.clear()
    gate.allowed = permissions("worker")
    assert application.drain() == 20
    gate.allowed = None
    used = set(gate.used)
    application.split()
    gate.used.clear()
    gate.allowed = permissions("worker")
    assert application.drain() == 20
    # The lease of the shard that has ended goes with a later cycle of the leader.
    application.work_until(lambda: ("dynamodb:DeleteItem", "") in gate.used)
    application.rare()["dynamodb:UpdateItem", WORKERS]()
    assert "AccessDenied" not in application.said()
    # A new table has its index: see test_iam_missing
    assert used | gate.used == gate.allowed - {("dynamodb:UpdateTable", "")}


def test_a_leader_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    rare = application.rare()
    gate.used.clear()
    gate.allowed = permissions("leader")
    report = application.lead()
    assert report.led
    assert report.error is None
    assert len(report.leases) == 2
    for call in rare.values():
        call()
    assert gate.used == gate.allowed


def test_a_reader_has_what_it_needs(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    gate.used.clear()
    gate.allowed = permissions("reader")
    read(application, monkeypatch, aws)
    gate.allowed = None
    seen = set(gate.used)
    application.drain()
    gate.used.clear()
    gate.used |= seen
    gate.allowed = permissions("reader")
    assert "shardId-000000000001" in read(application, monkeypatch, aws)
    writing = re.compile(r":(Put|Update|Delete|Create|Register|Tag)")
    assert not any(writing.search(action) for action, _ in gate.allowed | gate.used)
    assert gate.allowed == gate.used
