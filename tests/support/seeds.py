"""The simulation's seeds of the commit, run in parallel with the tests.

The seeds take minutes of processor time, and most other tests wait for something: the seeds
get what is left over, from the beginning on. The process that starts the tests starts them;
with several worker processes of pytest-xdist, any of them reads the result from a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from verification.simulation.seeds import commit_seeds, shown

RESULT = "KCL_TEST_SEEDS_RESULT"
"""Environment variable: the file that the result is written to."""

COMMAND = ["nice", "-n", "19", sys.executable, "-m", "verification.simulate", "--ci", "--json"]


class SeedsOfCi:
    """One run of the seeds, whose result appears in the file that `RESULT` names."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name, "result.json")
        os.environ[RESULT] = str(self._result)
        seeds, source = commit_seeds()
        print(
            f"beside the tests: {len(seeds)} seeds of the simulation that follow from {source}, "
            f"make simulate SEEDS={shown(seeds)}",
            flush=True,
        )
        self._process = subprocess.Popen(
            COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._write_result, daemon=True)
        self._thread.start()

    def _write_result(self) -> None:
        out, report = self._process.communicate()
        partial = self._result.with_suffix(".partial")
        partial.write_text(json.dumps([self._process.returncode, out, report]))
        partial.rename(self._result)

    def stop(self) -> None:
        """Whatever ends the tests ends the seeds."""
        if self._process.poll() is None:
            self._process.terminate()
        self._thread.join(30)
        self._folder.cleanup()


def result_of_seeds(timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Waits for the result.

    Raises:
        TimeoutError: the seeds have not ended in time.
    """
    result = Path(os.environ[RESULT])
    deadline = time.monotonic() + timeout_seconds
    while not result.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the seeds have not ended after {timeout_seconds:g} s")
        time.sleep(0.5)
    code, out, report = json.loads(result.read_text())
    return subprocess.CompletedProcess(COMMAND, code, out, report)
