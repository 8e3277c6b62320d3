"""Options that commands share, and exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kcl_pipeline.cli import app, exit_codes
from kcl_pipeline.cli.run import run as run_demonstration
from kcl_pipeline.cli.worker import as_dict
from kcl_pipeline.local.demo import run as demo
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
TARGETS = {"application": ["--application", "-a"], "pipeline": ["--pipeline", "-p"]}
WITHOUT_TARGET = {"init", "run", "dev", "local"}
NEED_A_PIPELINE = {"do replay", "do compact", "do vacuum"}
CODE = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def commands() -> Iterator[tuple[str, Any]]:
    """All commands with their names, as typed."""
    for name, command in typer.main.get_command(app).commands.items():
        below = getattr(command, "commands", {})
        if not below:
            yield name, command
        for operation, inner in below.items():
            yield f"{name} {operation}", inner


COMMANDS = dict(commands())


def options(name: str) -> dict[str, Any]:
    return {one.name: one for one in COMMANDS[name].params}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name):
    assert options(name)["as_json"].opts == ["--json"]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - WITHOUT_TARGET))
def test_every_command_with_a_target_has_the_same_options(name):
    found = options(name)
    for target, names in TARGETS.items():
        assert found[target].opts == names
    assert found["pipeline"].help == options("status")["pipeline"].help
    assert found["application"].hidden is (name in NEED_A_PIPELINE)
    has_streams = any(one.opts == ["--stream", "-s"] for one in found.values())
    assert has_streams is (name not in NEED_A_PIPELINE)


@pytest.mark.parametrize("name", sorted(WITHOUT_TARGET))
def test_other_commands_have_neither(name):
    assert not set(TARGETS) & set(options(name))


def test_a_letter_has_one_meaning():
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for one in command.params:
            for name in one.opts:
                if re.fullmatch(r"-\w", name):
                    meanings.setdefault(name, set()).add(one.opts[0])
    assert meanings["-a"] == {"--application"}
    assert meanings["-p"] == {"--pipeline"}
    assert all(len(found) == 1 for found in meanings.values()), meanings


@pytest.mark.parametrize("arguments", [["-a", "orders"], ["-a", "orders", "-p", "json:dumps"], []])
@pytest.mark.parametrize("name", sorted(NEED_A_PIPELINE))
def test_commands_that_need_code_name_the_option(name, arguments):
    assert "write" in (said := run(*name.split(), *arguments, code=1).stderr)
    assert "--pipeline module:attribute" in said


def test_the_page_has_every_command():
    listed = re.findall(r"^\| `kcl-pipeline ([a-z -]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_the_table_has_every_exit_code():
    table = PAGE[PAGE.index("## Exit codes") :]
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert sorted(map(int, CODE.findall(table))) == sorted(codes)


def test_exit_codes_of_commands(environment, shared, monkeypatch):
    assert exit_codes.DONE == 0
    run("status", "-a", shared.name, code=exit_codes.DONE)
    run("status", code=exit_codes.FAILED)
    run("status", "-a", "no-such-app", code=exit_codes.FAILED)
    run("status", "--no-such-option", code=exit_codes.WRONG_ARGUMENT)
    run("no-such-command", code=exit_codes.WRONG_ARGUMENT)
    run("plan", "--observe-seconds", "x", code=exit_codes.WRONG_ARGUMENT)
    run("worker", "--progress-seconds", "0", code=exit_codes.WRONG_ARGUMENT)

    def interrupt(**_settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kcl_pipeline.cli.target.ConsumerSettings", interrupt)
    run("status", "-a", shared.name, code=exit_codes.INTERRUPTED)


def test_json_goes_to_standard_output_alone(environment, fleet):
    fleet.clients.dynamodb.put_item(
        TableName=fleet.name,
        Item={"leaseKey": {"S": "shardId-odd"}, "checkpoint": {"S": "not a position"}},
    )
    assert len(run_json("status", "-a", fleet.name)["leases"]) == 4


def test_the_summary_of_a_worker_is_one_json_object():
    total = WorkerStatus(totals=WorkerTotals(1.25, records=3, batches=2, dead_letters=1))
    found = as_dict("w", "orders", WorkerSummary("w", StopReason.FAILED, total, "it was so"))
    assert found["reason"] == "failed"
    assert type(found["reason"]) is str
    assert (found["error"], found["records"], found["dead_letters"]) == ("it was so", 3, 1)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (demo.Verdict(exact=True, numbers={"published": 5, "missing": 0}), 0),
        (demo.Verdict(exact=False, numbers={"published": 5, "missing": 1}), 1),
        (demo.Verdict(exact=False, failure="interrupted"), 1),
    ],
)
def test_the_demonstration_ends_with_its_verdict(verdict, code, is_json, monkeypatch, capsys):
    def run_demo(options, clock, say, *, stay_open):
        say("starting")
        assert options.folder == Path(".run/demo"), "it is emptied; `dagster dev` uses .run"
        return verdict

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(sys.modules["kcl_pipeline.cli.run"], "require_java", lambda: None)
    with pytest.raises(typer.Exit) as ended:
        run_demonstration(as_json=is_json)
    assert ended.value.exit_code == code
    shown = capsys.readouterr()
    if not is_json:
        assert (shown.out, shown.err) == ("starting\n", "")
        return
    assert shown.err == "starting\n"
    assert json.loads(shown.out) == {
        "exact": verdict.exact,
        "failure": verdict.failure,
        **verdict.numbers,
    }


def test_the_line_of_a_verdict_has_its_numbers():
    found = demo.Verdict(exact=True, numbers={"published": 5, "seconds": 7})
    assert found.line == "VERDICT published=5 seconds=7"


def test_local_prints_its_address_as_json():
    command = [sys.executable, "-m", "kcl_pipeline.cli", "local", "--port", "0", "--json"]
    command += ["--create", "orders:3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            found = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()
    assert found["endpoint_url"].startswith("http://127.0.0.1:")
    assert found["environment"]["AWS_ENDPOINT_URL"] == found["endpoint_url"]
    assert found["streams"] == {"orders": 3}
