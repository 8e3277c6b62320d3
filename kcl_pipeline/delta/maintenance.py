"""Compact and vacuum a table while workers write to it, and delete announcements.

Compaction and vacuum commit to the log like any other writer: a worker that loses the race for a
version tries the next one. Neither changes an application transaction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.log import DeltaLog
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import delta_errors, delta_options, table_root
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.sinks.announcements import (
    FOLDER,
    AnnouncedBatch,
    AnnouncementError,
    read_announcements,
)
from kcl_pipeline.sinks.log import UnsafeObjectError

DEFAULT_RETENTION_HOURS: Final = 168
MINIMUM_RETENTION_HOURS: Final = 1
DEFAULT_FILE_BYTES: Final = 100 * 1024 * 1024
"""Target size of a compaction, unless the table has the property `delta.targetFileSize`."""
_RETRIES: Final = 50
_HOUR_MILLIS: Final = 3_600_000
_CLOCK_MARGIN_MILLIS: Final = _HOUR_MILLIS
"""The clocks of a writer, of the store and of this host may differ by this."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """Number of files that a compaction removed and added; both 0 if there was nothing to do."""

    files_removed: int
    files_added: int


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Files that a compaction may merge: those below the target size, two or more per partition."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """What a vacuum removed, or would remove.

    Attributes:
        files: Paths relative to the table.
        bytes: Their size.
        retention_hours: The retention time that was used.
    """

    files: tuple[str, ...]
    bytes: int
    retention_hours: int


def small_files(uri: str, storage_options: Mapping[str, str] | None = None) -> SmallFiles:
    """Count the files that `compact` may merge. Changes nothing.

    Raises:
        SinkError: The table cannot be read.
    """
    table = _open(uri, storage_options)
    with delta_errors(f"could not read {uri}", storage_options):
        configuration = table.metadata().configuration
        target = int(configuration.get("delta.targetFileSize") or DEFAULT_FILE_BYTES)
        rows = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in rows:
        if row["size_bytes"] < target:
            partition = tuple(f"{k}={v}" for k, v in row.items() if k.startswith("partition."))
            groups[partition].append(row["size_bytes"])
    merged = [size for sizes in groups.values() if len(sizes) > 1 for size in sizes]
    return SmallFiles(len(merged), sum(merged))


def table_exists(uri: str, storage_options: Mapping[str, str] | None = None) -> bool:
    """Return whether there is a Delta table.

    Raises:
        SinkError: Its folder cannot be read.
    """
    with delta_errors(f"could not open {uri}", storage_options):
        return DeltaLog(uri, storage_options).refresh()


def compact(uri: str, storage_options: Mapping[str, str] | None = None) -> Compacted:
    """Merge small files of each partition into files of the table's target size.

    The old files stay for readers until `vacuum`. Workers may write at the same time: they only
    add files, so the commits do not conflict.

    Raises:
        SinkError: The table cannot be compacted.
    """
    # deltalake starts threads when it is loaded: load it only in the process that uses it.
    from deltalake import CommitProperties  # noqa: PLC0415

    table = _open(uri, storage_options)
    with delta_errors(f"could not compact {uri}", storage_options):
        metrics = table.optimize.compact(
            commit_properties=CommitProperties(max_commit_retries=_RETRIES),
        )
    return Compacted(int(metrics["numFilesRemoved"]), int(metrics["numFilesAdded"]))


def vacuum(
    uri: str,
    retention_hours: int = DEFAULT_RETENTION_HOURS,
    storage_options: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Remove files that no version of the last `retention_hours` uses, and abandoned batches.

    The files of a written or announced batch are in no version either. They are protected only by
    their age: files younger than the retention time are never removed. The retention time must
    therefore be longer than any pause of a worker between write and commit, and longer than any
    query.

    Announcements of that age are deleted first. A worker that has already read one cannot commit
    it afterwards: vacuum commits to the log before it removes files, and every commit depends on
    the version that it was compared with.

    Args:
        uri: Address of the table.
        retention_hours: At least `MINIMUM_RETENTION_HOURS`.
        storage_options: Options of delta-rs.
        dry_run: Remove nothing.

    Returns:
        Paths of the removed files, relative to the table.

    Raises:
        SettingsError: `retention_hours` is too small.
        SinkError: The table cannot be vacuumed.
    """
    if retention_hours < MINIMUM_RETENTION_HOURS:
        raise SettingsError(
            f"retention_hours={retention_hours} is too small: files of batches that are not "
            "committed yet would be removed. "
            f"Write at least {MINIMUM_RETENTION_HOURS}; {DEFAULT_RETENTION_HOURS} is recommended."
        )
    retention_hours = guarded_retention(uri, retention_hours, storage_options)
    if not dry_run:
        _delete_old_announcements(uri, retention_hours, storage_options)
    table = _open(uri, storage_options)
    with delta_errors(f"could not vacuum {uri}", storage_options):
        return tuple(
            table.vacuum(
                retention_hours=retention_hours,
                dry_run=dry_run,
                enforce_retention_duration=False,
                full=True,
            )
        )


def measured_vacuum(
    uri: str,
    retention_hours: int = DEFAULT_RETENTION_HOURS,
    storage_options: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
) -> Vacuumed:
    """As `vacuum`, with the number of bytes. The table's folder is listed once more for this.

    Raises:
        SettingsError: `retention_hours` is too small.
        SinkError: The table cannot be vacuumed.
    """
    retention_hours = guarded_retention(uri, retention_hours, storage_options)
    files = vacuum(uri, retention_hours, storage_options, dry_run=True)
    sizes: dict[str, int] = {}
    if files:
        storage = open_storage(table_root(uri), storage_options)
        with delta_errors(f"could not list {uri}", storage_options):
            sizes = {one.path: one.size for one in storage.list("", partial=True)}
    if not dry_run:
        files = vacuum(uri, retention_hours, storage_options)
    size = sum(sizes.get(path, sizes.get(unquote(path), 0)) for path in files)
    return Vacuumed(files, size, retention_hours)


def guarded_retention(
    uri: str, retention_hours: int, storage_options: Mapping[str, str] | None = None
) -> int:
    """Return the retention time that keeps all files of current announcements.

    A worker may announce a batch long after it has written the first file. Such a file is older
    than its announcement, which may still be committed. An announcement states the time of a file
    by the clock of its writer, and a vacuum uses the clocks of the store and of this host, so an
    hour is added.

    Raises:
        SinkError: An announcement cannot be read. Its files are unknown, so nothing may be removed.
    """
    storage = open_storage(table_root(uri), storage_options)
    now = int(SystemClock().wall() * 1000)
    oldest = now - retention_hours * _HOUR_MILLIS
    with delta_errors(f"could not read the announcements of {uri}", storage_options):
        for _, found in read_announcements(storage, oldest):
            if isinstance(found, AnnouncedBatch):
                times = (file.modified_millis - _CLOCK_MARGIN_MILLIS for file in found.files)
                oldest = min([oldest, *times])
            # Another one has landed meanwhile, or is malformed: it is never committed, so its
            # files need no protection.
            elif not isinstance(found, AnnouncementError | FileNotFoundError | UnsafeObjectError):
                raise found
    return max(retention_hours, math.ceil((now - max(oldest, 0)) / _HOUR_MILLIS))


def _delete_old_announcements(
    uri: str, retention_hours: int, storage_options: Mapping[str, str] | None
) -> None:
    """Delete announcements older than the retention time.

    The age compares the clocks of the store and of this host, as it does for files. The retention
    time must cover the difference.
    """
    storage = open_storage(table_root(uri), storage_options)
    oldest = int(SystemClock().wall() * 1000) - retention_hours * _HOUR_MILLIS
    with delta_errors(f"could not remove old announcements of {uri}", storage_options):
        for stored in storage.list(FOLDER, partial=True):
            if stored.modified_millis < oldest:
                storage.delete(stored.path)


def _open(uri: str, storage_options: Mapping[str, str] | None) -> Any:
    # As in `compact`.
    from deltalake import DeltaTable  # noqa: PLC0415

    with delta_errors(f"could not open {uri}", storage_options):
        root = table_root(uri)
        return DeltaTable(root, storage_options=delta_options(root, storage_options))


@dataclass(frozen=True, slots=True)
class Announced:
    """The announcements of an application in one table.

    Attributes:
        names: Object names of its announcements, sorted.
        unknown: Number of objects whose application cannot be read. They stay until vacuum.
    """

    names: tuple[str, ...] = ()
    unknown: int = 0


class AnnouncementRemoval:
    """The announcements of one application in one table.

    Args:
        uri: Address of the table.
        application_name: The application.
        storage_options: Options of delta-rs.
    """

    def __init__(
        self, uri: str, application_name: str, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self.uri = table_root(uri)
        self._prefix = f"{application_name}/"
        self._options = storage_options
        self._storage = open_storage(self.uri, storage_options)

    def find(self) -> Announced:
        """List and read the announcements.

        Raises:
            SinkError: The table's folder cannot be read.
        """
        names: list[str] = []
        unknown = 0
        with delta_errors(f"could not read the announcements of {self.uri}", self._options):
            for name, found in read_announcements(self._storage):
                if not isinstance(found, AnnouncedBatch):
                    # One that does not exist any more was committed and deleted since.
                    unknown += not isinstance(found, FileNotFoundError)
                elif all(key.startswith(self._prefix) for key in found.expected):
                    names.append(name)
        return Announced(tuple(sorted(names)), unknown)

    def delete(self, names: Iterable[str]) -> None:
        """Delete announcements. One that does not exist any more is no error.

        Raises:
            SinkError: One cannot be deleted.
        """
        with delta_errors(f"could not delete an announcement of {self.uri}", self._options):
            for name in names:
                self._storage.delete(name)
