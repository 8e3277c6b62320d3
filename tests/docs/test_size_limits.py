"""A file has at most 400 lines, a function at most 70."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("kcl_pipeline", "verification", "benchmarks", "examples", "tests")
FILE_LINES = 400
FUNCTION_LINES = 70


def sources():
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_no_file_is_longer():
    assert [name for name, text in sources() if text.count("\n") > FILE_LINES] == []


def test_no_function_is_longer():
    assert [
        f"{name}:{node.name}"
        for name, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ] == []
