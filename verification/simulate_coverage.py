"""List the lines and branches of the product that no seed reaches: `make simulate-coverage`.

Looks at the packages in `PACKAGES`, inside functions: what a module does when it is imported needs
no seed. Each line or branch that is not reached must have a reason in `unreached.toml`. The exit
code is 1 when one has none. Entries of the file that were reached after all are listed as well;
they are no error, because a rare path depends on the range of seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import coverage

from verification.simulation import StormOptions, simulate
from verification.simulation.menu import CURRENT_MENU, MENUS
from verification.simulation.seeds import FIXED, seed_range, shown

PACKAGES: Final = ("worker", "leader", "leases", "planning")
REASONS: Final = Path(__file__).with_name("unreached.toml")
_PRODUCT: Final = Path(__file__).parents[1] / "kcl_pipeline"
_CHUNK: Final = 25


@dataclass(frozen=True, slots=True, order=True)
class Unreached:
    """A line, or a branch from a line that is reached, inside a function.

    Attributes:
        file: Path below `kcl_pipeline`.
        function: Qualified name.
        what: The text of the line, or `text -> text of the target` of a branch.
        line: Where the line is now; not part of an entry's identity.
    """

    file: str
    function: str
    what: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is not reached. `what` is empty when it holds for the whole function."""

    file: str
    function: str
    what: tuple[str, ...]
    reason: str

    def explains(self, one: Unreached) -> bool:
        """Whether the reason is that of this line or branch."""
        return (
            self.file == one.file
            and self.function in (one.function, "*")
            and (not self.what or one.what in self.what)
        )


def reasons(path: Path = REASONS) -> list[Reason]:
    """The entries of the file."""
    entries = tomllib.loads(path.read_text())["unreached"]
    return [
        Reason(e["file"], e["function"], tuple(e.get("what", ())), e["reason"]) for e in entries
    ]


def unreached(report: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Unreached]:
    """What a JSON report of coverage.py says about functions, with the text of the lines."""
    for name, measured in report:
        path = Path(name)
        text = [line.strip() for line in path.read_text().splitlines()]
        file = path.relative_to(_PRODUCT).as_posix()
        for function, part in measured["functions"].items():
            if not function:
                continue
            missing = part["missing_lines"]
            yield from (Unreached(file, function, text[line - 1], line) for line in missing)
            for begin, end in part.get("missing_branches", ()):
                if begin not in missing:
                    target = text[end - 1] if end > 0 else "exit"
                    yield Unreached(file, function, f"{text[begin - 1]} -> {target}", begin)


def measure(seeds: Sequence[int], menu: int, data_file: str) -> None:
    """Run seeds in this process, and write what they reached to a file."""
    measured = _coverage(data_file)
    measured.start()
    try:
        for seed in seeds:
            simulate(seed, StormOptions(menu=menu))
    finally:
        measured.stop()
        measured.save()


def _coverage(data_file: str) -> coverage.Coverage:
    # Tasks are greenlets: without `greenlet` the branches of one would be taken for another's.
    return coverage.Coverage(
        data_file=data_file,
        branch=True,
        concurrency=["greenlet"],
        include=[str(_PRODUCT / package / "*") for package in PACKAGES],
        config_file=False,
    )


def run(seeds: Sequence[int], menu: int, workers: int) -> list[Unreached]:
    """Run all seeds over `workers` processes; returns what none of them reached."""
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with tempfile.TemporaryDirectory() as directory:
        files = [f"{directory}/.coverage.{number}" for number in range(len(chunks))]
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(measure, chunks, [menu] * len(chunks), files))
        combined = _coverage(f"{directory}/.coverage")
        combined.combine(files)
        combined.json_report(
            morfs=[
                str(path) for package in PACKAGES for path in (_PRODUCT / package).rglob("*.py")
            ],
            outfile=f"{directory}/report.json",
        )
        report = json.loads(Path(f"{directory}/report.json").read_text())
    return sorted(
        unreached((str(Path(name).resolve()), part) for name, part in report["files"].items())
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m verification.simulate_coverage",
        description="List lines and branches that no seed reaches.",
    )
    parser.add_argument("--seeds", type=seed_range, default=FIXED, help="default 0:2000")
    parser.add_argument("--menu", type=int, choices=sorted(MENUS), default=CURRENT_MENU)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args(arguments)
    return _report(run(given.seeds, given.menu, given.workers), reasons(), shown(given.seeds))


def _report(found: list[Unreached], known: list[Reason], seeds: str) -> int:
    new = [one for one in found if not any(reason.explains(one) for reason in known)]
    for one in new:
        print(f"{one.file}:{one.line} {one.function}: {one.what}")
    for reason in known:
        of_function = [one for one in found if reason.explains(one)]
        texts = {one.what for one in of_function}
        late = [what for what in reason.what if what not in texts] if reason.what else []
        if late or not of_function:
            names = ", ".join(late) or "the function"
            print(f"reached after all: {reason.file} {reason.function}: {names}")
    print(
        f"SEEDS={seeds}: {len(found)} lines and branches are not reached, {len(new)} of them "
        "without a reason in unreached.toml"
    )
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
