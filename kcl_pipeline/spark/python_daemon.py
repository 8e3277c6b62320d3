"""Start Spark's Python workers from a process that has imported what they need.

A Python worker ends when a task fails in it. Spark's own daemon imports `pyspark.worker`, pyarrow
and pandas in every new worker, which takes most of a second. Here the daemon imports them once,
and workers are its forks. `gc.freeze` keeps these objects out of the collection that a worker makes
after every task.

Spark puts archives of pyspark and py4j on the import path, and one of its jars. Every new worker
reads their directories again, which takes most of a second. The daemon uses the installed packages
instead, if they are there.

The setting `spark.python.daemon.module` names this module. It runs no code of the application.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

_IMPORTED: Final = ("pyspark.worker", "pyarrow", "pandas", "pyspark.sql.pandas.types")


def main() -> None:
    """Import, then serve requests for workers until Spark ends."""
    sys.path[:] = without_archives(sys.path, os.environ.get("SPARK_HOME", ""))
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    daemon: Any = importlib.import_module("pyspark.daemon")
    daemon.worker = _quiet(daemon.worker)
    daemon.manager()


def without_archives(path: Sequence[str], spark_home: str) -> list[str]:
    """Return the import path without Spark's archives.

    They stay if pyspark is not installed as the package that `spark_home` names, or if py4j is not
    installed.
    """
    home = Path(spark_home).resolve()
    archives = (home / "python" / "lib", home / "jars")
    rest = [entry for entry in path if Path(entry).resolve().parent not in archives]
    is_installed = (home / "daemon.py").is_file() and any(
        Path(entry).resolve() == home.parent for entry in rest
    )
    if is_installed and PathFinder.find_spec("py4j", rest) is not None:
        return rest
    return list(path)


def _quiet(worker: Callable[[Any, bool], int]) -> Callable[[Any, bool], int]:
    """End a worker without a traceback if Spark has cancelled its task and closed the socket."""

    def run(sock: Any, authenticated: bool) -> int:
        try:
            return worker(sock, authenticated)
        except BrokenPipeError:
            return 1

    return run


if __name__ == "__main__":
    main()
