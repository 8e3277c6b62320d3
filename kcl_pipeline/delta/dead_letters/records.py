"""Read the records of a dead-letter table that are not marked as replayed, in bounded pages.

One version of the table is read. So each process, also after a crash, finds the same records in the
same order, and rows that are written later are not among them.

The records are arranged in shards, in which each position occurs once. A shard has the records of
one or several shards of streams. Two records may have the same position, for example after a stream
was deleted and created again: then they are in different shards (`DeadLetterShard.layer`). Rows of
the same record, which is written at least once, count as one record.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from kcl_pipeline.delta.dead_letters.queries import read_rows
from kcl_pipeline.delta.dead_letters.replayed import NAMED, open_dead_letters, sql_text, sql_time
from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.storage.storage import table_root
from kcl_pipeline.errors import SinkError
from kcl_pipeline.kinesis.client import NO_RECORDS, RECORD_SCHEMA
from kcl_pipeline.text import printable

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
