"""`make fuzz`: every boundary for a while, each in a process of its own.

python -m tests.fuzz                         all, 60 s each, a fresh seed
python -m tests.fuzz --only lease_row --seed 7 --index 12   one input again
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .boundary import Boundary
from .runner import Finding, all_boundaries, drawn, error_of, run, shown, shrunk

STUCK_SECONDS = 60.0
"""An input that waits for so long ends its process, with all stacks."""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Fuzz the boundaries of input.")
    parser.add_argument("--only", default="", help="a word that the boundary's name must contain")
    parser.add_argument("--seconds", type=float, default=60.0, help="per boundary")
    parser.add_argument("--inputs", type=int, default=None, help="per boundary, instead of a time")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, printed")
    parser.add_argument("--index", type=int, default=None, help="check one input of the seed only")
    parser.add_argument("--marker", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for. Exit code 1 when a boundary broke its promise."""
    given = _arguments(arguments)
    every = all_boundaries()
    chosen = [b for b in every if b.name == given.only] or [
        b for b in every if given.only in b.name
    ]
    if not chosen:
        print(f"no boundary has {given.only!r} in its name")
        return 2
    seed = secrets.randbelow(1_000_000) if given.seed is None else given.seed
    if given.index is not None:
        return max(_one(boundary, seed, given.index) for boundary in chosen)
    if given.marker is not None:
        return _worker(chosen[0], seed, given)
    print(f"seed {seed}", flush=True)
    return max(_in_a_process(boundary, seed, given) for boundary in chosen)


def _one(boundary: Boundary, seed: int, index: int) -> int:
    value = drawn(boundary, seed, index)
    counts: Counter[str] = Counter()
    error = error_of(boundary, value, counts)
    if error is None:
        print(f"{boundary.name}: {next(iter(counts))}\n  input: {shown(repr(value))}")
        return 0
    print(Finding(boundary, seed, index, value, error))
    raise error


def _worker(boundary: Boundary, seed: int, given: argparse.Namespace) -> int:
    """One boundary; the number of the input that is being checked stands in the marker file."""
    with given.marker.open("wb", buffering=0) as marker:

        def note(index: int) -> None:
            os.pwrite(marker.fileno(), index.to_bytes(8, "big"), 0)
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)

        seconds = None if given.inputs is not None else given.seconds
        outcome = run(boundary, seed, inputs=given.inputs, seconds=seconds, before=note)
    faulthandler.cancel_dump_traceback_later()
    told = ", ".join(f"{count} {what}" for what, count in sorted(outcome.counts.items()))
    print(f"{boundary.name}: {outcome.inputs} inputs ({told})", flush=True)
    if outcome.finding is None:
        return 0
    print(f"{outcome.finding}\n  kept: {shrunk(outcome.finding).keep()}", flush=True)
    return 1


def _in_a_process(boundary: Boundary, seed: int, given: argparse.Namespace) -> int:
    """Run a boundary in a child process, because native code may end it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        marker = Path(directory) / "index"
        command = [sys.executable, "-m", "tests.fuzz", "--only", boundary.name, "--seed", str(seed)]
        command += ["--seconds", str(given.seconds), "--marker", str(marker)]
        command += [] if given.inputs is None else ["--inputs", str(given.inputs)]
        code = subprocess.run(command, check=False).returncode
        if code in {0, 1} or not marker.exists():
            return min(abs(code), 1)
        index = int.from_bytes(marker.read_bytes(), "big")
    error = RuntimeError(f"the process ended with code {code}")
    finding = Finding(boundary, seed, index, drawn(boundary, seed, index), error)
    print(f"{finding}\n  kept: {finding.keep()}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
