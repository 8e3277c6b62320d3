"""Parsing a JSON body by offsets gives the result of a JSON parser, or nothing."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis import decode as columns
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import JSON_CONTENT_TYPE, columns_of, decode_event, decode_page
from tests.support import page_parsers

FIELDS = ("SequenceNumber", "Data", "PartitionKey", "ApproximateArrivalTimestamp", "EncryptionType")


@pytest.fixture(autouse=True)
def small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse bodies of any size by offsets, in pieces of a few bytes."""
    monkeypatch.setattr(columns, "MIN_BYTES", 0)
    monkeypatch.setattr(columns, "PIECE_BYTES", 64)


def record(
    number: int, data: bytes, key: str = "key", order: tuple[str, ...] = FIELDS[:4], **other: Any
) -> dict[str, Any]:
    values = {
        "SequenceNumber": str(10**55 + number),
        "Data": base64.b64encode(data).decode(),
        "PartitionKey": key,
        "ApproximateArrivalTimestamp": 1_760_000_000.123 + number,
        "EncryptionType": "KMS",
    } | other
    return {name: values[name] for name in order}


def body_of(
    records: list[dict[str, Any]], *, first: bool = False, ascii_only: bool = False, **more: Any
) -> bytes:
    """Compact JSON, the records last or first."""
    rest = {"NextShardIterator": 'it"er'[:2], "MillisBehindLatest": 7} | more
    response = {"Records": records} | rest if first else rest | {"Records": records}
    return json.dumps(response, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def by_parser(body: bytes) -> RecordsPage:
    return page_parsers.by_parser(body, JSON_CONTENT_TYPE, "columns_of")


def same(body: bytes) -> None:
    page_parsers.assert_read_alike(body, JSON_CONTENT_TYPE, "columns_of")


@given(
    order=st.permutations(FIELDS).flatmap(
        lambda names: st.sampled_from(
            [
                tuple(n for n in names if n not in missing)
                for missing in ((), ("EncryptionType",), ("PartitionKey",))
            ]
        )
    ),
    rows=st.lists(
        st.tuples(
            st.binary(max_size=70),
            st.text(
                st.characters(
                    blacklist_characters='"\\', min_codepoint=32, blacklist_categories=["Cs"]
                )
            ),
        ),
        min_size=1,
    ),
    first=st.booleans(),
)
def test_any_order_any_size_any_text(
    order: tuple[str, ...], rows: list[tuple[bytes, str]], *, first: bool
) -> None:
    records = [
        record(i, data, key if i else key.replace("}", ""), order)
        for i, (data, key) in enumerate(rows)
    ]
    same(body_of(records, first=first))


@pytest.mark.parametrize(
    "seconds", [1, 0, 1.76e9, 1_760_000_000.999999, 1760000000123e-3, 1e-7, -5.5]
)
def test_times_as_they_are_written(seconds: float) -> None:
    for order in (FIELDS[:4], FIELDS[::-1], FIELDS[1:] + FIELDS[:1]):
        same(
            body_of(
                [
                    record(i, b"abc", order=order, ApproximateArrivalTimestamp=seconds)
                    for i in range(3)
                ]
            )
        )
    text = body_of([record(i, b"abc") for i in range(3)]).replace(
        b"1760000000.123", b"1.760000000123E9"
    )
    same(text)


def test_keys_that_look_like_structure() -> None:
    same(
        body_of(
            [
                record(i, b"x", key)
                for i, key in enumerate(["a", "},{", "}]", "]}", "{:,", "", "é€😀", " "])
            ]
        )
    )


def test_no_time_at_all_and_empty_data() -> None:
    same(body_of([record(i, b"", order=FIELDS[:3]) for i in range(3)]))
    same(body_of([record(i, b"x" * (i % 4), order=FIELDS[:3]) for i in range(9)]))


def test_events_too() -> None:
    records = [record(i, b"%d" % i) for i in range(4)]
    page = decode_event(
        body_of(records, ContinuationSequenceNumber="77"), JSON_CONTENT_TYPE, "orders", "shard-0"
    )
    assert page.next_iterator == "77"
    assert page.records.column("data").to_pylist() == [b"0", b"1", b"2", b"3"]


R = [record(i, b"data") for i in range(3)]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"Records": R}).encode(),
        body_of(R).replace(b",", b", ", 3),
        body_of([*R, record(3, b"x", order=FIELDS)]),
        body_of([*R, record(3, b"x", order=FIELDS[:4][::-1])]),
        body_of([record(0, b"x", order=FIELDS), *R]),
        body_of([*R, record(3, b"x", key='"')]),
        body_of([*R, record(3, b"x", key="é")], ascii_only=True),
        body_of([record(0, b"x", key="}"), *R]),
        body_of([]),
        body_of([R[0] | {"More": "x"}, *R]),
        body_of([r | {"More": "x"} for r in R]),
        body_of(
            R,
            ChildShards=[
                {
                    "ShardId": "s",
                    "ParentShards": [],
                    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": "1"},
                }
            ],
            first=True,
        ),
    ],
)
def test_what_is_written_otherwise_is_left_to_the_parser(body: bytes) -> None:
    assert columns_of(body) is None
    assert decode_page(body, JSON_CONTENT_TYPE, "orders", "shard-0").records.equals(
        by_parser(body).records
    )


@pytest.mark.parametrize(
    "broken",
    [
        body_of([*R, record(3, b"x", Data="a")]),
        body_of([*R, record(3, b"x", Data="a===")]),
        body_of([*R, record(3, b"x", Data="=a==")]),
        body_of([*R, record(3, b"x", Data="aa=a")]),
        body_of([*R, record(3, b"x", Data="äaa")]),
        body_of([*R, record(3, b"x", SequenceNumber="12x")]),
        body_of([*R, record(3, b"x", SequenceNumber="")]),
        body_of(R).replace(b"key", b"k\xffy", 1),
        body_of(R).replace(b"key", b"k\x01y", 1),
        body_of(R).replace(b"key", b'k"y', 1),
        body_of(R).replace(b":1760000001.123", b":NaN"),
        body_of(R).replace(b":1760000001.123", b":1,7"),
        body_of(R).replace(b'"MillisBehindLatest":7', b'"MillisBehindLatest":x'),
        body_of(R)[:-1],
        body_of(R) + b"}",
    ],
)
def test_what_is_wrong_is_refused(broken: bytes) -> None:
    with pytest.raises(UnavailableError, match="cannot be read"):
        decode_page(broken, JSON_CONTENT_TYPE, "orders", "shard-0")


@pytest.mark.parametrize("changes", [1000, pytest.param(4000, marks=pytest.mark.long)])
def test_a_body_that_was_changed_anywhere_is_read_as_the_parser_reads_it_or_refused(
    changes: int,
) -> None:
    rng = random.Random(7)
    sound = body_of([record(i, rng.randbytes(i), f"key-{i}", FIELDS) for i in range(6)])
    marks = (b"", b'"', b",", b"}", b"]", b":", b"=", b"{", b'},{"')
    read = page_parsers.changed_bodies_read_alike(
        sound, marks, changes, JSON_CONTENT_TYPE, "columns_of"
    )
    assert read > changes / 20
