"""Log checkpoints and new handles of one table, made by a thread of their own.

A log checkpoint of a large table, or on an object store, takes from tenths of a second to many
seconds. So does opening the table. Both run in one thread per log, while commits go on. Neither
changes what a commit means: a checkpoint repeats what the entries before it say, and a handle that
was opened here is only a newer place to read on from.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.log.transactions import last_checkpoint_version
from kcl_pipeline.delta.storage.storage import Storage
from kcl_pipeline.errors import SinkError

_LOG: Final = logging.getLogger(__name__)


class LogUpkeep:
    """Log checkpoints and new handles of the table at `root`, at most one at a time.

    Of the requests that arrive while one runs, the newest is kept. A failure is only logged: the
    next multiple of the checkpoint interval asks again.
    """

    def __init__(self, root: str, storage: Storage, options: Mapping[str, str]) -> None:
        self._root = root
        self._storage = storage
        self._options = dict(options)
        self._pool = ThreadPoolExecutor(1, "delta-log")
        self._lock = threading.Lock()
        self._last: Future[None] | None = None
        self._opened: Any = None
        self._generation = 0

    def write_checkpoint(self, version: int) -> None:
        """Start to write the log checkpoint of `version`, and to remove expired log entries."""
        self._start(lambda generation: self._write_checkpoint(version, generation))

    def reopen(self, since: int) -> None:
        """Start to open a handle, if there is a log checkpoint of `since` or a later version."""
        self._start(lambda generation: self._reopen(since, generation))

    def take_opened(self) -> Any:
        """The handle that was opened since the last call, or None."""
        with self._lock:
            opened, self._opened = self._opened, None
            return opened

    def discard(self) -> None:
        """Discard a handle that was opened, or is being opened: the table was opened again."""
        with self._lock:
            self._opened = None
            self._generation += 1

    def _start(self, job: Callable[[int], None]) -> None:
        with self._lock:
            if self._last is not None:
                self._last.cancel()  # No effect if it runs already
            self._last = self._pool.submit(lambda: job(self._generation))

    def _write_checkpoint(self, version: int, generation: int) -> None:
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
        else:
            self._open(generation)

    def _reopen(self, since: int, generation: int) -> None:
        newest = last_checkpoint_version(self._storage)
        if newest is not None and newest >= since:
            self._open(generation)

    def _open(self, generation: int) -> None:
        from deltalake import DeltaTable  # noqa: PLC0415 (as above)

        try:
            with delta_errors(f"could not open {self._root} again", self._options):
                opened = DeltaTable(self._root, storage_options=self._options)
        except SinkError as error:
            _LOG.info("%s; the former handle is used", error)
            return
        with self._lock:
            if generation == self._generation:
                self._opened = opened
