"""Bytes of records, without creating an object per record."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def payload_bytes(records: pa.Table) -> int:
    """Return the bytes of data and partition keys, as Kinesis counts them."""
    return data_bytes(records) + _column_bytes(records, "partition_key")


def data_bytes(records: pa.Table) -> int:
    """Return the bytes of data, as KCL counts them for the throughput of a lease."""
    return _column_bytes(records, "data")


def _column_bytes(records: pa.Table, name: str) -> int:
    return sum(_value_bytes(chunk) for chunk in records.column(name).chunks)


def _value_bytes(array: pa.Array) -> int:
    if len(array) == 0:
        return 0
    offsets = np.frombuffer(array.buffers()[1], np.int32)
    return int(offsets[array.offset + len(array)]) - int(offsets[array.offset])
