"""A file has at most 400 lines, a function 70, a line 100 columns, a sub-package 13 modules."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("kcl_pipeline", "verification", "benchmarks", "examples", "tests", "tools", "docs")
FILE_LINES = 400
FUNCTION_LINES = 70
COLUMNS = 100
PACKAGE_MODULES = 13


def sources():
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_no_file_is_longer():
    assert [name for name, text in sources() if text.count("\n") > FILE_LINES] == []


def test_no_line_is_longer():
    """E501 of ruff passes over comments such as `noqa`, and over lines without a space."""
    assert [
        f"{name}:{number}"
        for name, text in sources()
        for number, line in enumerate(text.split("\n"), 1)
        if len(line) > COLUMNS
    ] == []


def test_no_function_is_longer():
    assert [
        f"{name}:{node.name}"
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ] == []


def test_no_package_has_more_modules():
    trees = (ROOT / "kcl_pipeline", ROOT / "verification")
    packages = [path for tree in trees for path in tree.rglob("*") if path.is_dir()]
    modules = {path: {*path.glob("*.py")} - {path / "__init__.py"} for path in packages}
    assert sum(map(len, modules.values())) > 300
    assert {
        path.name: len(found) for path, found in modules.items() if len(found) > PACKAGE_MODULES
    } == {}
