"""Records and pages of records, as producers and an endpoint of Kinesis send them."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any, Final
from unittest import mock

import cbor2
import numpy as np
import pyarrow as pa

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis import decode as cbor_columns
from kcl_pipeline.kinesis import decode as json_columns
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import (
    CBOR_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    decode_event,
    decode_page,
    records_table,
)
from kcl_pipeline.kinesis.reader import MAX_EXPANSION, deaggregate
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from tests.fuzz import values
from tests.fuzz.boundaries.rows import READ, REFUSED
from tests.fuzz.boundary import Boundary
from tests.support.kpl_encoder import Aggregate, delimited, seal, varint

PLAIN: Final = "plain"
NUMBER: Final = "4" * 56
WIRE: Final = (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x00", b"\x0a", b"\x12", b"\x1a")
MAX_BODY_BYTES: Final = 1_000_000
CBOR_LENGTHS: Final = (
    b"\x5a\xff\xff\xff\xff",
    b"\x7a\xff\xff\xff\xf0",
    b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x5f",
    b"\x9b\x00\x00\x00\x01\x00\x00\x00\x00",
    b"\xc1\x1b\xff\xff\xff\xff\xff\xff\xff\xff",
)


def draw_aggregate(random: Random) -> bytes:
    """A KPL aggregate: sound, with shared long keys, or damaged under a right digest."""
    aggregate = Aggregate(noise=random.choice((b"", b"", delimited(9, b"tag"))))
    for _ in range(random.randrange(20)):
        hash_key = random.choice((None, str(random.randrange(MAX_HASH_KEY)), values.text(random)))
        key = values.text(random)[: 300 if random.random() < 0.02 else 200]
        aggregate.add(key.encode(errors="replace").decode(), None, b"x")
        if hash_key is not None:
            hash_key = (
                hash_key[: 50 if random.random() < 0.02 else 39].encode(errors="replace").decode()
            )
        aggregate.add("k" * (257 if random.random() < 0.02 else 256), hash_key, values.data(random))
    message = aggregate.message()
    kind = random.randrange(4)
    if kind == 0:
        message += delimited(3, varint(1 << 3) + varint(random.randrange(3)) + b"\x1a\x00") * 20_000
    if kind == 1:
        message = values.mutated(random, message, WIRE)
    raw = seal(message)
    return values.mutated(random, raw, WIRE) if random.random() < 0.1 else raw


def check_aggregate(value: bytes) -> str:
    """A record is delivered, as it is or de-aggregated, and never much larger than it was."""
    records = records_table(
        "orders",
        "shardId-000000000001",
        sequence_numbers=[NUMBER],
        partition_keys=["outer"],
        data=[value],
        arrival_micros=np.zeros(1, np.int64),
        encryption_types=[None],
    )
    page = RecordsPage(records, "next", 0)
    for hash_keys in (None, HashKeyRange(0, MAX_HASH_KEY // 2)):
        found = deaggregate(page, "shard-1", TRIM_HORIZON, hash_keys)
        found.records.validate(full=True)
        assert found.records.schema == RECORD_SCHEMA
        misplaced = found.rejected is not None and found.rejected.misplaced
        assert not misplaced, "only the KPL's own partition key is dropped"
        assert found.records.nbytes <= 4096 + 4 * MAX_EXPANSION * len(value)
    return PLAIN if found.records["data"].to_pylist() == [value] else READ


def _page(random: Random, *, event: bool) -> dict[str, Any]:
    order = ["SequenceNumber", "Data", "PartitionKey", "ApproximateArrivalTimestamp"]
    random.shuffle(order)
    records = []
    for number in range(random.randrange(1, 30)):
        fields = {
            "SequenceNumber": str(10**55 + number),
            "Data": values.data(random),
            "PartitionKey": values.text(random)[:300].encode(errors="replace").decode(),
            "ApproximateArrivalTimestamp": 1_700_000_000 + number,
        }
        records.append({name: fields[name] for name in order})
    child = {
        "ShardId": "shardId-000000000002",
        "ParentShards": ["shardId-000000000001"],
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(MAX_HASH_KEY)},
    }
    page: dict[str, Any] = {"Records": records, "MillisBehindLatest": random.randrange(10**6)}
    page["ContinuationSequenceNumber" if event else "NextShardIterator"] = "next"
    if random.random() < 0.3:
        page["ChildShards"] = [child]
    return values.damaged(random, page, values.json_leaf) if random.random() < 0.4 else page


def _writable(value: Any) -> Any:
    """The same without lone surrogates, which CBOR cannot hold."""
    if isinstance(value, dict):
        return {_writable(name): _writable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_writable(part) for part in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _json_default(value: object) -> str:
    assert isinstance(value, bytes)
    return base64.b64encode(value).decode()


def _json(random: Random, *, event: bool) -> bytes:
    page = _page(random, event=event)
    body = json.dumps(page, default=_json_default, separators=(",", ":")).encode()
    kind = random.randrange(5)
    if kind == 0:
        body = values.mutated(random, body, (b'"', b":", b"\\", b'"Records":[', b"}]", b"1e999"))
        return body[:MAX_BODY_BYTES]
    if kind == 1 and random.random() < 0.2:
        deep = values.nested("[", "]", random.choice((100, 2_000, 100_000)))
        return body[:-1] + b',"Unknown":' + deep.encode() + b"}"
    return body


def draw_json(random: Random) -> bytes:
    """A body of GetRecords in JSON."""
    return _json(random, event=False)


def draw_event(random: Random) -> bytes:
    """A SubscribeToShardEvent."""
    return _json(random, event=True)


def draw_cbor(random: Random) -> bytes:
    """A body of GetRecords in CBOR."""
    body: bytes = cbor2.dumps(_writable(_page(random, event=False)))
    if random.random() < 0.6:
        body = values.mutated(random, body, (*CBOR_LENGTHS, b"\xff", b"\x67Records"))
        body = body[:MAX_BODY_BYTES]
    if random.random() < 0.05:
        body = b"\xa1\x67Records" + b"\x81" * 100_000
    return body


def _checked(page: RecordsPage) -> str:
    page.records.validate(full=True)
    assert page.millis_behind_latest is None or page.millis_behind_latest >= 0
    assert page.bytes >= 0
    arrivals = page.records["approximate_arrival_timestamp"].cast(pa.int64()).to_pylist()
    assert all(abs(micros) < 10**18 for micros in arrivals)
    return READ


def check_json(value: bytes) -> str:
    """A body is a page or `UnavailableError`, whatever its length."""
    with mock.patch.object(json_columns, "MIN_BYTES", 1):
        return _page_or_refusal(value, JSON_CONTENT_TYPE)


def check_cbor(value: bytes) -> str:
    """A body is a page or `UnavailableError`, whatever its length."""
    with mock.patch.object(cbor_columns, "MIN_BYTES", 1):
        return _page_or_refusal(value, CBOR_CONTENT_TYPE)


def _page_or_refusal(value: bytes, content_type: str) -> str:
    try:
        page = decode_page(value, content_type, "orders", "shardId-000000000001")
    except UnavailableError:
        return REFUSED
    return _checked(page)


def check_event(value: bytes) -> str:
    """An event is a page or `UnavailableError`."""
    try:
        page = decode_event(value, JSON_CONTENT_TYPE, "orders", "shardId-000000000001")
    except UnavailableError:
        return REFUSED
    return _checked(page)


BOTH: Final = frozenset({READ, REFUSED})
BOUNDARIES: Final = (
    Boundary(
        "kpl_aggregate",
        draw_aggregate,
        check_aggregate,
        frozenset({READ, PLAIN}),
        short_inputs=15,
    ),
    Boundary("json_page", draw_json, check_json, BOTH),
    Boundary("cbor_page", draw_cbor, check_cbor, BOTH),
    Boundary("fan_out_event", draw_event, check_event, BOTH),
)
