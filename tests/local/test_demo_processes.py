"""What the demonstration has started ends with it, also what a child left behind that ended
first.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.demo.processes import Processes

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
