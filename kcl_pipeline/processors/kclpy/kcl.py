"""`KCLProcess` and the base class of version 1, as `amazon_kclpy.kcl` has them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.processors.checkpointer import Checkpointer, CheckpointError
from kcl_pipeline.processors.kclpy.versions import FirstVersion as RecordProcessorBase

__all__ = ["CheckpointError", "Checkpointer", "KCLProcess", "RecordProcessorBase"]

_STARTED: Final[ContextVar[list[Any] | None]] = ContextVar("started", default=None)


class KCLProcess:
    """The end of a script of kclpy: `KCLProcess(processor).run()`.

    kclpy runs the script as a process for each shard. Here the worker runs it in its own process,
    once for each shard, and takes the processor of this object.

    Args:
        record_processor: The processor.
    """

    def __init__(self, record_processor: Any, *_files: object) -> None:
        self._processor = record_processor

    def run(self) -> None:
        """Give the processor to the worker.

        Raises:
            SettingsError: The script was started without a worker.
        """
        started = _STARTED.get()
        if started is None:
            raise SettingsError(
                "this script is run by a worker. Write kcl-pipeline worker --properties FILE, or "
                f"--processor {Path(sys.argv[0]).name} with --application and --stream."
            )
        started.append(self._processor)


def script_processor(path: Path) -> Callable[[], Any]:
    """Return a function that runs a script of kclpy and returns its processor.

    Raises:
        SettingsError: The file does not exist. The function: the script calls no
            `KCLProcess(...).run()`.
    """
    if not path.is_file():
        raise SettingsError(f"the script {path} does not exist. Write the path of a Python file.")
    folder = str(path.resolve().parent)

    def processor() -> Any:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        started: list[Any] = []
        token = _STARTED.set(started)
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            _STARTED.reset(token)
        if len(started) != 1:
            raise SettingsError(
                f"the script {path} has not called KCLProcess(processor).run() once. Write it at "
                "its end."
            )
        return started[0]

    processor.__qualname__ = path.name
    return processor
