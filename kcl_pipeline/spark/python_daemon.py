"""Start Spark's Python workers from a process that has imported what they need.

A Python worker ends when a task fails in it. Spark's own daemon imports `pyspark.worker`, pyarrow
and pandas in every new worker, which takes most of a second. Here the daemon imports them once,
and workers are its forks. `gc.freeze` keeps these objects out of the collection that a worker makes
after every task.

The setting `spark.python.daemon.module` names this module. It runs no code of the application.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable
from typing import Any, Final

_IMPORTED: Final = ("pyspark.worker", "pyarrow", "pandas", "pyspark.sql.pandas.types")


def main() -> None:
    """Import, then serve requests for workers until Spark ends."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    daemon: Any = importlib.import_module("pyspark.daemon")
    daemon.worker = _quiet(daemon.worker)
    daemon.manager()


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
