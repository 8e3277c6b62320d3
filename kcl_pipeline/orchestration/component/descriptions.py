"""Read the descriptions of fields and arguments from the source.

The schema of the component shows them. They are written once, as docstrings.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

_ARGUMENT: Final = re.compile(r"^    (\w+): (.*)$")


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 (the source of a class)
    return dict(_documented(tree.body))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                yield name, _one_line(doc)


def argument_descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entries of the section `Args` of a docstring, by name."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = _ARGUMENT.match(line)
        if entry is not None:
            name = entry[1]
        found[name] = f"{found.get(name, '')} {entry[2] if entry else line}"
    return {name: _one_line(text) for name, text in found.items()}


def _one_line(text: str) -> str:
    return " ".join(text.split())
