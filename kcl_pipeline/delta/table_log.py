"""A Delta table as the `Log` of a sink."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta import positions
from kcl_pipeline.delta.files import unique_name
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.storage.storage import is_local
from kcl_pipeline.delta.table_check import TableCheck
from kcl_pipeline.errors import SinkError
from kcl_pipeline.events import EventSink, TableRestored, ignore_events
from kcl_pipeline.sinks.log import Head
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition

_BACKOFF_SECONDS: Final = 0.004
_BACKOFF_LIMIT_SECONDS: Final = 0.4
_YOUNG_SECONDS: Final = 3600.0
"""Shortest time between the writing of a file and its removal by a vacuum."""
_PATH: Final = re.compile(
    r"batches/[A-Za-z0-9][A-Za-z0-9.-]{0,79}-(?P<unique>[0-9a-f]{32})"  # `files.batch_folder`
    r"(/[0-9a-f]{32})?"  # of a task
    r"(/[^/\\=\x00-\x1f\x7f]+=[^/\\\x00-\x1f\x7f]*)*"  # partition values, as Spark writes them
    r"/[A-Za-z0-9][A-Za-z0-9._-]*\.parquet"
)
"""The path of a batch file. A whitelist: no `..`, no absolute path, nothing in `_delta_log`."""


def is_batch_file(path: str, name: str) -> bool:
    """Return whether a path is that of a file in the batch folder whose unique part is `name`."""
    match = _PATH.fullmatch(path)
    return match is not None and match["unique"] == name


@dataclass(frozen=True, slots=True)
class DeltaHead:
    """The `Head` of a Delta table."""

    version: int
    _log: DeltaLog
    _look: Callable[[str], None]

    @property
    def table_id(self) -> str:
        """See `Head`."""
        return self._log.table_id

    @property
    def form(self) -> str:
        """See `Head`."""
        return self._log.layout.digest

    @property
    def changed(self) -> int:
        """See `Head`."""
        return self._log.transactions_at(self.version) // len(positions.SUFFIXES)

    def stored(self, key: str) -> StoredPosition:
        """See `Head`."""
        found = positions.stored(key, self._log.transaction)
        if found != NOTHING_STORED:
            self._look(key)
        return found


class DeltaTableLog:
    """The `Log` of a Delta table.

    Args:
        sink: The settings of the table.
        clock: Measures the waits of writers that add columns at the same time.
        rng: Spreads these waits.
        application: Name of the application.
        events: Receives `TableRestored`, once for each RESTORE after the first commit of the
            application.
    """

    def __init__(
        self,
        sink: DeltaSink,
        clock: Clock,
        rng: random.Random,
        application: str,
        events: EventSink = ignore_events,
    ) -> None:
        self._application = application
        self._events = events
        self._reported: set[tuple[int, str]] = set()
        self._clock = clock
        self._rng = rng
        self._log = DeltaLog(sink.uri, sink.storage_options, clock)
        self._check = TableCheck(sink, self._log, self._back_off)
        self.storage = self._log.storage
        self._is_local = is_local(self._log.root)

    @property
    def name(self) -> str:
        """See `Log`."""
        return self._log.root

    def check(self) -> int | None:
        """Check the store and the table. Returns the table's version; None: it does not exist."""
        return self._log.version if self._check.start() else None

    def columns(self) -> TableColumns:
        """What the result of a transform must fit (see `TableCheck.columns`)."""
        return self._check.columns()

    def has_files(self, files: Sequence[DataFile]) -> bool:
        """Return whether each file exists with its size."""
        return all(self.storage.size(file.path) == file.size for file in files)

    def ensure(self, schema: pa.Schema) -> bool:
        """See `Log`."""
        before = self._log.version
        if before < 0:
            self._check.ensure(schema)
        else:
            self._check.fit(schema)
        return self._log.version != before

    def read(self) -> DeltaHead | None:
        """See `Log`. It also checks that the table may be written with these settings."""
        if not self._log.refresh():
            return None
        self._check.table()
        return self._head()

    def peek(self) -> DeltaHead | None:
        """See `Log`."""
        return self._head() if self._log.peek() else None

    def _head(self) -> DeltaHead:
        _ = self._log.table_id  # It opens the table again if another program has changed it.
        return DeltaHead(self._log.version, self._log, self._report_restores)

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        """See `Log`. The log entry of a version is created only if it does not exist."""
        self._check.store()
        if self._log.version != head.version:
            raise SinkError(f"{self.name} is not at version {head.version} any more")
        found = [positions.transactions(key, stored) for key, stored in sets.items()]
        self._log.append(files, {name: value for one in found for name, value in one.items()})

    def batch_name(self, files: Sequence[DataFile]) -> str | None:
        """See `Log`: the unique part of the folder of the files."""
        matches = [_PATH.fullmatch(one.path) for one in files]
        folders = {None if match is None else match["unique"] for match in matches}
        if len(folders) > 1:
            return None
        return folders.pop() if folders else unique_name()

    def problem(self, name: str, files: Sequence[DataFile]) -> str | None:
        """See `Log`.

        In an object store the size costs a request for each file. A young file is there: its writer
        announces it after it was written, and no program removes it so soon.
        """
        young = 0.0 if self._is_local else self._clock.wall() - _YOUNG_SECONDS
        for file in files:
            if not is_batch_file(file.path, name):
                return "a path is not that of a file in the announcer's own folder"
            reason = self._log.layout.problem(file.partition_values)
            if reason is not None:
                return reason
            is_young = young and file.modified_millis >= young * 1000
            if not is_young and not self.has_files([file]):
                return f"a file of {file.size} bytes is not there"
        return None

    def upkeep(self, version: int) -> None:
        """See `Log`: it writes a log checkpoint from time to time."""
        self._log.maintain(version)

    def _report_restores(self, key: str) -> None:
        """Report each RESTORE after the first commit of a shard that the table knows.

        The keys of announced batches may be those of other applications.
        """
        if not key.startswith(f"{self._application}/"):
            return
        for one in self._log.restores:
            known = (one.version, one.restored_to)
            if known not in self._reported and one.is_after_first_commit(positions.names(key)[0]):
                self._reported.add(known)
                self._events(TableRestored(one.version, one.restored_to, self._log.table_id))

    def _back_off(self, attempt: int) -> None:
        longest = min(_BACKOFF_LIMIT_SECONDS, _BACKOFF_SECONDS * 2 ** min(attempt, 10))
        self._clock.sleep(self._rng.uniform(0, longest))
        if not self._log.refresh():
            raise SinkError(f"the table {self.name} does not exist any more")
