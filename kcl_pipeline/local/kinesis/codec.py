"""The two wire forms of Kinesis requests: JSON, and the CBOR that the Java SDK speaks.

In the model, blobs are bytes and timestamps are epoch milliseconds. JSON has base64 text and epoch
seconds; CBOR has byte strings, and epoch milliseconds under tag 1 (which is not what tag 1 means
elsewhere, but what the service and its SDKs send).
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, Final

import cbor2
import msgspec
import pybase64

from kcl_pipeline.testing.kinesis.data import Entry, Read
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.model import render_tail
from kcl_pipeline.testing.kinesis.state import Answer
from kcl_pipeline.testing.kinesis.subscriptions import SubscriptionEvent

JSON: Final = "application/x-amz-json-1.1"
CBOR: Final = "application/x-amz-cbor-1.1"
_EPOCH_TAG: Final = 1


class _Entry(msgspec.Struct, gc=False):
    Data: bytes | None = None
    PartitionKey: str | None = None
    ExplicitHashKey: str | None = None


class _PutRecords(msgspec.Struct):
    Records: list[_Entry] | None = None
    StreamName: str | None = None
    StreamARN: str | None = None


class _Record(msgspec.Struct, gc=False):
    SequenceNumber: str
    ApproximateArrivalTimestamp: float
    Data: bytes
    PartitionKey: str


_PUT_DECODER: Final = msgspec.json.Decoder(_PutRecords)
_ENCODER: Final = msgspec.json.Encoder()


def _epoch_millis(value: Any, _immutable: bool) -> Any:
    # Kinesis' SDKs put whole milliseconds under the tag; a fraction can only be the seconds that
    # the tag stands for elsewhere.
    return round(value * 1000) if isinstance(value, float) else value


def _serialization(message: str) -> KinesisError:
    return KinesisError("SerializationException", message)


def decode(content_type: str, body: bytes) -> dict[str, Any]:
    """A request's parameters. Raises `KinesisError` (SerializationException)."""
    try:
        params = (
            cbor2.loads(body, semantic_decoders={_EPOCH_TAG: _epoch_millis})
            if content_type == CBOR
            else msgspec.json.decode(body)
        )
    except (msgspec.DecodeError, cbor2.CBORDecodeError, ValueError) as error:
        raise _serialization(f"The request cannot be read: {error}") from error
    if not isinstance(params, dict):
        raise _serialization("The request is not a structure.")
    return params if content_type == CBOR else _from_json(params)


def decode_put_records(
    content_type: str, body: bytes
) -> tuple[dict[str, Any], list[tuple[str | None, bytes | None, str | None]] | None]:
    """A PutRecords request: what names the stream, and the records (None: absent), without an
    object per member for JSON.
    """
    if content_type == CBOR:
        params = decode(content_type, body)
        records = params.pop("Records", None)
        if records is not None and not (
            isinstance(records, list) and all(isinstance(r, dict) for r in records)
        ):
            raise _serialization("Records is not a list of structures.")
        return params, None if records is None else [
            (r.get("PartitionKey"), r.get("Data"), r.get("ExplicitHashKey")) for r in records
        ]
    try:
        put = _PUT_DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise _serialization(f"The request cannot be read: {error}") from error
    params = {"StreamName": put.StreamName, "StreamARN": put.StreamARN}
    return params, None if put.Records is None else [
        (r.PartitionKey, r.Data, r.ExplicitHashKey) for r in put.Records
    ]


def _from_json(params: dict[str, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = {}
    for name, value in params.items():
        if name.endswith("Timestamp") and isinstance(value, int | float):
            decoded[name] = round(value * 1000)
        elif name == "Data" and isinstance(value, str):
            try:
                decoded[name] = pybase64.b64decode(value, validate=True)
            except binascii.Error as error:
                raise _serialization(f"Data can not be converted to a Blob: {error}") from error
        else:
            decoded[name] = (
                _from_json(value) if isinstance(value, dict) and name != "Tags" else value
            )
    return decoded


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            k: v / 1000 if k.endswith("Timestamp") and isinstance(v, int) else _to_json(v)
            for k, v in value.items()
        }
    return [_to_json(v) for v in value] if isinstance(value, list) else value


def _to_cbor(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            k: cbor2.CBORTag(_EPOCH_TAG, v)
            if k.endswith("Timestamp") and isinstance(v, int)
            else _to_cbor(v)
            for k, v in value.items()
        }
    return [_to_cbor(v) for v in value] if isinstance(value, list) else value


def encode(content_type: str, answer: Answer) -> bytes:
    """An answer's body."""
    return (
        cbor2.dumps(_to_cbor(answer)) if content_type == CBOR else _ENCODER.encode(_to_json(answer))
    )


def encode_event(content_type: str, event: SubscriptionEvent) -> bytes:
    """A fan-out event's payload. At the shard's end it has children in place of a continuation."""
    tail = render_tail(event.read)
    tail.pop("NextShardIterator", None)
    return _encode_page(
        content_type,
        event.read,
        tail
        if event.continuation is None
        else tail | {"ContinuationSequenceNumber": event.continuation},
    )


def encode_read(content_type: str, read: Read) -> bytes:
    """A GetRecords answer."""
    return _encode_page(content_type, read, render_tail(read))


def _encode_page(content_type: str, read: Read, tail: Answer) -> bytes:
    page = read.page
    columns = zip(
        page.sequence_numbers, page.arrival_millis, page.data, page.partition_keys, strict=True
    )
    if content_type == CBOR:
        tag = cbor2.CBORTag
        records: list[Any] = [
            {
                "SequenceNumber": n,
                "ApproximateArrivalTimestamp": tag(_EPOCH_TAG, t),
                "Data": d,
                "PartitionKey": k,
            }
            for n, t, d, k in columns
        ]
        return cbor2.dumps({"Records": records} | tail)
    records = [_Record(n, t / 1000, d, k) for n, t, d, k in columns]
    return _ENCODER.encode({"Records": records} | tail)


def checked_entries(
    records: list[tuple[str | None, bytes | None, str | None]] | None,
) -> list[Entry]:
    """The records of a PutRecords request.

    Raises ValidationException for a missing member, SerializationException for one of a wrong type.
    """
    problem = (
        "1 validation error detected: Value null at '{}' failed to satisfy constraint: "
        "Member must not be null"
    )
    if records is None:
        raise KinesisError("ValidationException", problem.format("records"))
    entries: list[Entry] = []
    for i, (key, data, explicit) in enumerate(records, 1):
        if key is None or data is None:
            raise KinesisError(
                "ValidationException",
                problem.format(f"records.{i}.member.{'partitionKey' if key is None else 'data'}"),
            )
        if (
            not isinstance(key, str)
            or not isinstance(data, bytes)
            or not isinstance(explicit, str | None)
        ):
            raise _serialization(f"records.{i}.member has a member of a wrong type")
        entries.append((key, data, explicit))
    return entries
