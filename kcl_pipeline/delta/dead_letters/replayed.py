"""Count the records of a dead-letter table, and mark records as replayed.

`mark_replayed` marks the records of a time, a lease or a batch. `mark_records` marks exactly the
rows that a replay has read. The table may be large: counting reads two columns. Marking rewrites
the files with marked rows, so a worker that repeats a batch from before does not recognise
its records there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from kcl_pipeline.delta.dead_letters.queries import read_rows
from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.storage.options import delta_options
from kcl_pipeline.delta.storage.storage import table_root
from kcl_pipeline.errors import SinkError

RECENT: Final = timedelta(hours=1)
MAX_ATTEMPTS: Final = 10
"""Attempts to mark records while workers append to the table."""
NAMED: Final = (
    "stream",
    "shard_id",
    "sequence_number",
    "sub_sequence_number",
    "approximate_arrival_timestamp",
    "lease_key",
    "batch_id",
    "failed_at",
)
"""The columns that distinguish a row. A record that fails again has another `failed_at`."""
_TIMES: Final = ("failed_at", "replayed_at")
_SAME: Final = " AND ".join(
    [
        "t.replayed_at IS NULL",
        *(f"t.{name} = s.{name}" for name in NAMED[:5]),
        *(f"(t.{name} IS NOT DISTINCT FROM s.{name})" for name in NAMED[5:]),
    ]
)
_MARKED: Final = "select count(*) as marked from rows where replayed_at = {time}"
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
        found = open_dead_letters(uri, storage_options)
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
    conditions = ["replayed_at IS NULL", f"failed_at < {sql_time(failed_before)}"]
    if lease_key is not None:
        conditions.append(f"lease_key = {sql_text(lease_key)}")
    if batch_id is not None:
        conditions.append(f"batch_id = {sql_text(batch_id)}")

    def mark(table: DeltaTable) -> int:
        time = {"replayed_at": sql_time(replayed_at)}
        return int(table.update(time, predicate=" AND ".join(conditions))["num_updated_rows"])

    return _marked(uri, storage_options, mark)


def mark_records(
    uri: str,
    storage_options: Mapping[str, str] | None,
    names: pa.Table,
    replayed_at: datetime,
) -> int:
    """Set `replayed_at` of exactly these rows, unless it is set. The call may be repeated.

    Args:
        uri: Address of the table.
        storage_options: Options of delta-rs for the table's store.
        names: The rows, by the columns `NAMED`.
        replayed_at: The time to set, with a time zone. A repeated call has the same.

    Returns:
        How many rows have this time now.

    Raises:
        SinkError: There is no such table, or it cannot be written.
    """
    if not names.num_rows:
        return 0
    time = pa.scalar(replayed_at, pa.timestamp("us", tz="UTC"))
    source = names.group_by(list(NAMED)).aggregate([]).select(list(NAMED))
    source = source.append_column("replayed_at", pa.repeat(time, source.num_rows))

    def mark(table: DeltaTable) -> int:
        (
            table.merge(source, _SAME, source_alias="s", target_alias="t")
            .when_matched_update({"replayed_at": "s.replayed_at"})
            .execute()
        )
        counts = read_rows(table, _MARKED.format(time=sql_time(replayed_at)))
        return int(counts["marked"][0].as_py())

    return _marked(uri, storage_options, mark)


def _marked(
    uri: str, storage_options: Mapping[str, str] | None, mark: Callable[[DeltaTable], int]
) -> int:
    """Mark rows of the table, again if a worker has written to it meanwhile."""
    root = table_root(uri)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        with delta_errors(f"marking records in {root}", storage_options):
            found = open_dead_letters(uri, storage_options)
            if found is None:
                raise SinkError(f"there is no dead-letter table at {root}")
            try:
                return mark(found)
            except CommitFailedError:
                if attempt == MAX_ATTEMPTS:
                    raise
    raise AssertionError("the last attempt returns or raises")


def open_dead_letters(
    uri: str, storage_options: Mapping[str, str] | None, version: int | None = None
) -> DeltaTable | None:
    """Open the table at a version, or at its newest one. None: it does not exist.

    Raises:
        SinkError: It is no dead-letter table, or the version cannot be read.
    """
    root = table_root(uri)
    with delta_errors(f"reading the dead-letter table {root}", storage_options):
        options = delta_options(root, storage_options)
        try:
            # Not is_deltatable, which holds the interpreter lock while it waits for the network
            found = DeltaTable(root, version=version, storage_options=options)
        except TableNotFoundError:
            return None
        names = {field.name for field in found.schema().fields}
    missing = [name for name in _TIMES if name not in names]
    if missing:
        raise SinkError(
            f"{root} is no dead-letter table: it has no column {missing[0]}; write the address of "
            "another table"
        )
    return found


def sql_time(when: datetime) -> str:
    """Return a time as a literal of SQL."""
    text = when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return f"arrow_cast('{text}', 'Timestamp(Microsecond, Some(\"UTC\"))')"


def sql_text(value: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + value.replace("'", "''") + "'"
