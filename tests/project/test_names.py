"""`tools.names` finds each kind of name, and public classes with the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.names import problems

KINDS = {
    "a parameter": "def f(found): ...",
    "a keyword parameter": "def f(*, found=None): ...",
    "several parameters": "def f(*found): ...",
    "a parameter of a lambda": "f = lambda found: None",
    "a parameter of a coroutine": "async def f(found): ...",
    "an attribute of an instance": "def f(self): self._found = 1",
    "an attribute of a class": "class A:\n    found: int",
    "a method": "class A:\n    def found(self): ...",
    "a constant": "FOUND = 1",
    "one of several constants": "FIRST, FOUND = 1, 2",
    "a function": "def _found(): ...",
    "a class": "class Found: ...",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_name_is_found(kind: str, tmp_path: Path) -> None:
    product = tmp_path / "product"
    product.mkdir()
    (product / "module.py").write_text(KINDS[kind])
    [problem] = problems(product, ())
    assert problem.startswith("product/module.py:"), problem
    assert problem.endswith("does not say what it is"), problem


def test_a_local_variable_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f(): return [one for one in (found := ())]")
    assert problems(tmp_path, ()) == []


def test_a_package_that_is_still_to_come_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "module.py").write_text("def f(found): ...")
    assert problems(tmp_path, ("late",)) == []
    assert len(problems(tmp_path, ())) == 1


def test_two_public_classes_with_the_same_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("class Pause: ...\nclass _Pause: ...")
    (tmp_path / "second.py").write_text("class Pause: ...\nclass _Pause: ...")
    [problem] = problems(tmp_path, ())
    assert problem.startswith("class Pause: ")
    assert "first.py:1" in problem
    assert "second.py:1" in problem
