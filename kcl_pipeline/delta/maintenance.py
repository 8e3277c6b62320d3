"""Keeping a table in shape while workers write to it: small files into larger ones, and files of no
version removed.

Both commit to the same log as the workers, who take it like any other writer: they try again at the
next version. Neither touches an application transaction.
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
    """What a compaction did: files taken and files made; 0 and 0 when there was nothing to gain."""

    files_removed: int
    files_added: int


def compact(uri: str, storage_options: Mapping[str, str] | None = None) -> Compacted:
    """Rewrite small files of each partition into larger ones of the table's target size.
    The old ones stay for readers until `vacuum`.

    Safe beside workers: they only add files, so neither side's commit conflicts with the other's.
    Raises `SinkError`.
    """
    # its runtime must start in the process that uses it
    from deltalake import CommitProperties  # noqa: PLC0415

    table = _open(uri, storage_options)
    with delta_errors(f"could not compact {uri}", storage_options):
        figures = table.optimize.compact(
            commit_properties=CommitProperties(max_commit_retries=_RETRIES),
        )
    return Compacted(int(figures["numFilesRemoved"]), int(figures["numFilesAdded"]))


def vacuum(
    uri: str,
    retention_hours: int = DEFAULT_RETENTION_HOURS,
    storage_options: Mapping[str, str] | None = None,
    *,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Remove files that are in no version of the last `retention_hours`, and of batches that were
    given up; their paths.

    A batch that is prepared or announced has files in no version, too. They are told from rubbish
    by age alone: a file younger than the retention is never removed, so the retention must be
    longer than any worker can be paused between writing a batch and committing it, and longer than
    any query reads. Announcements of that age go first: a worker that has read one before cannot
    land it any more, because the removal writes its start to the log before it removes a file, and
    every commit is tied to the version it compared with. After that nobody finds it. Raises
    `SettingsError` below one hour, `SinkError`.
    """
    if retention_hours < MINIMUM_RETENTION_HOURS:
        raise SettingsError(
            f"retention_hours={retention_hours}: files of batches that workers are about to "
            "commit would be removed; "
            f"write at least {MINIMUM_RETENTION_HOURS}, better {DEFAULT_RETENTION_HOURS}"
        )
    if not dry_run:
        _forget_announcements(uri, retention_hours, storage_options, SystemClock())
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


def _forget_announcements(
    uri: str, retention_hours: int, storage_options: Mapping[str, str] | None, clock: Clock
) -> None:
    """The age is that of the store's clock against this host's: as inexact as that of the files,
    which the retention has to allow for.
    """
    storage = open_storage(table_root(uri), storage_options)
    oldest = int(clock.wall() * 1000) - retention_hours * 3_600_000
    with delta_errors(f"could not remove old announcements of {uri}", storage_options):
        for stored in storage.list(FOLDER, partial=True):
            if stored.modified_millis < oldest:
                storage.delete(stored.path)


def _open(uri: str, storage_options: Mapping[str, str] | None) -> Any:
    # its runtime must start in the process that uses it
    from deltalake import DeltaTable  # noqa: PLC0415

    log = DeltaLog(uri, storage_options)
    with delta_errors(f"could not open {uri}", storage_options):
        return DeltaTable(log.root, storage_options=dict(storage_options or {}))
