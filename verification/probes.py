"""Probes in the source of some packages that record which statements and branches run.

A probe is a store into a `bytearray`. coverage.py would look up the running greenlet at each event,
and a seed would take four times as long. Probes do not depend on the greenlet that runs a function.

Only code inside functions has probes; module-level code runs at import.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

_STORE: Final = "__reached__"
_OTHERWISE: Final = "otherwise"


@dataclass(frozen=True, slots=True)
class Place:
    """A statement, or a branch that has no statement of its own.

    Attributes:
        function: Qualified name of its function.
        what: First line of the statement, or `line -> otherwise` for a branch.
        line: Its current line number.
        begin: Index of the entry where the branch begins; None for a statement.
    """

    function: str
    what: str
    line: int
    begin: int | None = None


class _Instrument(ast.NodeTransformer):
    """Adds a probe before each statement of a function, and to each branch without a statement."""

    def __init__(self, text: str) -> None:
        self.places: list[Place] = []
        self._lines = [line.strip() for line in text.splitlines()]
        self._names: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._names.append(node.name)
        node.body = [self.visit(one) for one in node.body]
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._names.append(node.name)
        node.body = self._suite(node.body)
        self._names.pop()
        return node

    def _suite(self, suite: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for one in suite:
            if not _is_probed(one):
                found.append(one)
                continue
            begin = len(self.places)
            found += [self._probe(one, self._lines[one.lineno - 1]), self._inside(one, begin)]
        return found

    def _inside(self, one: ast.stmt, begin: int) -> ast.stmt:
        """Return the statement with probes in its own suites."""
        match one:
            case ast.ClassDef() | ast.FunctionDef():
                visited: ast.stmt = self.visit(one)
                return visited
            case ast.If() | ast.For() | ast.While():
                one.body = self._suite(one.body)
                one.orelse = self._suite(one.orelse) or self._branch(one, begin)
            case ast.With():
                one.body = self._suite(one.body)
            case ast.Try():
                one.body = self._suite(one.body)
                for handler in one.handlers:
                    handler.body = self._suite(handler.body)
                one.orelse = self._suite(one.orelse)
                one.finalbody = self._suite(one.finalbody)
            case ast.Match():
                for case in one.cases:
                    case.body = self._suite(case.body) or case.body
                if not _is_irrefutable(one.cases[-1]):
                    body = self._branch(one, begin)
                    one.cases.append(ast.match_case(ast.MatchAs(), None, body))
            case _:
                pass
        return one

    def _branch(self, one: ast.stmt, begin: int) -> list[ast.stmt]:
        if isinstance(one, ast.While) and isinstance(one.test, ast.Constant):
            return []
        what = f"{self._lines[one.lineno - 1]} -> {_OTHERWISE}"
        return [self._probe(one, what, begin)]

    def _probe(self, at: ast.stmt, what: str, begin: int | None = None) -> ast.stmt:
        number = len(self.places)
        self.places.append(Place(".".join(self._names), what, at.lineno, begin))
        probe = ast.parse(f"{_STORE}[{number}] = 1").body[0]
        for node in ast.walk(probe):
            ast.copy_location(node, at)
        return probe


def _is_probed(one: ast.stmt) -> bool:
    """Whether a statement has an effect; a docstring, an ellipsis and a declaration have none."""
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return False
    return not isinstance(one, ast.Pass | ast.Global | ast.Nonlocal)


def _is_irrefutable(case: ast.match_case) -> bool:
    return (
        case.guard is None
        and isinstance(case.pattern, ast.MatchAs)
        and (case.pattern.pattern is None)
    )


def instrumented(text: str) -> tuple[ast.Module, tuple[Place, ...]]:
    """Return the source with probes, and the location of each probe."""
    instrument = _Instrument(text)
    tree = ast.fix_missing_locations(instrument.visit(ast.parse(text)))
    return tree, tuple(instrument.places)


class _Loader(SourceFileLoader):
    """Loader that compiles with probes, and neither reads nor writes byte code."""

    def __init__(self, name: str, path: str, probes: Probes) -> None:
        super().__init__(name, path)
        self._probes = probes
        self._store = bytearray()

    def get_code(self, _fullname: str) -> CodeType:
        tree, places = instrumented(Path(self.path).read_text())
        self._store = bytearray(len(places))
        self._probes.stores[Path(self.path).relative_to(self._probes.root).as_posix()] = self._store
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        module.__dict__[_STORE] = self._store
        exec(code, module.__dict__)  # noqa: S102 (what an import does)


class Probes(MetaPathFinder):
    """Adds probes to some modules, and to those of some packages, that are imported meanwhile.

    Attributes:
        root: Folder of the packages.
        stores: One byte per probe of a module, by path below `root`.
    """

    def __init__(self, root: Path, packages: Sequence[str]) -> None:
        self.root = root
        self.stores: dict[str, bytearray] = {}
        self._folders = tuple(
            str(root / package) if package.endswith(".py") else f"{root / package}/"
            for package in packages
        )

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See `MetaPathFinder.find_spec`."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not (spec.origin or "").startswith(self._folders):
            return None
        spec.loader = _Loader(fullname, str(spec.origin), self)
        return spec

    @contextmanager
    def active(self) -> Iterator[None]:
        """Add probes to the modules that are imported in this context."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
