"""Runs boundaries: a given number of inputs, or for a time; and repeats one input."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from . import boundaries as folder
from .boundary import Boundary, keep
from .guard import TimeLimitError, limited

SHOWN_CHARACTERS = 2_000
SHRINK_ATTEMPTS = 400


def shown(text: str) -> str:
    """The text, cut where it is too long for a report."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that broke the promise of its boundary."""

    boundary: Boundary
    seed: int
    index: int
    value: Any
    error: BaseException

    def __str__(self) -> str:
        return (
            f"{self.boundary.name}: {type(self.error).__name__}: {shown(str(self.error))}\n"
            f"  input: {shown(repr(self.value))}\n"
            f"  again: python -m tests.fuzz --only {self.boundary.name} "
            f"--seed {self.seed} --index {self.index}"
        )

    def keep(self) -> str:
        """Add the input to the corpus; returns the file's path."""
        name = hashlib.sha256(repr(self.value).encode("utf-8", "replace")).hexdigest()[:12]
        return str(keep(self.boundary.corpus, name, self.value))


@dataclass(slots=True)
class Outcome:
    """How many inputs a run has checked, by what happened, and the first finding."""

    counts: Counter[str] = field(default_factory=Counter)
    finding: Finding | None = None

    @property
    def inputs(self) -> int:
        """How many inputs were checked."""
        return self.counts.total()


def all_boundaries() -> tuple[Boundary, ...]:
    """The boundaries of all modules in `boundaries/`, by name. Raises `ValueError` for a name that
    is there twice.
    """
    found: dict[str, Boundary] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        for boundary in importlib.import_module(f"{folder.__name__}.{module.name}").BOUNDARIES:
            if boundary.name in found:
                raise ValueError(f"two boundaries have the name {boundary.name}")
            found[boundary.name] = boundary
    return tuple(found[name] for name in sorted(found))


def drawn(boundary: Boundary, seed: int, index: int) -> Any:
    """Input number `index` of a seed; no other input has to be drawn for it."""
    return boundary.draw(Random(f"{boundary.name}/{seed}/{index}"))


def error_of(boundary: Boundary, value: Any, counts: Counter[str]) -> BaseException | None:
    """Check one input; returns what it raised, and counts what happened otherwise."""
    try:
        with limited(boundary.cpu_seconds, boundary.megabytes):
            outcome = boundary.check(value)
    except (Exception, TimeLimitError) as error:  # noqa: BLE001 (whatever it is, it is a finding)
        return error
    counts[outcome] += 1
    return None


def run(
    boundary: Boundary,
    seed: int,
    *,
    inputs: int | None = None,
    seconds: float | None = None,
    before: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Check inputs until one breaks the promise, `inputs` were checked, or `seconds` have passed.

    `before` is called with the number of each input, ahead of it.
    """
    outcome = Outcome()
    end = None if seconds is None else time.monotonic() + seconds
    index = 0
    while (inputs is None or index < inputs) and (end is None or time.monotonic() < end):
        before(index)
        value = drawn(boundary, seed, index)
        error = error_of(boundary, value, outcome.counts)
        if error is not None:
            outcome.finding = Finding(boundary, seed, index, value, error)
            return outcome
        index += 1
    return outcome


def shrunk(finding: Finding) -> Finding:
    """The same kind of error with a smaller input, as far as leaving parts out leads."""
    best = finding
    attempts = 0
    progress = True
    while progress and attempts < SHRINK_ATTEMPTS:
        progress = False
        for smaller in _smaller(best.value):
            attempts += 1
            if attempts >= SHRINK_ATTEMPTS:
                break
            error = error_of(best.boundary, smaller, Counter())
            if type(error) is type(finding.error):
                best = Finding(best.boundary, best.seed, best.index, smaller, error)
                progress = True
                break
    return best


def _smaller(value: Any) -> Iterator[Any]:
    """The value with one part left out or cut in half, big parts first."""
    match value:
        case dict():
            for key in value:
                yield {name: part for name, part in value.items() if name != key}
            for key, part in value.items():
                for smaller in _smaller(part):
                    yield {**value, key: smaller}
        case list():
            half = len(value) // 2
            yield from (value[:half], value[half:]) if half else ()
            for number, part in enumerate(value):
                yield [*value[:number], *value[number + 1 :]]
                for smaller in _smaller(part):
                    yield [*value[:number], smaller, *value[number + 1 :]]
        case str() | bytes() if len(value) > 1:
            half = len(value) // 2
            yield value[:half]
            yield value[half:]
