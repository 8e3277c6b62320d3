"""Read the descriptions of fields from the source.

The schema of the component shows them. They are written once, as docstrings.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise


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


def _one_line(text: str) -> str:
    return " ".join(text.split())
