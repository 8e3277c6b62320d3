"""Limits for failed records, and the dead letters that they become."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import Batch
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.errors import BrokenTransformError
from kcl_pipeline.events import RecordsDeadLettered
from kcl_pipeline.kinesis.client import RECORD_SCHEMA
from kcl_pipeline.worker.batches import records_of
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies

JUDGED_RECORDS: Final = 20
"""Limits by share use at least this many records: one failed record of one would be 100 %."""

_POSITION: Final = ["stream", "shard_id", "sequence_number", "sub_sequence_number"]
_Place = tuple[str | None, str, str, int]
_ERROR: Final = pa.field("error", pa.string())
FAILED_SCHEMA: Final = RECORD_SCHEMA.append(_ERROR)
"""Schema of the failed records of one lease."""

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        *RECORD_SCHEMA,
        pa.field("lease_key", pa.string()),
        _ERROR,
        pa.field("batch_id", pa.string()),
        pa.field("failed_at", pa.timestamp("us", tz="UTC")),
        pa.field("replayed_at", pa.timestamp("us", tz="UTC")),
    ]
)
"""The columns of the dead-letter table (docs/dead-letters.md)."""


class FailureLimits:
    """Compute how many records of a shard may fail in one batch.

    Only the processing thread uses it.

    Args:
        settings: The policy and its limits.
        takes_dead_letters: Whether the sink can store dead letters.
    """

    def __init__(self, settings: BatchSettings, takes_dead_letters: bool = True) -> None:
        self._settings = settings
        self._takes_dead_letters = takes_dead_letters
        self._recent: dict[str, deque[tuple[int, int]]] = {}

    def of(self, lease_key: str, records: int) -> int:
        """Return how many of `records` records of a lease may fail. More failures pause it."""
        settings = self._settings
        if settings.failed_records == "fail" or self._has_no_place:
            return 0
        judged, failed = records, 0
        for earlier_records, earlier_failed in reversed(self._recent.get(lease_key, ())):
            if judged >= JUDGED_RECORDS:
                break
            judged += earlier_records
            failed += earlier_failed
        by_share = math.floor(settings.max_dead_letter_share * max(judged, JUDGED_RECORDS)) - failed
        if settings.failed_records == "skip":
            return max(by_share, 0)
        return max(min(by_share, settings.max_dead_letters_per_batch), 0)

    def reason(self, lease_key: str, records: int) -> str:
        """Return the reason for the limit, with the settings and their values."""
        settings = self._settings
        if settings.failed_records == "fail":
            return "failed_records is 'fail'"
        if self._has_no_place:
            return "the sink has no dead_letter_uri; set one, or failed_records='skip'"
        named = f"max_dead_letter_share={settings.max_dead_letter_share:g}"
        if settings.failed_records != "skip":
            named += f" and max_dead_letters_per_batch={settings.max_dead_letters_per_batch}"
        return f"{named} allow {self.of(lease_key, records)}"

    @property
    def _has_no_place(self) -> bool:
        return self._settings.failed_records == "dead_letter" and not self._takes_dead_letters

    def note(self, lease_key: str, records: int, failed: int) -> None:
        """Note a committed batch. The limits of later small batches depend on it."""
        if not records:
            return
        recent = self._recent.setdefault(lease_key, deque(maxlen=JUDGED_RECORDS))
        if records >= JUDGED_RECORDS:
            recent.clear()
        recent.append((records, failed))

    def keep(self, lease_keys: Collection[str]) -> None:
        """Forget all other leases."""
        for key in [key for key in self._recent if key not in lease_keys]:
            del self._recent[key]


def positions_of(records: pa.Table) -> list[tuple[str, int]]:
    """Return the sequence number and sub-sequence number of each row."""
    return list(
        zip(
            records["sequence_number"].to_pylist(),
            records["sub_sequence_number"].to_pylist(),
            strict=True,
        )
    )


def failed_rows(records: pa.Table, errors: Mapping[int, str]) -> pa.Table:
    """Return the rows that have an error, in order, with their errors (`FAILED_SCHEMA`)."""
    rows = sorted(errors)
    return records.take(pa.array(rows, pa.int64())).append_column(
        _ERROR, pa.array([errors[row] for row in rows], pa.string())
    )


def rejected_records(batch: Batch, rejected: pa.Table) -> dict[str, pa.Table]:
    """Return the records that a transform rejected, by lease key (`FAILED_SCHEMA`).

    A record that was rejected more than once has its first error.

    Args:
        batch: The loaded batch.
        rejected: Positions and errors, with `batch.REJECTED_SCHEMA`.

    Raises:
        BrokenTransformError: A position is not in the batch, or matches two streams.
    """
    wanted: dict[_Place, str] = {}
    for row in rejected.to_pylist():
        wanted.setdefault(_place_of(row), row["error"])
    numbers = pa.array([place[2] for place in wanted], pa.string())
    found: dict[str, pa.Table] = {}
    matched: set[_Place] = set()
    for part in batch.ranges:
        records = records_of(batch, [part.lease_key])
        rows = pc.indices_nonzero(pc.is_in(records["sequence_number"], value_set=numbers))
        errors: dict[int, str] = {}
        for row, record in zip(
            rows.to_pylist(), records.select(_POSITION).take(rows).to_pylist(), strict=True
        ):
            place = _place_of(record)
            if place not in wanted:
                place = (None, *place[1:])
            if place not in wanted:
                continue
            if place in matched:
                raise BrokenTransformError(
                    f"the transform returns _error for shard_id={place[1]} of two streams; return "
                    "the column stream too"
                )
            matched.add(place)
            errors[row] = wanted[place]
        if errors:
            found[part.lease_key] = failed_rows(records, errors)
    for _, shard_id, number, sub in (place for place in wanted if place not in matched):
        raise BrokenTransformError(
            f"the transform returns _error for shard_id={shard_id}, sequence_number={number}, "
            f"sub_sequence_number={sub}, which is not in the batch; return these columns as they "
            "are in the records"
        )
    return found


def _place_of(row: Mapping[str, Any]) -> _Place:
    stream, shard_id, number, sub = (row[name] for name in _POSITION)
    return stream, shard_id, number, sub


def dead_letters(failed: Mapping[str, pa.Table], batch_id: str, failed_at: float) -> pa.Table:
    """Return failed records as rows of the dead-letter table; `failed_at` is in epoch seconds."""
    now = datetime.fromtimestamp(failed_at, UTC)
    tables = []
    for key, records in failed.items():
        constants = {"lease_key": key, "batch_id": batch_id, "failed_at": now, "replayed_at": None}
        columns = [
            records.column(field.name)
            if field.name not in constants
            else pa.array([constants[field.name]] * records.num_rows, field.type)
            for field in DEAD_LETTER_SCHEMA
        ]
        tables.append(pa.Table.from_arrays(columns, schema=DEAD_LETTER_SCHEMA))
    return pa.concat_tables(tables) if tables else DEAD_LETTER_SCHEMA.empty_table()


def write_dead_letters(
    dependencies: WorkerDependencies,
    failed: Mapping[str, pa.Table],
    batch_id: str,
    consumers: Mapping[str, ShardConsumer],
) -> None:
    """Write failed records to the dead letters, except those that an earlier attempt wrote.

    Call it before the rest of the batch is committed. With the policy `skip`, the records are only
    reported.

    Args:
        dependencies: The dependencies of the worker.
        failed: The records by lease key (`FAILED_SCHEMA`).
        batch_id: Their batch.
        consumers: The consumers of the leases.

    Raises:
        SinkError: The records could not be written. Call again.
    """
    skip = dependencies.settings.batch.failed_records == "skip"
    new = {}
    for key, records in failed.items():
        fresh = records.filter(
            pa.array([place not in consumers[key].set_aside for place in positions_of(records)])
        )
        if fresh.num_rows:
            new[key] = fresh
    if new and not skip:
        dependencies.sink.write_dead_letters(dead_letters(new, batch_id, dependencies.clock.wall()))
    for key, records in new.items():
        consumers[key].set_aside.update(positions_of(records))
        error = records["error"][0].as_py()
        dependencies.events(
            RecordsDeadLettered(dependencies.worker_id, key, records.num_rows, error, skipped=skip)
        )
