"""With `--json`, standard output has one JSON value, also if a command fails or is refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from kcl_pipeline.cli import app, exit_codes
from kcl_pipeline.cli.worker import as_dict
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.cli.test_options import COMMANDS, NEED_A_PIPELINE, WITHOUT_TARGET
from tests.support.cli_fleet import run

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")

PLACEHOLDERS = {"do drain": ["--worker", "x"]}


def words(name: str) -> list[str]:
    return [*name.split(), *PLACEHOLDERS.get(name, ())]


def error_of(*arguments: str, code: int) -> str:
    """Run a command with --json; its value must have the error alone."""
    done = run(*arguments, "--json", code=code)
    found = json.loads(done.stdout)
    assert list(found) == ["error"]
    if code == exit_codes.FAILED:
        assert done.stderr == f"Error: {found['error']}\n", "the sentence for a person"
    return str(found["error"])


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_arguments_are_json(name):
    text = error_of(*words(name), "--no-such-option", code=exit_codes.WRONG_ARGUMENT)
    assert text.startswith("No such option: --no-such-option")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - WITHOUT_TARGET))
def test_a_missing_application_is_json(name):
    option = "--pipeline" if name in NEED_A_PIPELINE else "--application"
    assert option in error_of(*words(name), code=exit_codes.FAILED)


@pytest.mark.parametrize(
    "arguments",
    [
        ["do", "drain", "--worker", "nobody"],
        ["do", "seek", "--to", "never"],
        ["do", "seek", "--to", "LATEST", "--shard", "no-shard"],
        ["do", "retire", "--confirm", "another-name"],
    ],
)
def test_what_is_refused_is_json(shared, arguments):
    assert error_of(*arguments, "-a", shared.name, code=exit_codes.FAILED)


@pytest.mark.parametrize(
    "arguments",
    [["do", "pause"], ["do", "resume"], ["status"], ["do", "drain", "--worker", "x"]],
)
def test_missing_tables_are_json(arguments):
    assert "no-such-app" in error_of(*arguments, "-a", "no-such-app", code=exit_codes.FAILED)


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["--no-such-option", "status"],
        ["status", "a\x1bb"],
    ],
)
def test_arguments_that_reach_no_command_are_json(arguments):
    assert error_of(*arguments, code=exit_codes.WRONG_ARGUMENT)


def test_other_commands_are_json(tmp_path, monkeypatch):
    assert "json" in error_of("init", str(tmp_path / "json"), code=exit_codes.FAILED)
    assert "--create" in error_of("local", "--create", "a:0", code=exit_codes.FAILED)

    def refuse() -> None:
        raise SettingsError("Java 17 is missing")

    monkeypatch.setattr(sys.modules["kcl_pipeline.cli.run"], "require_java", refuse)
    assert error_of("run", code=exit_codes.FAILED) == "Java 17 is missing"


def test_without_json_nothing_is_on_standard_output():
    assert run("status", code=exit_codes.FAILED).stdout == ""
    assert run("status", "--no-such-option", code=exit_codes.WRONG_ARGUMENT).stdout == ""


def test_an_interrupt_is_json(shared, monkeypatch):
    def interrupt(**_settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kcl_pipeline.cli.target.ConsumerSettings", interrupt)
    found = error_of("status", "-a", shared.name, code=exit_codes.INTERRUPTED)
    assert found == "interrupted"


def test_a_defect_is_json_and_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("kcl_pipeline.cli.target.ConsumerSettings", lambda **_: 1 / 0)
    done = CliRunner().invoke(app, ["status", "-a", "some-app", "--json"])
    assert isinstance(done.exception, ZeroDivisionError)
    assert json.loads(done.stdout) == {"error": "ZeroDivisionError: division by zero"}


def test_a_drain_that_a_pause_ended_has_an_error():
    ended = WorkerSummary(
        "w", StopReason.APPLICATION_PAUSED, WorkerStatus(totals=WorkerTotals(1.0))
    )
    assert as_dict("w", "orders", ended, is_drain=False)["error"] is None
    found = as_dict("w", "orders", ended, is_drain=True)["error"]
    assert found == "the application was paused before all records were read"
