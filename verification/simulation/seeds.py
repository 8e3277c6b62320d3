"""The seeds of a run: a requested range, a random one, or one derived from the commit."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import subprocess
from pathlib import Path
from typing import Final

FIXED: Final = range(2_000)
"""The seeds of `make simulate` and `make test-long`."""

COMMIT_COUNT: Final = 300
"""The seeds of `make test`."""

_FIRST_RANDOM: Final = 50_000_000
_RANDOM_BEGINS: Final = 1_000_000
_STEP: Final = 10_000
_ROOT: Final = Path(__file__).parents[2]


def seed_range(text: str) -> range:
    """Parse `10:20` (end exclusive) or one seed; raises `ArgumentTypeError`."""
    first, colon, last = text.partition(":")
    try:
        begin, end = int(first), int(last) if colon else int(first) + 1
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of seeds; write for example 0:2000"
        ) from None
    if not 0 <= begin < end:
        raise argparse.ArgumentTypeError(f"{text!r} has no seeds; write for example 0:2000")
    return range(begin, end)


def shown(seeds: range) -> str:
    """The range in the format of `seed_range`."""
    return f"{seeds.start}:{seeds.stop}"


def random_seeds(count: int) -> range:
    """`count` random seeds, most likely never used before."""
    begin = _FIRST_RANDOM + _STEP * secrets.randbelow(_RANDOM_BEGINS)
    return range(begin, begin + count)


def commit_seeds(count: int = COMMIT_COUNT, root: Path = _ROOT) -> tuple[range, str]:
    """`count` seeds derived from the commit id, and a text that names their origin.

    Without a commit id, as in an unpacked archive, they are derived from the sources.
    """
    commit = _commit(root)
    known = commit if commit is not None else _digest_of_sources(root)
    begin = _FIRST_RANDOM + _STEP * (int(known[:12], 16) % _RANDOM_BEGINS)
    source = f"commit {known[:12]}" if commit is not None else f"sources {known[:12]} (no commit)"
    return range(begin, begin + count), source


def _commit(root: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607 (whichever git the caller uses)
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _digest_of_sources(root: Path) -> str:
    digest = hashlib.sha256()
    for package in ("kcl_pipeline", "verification"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
