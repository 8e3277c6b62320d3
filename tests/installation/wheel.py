"""Build the wheel, and virtual environments that hold only the core requirements.

Everything works without a network: packages are linked from the environment of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this work tree into the folder and return its path."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def closure(requirements: list[str]) -> list[Distribution]:
    """Return the installed distributions that the requirements need, directly or not."""
    seen: set[tuple[str, str]] = set()
    open_requirements = [Requirement(text) for text in requirements]
    while open_requirements:
        requirement = open_requirements.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            open_requirements += [
                dependency
                for dependency in map(Requirement, distribution(name).requires or ())
                if dependency.marker is None or dependency.marker.evaluate({"extra": extra})
            ]
    return [distribution(name) for name in sorted({name for name, _ in seen})]


def lean_environment(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """Make a virtual environment with the wheel and what it requires, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--no-index", "--no-deps", "--no-compile", "--quiet", str(wheel)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    _link(closure(requirements), packages)
    _take_compiled(packages / "kcl_pipeline")
    return python


def _take_compiled(package: Path) -> None:
    """Use the compiled modules of this work tree for modules with the same text.

    A compiled module belongs to the time and the size of its source.
    """
    for module in package.rglob("*.py"):
        source = ROOT / "kcl_pipeline" / module.relative_to(package)
        assert module.read_bytes() == source.read_bytes()
        status = source.stat()
        os.utime(module, ns=(status.st_atime_ns, status.st_mtime_ns))
        compiled = source.parent / "__pycache__"
        if compiled.exists() and not (module.parent / "__pycache__").exists():
            (module.parent / "__pycache__").symlink_to(compiled)


def _link(chosen: list[Distribution], packages: Path) -> None:
    """Link the files of the distributions.

    A folder is a link if no other distribution of the environment has files in it, so that its
    modules are not compiled again.
    """
    owners: dict[str, set[int]] = {}
    for number, installed in enumerate(distributions()):
        for file in installed.files or ():
            folder, _, _ = str(file).rpartition("/")
            while folder and number not in owners.setdefault(folder, set()):
                owners[folder].add(number)
                folder, _, _ = folder.rpartition("/")
    linked: set[str] = set()
    for found in chosen:
        for file in found.files or ():
            if file.parts[0] == ".." or "__pycache__" in file.parts:
                continue
            folders = [str(folder) for folder in reversed(file.parents)][1:]
            part = next((folder for folder in folders if len(owners[folder]) == 1), str(file))
            if part not in linked:
                linked.add(part)
                target = packages / part
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(found.locate_file(part))).resolve())
