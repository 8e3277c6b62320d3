"""Write each failed record once to the dead-letter table, also if its batch is repeated.

A batch that cannot be committed is read, transformed and written again, by this worker or another
one, and often with another end. Written records are therefore identified one by one: by lease key,
sequence number and sub-sequence number.

Per lease the table has one application transaction, `<application>/<lease key>/dead_letters`. Each
commit of dead letters of that lease increments it. While its version is the one that this process
wrote, the process knows the records in the table. Otherwise another worker has written, and the
records are looked up in the files whose names include their sequence numbers. Each commit is made
on the version that was compared, so that two workers cannot both write a record.

A record is written again if it cannot be identified: it has no sequence number, or if
a compaction rewrote its file.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.errors import first_line
from kcl_pipeline.delta.files import BATCH_FOLDER, unique_name, write_table
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.results import TableColumns
from kcl_pipeline.delta.schema import delta_schema
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.table_check import MAX_ATTEMPTS, TABLE_PROPERTIES, TableCheck
from kcl_pipeline.errors import SinkError

MAX_KNOWN: Final = 100_000
"""Records of one lease that a process remembers; more are looked up in the table."""
_POSITION: Final = ("lease_key", "sequence_number", "sub_sequence_number")
_NUMBER: Final = re.compile(r"[0-9]{1,129}")
_NAME: Final = re.compile(
    r"batches/dead-letters-(?P<application>[0-9a-f]{16})-[0-9a-f]{32}"
    r"(/[^/=]+=[^/]*)*"  # `files.partition_folders`
    r"/(?P<first>[0-9a-f]{1,110})-(?P<last>[0-9a-f]{1,110})-[0-9]+\.parquet"
)
_LOG: Final = logging.getLogger(__name__)

Position = tuple[str, int]
"""Sequence number and sub-sequence number."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The records of a lease in the table, from sequence number `first` on (inclusive).

    Valid while the lease's transaction has the version `number`.
    """

    number: int
    first: int
    positions: frozenset[Position]


class DeadLetterTable:
    """Append failed records to a separate Delta table, created when it is first needed.

    Not thread-safe.

    Args:
        sink: Settings of the table: its address and storage options.
        application_name: Distinguishes applications that share the table.
        clock: For waiting.
        rng: For waiting.
    """

    def __init__(
        self, sink: DeltaSink, application_name: str, clock: Clock, rng: random.Random
    ) -> None:
        self._sink = sink
        self._application = application_name
        self._clock = clock
        self._rng = rng
        self._log = DeltaLog(sink.uri, sink.storage_options, clock)
        self._known: dict[str, _Known] = {}
        digest = hashlib.sha256(application_name.encode()).hexdigest()[:16]
        self._prefix = f"dead-letters-{digest}"

    def append(self, records: pa.Table) -> int:
        """Write the records that are not in the table yet.

        Args:
            records: With the columns `lease_key`, `sequence_number` and `sub_sequence_number`;
                without them nothing is recognised.

        Returns:
            How many were written.

        Raises:
            SinkError: The table cannot be written, or the outcome is not known. Call again.
        """
        if not records.num_rows:
            return 0
        found = _identified(records)
        positions: dict[str, set[Position]] = {key: set() for key, _ in found}
        for key, position in found:
            if position is not None:
                positions[key].add(position)
        check: TableCheck | None = None
        written: tuple[list[int], tuple[DataFile, ...]] | None = None
        for attempt in range(MAX_ATTEMPTS):
            check = self._refreshed(records.schema, check)
            numbers = {key: self._log.transaction(self._id(key)) for key in positions}
            compared = self._log.version
            known = {key: self._in_table(key, numbers[key], positions[key]) for key in positions}
            rows = [row for row, (key, position) in enumerate(found) if position not in known[key]]
            if not rows:
                self._remember(positions, known, numbers)
                return 0
            if written is None or written[0] != rows:
                written = rows, self._write(records.take(pa.array(rows, pa.int64())))
            raised = {key: (numbers[key] or 0) + 1 for key in {found[row][0] for row in rows}}
            try:
                self._log.append(written[1], {self._id(key): n for key, n in raised.items()})
            except SinkError:
                self._log.refresh()
                if self._log.version == compared:
                    raise
                self._back_off(attempt)
            else:
                self._log.maintain(compared + 1)
                self._remember(positions, known, {**numbers, **raised})
                return len(rows)
        raise SinkError(f"{self._log.root}: {MAX_ATTEMPTS} attempts lost to other writers")

    def _refreshed(self, schema: pa.Schema, check: TableCheck | None) -> TableCheck:
        """Read the table's newest version, and add missing columns."""
        if not self._log.refresh():
            self._log.create(delta_schema(schema), (), TABLE_PROPERTIES)
            self._log.refresh()
        if check is None:
            # A user may have created the table with partition columns
            columns, options = self._log.partition_columns(), self._sink.storage_options
            sink = DeltaSink(self._sink.uri, columns, options, schema_evolution=True)
            check = TableCheck(sink, self._log, self._back_off)
        check.fit(schema)
        return check

    def _in_table(
        self, lease_key: str, number: int | None, positions: AbstractSet[Position]
    ) -> frozenset[Position]:
        """The records of a lease in the table, from the first of these positions on."""
        first = _first(positions)
        if number is None or first is None:
            return frozenset()
        known = self._known.get(lease_key)
        if known is not None and known.number == number and known.first <= first:
            return known.positions
        return self._looked_up(lease_key, first)

    def _looked_up(self, lease_key: str, first: int) -> frozenset[Position]:
        found: set[Position] = set()
        for path in self._log.paths():
            match = _NAME.fullmatch(path)
            if match is None or not self._is_mine(match) or int(match["last"], 16) < first:
                continue
            try:
                with self._log.storage.open(path) as file:
                    rows = pq.read_table(
                        file, columns=list(_POSITION), filters=[("lease_key", "=", lease_key)]
                    )
            except (OSError, ValueError, pa.ArrowException) as error:
                # Records that are not found are written again.
                _LOG.warning("cannot read the dead letters in %s: %s", path, first_line(error))
                continue
            found |= {one for key, one in _identified(rows) if key == lease_key and one is not None}
        return frozenset(found)

    def _is_mine(self, match: re.Match[str]) -> bool:
        return f"dead-letters-{match['application']}" == self._prefix

    def _remember(
        self,
        positions: dict[str, set[Position]],
        known: dict[str, frozenset[Position]],
        numbers: dict[str, int | None],
    ) -> None:
        """Note the records in the table. Earlier records of a lease are never written again."""
        for key, found in positions.items():
            number, first = numbers[key], _first(found)
            if number is None or first is None:
                continue
            here = found | {one for one in known[key] if int(one[0]) >= first}
            self._known.pop(key, None)
            if len(here) <= MAX_KNOWN:
                self._known[key] = _Known(number, first, frozenset(here))

    def _write(self, rows: pa.Table) -> tuple[DataFile, ...]:
        numbers = [int(one[0]) for _, one in _identified(rows) if one is not None]
        span = f"{min(numbers):x}-{max(numbers):x}" if numbers else "unknown"
        return write_table(
            self._log.storage,
            f"{BATCH_FOLDER}/{self._prefix}-{unique_name()}",
            TableColumns().convert(rows),
            self._log.partition_columns(),
            modified_millis=int(self._clock.wall() * 1000),
            part=span,
        )

    def _id(self, lease_key: str) -> str:
        return f"{self._application}/{lease_key}/dead_letters"

    def _back_off(self, attempt: int) -> None:
        self._clock.sleep(self._rng.uniform(0, min(0.4, 0.004 * 2 ** min(attempt, 10))))
        self._log.refresh()


def _identified(records: pa.Table) -> list[tuple[str, Position | None]]:
    """The lease and the position of each record; None for a record without a position."""
    if not set(_POSITION) <= set(records.column_names):
        return [("", None)] * records.num_rows
    found: list[tuple[str, Position | None]] = []
    for key, number, sub in zip(
        *(records.column(name).to_pylist() for name in _POSITION), strict=True
    ):
        is_valid = isinstance(number, str) and _NUMBER.fullmatch(number) and isinstance(sub, int)
        found.append((key or "", (number, sub) if is_valid else None))
    return found


def _first(positions: AbstractSet[Position]) -> int | None:
    return min((int(one[0]) for one in positions), default=None)
