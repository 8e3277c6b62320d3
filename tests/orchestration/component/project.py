"""A small `dg` project in a folder, for the tests of the component."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

DEFINITIONS = """\
from pathlib import Path

import dagster as dg


@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
FUNCTIONS = """\
from kcl_pipeline import SparkResource

spark = SparkResource(app_name="shared")


def unchanged(records):
    return records


def write(frame, identity):
    frame.collect()


def names():
    return ["orders"]


class Nested:
    @staticmethod
    def unchanged(records):
        return records
"""
TEMPLATES = """\
import dagster as dg

from {package}.functions import names, spark


@dg.template_var
def shared_spark():
    return spark


@dg.template_var
def eager():
    return dg.AutomationCondition.eager()


@dg.template_var
def group():
    return "shop"


@dg.template_var
def the_streams():
    return names
"""
PYPROJECT = """\
[project]
name = "{package}"
version = "0.1.0"
requires-python = ">=3.11"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "{package}"
"""


class Project:
    """A project whose package has a name of its own."""

    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package
        self.source = folder / "src"
        self.root = self.source / package
        self.defs_folder = self.root / "defs"
        self.defs_folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PYPROJECT.format(package=package))
        (self.root / "__init__.py").touch()
        (self.defs_folder / "__init__.py").touch()
        (self.root / "definitions.py").write_text(DEFINITIONS)
        (self.root / "functions.py").write_text(FUNCTIONS)
        (self.root / "template_vars.py").write_text(TEMPLATES.format(package=package))

    def write(self, name: str, text: str, file: str = "defs.yaml") -> Path:
        path = self.defs_folder / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("PACKAGE", self.package))
        return path

    def load(self) -> dg.Definitions:
        """The definitions, as a code server loads them."""
        return dg.load_from_defs_folder(path_within_project=self.root)

    def component(self, name: str) -> Any:
        """The component in a folder of `defs`."""
        tree: Any = dg.ComponentTree.for_project(self.folder)
        return tree.load_component(name)


@pytest.fixture
def project(tmp_path, request, monkeypatch):
    package = f"project_{abs(hash(request.node.nodeid)):x}"
    made = Project(tmp_path / "project", package)
    monkeypatch.syspath_prepend(made.source)
    yield made
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
