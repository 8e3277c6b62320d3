"""`pytest --resume FILE`: a run that was stopped continues; the end lists what all parts ran.

FILE has the tests that passed for this state of the tree. Another state begins from the front.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from verification.simulation.seeds import commit_seeds

ROOT: Final = Path(__file__).parents[2]


def state_of_the_tree() -> str:
    """The commit, and what is not committed."""
    changes = subprocess.run(
        ["git", "diff", "HEAD", "--", "."], cwd=ROOT, capture_output=True, check=False
    ).stdout
    return f"{commit_seeds()[1]}, changes {hashlib.sha256(changes).hexdigest()[:12]}"


class Resume:
    """Skips the tests that have passed, and notes those that pass."""

    def __init__(self, path: Path, state: str) -> None:
        self._path = path
        self._record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self._record.get("state") != state:
            self._record = {"state": state, "passed": {}}
        self._before = len(self._record["passed"])
        self._seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what has passed."""
        passed = self._record["passed"]
        done = [item for item in items if item.nodeid in passed]
        items[:] = [item for item in items if item.nodeid not in passed]
        config.hook.pytest_deselected(items=done)
        print(
            f"{len(items)} tests to run, {len(done)} passed before in this state of the tree "
            f"({self._path})",
            flush=True,
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down what passed as soon as it has."""
        seconds = self._seconds.get(report.nodeid, 0.0) + report.duration
        self._seconds[report.nodeid] = seconds
        if report.when == "call" and report.passed:
            self._record["passed"][report.nodeid] = round(seconds, 1)
        elif report.failed:
            self._record["passed"].pop(report.nodeid, None)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._record, indent=1))
        partial.rename(self._path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List what has run, with its seconds."""
        passed = self._record["passed"]
        terminalreporter.section(f"passed: {len(passed)}, of them {self._before} before this run")
        for nodeid, seconds in sorted(passed.items()):
            terminalreporter.write_line(f"{seconds:8.1f} s  {nodeid}")
