r"""Make one small change of a function, named by its place and an operator.

The ledger names no source text, so that a change of the format, of a comment or of another line
does not touch it. An entry has three parts:

- `function`: `package.module:Class.method`, or `package.module:NAME` for what a module or a class
  assigns to NAME.
- `at`: one node in it. A step is a kind, words and perhaps `#n`: the node of this kind that
  mentions all words (identifiers, numbers, short strings), or the n-th of them. The word of a
  `call` is what is called, that of an `assign` or `keyword` its name. Steps are separated by
  ` / `, each looks inside of the one before. A step that fits no node, or several, is an error.
  `A + B` are two nodes, both changed.
- `operator`: what happens to it; two that are joined by ` + ` are for the nodes in their order.

| operator | effect |
|---|---|
| `removed` | a statement, element, argument, operand, entry or filter is left out |
| `becomes LITERAL` | the value is `True`, `None`, `0`, `()`, ... |
| `becomes NAME` | the value is another name, such as `versions` or `self._inner` |
| `becomes argument N`, `becomes operand N` | a part of it stays, counted from 1 |
| `becomes continue`, `becomes return` | a statement is replaced by this one |
| `repeats NAME` | the value is computed again as it was when NAME was assigned |
| `negated` | the value is the opposite |
| `ignored` | the condition is evaluated and then counts as false |
| `compares with OP` | the comparison uses another operator, such as `<=` |
| `compares arguments` | a call of two arguments becomes their `==` |
| `calls NAME` | another function or method gets the same arguments |
| `plus N`, `minus N` | the value is larger or smaller |
| `moved first`, `moved last` | its place in the block, list or dictionary |

The value of a statement is its condition, result, right side, iterable or exception. The value of
a `keyword` is the argument.

Example:
    >>> change("def f(a):\n    if a > 1:\n        return a\n", "f", "if a", "becomes False")
    'def f(a):\n    if False:\n        return a'
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

KINDS: Final = {
    ast.If: "if",
    ast.While: "while",
    ast.For: "for",
    ast.With: "with",
    ast.Return: "return",
    ast.Raise: "raise",
    ast.Assign: "assign",
    ast.AnnAssign: "assign",
    ast.AugAssign: "assign",
    ast.NamedExpr: "assign",
    ast.Assert: "assert",
    ast.Continue: "continue",
    ast.Break: "break",
    ast.ExceptHandler: "except",
    ast.match_case: "case",
    ast.FunctionDef: "def",
    ast.Expr: "statement",
    ast.Call: "call",
    ast.Compare: "compare",
    ast.BoolOp: "bool",
    ast.BinOp: "arithmetic",
    ast.UnaryOp: "unary",
    ast.IfExp: "ternary",
    ast.Constant: "constant",
    ast.Name: "name",
    ast.Attribute: "name",
    ast.Subscript: "subscript",
    ast.Dict: "dict",
    ast.List: "list",
    ast.Tuple: "tuple",
    ast.Set: "set",
    ast.Lambda: "lambda",
    ast.GeneratorExp: "comprehension",
    ast.ListComp: "comprehension",
    ast.SetComp: "comprehension",
    ast.DictComp: "comprehension",
    ast.comprehension: "each",
    ast.Yield: "yield",
    ast.keyword: "keyword",
    ast.JoinedStr: "text",
}
ROLES: Final = {
    (ast.BoolOp, "values"): "operand",
    (ast.BinOp, "left"): "operand",
    (ast.BinOp, "right"): "operand",
    (ast.Compare, "left"): "operand",
    (ast.Compare, "comparators"): "operand",
    (ast.List, "elts"): "item",
    (ast.Tuple, "elts"): "item",
    (ast.Set, "elts"): "item",
    (ast.Call, "args"): "item",
    (ast.Dict, "values"): "item",
    (ast.comprehension, "ifs"): "filter",
    (ast.MatchOr, "patterns"): "pattern",
}
VALUES: Final = {
    ast.If: "test",
    ast.While: "test",
    ast.For: "iter",
    ast.comprehension: "iter",
    ast.Return: "value",
    ast.Raise: "exc",
    ast.Assign: "value",
    ast.AnnAssign: "value",
    ast.AugAssign: "value",
    ast.NamedExpr: "value",
    ast.Assert: "test",
    ast.ExceptHandler: "type",
    ast.keyword: "value",
    ast.Yield: "value",
    ast.Lambda: "body",
}
"""The field that holds the value of a node."""

COMPARISONS: Final = {
    "==": ast.Eq,
    "!=": ast.NotEq,
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
    "is": ast.Is,
    "is not": ast.IsNot,
    "in": ast.In,
    "not in": ast.NotIn,
}
STATEMENTS: Final = {"continue": ast.Continue, "return": ast.Return, "raise": ast.Raise}
BLOCKS: Final = frozenset({"body", "orelse", "finalbody", "handlers", "cases"})
_NAMED: Final = frozenset({"call", "assign", "keyword"})


class NoSuchPlaceError(ValueError):
    """A part of an entry does not fit the tree; the message says which."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node and where it is: in `field` of `parent`, at `index` if that is a list."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None

    def kinds(self) -> Iterator[str]:
        """What a step may call the node."""
        if kind := KINDS.get(type(self.node)):
            yield kind
        if role := ROLES.get((type(self.parent), self.field)):
            yield role

    def put(self, new: ast.AST) -> None:
        """Put another node in its place."""
        if self.index is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.index] = new


def places(parent: ast.AST, *, headers_only: bool = False) -> Iterator[Place]:
    """Yield what is inside of a node, in the order of the source."""
    for field, value in ast.iter_fields(parent):
        if headers_only and field in BLOCKS and isinstance(parent, ast.stmt | ast.ExceptHandler):
            continue
        if isinstance(value, ast.AST):
            found = [Place(value, parent, field, None)]
        elif isinstance(value, list):
            found = [
                Place(one, parent, field, index)
                for index, one in enumerate(value)
                if isinstance(one, ast.AST)
            ]
        else:
            continue
        for place in found:
            yield place
            yield from places(place.node, headers_only=headers_only)


def words(node: ast.AST) -> Iterator[str]:
    """Yield the words that a step may use for a node: those of its head, not of its blocks."""
    for one in (node, *(place.node for place in places(node, headers_only=True))):
        match one:
            case ast.Name(id=word) | ast.Attribute(attr=word):
                yield word
            case ast.keyword(arg=str(word)) | ast.arg(arg=word):
                yield word
            case ast.Constant(value=value) if re.fullmatch(r"[\w.:-]{1,40}", str(value)):
                yield str(value)
            case _:
                continue


def own_name(node: ast.AST) -> str | None:
    """The word that a step for a call, an assignment or a keyword begins with."""
    match node:
        case ast.Call(func=ast.Name(id=word) | ast.Attribute(attr=word)):
            return word
        case ast.Assign(targets=[target, *_]):
            return next(words(target), None)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return next(words(target), None)
        case ast.NamedExpr(target=ast.Name(id=word)) | ast.keyword(arg=str(word)):
            return word
        case _:
            return None


def matching(inside: ast.AST, kind: str, wanted: tuple[str, ...]) -> list[Place]:
    """Return the nodes of a kind that mention all words."""
    return [
        place
        for place in places(inside)
        if kind in place.kinds()
        and (kind not in _NAMED or not wanted or own_name(place.node) == wanted[0])
        and set(wanted) <= set(words(place.node))
    ]


def find(inside: ast.AST, at: str) -> Place:
    """Return the one node that all steps lead to."""
    place = None
    for step in at.split(" / "):
        kind, *wanted = step.split()
        number = int(wanted.pop()[1:]) if wanted and wanted[-1].startswith("#") else None
        found = matching(place.node if place else inside, kind, tuple(wanted))
        if not found or (number is None and len(found) != 1) or (number or 1) > len(found):
            raise NoSuchPlaceError(f"{step!r} fits {len(found)} places")
        place = found[(number or 1) - 1]
    assert place is not None
    return place


def function(tree: ast.Module, name: str) -> ast.AST:
    """Return the function, class or assignment of a qualified name."""
    node: ast.AST = tree
    for part in name.split("."):
        found = [one for one in _defined(node) if _name(one) == part]
        if not found:
            raise NoSuchPlaceError(f"there is no {name}")
        node = found[0] if len(found) == 1 else ast.Module(found, [])
    return node


def _defined(node: ast.AST) -> Iterator[ast.stmt]:
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            if isinstance(node, ast.Module | ast.ClassDef):
                yield one
        elif isinstance(one, ast.stmt | ast.ExceptHandler):
            yield from _defined(one)


def _name(node: ast.AST) -> str | None:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case _:
            return own_name(node)


def change(source: str, name: str, at: str, operator: str) -> str:
    """Return the source with the change.

    Raises:
        NoSuchPlaceError: A part of the entry does not fit the source, or changes nothing.
    """
    tree = ast.parse(source)
    _change(function(tree, name) if name else tree, at, operator)
    return ast.unparse(ast.fix_missing_locations(tree))


def check(source: str, name: str, at: str, operator: str) -> None:
    """Make the change in a copy of the function. A source is parsed once for all of its entries.

    Raises:
        NoSuchPlaceError: See `change`.
    """
    tree = _parsed(source)
    _change(copy.deepcopy(function(tree, name) if name else tree), at, operator)


@lru_cache(maxsize=100)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _change(inside: ast.AST, at: str, operator: str) -> None:
    """Make the change; new nodes have no locations."""
    before = ast.dump(inside)
    chosen = [find(inside, one) for one in at.split(" + ")]
    operators = operator.split(" + ")
    if len(operators) not in {1, len(chosen)}:
        raise NoSuchPlaceError(f"{len(operators)} operators for {len(chosen)} places")
    # from behind, so that a removal does not move what is still to be changed
    for number in reversed(range(len(chosen))):
        apply(chosen[number], operators[number % len(operators)], inside)
    if ast.dump(inside) == before:
        raise NoSuchPlaceError(f"{operator!r} changes nothing at {at!r}")


def apply(place: Place, operator: str, inside: ast.AST) -> None:
    """Change the node at a place in the function `inside`."""
    if operator == "removed":
        _remove(place)
        return
    if operator in {"moved first", "moved last"}:
        _move(place, operator)
        return
    verb, _, what = operator.partition(" ")
    if verb == "becomes" and what in STATEMENTS:
        _statement(place).put(STATEMENTS[what]())
        return
    value = _value(place)
    if operator == "compares arguments":
        left, right = _arguments(value.node)
        value.put(ast.Compare(left, [ast.Eq()], [right]))
    elif verb == "compares":
        compared = [one for one in _with_inner(value) if isinstance(one.node, ast.Compare)]
        _only(compared, operator).node.ops = [COMPARISONS[what.removeprefix("with ")]()]
    elif verb == "calls":
        called = _only([value] if isinstance(value.node, ast.Call) else [], operator).node.func
        setattr(called, "id" if isinstance(called, ast.Name) else "attr", what)
    else:
        value.put(_new_value(value.node, verb, what, inside))


def _new_value(node: Any, verb: str, what: str, inside: ast.AST) -> ast.AST:
    match verb:
        case "becomes":
            return _replacement(node, what)
        case "repeats":
            return _value(find(inside, f"assign {what}")).node
        case "ignored":
            return ast.BoolOp(ast.And(), [node, ast.Constant(value=False)])
        case "negated":
            return _negated(node)
        case "plus" | "minus":
            sign = ast.Add() if verb == "plus" else ast.Sub()
            return ast.BinOp(node, sign, ast.Constant(ast.literal_eval(what)))
        case _:
            raise NoSuchPlaceError(f"{verb} {what}".strip() + " is not an operator")


def _only(found: list[Place], operator: str) -> Any:
    if len(found) != 1:
        raise NoSuchPlaceError(f"{operator!r} fits {len(found)} nodes")
    return found[0]


def _with_inner(place: Place) -> list[Place]:
    return [place] if isinstance(place.node, ast.Compare) else list(places(place.node))


def _value(place: Place) -> Place:
    field = VALUES.get(type(place.node))
    if field is None:
        return place
    return Place(getattr(place.node, field), place.node, field, None)


def _statement(place: Place) -> Place:
    if not isinstance(place.node, ast.stmt):
        raise NoSuchPlaceError("this operator needs a statement")
    return place


def _replacement(node: Any, what: str) -> ast.expr:
    part, _, number = what.partition(" ")
    if part in {"argument", "operand"} and number:
        parts = _arguments(node) if part == "argument" else _operands(node)
        if int(number) > len(parts):
            raise NoSuchPlaceError(f"there are {len(parts)} of {part}")
        return parts[int(number) - 1]
    try:
        ast.literal_eval(what)
    except (ValueError, SyntaxError):
        if not re.fullmatch(r"[A-Za-z_][\w.]*", what):
            raise NoSuchPlaceError(f"{what!r} is neither a literal nor a name") from None
    return ast.parse(what, mode="eval").body


def _arguments(node: Any) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        raise NoSuchPlaceError("only a call has arguments")
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _operands(node: Any) -> list[ast.expr]:
    match node:
        case ast.BoolOp(values=values):
            return values
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Compare(left=left, comparators=comparators):
            return [left, *comparators]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.IfExp(body=body, orelse=orelse):
            return [body, orelse]
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            return [value]
        case ast.Call(func=ast.Attribute(value=value)):
            return [value]
        case _:
            raise NoSuchPlaceError("this node has no operands")


def _negated(node: Any) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _remove(place: Place) -> None:
    node, parent = place.node, place.parent
    if isinstance(parent, ast.Expr):
        # the whole statement goes, which is where the call stood
        parent.value = ast.Constant(value=None)
    elif isinstance(node, ast.With):
        place.put(ast.If(test=ast.Constant(value=True), body=node.body, orelse=[]))
    elif isinstance(node, ast.stmt):
        place.put(ast.Pass())
    elif isinstance(parent, ast.BinOp):
        raise NoSuchPlaceError("an arithmetic expression 'becomes operand N'")
    elif isinstance(parent, ast.Compare) and place.field == "left" and len(parent.ops) > 1:
        parent.left = parent.comparators.pop(0)
        del parent.ops[0]
    elif place.index is None:
        raise NoSuchPlaceError(f"a {type(node).__name__} cannot be left out here")
    else:
        del getattr(parent, place.field)[place.index]
        if isinstance(parent, ast.Dict):
            del parent.keys[place.index]
        if isinstance(parent, ast.Compare):
            del parent.ops[place.index]
        if isinstance(parent, ast.BoolOp | ast.Compare) and not getattr(parent, place.field):
            raise NoSuchPlaceError("nothing is left")


def _move(place: Place, operator: str) -> None:
    if place.index is None:
        raise NoSuchPlaceError("this node is not in a list")
    fields = [getattr(place.parent, place.field)]
    if isinstance(place.parent, ast.Dict):
        fields.append(place.parent.keys)
    for field in fields:
        one = field.pop(place.index)
        field.insert(0 if operator.endswith("first") else len(field), one)
