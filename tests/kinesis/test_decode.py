"""Decoding of GetRecords bodies, compared with botocore's parser, and of invalid bodies."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import botocore.session
import cbor2
import pytest
from botocore.parsers import create_parser
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis.decode import CBOR_CONTENT_TYPE, JSON_CONTENT_TYPE, decode_page, repeated
from kcl_pipeline.shards import ChildShard, HashKeyRange
from tests.support.examples import examples

SHARD = "shardId-000000000000"
RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "SequenceNumber": st.integers(0, 10**56).map(str),
            "Data": st.binary(max_size=200),
            "ApproximateArrivalTimestamp": st.integers(0, 4_000_000_000_000),
        },
        optional={
            "PartitionKey": st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
            "EncryptionType": st.sampled_from(["NONE", "KMS"]),
        },
    ),
    max_size=8,
)
CHILDREN = [
    {
        "ShardId": "c",
        "ParentShards": ["p", "q"],
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(2**128 - 1)},
    }
]


def as_json(records, **rest) -> bytes:
    wire = [
        r
        | {
            "Data": base64.b64encode(r["Data"]).decode(),
            "ApproximateArrivalTimestamp": r["ApproximateArrivalTimestamp"] / 1000,
            "Unknown": {"x": [1]},
        }
        for r in records
    ]
    return json.dumps({"Records": wire, "Later": [None]} | rest).encode()


def as_cbor(records, **rest) -> bytes:
    wire = [
        r | {"ApproximateArrivalTimestamp": cbor2.CBORTag(1, r["ApproximateArrivalTimestamp"])}
        for r in records
    ]
    return cbor2.dumps({"Records": wire, "Later": 1} | rest)


def expected(records) -> list[dict]:
    return [
        {
            "stream": "orders",
            "shard_id": SHARD,
            "sequence_number": r["SequenceNumber"],
            "sub_sequence_number": 0,
            "partition_key": r.get("PartitionKey"),
            "explicit_hash_key": None,
            "data": r["Data"],
            "approximate_arrival_timestamp": datetime.fromtimestamp(
                r["ApproximateArrivalTimestamp"] // 1000, UTC
            ).replace(microsecond=r["ApproximateArrivalTimestamp"] % 1000 * 1000),
            "encryption_type": r.get("EncryptionType"),
        }
        for r in records
    ]


@given(RECORDS)
@examples(100)
def test_both_formats_give_the_same_columns(records) -> None:
    for body, kind in (
        (as_json(records), JSON_CONTENT_TYPE),
        (as_cbor(records), CBOR_CONTENT_TYPE),
    ):
        page = decode_page(body, kind, "orders", SHARD)
        page.records.validate(full=True)
        assert page.records.schema == RECORD_SCHEMA
        assert page.records.to_pylist() == expected(records)
        assert page.bytes == sum(
            len(r["Data"]) + len(r.get("PartitionKey", "").encode()) for r in records
        )


@pytest.mark.parametrize("key", [{}, {"PartitionKey": None}])
def test_a_long_page_with_and_without_keys(key: dict[str, None]) -> None:
    """Every record, or every second one, has no key."""
    bare = {"Data": b"x" * 2000, "ApproximateArrivalTimestamp": 1_760_000_000_123} | key
    for records in (
        [{"SequenceNumber": str(n), **bare} for n in range(600)],
        [
            {"SequenceNumber": str(n), **bare, **({"PartitionKey": f"k{n}"} if n % 2 else {})}
            for n in range(600)
        ],
    ):
        for body, kind in (
            (as_json(records), JSON_CONTENT_TYPE),
            (as_cbor(records), CBOR_CONTENT_TYPE),
        ):
            page = decode_page(body, kind, "orders", SHARD)
            page.records.validate(full=True)
            assert page.records.to_pylist() == expected(records)
            assert page.bytes == sum(2000 + len(r.get("PartitionKey") or "") for r in records)


@given(RECORDS)
@examples(50)
def test_agrees_with_botocore(records) -> None:
    body = as_json(records, NextShardIterator="next", MillisBehindLatest=5)
    operation = (
        botocore.session.get_session().get_service_model("kinesis").operation_model("GetRecords")
    )
    theirs = create_parser("json").parse(
        {"body": body, "headers": {}, "status_code": 200}, operation.output_shape
    )
    page = decode_page(body, JSON_CONTENT_TYPE, "orders", SHARD)
    assert (page.next_iterator, page.millis_behind_latest) == (
        theirs["NextShardIterator"],
        theirs["MillisBehindLatest"],
    )
    rows = page.records.to_pylist()
    assert [(r["sequence_number"], r["data"], r["partition_key"]) for r in rows] == [
        (r["SequenceNumber"], r["Data"], r.get("PartitionKey")) for r in theirs["Records"]
    ]
    for ours, other in zip(rows, theirs["Records"], strict=True):
        assert (
            abs(
                (
                    ours["approximate_arrival_timestamp"]
                    - other["ApproximateArrivalTimestamp"].astimezone(UTC)
                ).total_seconds()
            )
            < 1e-5
        )


@pytest.mark.parametrize(
    ("encode", "kind"), [(as_json, JSON_CONTENT_TYPE), (as_cbor, CBOR_CONTENT_TYPE)]
)
def test_tail_of_the_response(encode, kind: str) -> None:
    page = decode_page(
        encode([], NextShardIterator=None, MillisBehindLatest=7, ChildShards=CHILDREN),
        kind,
        "orders",
        SHARD,
    )
    assert (page.next_iterator, page.millis_behind_latest, page.bytes, page.records.num_rows) == (
        None,
        7,
        0,
        0,
    )
    assert page.child_shards == (ChildShard("c", ("p", "q"), HashKeyRange(0, 2**128 - 1)),)
    bare = decode_page(encode([]), kind, "orders", SHARD)
    assert (bare.next_iterator, bare.millis_behind_latest, bare.child_shards) == (None, None, ())
    assert bare.records.schema == RECORD_SCHEMA


ONE = [
    {"SequenceNumber": "1", "Data": b"abc", "PartitionKey": "k", "ApproximateArrivalTimestamp": 1}
]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", JSON_CONTENT_TYPE),
        (b"<html>bad gateway</html>", "text/html"),
        (b"[]", JSON_CONTENT_TYPE),
        (b"{}", JSON_CONTENT_TYPE),
        (b'{"Records": [{"SequenceNumber": "1"}]}', JSON_CONTENT_TYPE),
        (
            b'{"Records": [{"SequenceNumber": 1, "Data": "", "PartitionKey": "k"}]}',
            JSON_CONTENT_TYPE,
        ),
        (
            b'{"Records": [{"SequenceNumber": "1", "Data": "not base64!", "PartitionKey": "k"}]}',
            JSON_CONTENT_TYPE,
        ),
        (
            b'{"Records": [{"SequenceNumber": "one", "Data": "", "PartitionKey": "k"}]}',
            JSON_CONTENT_TYPE,
        ),
        (
            b'{"Records": [{"SequenceNumber": "", "Data": "", "PartitionKey": "k"}]}',
            JSON_CONTENT_TYPE,
        ),
        (
            b'{"Records": [{"SequenceNumber": "1", "Data": "", "PartitionKey": "\xff"}]}',
            JSON_CONTENT_TYPE,
        ),
        (
            (
                b'{"Records": [], "ChildShards": [{"ShardId": "c", "HashKeyRange": '
                b'{"StartingHashKey": "x", "EndingHashKey": "1"}}]}'
            ),
            JSON_CONTENT_TYPE,
        ),
        (
            (
                b'{"Records": [], "ChildShards": [{"ShardId": "c", "HashKeyRange": '
                b'{"StartingHashKey": "9", "EndingHashKey": "1"}}]}'
            ),
            JSON_CONTENT_TYPE,
        ),
        (b"", CBOR_CONTENT_TYPE),
        (cbor2.dumps([]), CBOR_CONTENT_TYPE),
        (cbor2.dumps({}), CBOR_CONTENT_TYPE),
        (cbor2.dumps({"Records": [1]}), CBOR_CONTENT_TYPE),
        (
            cbor2.dumps({"Records": [ONE[0] | {"ApproximateArrivalTimestamp": "soon"}]}),
            CBOR_CONTENT_TYPE,
        ),
        (cbor2.dumps({"Records": [ONE[0] | {"Data": "YWJj"}]}), CBOR_CONTENT_TYPE),
        (cbor2.dumps({"Records": ONE, "MillisBehindLatest": "no"}), CBOR_CONTENT_TYPE),
        (cbor2.dumps({"Records": [ONE[0] | {"SequenceNumber": 5}]}), CBOR_CONTENT_TYPE),
    ],
)
def test_a_body_that_is_not_a_response_is_unavailable(body: bytes, kind: str) -> None:
    with pytest.raises(UnavailableError, match="cannot be read") as caught:
        decode_page(body, kind, "orders", SHARD)
    assert (caught.value.code, caught.value.operation) == ("BrokenBody", "GetRecords")


@pytest.mark.parametrize(
    ("encode", "kind"), [(as_json, JSON_CONTENT_TYPE), (as_cbor, CBOR_CONTENT_TYPE)]
)
def test_a_body_cut_anywhere_is_unavailable(encode, kind: str) -> None:
    whole = encode(ONE, NextShardIterator="next", MillisBehindLatest=5)
    for length in range(len(whole)):
        with pytest.raises(UnavailableError):
            decode_page(whole[:length], kind, "orders", SHARD)


@given(st.binary(max_size=200), st.sampled_from([JSON_CONTENT_TYPE, CBOR_CONTENT_TYPE]))
@examples(300)
def test_garbage_raises_nothing_else(body: bytes, kind: str) -> None:
    try:
        decode_page(body, kind, "orders", SHARD)
    except UnavailableError:
        return
    assert cbor2.loads(body)["Records"] is not None


def test_a_column_of_one_value() -> None:
    for rows in (0, 1, 5):
        column = repeated("größe", rows)
        column.validate(full=True)
        assert column.to_pylist() == ["größe"] * rows
