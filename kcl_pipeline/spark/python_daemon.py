"""Start Spark's Python workers from a process that has imported what they need.

A Python worker ends when a task fails in it, and the search for failing records of a batch makes a
hundred tasks fail. Spark's own daemon imports pyarrow and pandas in every new worker. Each of them
also reads the directories of the archives of pyspark and py4j again, and that of a jar, which Spark
puts on the import path. Together this takes most of a second. Here the daemon imports once, without
the archives if the packages are installed, and workers are its forks.

The setting `spark.python.daemon.module` names this module. It runs no code of the application.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

_IMPORTED: Final = (
    "pyspark.worker",
    "pyarrow",
    "pandas",
    "pyarrow.pandas_compat",
    "pyarrow.vendored.version",
    "pyspark.sql.pandas.types",
)


def main() -> None:
    """Import, then serve requests for workers until Spark ends."""
    sys.path[:] = without_archives(sys.path, os.environ.get("SPARK_HOME", ""))
    # Each worker calls `importlib.invalidate_caches`, which reads the archives in this cache again.
    sys.path_importer_cache.clear()
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Keeps these objects out of the collection that a worker makes after every task.
    daemon: Any = importlib.import_module("pyspark.daemon")
    daemon.manager()


def without_archives(path: Sequence[str], spark_home: str) -> list[str]:
    """Return the import path without Spark's archives.

    They stay if pyspark is not installed as the package that `spark_home` names, or if py4j is not
    installed.
    """
    home = Path(spark_home).resolve()
    archives = (home / "python" / "lib", home / "jars")
    rest = [entry for entry in path if Path(entry).resolve().parent not in archives]
    is_installed = any(Path(entry).resolve() == home.parent for entry in rest)
    return rest if is_installed and PathFinder.find_spec("py4j", rest) else list(path)


if __name__ == "__main__":
    main()
