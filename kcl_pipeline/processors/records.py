"""The records that a record processor gets, with the names of kclpy."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a stream, or one user record of a KPL aggregate.

    Attributes:
        binary_data: The payload.
        partition_key: The partition key. None: the producer put the record without a key.
        sequence_number: The sequence number. The records of an aggregate share it.
        sub_sequence_number: Index in the aggregate, from 0.
        timestamp_millis: Approximate arrival time (epoch milliseconds).

    Example:
        >>> from kcl_pipeline import Record
        >>> def value(record: Record) -> bytes:
        ...     return record.binary_data
    """

    binary_data: bytes
    partition_key: str | None
    sequence_number: str
    sub_sequence_number: int
    timestamp_millis: int

    @property
    def data(self) -> str:
        """The payload as Base64 text, as in kclpy."""
        return base64.b64encode(self.binary_data).decode("ascii")

    @property
    def approximate_arrival_timestamp(self) -> datetime:
        """Approximate arrival time in local time, without a time zone, as in kclpy."""
        return datetime.fromtimestamp(self.timestamp_millis / 1000)  # noqa: DTZ006

    def get(self, field: str) -> Any:
        """Return a field by its name in the protocol of the MultiLangDaemon, such as `data`.

        Raises:
            KeyError: There is no such field.
        """
        return getattr(self, _FIELDS[field])

    def __getitem__(self, field: str) -> Any:
        """See `get`."""
        return self.get(field)


_FIELDS = {
    "data": "data",
    "partitionKey": "partition_key",
    "sequenceNumber": "sequence_number",
    "subSequenceNumber": "sub_sequence_number",
    "approximateArrivalTimestamp": "timestamp_millis",
}


def records_of(rows: pa.Table) -> list[Record]:
    """Return the rows (`RECORD_SCHEMA`) as records."""
    arrival = rows["approximate_arrival_timestamp"].cast(pa.int64())
    columns: Iterator[tuple[Any, ...]] = zip(
        rows["data"].to_pylist(),
        rows["partition_key"].to_pylist(),
        rows["sequence_number"].to_pylist(),
        rows["sub_sequence_number"].to_pylist(),
        [micros // 1000 for micros in arrival.to_pylist()],
        strict=True,
    )
    return [Record(*values) for values in columns]
