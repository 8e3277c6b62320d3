"""What the demonstration has started ends with it, also what a child left behind that ended
first.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from kcl_pipeline import use_local_aws
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.demo.processes import Processes, free_port

GRANDCHILD = "import time; time.sleep(600)"
PARENT = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
    f"'{GRANDCHILD}']).pid, flush=True)"
)


@pytest.mark.parametrize("outlives", [True, False])
def test_nothing_is_left(tmp_path: Path, *, outlives: bool) -> None:
    processes = Processes(tmp_path, SystemClock(), patience_seconds=1.0)
    child = processes.start(
        "parent", ["-c", PARENT if outlives else f"{PARENT}; import time; time.sleep(600)"]
    )
    if outlives:
        child.wait(60)
    clock = SystemClock()
    deadline = clock.monotonic() + 60
    while not processes.log_text("parent").strip() and clock.monotonic() < deadline:
        clock.sleep(0.02)
    grandchild = psutil.Process(int(processes.log_text("parent")))
    processes.stop_all()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_project_beside_the_demonstration_finds_its_aws(tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "demo").mkdir()
    processes = Processes(tmp_path / "demo", SystemClock())
    try:
        url = processes.start_aws(free_port(0))
        for name in processes.environment:  # what is set from here on is removed at the end
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert use_local_aws({"orders": 1}, folder=tmp_path) == url
        assert os.environ["AWS_ENDPOINT_URL"] == url
    finally:
        processes.stop_all()
    for name in processes.environment:
        monkeypatch.delenv(name, raising=False)
    assert use_local_aws({"orders": 1}, folder=tmp_path) is None, "it has ended"
