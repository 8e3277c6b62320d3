"""The module of a user's function goes to the executors, which cannot import it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark import cloudpickle

from kcl_pipeline.spark.executors import ship_by_value
from kcl_pipeline.text import printable

LOAD = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(20))"


def loaded_elsewhere(function) -> str:
    """Return the result of the function in a process that has no module of this one."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        input=cloudpickle.dumps(function),
        capture_output=True,
        check=False,
        cwd="/",
    )
    return done.stdout.decode().strip() or done.stderr.decode()


@pytest.mark.parametrize("folder", ["project", "kcl_pipeline", "kcl_pipeline/orders"])
def test_a_module_in_a_folder_of_any_name_is_sent(folder, tmp_path: Path, monkeypatch) -> None:
    name = f"user_module_{folder.replace('/', '_')}"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"{name}.py").write_text(
        "FACTOR = 2\n\n\ndef doubled(number):\n    return number * FACTOR\n"
    )
    monkeypatch.syspath_prepend(tmp_path / folder)
    function = importlib.import_module(name).doubled
    ship_by_value(function)
    assert loaded_elsewhere(function) == "40"


def test_a_module_of_this_package_is_imported_there() -> None:
    ship_by_value(printable)
    assert len(cloudpickle.dumps(printable)) < 200
