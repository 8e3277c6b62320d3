"""Set positions that the table of a sink stores: the row, then the table, then the row again.

A worker continues after the later one of the checkpoint and the position in the table, so a seek
sets both. A worker that was paused before the seek may have read the row before its first write.
The last write changes the counter after the table was written, so it refuses that worker, which
would move the position to a former checkpoint (docs/decisions/0007-positions-in-the-table.md).
"""

from __future__ import annotations

from dataclasses import replace

from kcl_pipeline.batch import PositionStore, TxnVersions
from kcl_pipeline.control.seek.log import BatchLog
from kcl_pipeline.control.seek.plan import PositionChange
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.leases.lease.table_mark import TableMark
from kcl_pipeline.leases.lease.values import Lease


class StoredPositions:
    """The positions of the shards in the table of a sink.

    Args:
        log: The sink.
        store: The same sink.
    """

    def __init__(self, log: BatchLog, store: PositionStore) -> None:
        self._sink = log
        self._store = store

    def begun(self, changes: tuple[PositionChange, ...]) -> tuple[PositionChange, ...]:
        """Return the changes for the first write of the rows.

        Their marks do not refuse the table, neither before nor after the position is set in it.

        Raises:
            SettingsError: A shard has no name in the table.
        """
        found = self._sink.txn_versions([_key(one) for one in changes]) if changes else {}
        return tuple(_marked(one, _lower(found[_key(one)], one)) for one in changes)

    def moved(self, change: PositionChange, row: Lease) -> PositionChange:
        """Set the position of a shard in the table; return the change for the last write.

        Raises:
            SinkError: The outcome is unknown. Run the seek again.
        """
        key, wanted = _key(change), change.seek.position
        now = self._sink.txn_versions([key])[key]
        while True:
            place = now.position if wanted.is_shard_end else wanted
            is_removed = place is None or place.is_sentinel or change.leaves_table
            moved = self._store.move(
                key,
                now,
                None if is_removed else place,
                ended=wanted.is_shard_end,
            )
            if moved is not None:
                break
            now = self._sink.txn_versions([key])[key]
        last = _marked(change, TableMark.of(moved))
        return replace(last, seek=replace(last.seek, lease=row, exists=True))


def _key(change: PositionChange) -> str:
    if change.key is None:
        raise SettingsError(
            f"the position of {change.lease_key} has no name in the table: ARN or creation time of "
            "its stream are unknown"
        )
    return change.key


def _lower(versions: TxnVersions, change: PositionChange) -> TableMark | None:
    """Return the mark that fits the table before and after the position is set."""
    mark, wanted = TableMark.of(versions), change.seek.position
    if mark is None or mark.position is None:
        return mark
    if wanted.is_shard_end:
        return mark
    is_removed = wanted.is_sentinel or change.leaves_table
    return replace(mark, position=None if is_removed else min(wanted, mark.position))


def _marked(change: PositionChange, mark: TableMark | None) -> PositionChange:
    return replace(change, seek=replace(change.seek, table_mark=mark))
