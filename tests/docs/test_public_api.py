"""The public names: `kcl_pipeline` exports them lazily, and documents use nothing deeper."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import kcl_pipeline
from kcl_pipeline import errors, events
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.pipeline import KinesisPipeline

ROOT = Path(__file__).parents[2]
HEAVY = ("boto3", "botocore", "dagster", "pyspark", "pyarrow", "deltalake", "pydantic", "moto")
KCLPY = "kcl_pipeline.processors.kclpy"
PUBLIC = {"kcl_pipeline", "kcl_pipeline.testing", KCLPY, f"{KCLPY}.v3"}
DEEP = re.compile(r"(?:from|import)\s+(kcl_pipeline(?:\.\w+)*)")


def typed_names() -> dict[str, str]:
    """The names that type checkers see, with their modules."""
    tree = ast.parse((ROOT / "kcl_pipeline" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    assert set(typed_names()) | {"__version__"} == set(kcl_pipeline.__all__)
    assert set(kcl_pipeline._MODULES) <= set(kcl_pipeline.__all__)


@pytest.mark.parametrize("name", sorted(typed_names()))
def test_each_name_comes_from_its_module(name: str) -> None:
    found = getattr(kcl_pipeline, name)
    module = sys.modules[typed_names()[name]]
    assert found is getattr(module, "register" if name == "register_strategy" else name)


def test_all_errors_and_events_are_public() -> None:
    mine = {
        name
        for module in (errors, events)
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    }
    assert mine | {"EventSink", "ignore_events"} <= set(kcl_pipeline.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'KinesisPipelin'"):
        _ = kcl_pipeline.KinesisPipelin


def test_the_import_loads_nothing_heavy() -> None:
    code = f"import kcl_pipeline, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def documents() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    pages = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return [page for page in pages if not page.startswith("docs/contributing/")]


@pytest.mark.parametrize("page", documents())
def test_documents_and_examples_import_only_public_modules(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".md"):
        text = "\n".join(re.findall(r"```(?:python|console|shell)\n(.*?)```", text, re.DOTALL))
    assert set(DEEP.findall(text)) - PUBLIC == set()


def documented_text(name: str) -> str:
    """The docstring of a public name: of a class, a function, or a value of a module."""
    value = getattr(kcl_pipeline, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    elsewhere = {"__version__": "kcl_pipeline.version", "EventSink": "kcl_pipeline.events"}
    module = sys.modules[elsewhere.get(name) or typed_names()[name]]
    body = ast.parse(inspect.getsource(module)).body
    for node, following in pairwise(body):
        if name in ast.unparse(node).partition("=")[0].replace(":", " ").split():
            assert isinstance(following, ast.Expr)
            return str(ast.literal_eval(following.value))
    raise AssertionError(f"{name} is not a value of {module.__name__}")


@pytest.mark.parametrize("name", sorted(kcl_pipeline.__all__))
def test_the_example_of_each_public_name_runs(name: str) -> None:
    text = inspect.cleandoc(documented_text(name))
    assert "Example:" in text
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    out: list[str] = []
    assert doctest.DocTestRunner().run(example, out=out.append).failed == 0, "".join(out)


def test_the_page_of_the_api_lists_the_public_names() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"currentmodule:: kcl_pipeline\n(.*?)```", page, re.DOTALL)
    listed = re.findall(r"\.\. auto\w+:: (\w+)", "\n".join(blocks))
    assert sorted(listed) == sorted(set(kcl_pipeline.__all__) - {"__version__"})


def test_a_misspelt_option_is_still_suggested() -> None:
    pipeline = KinesisPipeline("orders", ["orders"], kcl_pipeline.DeltaSink("/nowhere/orders"))
    with pytest.raises(SettingsError, match="Did you mean group_name"):
        pipeline.definitions(group_nme="x")  # type: ignore[call-arg]
