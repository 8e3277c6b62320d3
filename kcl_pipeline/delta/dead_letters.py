"""Count the records of a dead-letter table, read those that wait in bounded pages, and mark them.

`DeadLetterRecords` reads one version of the table. So each process, also after a crash, finds the
same records in the same order, and rows that are written later are not among them. The records are
arranged in shards, in which each position occurs once. A shard has the records of one or several
shards of streams. Two records may have the same position, for example after a stream was deleted
and created again: then they are in different shards (`DeadLetterShard.layer`). Rows of the same
record, which is written at least once, count as one record.

`mark_replayed` marks the records of a time, a lease or a batch. `mark_records` marks exactly the
rows that a replay has read. Marking rewrites the files with marked rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from kcl_pipeline.batch import NO_RECORDS, RECORD_SCHEMA
from kcl_pipeline.delta.storage import delta_errors, delta_options, table_root
from kcl_pipeline.errors import SinkError
from kcl_pipeline.text import printable


def read_rows(table: DeltaTable, query: str) -> pa.Table:
    """Return the result of a query.

    Args:
        table: The table, at the version that is read. The query knows it as `rows`.
        query: A query in the SQL of DataFusion. Without `order by`, rows come in any order.
    """
    return pa.table(QueryBuilder().register("rows", table).execute(query).read_all())


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


NO_TABLE: Final = -1
"""In place of a version: the table does not exist, so there are no records."""
MAX_SHARDS: Final = 32
"""Shards of streams share a shard here if there are more."""
MAX_LAYERS: Final = 64
"""More different records of the same position are not read."""
MAX_PAGE_RECORDS: Final = 10_000
MAX_PAGE_BYTES: Final = 8 * 1024 * 1024

_RECORD: Final = ", ".join(RECORD_SCHEMA.names)
_SIZE: Final = (
    "octet_length(encode(data, 'hex')) / 2 + coalesce(octet_length(partition_key), 0) as size"
)
_VALID: Final = (
    "coalesce(stream is not null and shard_id is not null and data is not null "
    "and approximate_arrival_timestamp is not null "
    "and sub_sequence_number >= 0 "
    "and regexp_like(sequence_number, '^(0|[1-9][0-9]{0,128})$'), false)"
)
_TYPES: Final[dict[str, pa.DataType]] = {
    **{field.name: field.type for field in RECORD_SCHEMA},
    "lease_key": pa.string(),
    "batch_id": pa.string(),
    "failed_at": pa.timestamp("us", tz="UTC"),
    "size": pa.int64(),
    "valid": pa.bool_(),
}
_ORDER: Final = ("stream", "shard_id", "approximate_arrival_timestamp")

_Flags = npt.NDArray[np.bool_]
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters are read.

    Attributes:
        begin: Only records that failed at this time or later. None: no limit.
        end: Only records that failed before this time. None: no limit.
        only_stream: Only records of the stream with this name or ARN. None: of all streams.
    """

    begin: datetime | None = None
    end: datetime | None = None
    only_stream: str | None = None

    def condition(self) -> str:
        """Return the condition of SQL for these records, among those that are not marked."""
        parts = ["replayed_at is null"]
        if self.begin is not None:
            parts.append(f"failed_at >= {sql_time(self.begin)}")
        if self.end is not None:
            parts.append(f"failed_at < {sql_time(self.end)}")
        if self.only_stream is not None:
            name = self.only_stream.rpartition("/")[2]
            texts = f"{sql_text(self.only_stream)}, {sql_text(name)}"
            other = f" or ends_with(stream, {sql_text('/' + name)})"
            parts.append(f"(stream in ({texts}){other if name == self.only_stream else ''})")
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class DeadLetterPage:
    """The records of a shard between two sequence numbers (both inclusive)."""

    first: str
    last: str
    records: int


@dataclass(frozen=True, slots=True)
class DeadLetterShard:
    """Records in the order of their positions.

    Attributes:
        origins: Stream and shard id of the records.
        layer: How many other records with the position of each record are in other shards.
        pages: At least one. All records of a sequence number are in one page.
    """

    origins: tuple[tuple[str, str], ...]
    layer: int
    pages: tuple[DeadLetterPage, ...]


class DeadLetterRecords:
    """The records of one version of a dead-letter table. Thread-safe.

    Args:
        uri: Address of the table.
        storage_options: Options of delta-rs for the table's store.
        version: Version of the table, or `NO_TABLE`.
        selection: Which records are read.
        page_records: About the largest number of records of a page.

    Attributes:
        version: Version of the table, or `NO_TABLE`.
        page_records: About the largest number of records of a page.
        shards: The shards; none if there are no records.
        records: Number of records.
        streams: By stream, the number of its shards that have records.
        unreadable: Number of rows that are no records.
        example: One of these rows. Empty: there is none.

    Raises:
        SinkError: The version cannot be read, or the table is no dead-letter table.
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None,
        version: int,
        selection: Selection,
        *,
        page_records: int = MAX_PAGE_RECORDS,
    ) -> None:
        self.root = table_root(uri)
        self.version = version
        self._options = storage_options
        self._condition = selection.condition()
        self.page_records = min(page_records, MAX_PAGE_RECORDS)
        self._lock = threading.Lock()
        self._table: DeltaTable | None = None
        self.shards: tuple[DeadLetterShard, ...] = ()
        self.records = self.unreadable = 0
        self.streams: dict[str, int] = {}
        self.example = ""
        if version == NO_TABLE:
            return
        self._table = open_dead_letters(uri, storage_options, version)
        if self._table is None:
            raise SinkError(f"there is no dead-letter table at {self.root}")
        self._arrange()

    def read(self, shard: DeadLetterShard, page: DeadLetterPage) -> pa.Table:
        """Return the records of a page (`RECORD_SCHEMA`), in the order of their positions.

        Raises:
            SinkError: The table cannot be read.
        """
        found = _records(self._rows(shard, page, _RECORD), shard.layer, shard.layer + 1)
        if found.num_rows != page.records:
            raise SinkError(
                f"the version {self.version} of {self.root} has {found.num_rows} dead letters from "
                f"{page.first} to {page.last}, not the {page.records} that were found before"
            )
        table = found.select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA)
        return pa.table(table.combine_chunks()) if table.num_rows else NO_RECORDS

    def named(self, shard: DeadLetterShard, page: DeadLetterPage) -> pa.Table:
        """Return the rows of the records of a page, also the repeated ones, by the columns `NAMED`.

        Raises:
            SinkError: The table cannot be read.
        """
        rows = self._rows(shard, page, ", ".join(NAMED[:5]))
        return rows.filter(pa.array(_layers(rows)[1] == shard.layer)).select(NAMED)

    def _rows(self, shard: DeadLetterShard, page: DeadLetterPage, columns: str) -> pa.Table:
        """Return the rows between the numbers of a page, of all layers, in their order."""
        origins = " or ".join(
            f"(stream = {sql_text(stream)} and shard_id = {sql_text(shard_id)})"
            for stream, shard_id in shard.origins
        )
        length, number = "character_length(sequence_number)", "sequence_number"
        first, last = sql_text(page.first), sql_text(page.last)
        between = (
            f"({length} > {len(page.first)} or ({length} = {len(page.first)} and {number} >= "
            f"{first})) and ({length} < {len(page.last)} or ({length} = {len(page.last)} and "
            f"{number} <= {last}))"
        )
        if len(page.first) == len(page.last):
            # files without such numbers are not read
            between = f"{number} >= {first} and {number} <= {last} and {between}"
        rows = self._query(
            f"{columns}, failed_at, batch_id, lease_key",
            f"{self._condition} and {_VALID} and ({origins}) and {between}",
        )
        return _sorted(rows.append_column("bucket", pa.array(np.zeros(rows.num_rows, np.int64))))

    def _arrange(self) -> None:
        rows, invalid, origins = self._indexed()
        for row in invalid.slice(0, 1).to_pylist():
            self.example = ", ".join(
                f"{name}={printable(str(row[name]), 200)}"
                for name in ("lease_key", "sequence_number", "sub_sequence_number", "batch_id")
            )
        self.unreadable = invalid.num_rows
        if not rows.num_rows:
            return
        for stream, _ in origins:
            self.streams[stream] = self.streams.get(stream, 0) + 1
        buckets = rows["bucket"].to_numpy()
        records = _records(rows, 0, MAX_LAYERS)
        self.records = records.num_rows
        shards = []
        for bucket in np.unique(buckets).tolist():
            mine = records.filter(pc.equal(records["bucket"], bucket))
            for layer in np.unique(mine["layer"].to_numpy()).tolist():
                one = mine.filter(pc.equal(mine["layer"], layer))
                shards.append(
                    DeadLetterShard(tuple(origins[bucket::MAX_SHARDS]), layer, self._pages(one))
                )
        self.shards = tuple(shards)

    def _indexed(self) -> tuple[pa.Table, pa.Table, list[tuple[str, str]]]:
        """Return the sorted rows without their data, the rows that are no records, and the origins.

        Records beyond `MAX_LAYERS` count as rows that are no records.
        """
        found = self._query(f"{', '.join(NAMED)}, {_SIZE}, {_VALID} as valid", self._condition)
        rows, invalid = found.filter(found["valid"]), found.filter(pc.invert(found["valid"]))
        pairs = list(zip(rows["stream"].to_pylist(), rows["shard_id"].to_pylist(), strict=True))
        origins = sorted(set(pairs))
        places = {one: n % MAX_SHARDS for n, one in enumerate(origins)}
        buckets = np.fromiter((places[one] for one in pairs), np.int64, rows.num_rows)
        rows = _sorted(rows.append_column("bucket", pa.array(buckets)))
        is_over = _layers(rows)[1] >= MAX_LAYERS
        if is_over.any():
            over = rows.filter(pa.array(is_over)).select(invalid.column_names)
            invalid = pa.concat_tables([invalid, over])
            rows = rows.filter(pa.array(~is_over))
        return rows, invalid, origins

    def _pages(self, records: pa.Table) -> tuple[DeadLetterPage, ...]:
        """Cut the records of a shard between sequence numbers."""
        numbers = records["sequence_number"].combine_chunks()
        rows = len(numbers)
        is_new = np.ones(rows + 1, np.bool_)
        is_new[1:rows] = pc.not_equal(numbers[1:], numbers[:-1]).to_numpy(zero_copy_only=False)
        cuts = np.flatnonzero(is_new)
        sizes = np.concatenate(([0], np.cumsum(records["size"].to_numpy())))
        pages = []
        start = 0
        while start < rows:
            fits = int(np.searchsorted(sizes, sizes[start] + MAX_PAGE_BYTES, side="right")) - 1
            wanted = min(fits, start + self.page_records)
            # the last cut that fits, or else the next one
            cut = int(cuts[np.searchsorted(cuts, wanted, side="right") - 1])
            if cut <= start:
                cut = int(cuts[np.searchsorted(cuts, start, side="right")])
            pages.append(
                DeadLetterPage(numbers[start].as_py(), numbers[cut - 1].as_py(), cut - start)
            )
            start = cut
        return tuple(pages)

    def _query(self, columns: str, condition: str) -> pa.Table:
        if self._table is None:
            raise ValueError("there is no table")
        query = f"select {columns} from rows where {condition}"  # noqa: S608 (from this module)
        doing = f"reading the dead-letter table {self.root} at version {self.version}"
        # One query at a time: each may need the memory of a page.
        with self._lock, delta_errors(doing, self._options):
            rows = read_rows(self._table, query)
        # With the types of records, because queries return views of bytes
        return rows.cast(_schema(rows.column_names))


def _schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, _TYPES[name]) for name in names])


def _sorted(rows: pa.Table) -> pa.Table:
    """Sort by bucket and position; the rows of one record follow each other."""
    keyed = rows.append_column("length", pc.utf8_length(rows["sequence_number"]))
    position = ("bucket", "length", "sequence_number", "sub_sequence_number", *_ORDER)
    names = (*position, "failed_at", "batch_id", "lease_key")
    return keyed.sort_by(
        [(name, "descending" if name == "failed_at" else "ascending") for name in names]
    )


def _layers(rows: pa.Table) -> tuple[_Flags, _Numbers]:
    """Return which sorted rows are the first of a record, and the layer of each row's record."""
    is_position = _changes(rows, ("bucket", "sequence_number", "sub_sequence_number"))
    is_record = is_position | _changes(rows, _ORDER)
    places: _Numbers = np.cumsum(is_record)
    starts: _Numbers = np.where(is_position, np.arange(rows.num_rows), 0)
    return is_record, places - places[np.maximum.accumulate(starts)]


def _changes(rows: pa.Table, names: tuple[str, ...]) -> _Flags:
    """Return where one of these columns differs from the row before."""
    changed: _Flags = np.arange(rows.num_rows) == 0
    for name in names:
        values = rows[name].combine_chunks()
        changed[1:] |= pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return changed


def _records(rows: pa.Table, first: int, end: int) -> pa.Table:
    """Return one row for each record of the layers `first` (inclusive) to `end` (exclusive)."""
    is_record, layers = _layers(rows)
    found = rows.append_column("layer", pa.array(layers))
    return found.filter(pa.array(is_record & (layers >= first) & (layers < end)))
