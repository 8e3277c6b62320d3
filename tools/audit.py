"""Compare what is installed with constraints.txt, in both directions.

`make audit` runs this module in the virtual environment of `make setup`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
UNPINNED = frozenset({"kcl-pipeline", "setuptools", "wheel"})
"""The package itself, and packages of the installer, which come with the virtual environment."""


def pinned(text: str) -> dict[str, str]:
    """Return the versions of the constraints that apply to this interpreter, by package."""
    pins: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                name = canonicalize_name(requirement.name)
                pins[name] = str(requirement.specifier).removeprefix("==")
    return pins


def installed() -> dict[str, str]:
    """Return the versions of the installed packages, by package."""
    return {
        canonicalize_name(distribution.metadata["Name"]): distribution.version
        for distribution in importlib.metadata.distributions()
    }


def differences(pins: dict[str, str], present: dict[str, str]) -> list[str]:
    """Return one line for each package that is missing, not pinned, or of another version."""
    names = (pins.keys() | present.keys()) - UNPINNED
    return [
        f"{name}: constraints.txt has {pins.get(name, 'no version')}, "
        f"installed is {present.get(name, 'no version')}"
        for name in sorted(names)
        if pins.get(name) != present.get(name)
    ]


def main() -> int:
    """Print the differences; return 1 when there is one."""
    found = differences(pinned(CONSTRAINTS.read_text(encoding="utf-8")), installed())
    print("\n".join(found) or "what is installed is what constraints.txt says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
