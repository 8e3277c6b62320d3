"""Decode GetRecords bodies into pages of Arrow columns.

JSON and CBOR bodies are parsed by byte offsets (`json_columns`, `cbor_columns`), without an object
per record. A body that these modules do not support is parsed by msgspec (JSON, one struct per
record) or cbor2. Unknown fields are ignored. A body that is not a GetRecords response raises
`UnavailableError`, because the reader may repeat the request with the same iterator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import cbor2
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis.client import RECORD_SCHEMA, RecordsPage
from kcl_pipeline.kinesis.decode.cbor_columns import cbor_columns_of
from kcl_pipeline.kinesis.decode.json_columns import (
    MAX_ARRIVAL_SECONDS,
    MIN_ARRIVAL_SECONDS,
    Columns,
    columns_of,
    micros_of,
)
from kcl_pipeline.kinesis.sizes import payload_bytes
from kcl_pipeline.position import MAX_SEQUENCE_NUMBER_DIGITS
from kcl_pipeline.shards import ChildShard, HashKeyRange

JSON_CONTENT_TYPE: Final = "application/x-amz-json-1.1"
CBOR_CONTENT_TYPE: Final = "application/x-amz-cbor-1.1"

_EPOCH_TIME_TAG: Final = 1


_Millis = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Record(msgspec.Struct, rename="pascal", gc=False):
    sequence_number: str
    data: bytes
    partition_key: str | None = None
    approximate_arrival_timestamp: float = 0.0
    encryption_type: str | None = None


class _Range(msgspec.Struct, rename="pascal", gc=False):
    starting_hash_key: str
    ending_hash_key: str


class _Child(msgspec.Struct, rename="pascal", gc=False):
    shard_id: str
    hash_key_range: _Range
    parent_shards: list[str] = []


class _Response(msgspec.Struct, rename="pascal", gc=False):
    records: list[_Record]
    next_shard_iterator: str | None = None
    millis_behind_latest: _Millis | None = None
    child_shards: list[_Child] | None = None


class _Event(_Response, rename="pascal", gc=False):
    continuation_sequence_number: str | None = None


_A = TypeVar("_A", bound=_Response)
_JSON: Final = msgspec.json.Decoder(_Response)
_EVENT_JSON: Final = msgspec.json.Decoder(_Event)


def decode_page(body: bytes, content_type: str, stream: str, shard_id: str) -> RecordsPage:
    """Decode a GetRecords body.

    Args:
        body: The body.
        content_type: Its Content-Type header. It decides between CBOR and JSON.
        stream: Name of the stream.
        shard_id: The shard.

    Raises:
        UnavailableError: The body is truncated, or is not a GetRecords response.
    """
    with _unreadable_is_unavailable("GetRecords", body, content_type, f"{shard_id} of {stream}"):
        if "cbor" in content_type.lower():
            return _from_cbor(body, stream, shard_id)
        return _from_json(_JSON, body, stream, shard_id)


def decode_event(payload: bytes, content_type: str, stream: str, shard_id: str) -> RecordsPage:
    """Decode a SubscribeToShardEvent in JSON. Arguments and errors are those of `decode_page`.

    Returns:
        A page whose `next_iterator` is the ContinuationSequenceNumber.
    """
    about = f"{shard_id} of {stream}"
    with _unreadable_is_unavailable("SubscribeToShard", payload, content_type, about):
        return _from_json(_EVENT_JSON, payload, stream, shard_id)


@contextmanager
def _unreadable_is_unavailable(
    operation: str, body: bytes, content_type: str, about: str
) -> Iterator[None]:
    try:
        yield
    except (
        msgspec.MsgspecError,
        cbor2.CBORDecodeError,
        pa.ArrowException,
        LookupError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UnavailableError(
            f"the {operation} response for {about} ({len(body)} bytes, "
            f"{content_type or 'no content type'}) cannot be read: {error}",
            code="BrokenBody",
            operation=operation,
        ) from error


def _from_json(
    decoder: msgspec.json.Decoder[_A], body: bytes, stream: str, shard_id: str
) -> RecordsPage:
    columns = columns_of(body)
    if columns is not None:
        return _page(decoder.decode(columns.frame), _table_of_columns(columns, stream, shard_id))
    response = decoder.decode(body)
    records = response.records
    table = records_table(
        stream,
        shard_id,
        sequence_numbers=[r.sequence_number for r in records],
        partition_keys=[r.partition_key for r in records],
        data=[r.data for r in records],
        arrival_micros=micros_of(
            np.fromiter(
                (r.approximate_arrival_timestamp for r in records), np.float64, len(records)
            )
        ),
        encryption_types=[r.encryption_type for r in records],
    )
    return _page(response, table)


def _table_of_columns(columns: Columns, stream: str, shard_id: str) -> pa.Table:
    micros = columns.arrival_micros
    rows = len(columns.data)
    return _table(
        stream,
        shard_id,
        columns.sequence_numbers,
        _or_nulls(columns.partition_keys, rows),
        columns.data,
        np.zeros(rows, np.int64) if micros is None else micros,
        _or_nulls(columns.encryption_types, rows),
    )


def _or_nulls(values: pa.StringArray | None, rows: int) -> pa.StringArray:
    return pa.nulls(rows, pa.string()) if values is None else values


def _page(response: _Response, table: pa.Table) -> RecordsPage:
    children = tuple(
        ChildShard(
            c.shard_id,
            tuple(c.parent_shards),
            HashKeyRange(
                int(c.hash_key_range.starting_hash_key), int(c.hash_key_range.ending_hash_key)
            ),
        )
        for c in response.child_shards or ()
    )
    following = (
        response.continuation_sequence_number
        if isinstance(response, _Event)
        else response.next_shard_iterator
    )
    return RecordsPage(
        table, following or None, response.millis_behind_latest, children, payload_bytes(table)
    )


def load_conversions() -> None:
    """Load what the first page would load, before a worker has a shard that waits for it.

    pyarrow imports pandas at the first conversion of Python values: 0.5 s, and several on a busy
    machine.
    """
    pa.array([""], pa.string())


def records_table(
    stream: str,
    shard_id: str,
    *,
    sequence_numbers: Sequence[str],
    partition_keys: Sequence[str | None],
    data: Sequence[bytes],
    arrival_micros: npt.NDArray[np.int64],
    encryption_types: Sequence[str | None],
) -> pa.Table:
    """Return columns of equal length as a table (`RECORD_SCHEMA`) of plain records.

    Sub-sequence numbers are 0, and explicit hash keys are null. A partition key is null if the
    producer gave none.

    Raises:
        ValueError: A sequence number is not decimal.
    """
    numbers, keys, encryption = (
        pa.array(texts, pa.string())
        for texts in (sequence_numbers, partition_keys, encryption_types)
    )
    return _table(
        stream, shard_id, numbers, keys, pa.array(data, pa.binary()), arrival_micros, encryption
    )


def _table(
    stream: str,
    shard_id: str,
    numbers: pa.Array,
    partition_keys: pa.Array,
    data: pa.Array,
    arrival_micros: npt.NDArray[np.int64],
    encryption_types: pa.Array,
) -> pa.Table:
    rows = len(numbers)
    if not _all_decimal(numbers):
        raise ValueError("a sequence number is not a decimal number")
    return pa.Table.from_arrays(
        [
            repeated(stream, rows),
            repeated(shard_id, rows),
            numbers,
            pa.array(np.zeros(rows, np.int64)),
            partition_keys,
            pa.nulls(rows, pa.string()),
            data,
            pa.array(arrival_micros, pa.timestamp("us", tz="UTC")),
            encryption_types,
        ],
        schema=RECORD_SCHEMA,
    )


def repeated(text: str, rows: int) -> pa.Array:
    """Return a string column with the same value in every row."""
    value = text.encode()
    offsets = np.arange(rows + 1, dtype=np.int64) * len(value)
    return pa.StringArray.from_buffers(
        rows, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(value * rows)
    )


def _all_decimal(texts: pa.Array) -> bool:
    """Return whether every string of an array without offset is a valid sequence number."""
    if len(texts) == 0:
        return True
    _, offsets, characters = texts.buffers()
    lengths = np.diff(np.frombuffer(offsets, np.int32, len(texts) + 1))
    digits = np.frombuffer(characters, np.uint8, int(lengths.sum())) - np.uint8(ord("0"))
    return bool(
        lengths.min() > 0
        and lengths.max() <= MAX_SEQUENCE_NUMBER_DIGITS
        # unsigned: characters below "0" are above 9
        and digits.max() <= 9  # noqa: PLR2004
    )


def _from_cbor(body: bytes, stream: str, shard_id: str) -> RecordsPage:
    columns = cbor_columns_of(body)
    # Kinesis tags integer milliseconds as a time. cbor2 would read them as seconds and refuse them.
    response = cbor2.loads(
        body if columns is None else columns.frame,
        semantic_decoders={_EPOCH_TIME_TAG: lambda value, *_: value},
    )
    if not isinstance(response, dict):
        raise TypeError("the body is not a map")
    records = response["Records"]
    if columns is not None and records == []:
        return _page(_rest(response), _table_of_columns(columns, stream, shard_id))
    data = [r["Data"] for r in records]
    if set(map(type, data)) - {bytes}:
        raise TypeError("a record's data is not a byte string")
    micros = np.fromiter(
        (_cbor_micros(r.get("ApproximateArrivalTimestamp", 0)) for r in records),
        np.int64,
        len(records),
    )
    table = records_table(
        stream,
        shard_id,
        sequence_numbers=[r["SequenceNumber"] for r in records],
        partition_keys=[r.get("PartitionKey") for r in records],
        data=data,
        arrival_micros=micros,
        encryption_types=[r.get("EncryptionType") for r in records],
    )
    return _page(_rest(response), table)


def _rest(response: dict[str, Any]) -> _Response:
    return msgspec.convert({**response, "Records": []}, _Response)


def _cbor_micros(value: Any) -> int:
    if isinstance(value, datetime):
        value = value.timestamp()
    if isinstance(value, float):
        return int(micros_of(np.array([value]))[0])
    if not isinstance(value, int):
        raise TypeError(f"an arrival time is {type(value).__name__}")
    if not MIN_ARRIVAL_SECONDS * 1000 <= value <= MAX_ARRIVAL_SECONDS * 1000:
        raise ValueError("an arrival time is out of range")
    return value * 1000
