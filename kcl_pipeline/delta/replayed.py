"""Count the records of a dead-letter table, and mark records as replayed.

The table may be large: counting reads two columns. Marking rewrites the files with marked rows, so
a worker that repeats a batch from before the mark does not recognise its records there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.queries import read_rows
from kcl_pipeline.delta.storage.storage import table_root
from kcl_pipeline.errors import SinkError

RECENT: Final = timedelta(hours=1)
MAX_ATTEMPTS: Final = 10
"""Attempts to mark records while workers append to the table."""
_TIMES: Final = ("failed_at", "replayed_at")
_COUNTS: Final = (
    "select count(*) as total, count(*) - count(replayed_at) as waiting, "
    "count(*) filter (where failed_at >= to_timestamp_micros({began})) as recent from rows"
)


@dataclass(frozen=True, slots=True)
class DeadLetterCounts:
    """The records of a dead-letter table at one moment.

    Attributes:
        total: All records.
        waiting: Records that are not marked as replayed.
        recent: Records that failed within the last hour.
    """

    total: int = 0
    waiting: int = 0
    recent: int = 0


def count_dead_letters(
    uri: str, storage_options: Mapping[str, str] | None, now_seconds: float
) -> DeadLetterCounts | None:
    """Count the records of a dead-letter table. None: there is no table yet.

    Args:
        uri: Address of the table.
        storage_options: Options of delta-rs for the table's store.
        now_seconds: Current time in epoch seconds.

    Raises:
        SinkError: The table cannot be read, or is no dead-letter table.
    """
    root = table_root(uri)
    with delta_errors(f"reading the dead-letter table {root}", storage_options):
        found = _open(root, storage_options)
        if found is None:
            return None
        began = round((now_seconds - RECENT.total_seconds()) * 1e6)
        counts = read_rows(found, _COUNTS.format(began=began))
    return DeadLetterCounts(**counts.to_pylist()[0])


def mark_replayed(
    uri: str,
    storage_options: Mapping[str, str] | None,
    *,
    failed_before: datetime,
    replayed_at: datetime,
    lease_key: str | None = None,
    batch_id: str | None = None,
) -> int:
    """Set `replayed_at` of records that are not marked yet.

    Args:
        uri: Address of the table.
        storage_options: Options of delta-rs for the table's store.
        failed_before: Only records that failed before this time (exclusive), with a time zone.
            Take the time at which the records were read: later ones were not replayed.
        replayed_at: The time to set, with a time zone.
        lease_key: Only records of this lease.
        batch_id: Only records of this batch.

    Returns:
        How many records were marked.

    Raises:
        SinkError: There is no such table, or it cannot be written.
    """
    conditions = ["replayed_at IS NULL", f"failed_at < {_time(failed_before)}"]
    if lease_key is not None:
        conditions.append(f"lease_key = {_text(lease_key)}")
    if batch_id is not None:
        conditions.append(f"batch_id = {_text(batch_id)}")
    root = table_root(uri)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        with delta_errors(f"marking records in {root}", storage_options):
            found = _open(root, storage_options)
            if found is None:
                raise SinkError(f"there is no dead-letter table at {root}")
            try:
                done = found.update(
                    updates={"replayed_at": _time(replayed_at)},
                    predicate=" AND ".join(conditions),
                )
            except CommitFailedError:
                if attempt == MAX_ATTEMPTS:
                    raise
                continue
        return int(done["num_updated_rows"])
    raise AssertionError("the last attempt returns or raises")


def _open(root: str, storage_options: Mapping[str, str] | None) -> DeltaTable | None:
    """Open the table. None: it does not exist.

    Raises:
        SinkError: It is no dead-letter table.
    """
    options = dict(storage_options or {})
    if not DeltaTable.is_deltatable(root, options):
        return None
    found = DeltaTable(root, storage_options=options)
    schema: Any = found.schema()
    missing = [name for name in _TIMES if name not in {field.name for field in schema.fields}]
    if missing:
        raise SinkError(
            f"{root} is no dead-letter table: it has no column {missing[0]}; write the address of "
            "another table"
        )
    return found


def _time(when: datetime) -> str:
    text = when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return f"arrow_cast('{text}', 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
