"""The walk-throughs of docs/contributing run, from the first block to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kcl_pipeline.planning import strategies

PAGES = Path(__file__).parents[2] / "docs" / "contributing"
WALK_THROUGHS = sorted(PAGES.glob("add-*.md"))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))


def test_there_is_one_for_each_extension_point() -> None:
    assert [page.stem for page in WALK_THROUGHS] == [
        "add-a-cpu-provider",
        "add-a-sink",
        "add-a-strategy",
    ]


@pytest.mark.parametrize("page", WALK_THROUGHS, ids=lambda page: page.stem)
def test_its_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert "\nassert " in blocks[-1], "the last block tests the others"
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", WALK_THROUGHS, ids=lambda page: page.stem)
def test_the_files_that_it_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:kcl_pipeline|tests)/[\w/]+\.py)`", text))
    new = set(re.findall(r"new (?:file|package), `([\w/.]+)`", text))
    assert named
    assert [name for name in named - new if not (PAGES.parents[1] / name).exists()] == []
