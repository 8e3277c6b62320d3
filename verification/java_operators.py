"""Make one small change of a method in Java, in a file or in the text of a Python constant.

The places and operators are a part of those of `mutation_operators`, found by brackets alone:

- `if WORDS`: the condition of an if; `if WORDS / operand WORDS`: one side of its `||` or `&&`;
- `return WORDS`: the result; `throw WORDS`: the whole statement; `call NAME`: a call;
- `removed`; `becomes LITERAL`; for a statement `becomes return LITERAL`; for a call `becomes
  argument N applied`: this argument's method `apply` instead of the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from verification.mutation_operators import NoSuchPlaceError

_OPEN: Final = {"(": ")", "{": "}"}
_SKIPPED: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """The characters `start` to `end` (exclusive) of a source."""

    start: int
    end: int

    def of(self, source: str) -> str:
        """Return the text."""
        return source[self.start : self.end]


def change(source: str, name: str, at: str, operator: str) -> str:
    """Return the source with the change; `name` is `method` or `Class.method`.

    Raises:
        NoSuchPlaceError: A part of the entry does not fit the source.
    """
    clear = _SKIPPED.sub(lambda match: " " * len(match[0]), source)
    inside = Part(0, len(source))
    *classes, method = name.split(".")
    for one in classes:
        inside = _body(clear, inside, rf"\bclass {one}\b[^{{;]*")
    inside = _body(clear, inside, rf"(?<!new)(?<!return)[\w>\]] {method}\([^;{{]*\)[^;{{(]*")
    part = _found(clear, source, inside, at)
    new = _changed(clear, source, part, operator)
    return source[: part.start] + new + source[part.end :]


def _body(clear: str, inside: Part, head: str) -> Part:
    found = [*re.compile(head + r"\{").finditer(clear, inside.start, inside.end)]
    # not those of nested classes
    depths = [_depth(clear, inside.start, one.start()) for one in found]
    found = [one for one, depth in zip(found, depths, strict=True) if depth == min(depths)]
    if len(found) != 1:
        raise NoSuchPlaceError(f"{head!r} fits {len(found)} places")
    return Part(found[0].end(), _closing(clear, found[0].end() - 1))


def _depth(clear: str, start: int, end: int) -> int:
    return clear.count("{", start, end) - clear.count("}", start, end)


def _closing(clear: str, at: int) -> int:
    depth = 0
    pair = clear[at] + _OPEN[clear[at]]
    for end in range(at, len(clear)):
        depth += (clear[end] == pair[0]) - (clear[end] == pair[1])
        if not depth:
            return end
    raise NoSuchPlaceError("a bracket is not closed")


def _found(clear: str, source: str, inside: Part, at: str) -> Part:
    for step in at.split(" / "):
        kind, *words = step.split()
        number = int(words.pop()[1:]) if words and words[-1].startswith("#") else None
        found = [
            part
            for part in _parts(clear, inside, kind, words[0] if words else "")
            if all(re.search(rf"\b{word}\b", part.of(source)) for word in words)
        ]
        if not found or (number is None and len(found) != 1) or (number or 1) > len(found):
            raise NoSuchPlaceError(f"{step!r} fits {len(found)} places")
        inside = found[(number or 1) - 1]
    return inside


def _parts(clear: str, inside: Part, kind: str, word: str) -> list[Part]:
    def found(pattern: str) -> list[re.Match[str]]:
        return [*re.compile(pattern).finditer(clear, inside.start, inside.end)]

    match kind:
        case "if":
            return [Part(m.end(), _closing(clear, m.end() - 1)) for m in found(r"\bif \(")]
        case "return":
            return [Part(m.end(), clear.index(";", m.end())) for m in found(r"\breturn ")]
        case "throw":
            return [Part(m.start(), clear.index(";", m.end())) for m in found(r"\bthrow ")]
        case "call":
            matches = found(rf"[\w.]*\b{word}\(")
            return [Part(m.start(), _closing(clear, m.end() - 1) + 1) for m in matches]
        case "operand":
            return _split(clear, inside, ("||", "&&"))
        case _:
            raise NoSuchPlaceError(f"{kind!r} is not a kind of place in Java")


def _split(clear: str, inside: Part, separators: tuple[str, ...]) -> list[Part]:
    found, start, at = [], inside.start, inside.start
    while at < inside.end:
        if clear[at] in _OPEN:
            at = _closing(clear, at)
        for one in separators:
            if clear.startswith(one, at):
                found.append(Part(start, at))
                start = at + len(one)
        at += 1
    return [*found, Part(start, inside.end)]


def _changed(clear: str, source: str, part: Part, operator: str) -> str:
    verb, _, what = operator.partition(" ")
    if operator == "removed":
        if clear[part.end] == ";":
            return ""
        before = clear[: part.start].rstrip()[-2:]
        # what is left of `a || b` is `a || false`, and of `a && b` is `a && true`
        return " true" if "&&" in {before, clear[part.end :].lstrip()[:2]} else " false"
    argument = re.fullmatch(r"argument (\d+) applied", what)
    if verb == "becomes" and argument:
        opened = clear.index("(", part.start)
        arguments = _split(clear, Part(opened + 1, _closing(clear, opened)), (",",))
        return f"{arguments[int(argument[1]) - 1].of(source).strip()}.apply()"
    if verb == "becomes" and re.fullmatch(r"(return )?(true|false|null|-?\d+)", what):
        return what
    raise NoSuchPlaceError(f"{operator!r} is not an operator for Java")
