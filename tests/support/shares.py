"""Shares the tests out to processes by how long they take, and says what runs.

`durations.json` has the seconds of every unit that stays in one process: a file, or all tests of
one slow fixture. The longest units begin first, so that the processes end at nearly the same time.
`make test DURATIONS=1` writes the file again; a unit that it does not know counts as the mean.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

DURATIONS: Final = Path(__file__).parent / "durations.json"
EVERY_SECONDS: Final = 20.0

SHARED: Final = {
    "tests/integration/dagster_dev/": "stage",
    "tests/docs/test_readme_example.py": "spark",
    "tests/guides/test_several_objects.py": "spark",
    "tests/guides/test_snippets.py": "spark",
    "tests/installation/test_private_interfaces.py": "spark",
    "tests/orchestration/resources/test_dagster_libraries.py": "spark",
    "tests/project/test_project.py::test_a_reading": "spark",
    "tests/spark/": "spark",
    "tests/testing/test_pipelines.py::test_a_function_on_spark": "spark",
    "tests/verification/test_simulation.py::test_the_seeds_of_the_commit": "seeds",
    "tests/worker/test_memory.py": "spark",
}
"""Tests, files and folders that share a fixture that is slow to start, by the start of their ids.
Each test that needs a Spark session is here: another process would start a session for it. The test
of the seeds waits for another process, and a unit that is given to the same one would wait with it.
"""


def unit_of(nodeid: str) -> str:
    """The unit of a test: all of it runs in one process."""
    path = nodeid.split("::", 1)[0]
    return next((name for start, name in SHARED.items() if nodeid.startswith(start)), path)


def part_of(nodeid: str) -> str:
    """The part of the suite that a test belongs to, for the table at the end."""
    unit = unit_of(nodeid)
    if unit in {"spark", "stage"}:
        return {"spark": "Spark", "stage": "browser and `dagster dev`"}[unit]
    folder = nodeid.split("/")[1]
    return {"docs": "documents", "guides": "documents", "integration": "processes"}.get(
        folder, folder if folder in {"verification", "fuzz"} else "the rest"
    )


class Durations:
    """The recorded seconds of all units."""

    def __init__(self, path: Path = DURATIONS) -> None:
        self._path = path
        self._known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self._mean = sum(self._known.values()) / len(self._known) if self._known else 1.0

    def seconds(self, unit: str) -> float:
        """The seconds of a unit; the mean, if it is not known."""
        return self._known.get(unit, self._mean)

    def sort(self, items: list[pytest.Item]) -> None:
        """Bring the units with the longest durations to the front; each stays together."""
        place = {unit_of(item.nodeid): 0 for item in items}
        order = sorted(place, key=lambda unit: (-self.seconds(unit), unit))
        place = {unit: number for number, unit in enumerate(order)}
        items.sort(key=lambda item: place[unit_of(item.nodeid)])

    def write(self, found: Counter[str]) -> None:
        """Replace the file by the durations of this run."""
        rounded = {
            unit: round(seconds, 1)
            for unit, seconds in sorted(found.items())
            if unit != "seeds"  # it waits until they have ended
        }
        self._path.write_text(json.dumps(rounded, indent=0) + "\n")


def minutes(seconds: float) -> str:
    """Minutes and seconds, such as `3:05`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr if crash is None else crash.message).strip()
    return text.splitlines()[0][:200] if text else ""


class Progress:
    """In the process that starts the others: prints what runs, how far it is, and how long."""

    def __init__(self, config: pytest.Config, durations: Durations) -> None:
        self._config = config
        self._durations = durations
        self._began = self._told = time.monotonic()
        self._total = 0
        self._expected = 0.0
        self._done = 0.0
        self._outcomes: Counter[str] = Counter()
        self._units: Counter[str] = Counter()
        self._size: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()
        self._running: dict[str, None] = {}

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """Say once how much there is to do; every process has collected the same tests."""
        if self._total:
            return
        self._total = len(ids)
        self._size = Counter(map(unit_of, ids))
        self._expected = sum(map(self._durations.seconds, self._size))
        processes = self._config.getoption("numprocesses")
        self._print(
            f"{len(ids):,} tests in {len(self._size):,} units and {processes} processes, about "
            f"{minutes(self._expected / processes)} minutes on a quiet machine"
        )

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: `pytest_runtest_logreport` prints lines instead."""
        if report.passed:
            return ("passed" if report.when == "call" else "", "", "PASSED")
        if report.failed:
            return ("failed" if report.when == "call" else "error", "", "FAILED")
        return None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note what runs."""
        self._running[nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a result, and print a line from time to time."""
        unit = unit_of(report.nodeid)
        self._units[unit] += report.duration
        self._parts[part_of(report.nodeid)] += report.duration
        if report.when == "call" or not report.passed:
            self._outcomes[report.outcome] += 1
        if report.failed:
            self._print(f"FAILED {report.nodeid} ({report.when}): {_reason(report)}")
        if report.when == "teardown":
            self._running.pop(report.nodeid, None)
            self._done += self._durations.seconds(unit) / self._size[unit]
        if time.monotonic() - self._told >= EVERY_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        running = sorted({nodeid.split("::", 1)[0] for nodeid in self._running})
        tests = sum(self._outcomes.values())
        self._print(
            f"{minutes(self._told - self._began)}  {100 * self._done / self._expected:3.0f} %  "
            f"{tests:,} of {self._total:,} tests, {self._outcomes['failed']} failed; "
            f"now {', '.join(running)}"
        )

    def _print(self, text: str) -> None:
        print(text, flush=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the minutes by part, which the processes share."""
        if not self._total:
            return
        terminalreporter.section("minutes by part, summed over the processes")
        for part, seconds in self._parts.most_common():
            terminalreporter.write_line(f"{minutes(seconds):>6}  {part}")
        if self._config.getoption("write_durations"):
            self._durations.write(self._units)
