"""A line has at most 100 columns."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("kcl_pipeline", "verification", "benchmarks", "tests", "tools", "docs")
COLUMNS = 100


def test_no_line_is_longer():
    """E501 of ruff passes over comments such as `noqa`, and over lines without a space."""
    assert [
        f"{path.relative_to(ROOT).as_posix()}:{number}"
        for tree in TREES
        for path in sorted((ROOT / tree).rglob("*.py"))
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if len(line) > COLUMNS
    ] == []
