"""Compact and vacuum a table while workers write to it.

Both commit to the log like any other writer: a worker that loses the race for a version tries the
next one. Neither changes an application transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.delta.announcements import FOLDER
from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.storage.storage import open_storage, table_root
from kcl_pipeline.errors import SettingsError

DEFAULT_RETENTION_HOURS: Final = 168
MINIMUM_RETENTION_HOURS: Final = 1
_RETRIES: Final = 50


@dataclass(frozen=True, slots=True)
class Compacted:
    """Number of files that a compaction removed and added; both 0 if there was nothing to do."""

    files_removed: int
    files_added: int


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

    The files of a prepared or announced batch are in no version either. They are protected only by
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
    if not dry_run:
        _delete_old_announcements(uri, retention_hours, storage_options, SystemClock())
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


def _delete_old_announcements(
    uri: str, retention_hours: int, storage_options: Mapping[str, str] | None, clock: Clock
) -> None:
    """Delete announcements older than the retention time.

    The age compares the clocks of the store and of this host, as it does for files. The retention
    time must cover the difference.
    """
    storage = open_storage(table_root(uri), storage_options)
    oldest = int(clock.wall() * 1000) - retention_hours * 3_600_000
    with delta_errors(f"could not remove old announcements of {uri}", storage_options):
        for stored in storage.list(FOLDER, partial=True):
            if stored.modified_millis < oldest:
                storage.delete(stored.path)


def _open(uri: str, storage_options: Mapping[str, str] | None) -> Any:
    # As in `compact`.
    from deltalake import DeltaTable  # noqa: PLC0415

    log = DeltaLog(uri, storage_options)
    with delta_errors(f"could not open {uri}", storage_options):
        return DeltaTable(log.root, storage_options=dict(storage_options or {}))
