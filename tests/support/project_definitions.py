"""Load the definitions of a Dagster project in this process, which has imported Dagster already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType

import dagster as dg

MODULES = {"definitions", "assets", "resources", "sensors"}


@contextmanager
def project_definitions(folder: Path) -> Iterator[dg.Definitions]:
    """The definitions of the project in a folder. Afterwards its modules are gone again."""
    kept = _take_modules()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with chdir(folder):
            yield importlib.import_module("definitions").defs
    finally:
        sys.path.remove(str(folder))
        _take_modules()
        sys.modules.update(kept)


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] in MODULES]
    return {name: sys.modules.pop(name) for name in names}
