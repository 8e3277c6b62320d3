"""List the statements and branches of the product that no seed reaches: `make simulate-coverage`.

The command covers functions of the packages and modules in `PACKAGES`. Each statement or branch
that is not reached must have a reason in `unreached.toml`, and each reason must be needed. The exit
code is 1 when a reason is missing or explains nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from verification.probes import Probes, instrumented
from verification.processes import begin_process

# Functions import the simulation: in the processes of a run, probes must be active first.
# ruff: noqa: PLC0415

PACKAGES: Final = ("worker", "leader", "leases", "planning", "sinks", "threads.py")
REASONS: Final = Path(__file__).with_name("unreached.toml")
_PRODUCT: Final = Path(__file__).parents[1] / "kcl_pipeline"
_CHUNK: Final = 25
_NOT_CALLED: Final = "(not called)"


@dataclass(frozen=True, slots=True, order=True)
class Code:
    """A statement, a branch from a statement, or a function that is not called.

    Attributes:
        file: Path below the product's folder.
        function: Qualified name.
        line: Its current line number.
        what: First line of the statement, `line -> otherwise` of a branch, `(not called)`.
    """

    file: str
    function: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.what}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some code is not reached.

    Attributes:
        functions: Patterns `package or module:qualified name`, such as `worker:Lifecycle.*`. A
            package stands for all its modules, so that code may move between them.
        texts: Patterns of statements and branches; empty for whole functions.
        reason: One sentence.
        is_rare: Whether some seeds may reach the code.
    """

    functions: tuple[str, ...]
    texts: tuple[str, ...]
    reason: str
    is_rare: bool = False

    def explains(self, one: Code) -> bool:
        """Whether the reason applies to this code."""
        return self._is_about(one.file, one.function) and (
            not self.texts or any(fnmatchcase(one.what, text) for text in self.texts)
        )

    def useless(self, found: Sequence[Code], known: Sequence[Code]) -> Iterator[str]:
        """The patterns that explain nothing; a rare one must still match existing code."""
        searched = known if self.is_rare else found
        # A function has many statements, and its name is compared once
        functions = {(one.file, one.function) for one in searched}
        about = {place for place in functions if self._is_about(*place)}
        code = [one for one in searched if (one.file, one.function) in about]
        for pattern in self.functions:
            one = Reason((pattern,), self.texts, self.reason)
            if not any(map(one.explains, code)):
                yield pattern
        for text in self.texts:
            one = Reason(self.functions, (text,), self.reason)
            if not any(map(one.explains, code)):
                yield f"{', '.join(self.functions)}: {text}"

    def _is_about(self, file: str, function: str) -> bool:
        return any(_is_of(pattern, file, function) for pattern in self.functions)


def _is_of(pattern: str, file: str, function: str) -> bool:
    module, _, functions = pattern.partition(":")
    within = file.startswith(f"{module}/") or file == f"{module}.py"
    return within and fnmatchcase(function, functions)


def reasons(path: Path = REASONS) -> list[Reason]:
    """Read the entries of the file."""
    entries = tomllib.loads(path.read_text()).get("unreached", ())
    return [
        Reason(
            tuple(one["functions"]),
            tuple(one.get("texts", ())),
            one["reason"],
            one.get("is_rare", False),
        )
        for one in entries
    ]


def sources(root: Path, packages: Iterable[str]) -> dict[str, str]:
    """Source text of all modules of the packages, by path below `root`. A module is its own."""
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for package in packages
        for path in sorted((root / package).rglob("*.py")) or [root / package]
    }


def all_code(texts: Mapping[str, str]) -> list[Code]:
    """All statements and branches, and one `(not called)` entry for each function."""
    found: set[Code] = set()
    for file, text in texts.items():
        for place in instrumented(text)[1]:
            found.add(Code(file, place.function, place.line, place.what))
            found.add(Code(file, place.function, place.line, _NOT_CALLED))
    return sorted(found)


def unreached(texts: Mapping[str, str], reached: Mapping[str, bytes]) -> list[Code]:
    """Unreached code: a whole function, a statement, or a branch of a reached statement."""
    found: list[Code] = []
    for file, text in texts.items():
        places = instrumented(text)[1]
        store = reached.get(file, bytes(len(places)))
        called = {one.function for one, hit in zip(places, store, strict=True) if hit}
        silent = {one.function: one.line for one in reversed(places) if one.function not in called}
        found += [Code(file, name, line, _NOT_CALLED) for name, line in silent.items()]
        found += [
            Code(file, one.function, one.line, one.what)
            for one, hit in zip(places, store, strict=True)
            if not hit and one.function in called and (one.begin is None or store[one.begin])
        ]
    return sorted(found)


def _measure(seeds: Sequence[int]) -> tuple[dict[str, bytes], list[int]]:
    """Run seeds in this process; return what they reached, by file, and the failing seeds."""
    probes = _PROBES
    if probes is None:
        raise RuntimeError("_begin_process has not run")
    from verification.simulation import simulate

    failing = []
    for seed in seeds:
        if simulate(seed).violations:
            failing.append(seed)
        gc.collect()
    return {file: bytes(store) for file, store in probes.stores.items()}, failing


_PROBES: Probes | None = None


def _begin_process() -> None:
    global _PROBES  # noqa: PLW0603 (one per process)
    _PROBES = Probes(_PRODUCT, PACKAGES)
    sys.meta_path.insert(0, _PROBES)
    begin_process()


def run(seeds: Sequence[int], workers: int) -> dict[str, bytes]:
    """Run all seeds in `workers` processes; return what they reached, by file.

    Failing seeds are printed; `make simulate` explains them.
    """
    found: dict[str, int] = {}
    sizes: dict[str, int] = {}
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_begin_process
    ) as pool:
        parts = as_completed([pool.submit(_measure, chunk) for chunk in chunks])
        for done, part in enumerate(parts, 1):
            stores, failing = part.result()
            for file, store in stores.items():
                found[file] = found.get(file, 0) | int.from_bytes(store, "big")
                sizes[file] = len(store)
            for seed in failing:
                print(f"seed {seed} breaks an invariant", file=sys.stderr, flush=True)
            print(f"{done} of {len(chunks)} parts", file=sys.stderr, flush=True)
    return {file: number.to_bytes(sizes[file], "big") for file, number in found.items()}


def report(found: Sequence[Code], known: Sequence[Code], given: Sequence[Reason]) -> int:
    """Print code without a reason and reasons that explain nothing; return their number."""
    new = [one for one in found if not any(reason.explains(one) for reason in given)]
    for one in new:
        print(one)
    useless = [text for reason in given for text in reason.useless(found, known)]
    for text in useless:
        print(f"this entry of unreached.toml explains nothing: {text}. Remove it, or correct it.")
    print(
        f"{len(found)} statements, branches and functions are not reached, {len(new)} of them "
        f"without a reason in unreached.toml; {len(useless)} entries explain nothing"
    )
    return len(new) + len(useless)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    from verification.simulation.seeds import FIXED, seed_range, shown

    parser = argparse.ArgumentParser(
        prog="python -m verification.simulate_coverage",
        description="List statements and branches that no seed reaches.",
    )
    parser.add_argument("--seeds", type=seed_range, default=FIXED, help="default 0:2000")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args(arguments)
    texts = sources(_PRODUCT, PACKAGES)
    found = unreached(texts, run(given.seeds, given.workers))
    print(f"SEEDS={shown(given.seeds)}")
    return 1 if report(found, all_code(texts), reasons()) else 0


if __name__ == "__main__":
    sys.exit(main())
