"""Find names of the product that do not say what they name.

`make lint` runs this module. No attribute, parameter or module-level name has one of the names of
`FORBIDDEN`, with or without underscores. No two public classes of the product have the same name.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path(__file__).parent.parent / "kcl_pipeline"
FORBIDDEN = frozenset({"one", "found", "own", "seen", "wanted", "parts"})
UNFINISHED: tuple[str, ...] = ()
"""Packages of the product that are not checked for `FORBIDDEN` yet. The list only shrinks."""


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each attribute, parameter and module-level name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield child.lineno, child.name
                elif isinstance(child, ast.Assign | ast.AnnAssign):
                    targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                    for name in (inner for target in targets for inner in ast.walk(target)):
                        if isinstance(name, ast.Name):
                            yield child.lineno, name.id


def problems(product: Path = PRODUCT, unfinished: tuple[str, ...] = UNFINISHED) -> list[str]:
    """Return one line per forbidden name, and per public class whose name occurs twice."""
    lines: list[str] = []
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(product.rglob("*.py")):
        tree, place = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(product.parent)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{place}:{node.lineno}")
        if path.relative_to(product).parts[0] not in unfinished:
            lines += [
                f"{place}:{line}: {name} does not say what it is"
                for line, name in names(tree)
                if name.strip("_").lower() in FORBIDDEN
            ]
    repeated = {name: places for name, places in classes.items() if len(places) > 1}
    return [*lines, *(f"class {name}: {', '.join(repeated[name])}" for name in sorted(repeated))]


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
