"""A file has at most 400 lines, a function at most 70, a line at most 100 columns."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("kcl_pipeline", "verification", "benchmarks", "examples", "tests", "tools", "docs")
FILE_LINES = 400
FUNCTION_LINES = 70
COLUMNS = 100


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
