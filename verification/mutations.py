"""Check the mutation ledger: make each change in a copy of the tree; its test must fail.

    python -m verification.mutations              check all entries (`make mutate`)
    python -m verification.mutations --only lock  check entries whose name or function contains it
    python -m verification.mutations --show lock  print these changes as differences of the source

The ledger is `verification/mutations.toml`. An entry names a function, a place in it and an
operator; `mutation_operators.py` has their words. `guard` is the argument of `pytest`, or
`seeds a:b` for a range of seeds of the simulation. The exit code is 1 when a test passes although
its function was changed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from verification import java_operators, mutation_operators
from verification.mutation_operators import NoSuchPlaceError

ROOT: Final = Path(__file__).resolve().parent.parent
LEDGER: Final = ROOT / "verification" / "mutations.toml"
TIMEOUT_SECONDS: Final = 600
SEEDS: Final = "seeds "


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of `function` that `guard` must notice; `why` states the effect of the change.

    `function` is `module:qualified.name`, or `folder/File.java:Class.method`, or
    `module:CONSTANT:method` for Java in the text of a constant.
    """

    name: str
    function: str
    at: str
    operator: str
    guard: str
    why: str

    @property
    def file(self) -> str:
        """The file of the function."""
        module = self.function.partition(":")[0]
        if module.endswith(".java"):
            return module
        path = module.replace(".", "/")
        return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"

    def changed(self, source: str) -> str:
        """Return the source with the change.

        Raises:
            NoSuchPlaceError: The entry does not fit the source.
        """
        _, _, name = self.function.partition(":")
        if self.file.endswith(".java"):
            return java_operators.change(source, name, self.at, self.operator)
        constant, _, method = name.partition(":")
        if method:
            return self._changed_constant(source, constant, method)
        return mutation_operators.change(source, name, self.at, self.operator)

    def check(self, source: str) -> None:
        """Make the change, without the text of it, which takes most of the time.

        Raises:
            NoSuchPlaceError: The entry does not fit the source.
        """
        _, _, name = self.function.partition(":")
        if self.file.endswith(".java") or ":" in name:
            self.changed(source)
        else:
            mutation_operators.check(source, name, self.at, self.operator)

    def _changed_constant(self, source: str, constant: str, method: str) -> str:
        tree = ast.parse(source)
        found = mutation_operators.function(tree, constant)
        texts = [one for one in ast.walk(found) if isinstance(one, ast.Constant)]
        text = max(texts, key=lambda one: len(str(one.value)))
        text.value = java_operators.change(str(text.value), method, self.at, self.operator)
        return ast.unparse(tree)

    def command(self) -> list[str]:
        """The command that must fail after the change."""
        if self.guard.startswith(SEEDS):
            return [
                sys.executable,
                "-m",
                "verification.simulate",
                "--first",
                "--seeds",
                self.guard.removeprefix(SEEDS),
            ]
        return [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "--tb=line",
            *self.guard.split(),
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the guard detected the change; `evidence` is its last line of output about it."""

    mutation: Mutation
    noticed: bool
    evidence: str


def ledger() -> list[Mutation]:
    """Return all mutations, in the order of the file."""
    return [Mutation(**entry) for entry in tomllib.loads(LEDGER.read_text())["mutation"]]


def stale(mutation: Mutation) -> str | None:
    """Why a mutation does not fit the tree, or None."""
    path = ROOT / mutation.file
    if not path.is_file():
        return f"{mutation.name}: there is no {mutation.file}"
    try:
        mutation.check(path.read_text())
    except NoSuchPlaceError as error:
        return f"{mutation.name}: {mutation.function}: {error}"
    return None


def difference(mutation: Mutation) -> str:
    """Return the change as a difference of the source without its comments."""
    source = (ROOT / mutation.file).read_text()
    before = source if mutation.file.endswith(".java") else ast.unparse(ast.parse(source))
    after = mutation.changed(source)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
    return "\n".join([mutation.name, *list(lines)[2:], ""])


def copy_of_the_tree(target: Path) -> Path:
    """Copy the files that the guards need to `target`."""
    for name in ("kcl_pipeline", "verification", "tests", "docs", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)
    return target


def run(command: Sequence[str], tree: Path) -> tuple[int, str]:
    """Return exit code and output of a guard in a copy of the tree.

    A guard that exceeds its time limit counts as failed, because a hang is also a failure.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {TIMEOUT_SECONDS} s"
    return done.returncode, done.stdout + done.stderr


def check(mutation: Mutation, tree: Path) -> Verdict:
    """Make the change, run the guard, and undo the change."""
    path = tree / mutation.file
    original = path.read_text()
    path.write_text(mutation.changed(original))
    try:
        code, output = run(mutation.command(), tree)
    finally:
        path.write_text(original)
    lines = [
        line
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR", "seed ", "no end"))
    ]
    # 1 is a failed test or a broken invariant; SIGABRT is an abort in native code. With any other
    # code the guard could not run, which proves nothing.
    return Verdict(
        mutation,
        code in {1, -signal.SIGABRT},
        lines[-1]
        if lines
        else f"exit code {code}: {output.strip().splitlines()[-1] if output.strip() else ''}",
    )


def guards_pass(mutations: Sequence[Mutation], tree: Path) -> list[str]:
    """Return the guards that fail without a change; such a guard proves nothing."""
    failing = []
    for guard in dict.fromkeys(m.guard for m in mutations):
        code, _ = run(next(m for m in mutations if m.guard == guard).command(), tree)
        if code:
            failing.append(guard)
    return failing


def check_all(mutations: Sequence[Mutation], workers: int) -> list[Verdict]:
    """Return all verdicts, in the order of the ledger; each worker has its own copy of the tree."""
    trees: SimpleQueue[Path] = SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as directory,
        ThreadPoolExecutor(workers) as pool,
    ):
        for number in range(workers):
            trees.put(copy_of_the_tree(Path(directory) / str(number)))

        def one(mutation: Mutation) -> Verdict:
            tree = trees.get()
            try:
                verdict = check(mutation, tree)
            finally:
                trees.put(tree)
            print(
                f"{'ok  ' if verdict.noticed else 'MISS'} {mutation.name:46} "
                f"{verdict.evidence[:110]}",
                flush=True,
            )
            return verdict

        return list(pool.map(one, mutations))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Re-check the mutation ledger.")
    parser.add_argument("--only", default="", help="a word that name or function must contain")
    parser.add_argument("--show", metavar="WORD", help="print these changes, check nothing")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--baseline", action="store_true", help="also run each guard without any change"
    )
    given = parser.parse_args(arguments)
    only = given.show or given.only
    mutations = [m for m in ledger() if only in m.name or only in m.function]
    if problems := [problem for m in mutations if (problem := stale(m))]:
        print("\n".join(problems))
        return 1
    if given.show is not None:
        print("\n".join(map(difference, mutations)))
        return 0
    if given.baseline:
        with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
            if failing := guards_pass(mutations, copy_of_the_tree(Path(directory) / "tree")):
                print("these guards fail without any change:\n" + "\n".join(failing))
                return 1
    verdicts = check_all(mutations, given.workers)
    missed = [v.mutation.name for v in verdicts if not v.noticed]
    print(
        f"\n{len(verdicts) - len(missed)} of {len(verdicts)} changes were noticed"
        + (f"; not: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
