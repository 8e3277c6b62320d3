"""How `make test` shares its tests out, and how `make test-long` continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.resume import Resume
from tests.support.shares import Durations, minutes, part_of, unit_of

ROOT = Path(__file__).parents[2]


def item(nodeid):
    return SimpleNamespace(nodeid=nodeid)


def test_the_tests_of_one_slow_fixture_are_one_unit():
    assert unit_of("tests/spark/test_writer.py::test_a[b::c]") == "spark"
    assert unit_of("tests/docs/test_readme_example.py::test_a") == "spark"
    pipelines = "tests/testing/test_pipelines.py"
    assert unit_of(f"{pipelines}::test_a_function_on_spark") == "spark"
    assert unit_of(f"{pipelines}::test_wrong_arguments") == pipelines
    assert unit_of("tests/leases/test_held.py::test_a") == "tests/leases/test_held.py"
    assert part_of("tests/spark/test_writer.py::test_a") == "Spark"
    assert part_of("tests/guides/test_links.py::test_a") == "documents"
    assert part_of("tests/leases/test_held.py::test_a") == "the rest"


def test_the_longest_unit_begins_and_an_unknown_one_counts_as_the_mean(tmp_path):
    path = tmp_path / "durations.json"
    path.write_text(json.dumps({"tests/a.py": 1.0, "tests/b.py": 9.0}))
    durations = Durations(path)
    items = [item(f"tests/{name}::t{n}") for name in ("a.py", "new.py", "b.py") for n in (1, 2)]
    durations.sort(items)
    assert [one.nodeid for one in items] == [
        f"tests/{name}::t{n}" for name in ("b.py", "new.py", "a.py") for n in (1, 2)
    ]
    assert minutes(185.9) == "3:05"


def report(nodeid, when="call", outcome="passed"):
    return SimpleNamespace(
        nodeid=nodeid,
        when=when,
        duration=1.5,
        passed=outcome == "passed",
        failed=outcome == "failed",
    )


def left_out(resume, *nodeids):
    deselected = []

    def note(items):
        deselected.extend(items)

    hook = SimpleNamespace(pytest_deselected=note)
    items = [item(nodeid) for nodeid in nodeids]
    resume.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    return [one.nodeid for one in items], [one.nodeid for one in deselected]


def test_a_run_that_was_stopped_continues_with_what_has_not_passed(tmp_path):
    path = tmp_path / "below" / "test-long.json"
    first = Resume(path, "commit 1")
    assert left_out(first, "a", "b", "c", "d") == (["a", "b", "c", "d"], [])
    first.pytest_runtest_logreport(report("a"))
    first.pytest_runtest_logreport(report("b", outcome="failed"))
    first.pytest_runtest_logreport(report("c"))
    first.pytest_runtest_logreport(report("c", when="teardown", outcome="failed"))
    again = Resume(path, "commit 1")
    assert left_out(again, "a", "b", "c", "d") == (["b", "c", "d"], ["a"])


def test_another_state_of_the_tree_begins_from_the_front(tmp_path):
    path = tmp_path / "test-long.json"
    Resume(path, "commit 1").pytest_runtest_logreport(report("a"))
    assert left_out(Resume(path, "commit 2"), "a", "b") == (["a", "b"], [])


CRASHING = """
import os, time

def test_first(): time.sleep(0.2)

def test_crashes(): os.abort()

def test_last(): pass
"""
GOOD = """
import time

def test_first(): time.sleep(0.3)

def test_last(): pass
"""
CONFTEST = """
from tests.support.scheduling import UnitScheduling

def pytest_xdist_make_scheduler(config, log):
    return UnitScheduling(config, log)
"""


def ended(command: list[object], seconds: float) -> tuple[int, str]:
    """Run pytest with pytest-xdist alone. Each of up to seven processes would load the other
    plugins, which takes most of its processor time.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(
        list(map(str, command)),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            raise AssertionError(f"not ended after {seconds:g} s:\n{output}") from None
    return process.returncode, output


@pytest.mark.parametrize(
    "crashing",
    [
        pytest.param(("a",), marks=pytest.mark.long),
        pytest.param(("c",), marks=pytest.mark.long),
        pytest.param(("d",), marks=pytest.mark.long),
        ("a", "b", "d"),
    ],
)
def test_a_process_that_crashes_is_one_failed_test(tmp_path, crashing):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abcd":
        text = CRASHING if name in crashing else GOOD
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist"]
    code, output = ended(
        [*command, "-n", "2", "--no-loadscope-reorder", "--rootdir", tmp_path, tmp_path], 240
    )
    passed, failed = 2 * 4, len(crashing)
    assert f"{failed} failed, {passed} passed" in output, output
    assert code == 1
