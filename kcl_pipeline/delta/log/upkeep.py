"""Log checkpoints of one table, made by a thread of their own.

A log checkpoint of a large table, or on an object store, takes from tenths of a second to many
seconds. It is written while commits go on. It does not change what a commit means: it repeats what
the entries before it say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Final

from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.errors import SinkError
from kcl_pipeline.pools import DaemonPool

_LOG: Final = logging.getLogger(__name__)


class LogUpkeep:
    """Log checkpoints of the table at `root`, at most one at a time.

    Of the requests that arrive while one runs, the newest is kept. A failure is only logged: the
    next multiple of the checkpoint interval asks again.
    """

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        self._root = root
        self._options = dict(options)
        self._pool = DaemonPool(1, "delta-log")
        self._lock = threading.Lock()
        self._last: Future[None] | None = None

    def write_checkpoint(self, version: int) -> None:
        """Start to write the log checkpoint of `version`, and to remove expired log entries."""
        with self._lock:
            if self._last is not None:
                self._last.cancel()  # No effect if it runs already
            self._last = self._pool.submit(self._write_checkpoint, version)

    def _write_checkpoint(self, version: int) -> None:
        from deltalake import DeltaTable  # noqa: PLC0415 (it starts threads when it is loaded)

        try:
            with delta_errors(f"could not checkpoint the log of {self._root}", self._options):
                table = DeltaTable(self._root, version=version, storage_options=self._options)
                table.create_checkpoint()
                given = table.metadata().configuration
                if given.get("delta.enableExpiredLogCleanup", "true") != "false":
                    table.cleanup_metadata()
        except SinkError as error:
            _LOG.warning("%s; the log grows until the next attempt", error)
