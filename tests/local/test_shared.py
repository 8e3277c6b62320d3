"""One embedded AWS for the processes of a project: started once, and ended with its owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kcl_pipeline import use_local_aws
from kcl_pipeline.local.shared import Server

OWNER = """
import subprocess, sys
use = "from kcl_pipeline import use_local_aws; import os; " \\
    "print(use_local_aws({'orders': 2}, folder=sys.argv[1]), os.environ['AWS_REGION'])"
children = [
    subprocess.Popen(
        [sys.executable, "-c", "import sys; " + use, sys.argv[2]], stdout=subprocess.PIPE, text=True
    )
    for _ in range(2)
]
for child in children:
    print(child.communicate()[0], end="")
print("ready", flush=True)
sys.stdin.read()
"""


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def no_aws(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def test_a_configured_account_is_used(no_aws, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert use_local_aws({"orders": 1}, folder=tmp_path) is None
    assert [*tmp_path.iterdir()] == []


def test_outside_of_dagster_dev_nothing_is_started(no_aws, tmp_path):
    assert use_local_aws({"orders": 1}, folder=tmp_path) is None
    assert "AWS_ENDPOINT_URL" not in os.environ


@pytest.mark.processes
def test_processes_of_one_dagster_share_a_server_that_ends_with_it(no_aws, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    program = tmp_path / "dagster"
    program.write_text(OWNER)
    folder = tmp_path / "run"
    owner = subprocess.Popen(
        [sys.executable, str(program), "dev", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    lines = []
    while not lines or lines[-1] != "ready":
        lines.append(owner.stdout.readline().strip())
        assert lines[-1], owner.stderr.read()
    server = json.loads((folder / "local-aws.json").read_text())
    try:
        assert lines == [f"{server['endpoint_url']} us-east-1"] * 2 + ["ready"]
        owner.send_signal(signal.SIGKILL)
        told = owner.stderr.read()
        assert told.count("an embedded AWS runs at") == 1
        assert "no AWS_* variable names an account, a region or an endpoint" in told
        owner.wait(30)
        wait_until(lambda: not psutil.pid_exists(server["pid"]))
        assert not (folder / "local-aws.json").exists()
    finally:
        if psutil.pid_exists(server["pid"]):
            os.kill(server["pid"], signal.SIGKILL)


@pytest.mark.parametrize(("seconds", "is_alive"), [(0.0, True), (1.0, True), (60.0, False)])
def test_a_server_is_known_although_the_time_of_the_boot_moves(seconds, is_alive):
    """The kernel's answer differs by up to a second between two reads on a virtual machine."""
    started = psutil.Process().create_time() - seconds
    assert Server("http://127.0.0.1:1", os.getpid(), started, {}).is_alive == is_alive
