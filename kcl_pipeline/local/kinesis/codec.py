"""JSON and CBOR encodings of Kinesis requests and responses.

The Java SDK uses CBOR. In the model, blobs are bytes and timestamps are epoch milliseconds. In
JSON, blobs are base64 text and timestamps are epoch seconds. In CBOR, blobs are byte strings and
timestamps are epoch milliseconds under tag 1. The CBOR standard defines tag 1 as seconds; Kinesis
and its SDKs send milliseconds.
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


class _Record(msgspec.Struct, gc=False, omit_defaults=True):
    SequenceNumber: str
    ApproximateArrivalTimestamp: float
    Data: bytes
    PartitionKey: str | None = None


_PUT_DECODER: Final = msgspec.json.Decoder(_PutRecords)
_ENCODER: Final = msgspec.json.Encoder()


def _epoch_millis(value: Any, _immutable: bool) -> Any:
    # Kinesis SDKs send integer milliseconds under this tag. A float can only be the seconds that
    # the CBOR standard defines.
    return round(value * 1000) if isinstance(value, float) else value


def _serialization(message: str) -> KinesisError:
    return KinesisError("SerializationException", message)


def decode(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the parameters of a request.

    Raises:
        KinesisError: The body is invalid (SerializationException).
    """
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
    """Return the stream parameters and the records of a PutRecords request.

    The JSON decoder uses typed structures, which avoids a dictionary per record.

    Returns:
        The parameters that identify the stream, and a list of (partition key, data, explicit hash
        key). The list is None when the request has no records member.

    Raises:
        KinesisError: The body is invalid (SerializationException).
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
    """Return the body of a response."""
    return (
        cbor2.dumps(_to_cbor(answer)) if content_type == CBOR else _ENCODER.encode(_to_json(answer))
    )


def encode_event(content_type: str, event: SubscriptionEvent) -> bytes:
    """Return the payload of a SubscribeToShard event.

    At the end of the shard, the event has child shards instead of a continuation sequence number.
    """
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
    """Return the body of a GetRecords response."""
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
            }
            | ({} if k is None else {"PartitionKey": k})
            for n, t, d, k in columns
        ]
        return cbor2.dumps({"Records": records} | tail)
    records = [_Record(n, t / 1000, d, k) for n, t, d, k in columns]
    return _ENCODER.encode({"Records": records} | tail)


def checked_entries(
    records: list[tuple[str | None, bytes | None, str | None]] | None,
) -> list[Entry]:
    """Return the validated records of a PutRecords request.

    Raises:
        KinesisError: A member is missing (ValidationException) or has a wrong type
            (SerializationException).
    """
    problem = (
        "1 validation error detected: Value null at '{}' failed to satisfy constraint: "
        "Member must not be null"
    )
    if records is None:
        raise KinesisError("ValidationException", problem.format("records"))
    entries: list[Entry] = []
    for i, (key, data, explicit) in enumerate(records, 1):
        if data is None:
            raise KinesisError("ValidationException", problem.format(f"records.{i}.member.data"))
        if (
            not isinstance(key, str | None)
            or not isinstance(data, bytes)
            or not isinstance(explicit, str | None)
        ):
            raise _serialization(f"records.{i}.member has a member of a wrong type")
        entries.append((key, data, explicit))
    return entries
