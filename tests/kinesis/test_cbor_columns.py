"""Parsing a CBOR body by offsets gives the result of a CBOR parser, or nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis import decode as cbor_columns
from kcl_pipeline.kinesis import decode as columns
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import CBOR_CONTENT_TYPE, cbor_columns_of, decode_page
from tests.support import page_parsers
from tests.support.shortened import shortened

FIELDS = ("SequenceNumber", "Data", "PartitionKey", "ApproximateArrivalTimestamp", "EncryptionType")


@pytest.fixture(autouse=True)
def small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse bodies of any size by offsets, in pieces of a few bytes."""
    monkeypatch.setattr(cbor_columns, "MIN_BYTES", 0)
    monkeypatch.setattr(cbor_columns, "PIECE_BYTES", 64)
    monkeypatch.setattr(columns, "PIECE_BYTES", 64)


@dataclass(frozen=True)
class Style:
    """The encodings of the same body."""

    endless_maps: bool = False
    endless_list: bool = False
    tagged_times: bool = True

    def item(self, value: Any) -> bytes:
        return cbor2.dumps(value)

    def map(self, values: dict[str, bytes]) -> bytes:
        inside = b"".join(cbor2.dumps(name) + value for name, value in values.items())
        return (
            b"\xbf" + inside + b"\xff"
            if self.endless_maps
            else bytes([0xA0 + len(values)]) + inside
        )

    def record(self, values: dict[str, Any]) -> bytes:
        return self.map(
            {
                name: self.time(value) if name == FIELDS[3] else cbor2.dumps(value)
                for name, value in values.items()
            }
        )

    def time(self, value: Any) -> bytes:
        return (b"\xc1" if self.tagged_times else b"") + cbor2.dumps(value)

    def body(self, records: list[bytes], *, first: bool = False, **more: Any) -> bytes:
        head = (
            b"\x9f"
            if self.endless_list
            else cbor2.dumps([0] * len(records))[: -len(records) or None]
        )
        rest = {"NextShardIterator": cbor2.dumps("it"), "MillisBehindLatest": cbor2.dumps(7)} | {
            name: cbor2.dumps(value) for name, value in more.items()
        }
        listed = {"Records": head + b"".join(records) + (b"\xff" if self.endless_list else b"")}
        return self.map(listed | rest if first else rest | listed)


STYLES = [
    Style(maps, listed, tagged)
    for maps in (False, True)
    for listed in (False, True)
    for tagged in (False, True)
]
PLAIN = STYLES[1]
SHORT = [STYLES[0], STYLES[3], STYLES[5], STYLES[6]]
"""Every pair of two encodings; `make test-long` has all styles."""
each_style = pytest.mark.parametrize("style", shortened(STYLES, SHORT.__contains__))


def values(
    number: int, data: bytes, key: str = "key", order: tuple[str, ...] = FIELDS[:4], **other: Any
) -> dict[str, Any]:
    every = {
        "SequenceNumber": str(10**55 + number),
        "Data": data,
        "PartitionKey": key,
        "ApproximateArrivalTimestamp": 1_760_000_000_123 + number,
        "EncryptionType": "KMS",
    } | other
    return {name: every[name] for name in order}


def by_parser(body: bytes) -> RecordsPage:
    return page_parsers.by_parser(body, CBOR_CONTENT_TYPE, "cbor_columns_of")


def same(body: bytes) -> None:
    page_parsers.assert_read_alike(body, CBOR_CONTENT_TYPE, "cbor_columns_of")


@given(
    style=st.sampled_from(STYLES),
    order=st.permutations(FIELDS).flatmap(
        lambda names: st.sampled_from(
            [
                tuple(n for n in names if n not in missing)
                for missing in ((), ("EncryptionType",), ("PartitionKey",))
            ]
        )
    ),
    rows=st.lists(
        st.tuples(st.binary(max_size=300), st.text(st.characters(blacklist_categories=["Cs"]))),
        min_size=1,
    ),
    first=st.booleans(),
)
def test_any_order_any_size_any_text(
    style: Style, order: tuple[str, ...], rows: list[tuple[bytes, str]], *, first: bool
) -> None:
    same(
        style.body(
            [style.record(values(i, data, key, order)) for i, (data, key) in enumerate(rows)],
            first=first,
        )
    )


@each_style
@pytest.mark.parametrize("least", [0, 11, 12, 13, 40])
def test_records_of_every_length_at_every_offset(style: Style, least: int) -> None:
    """Values of at most twelve bytes are in the view of Arrow, longer ones are not."""
    for shift in range(4):
        body = style.body(
            [
                style.record(values(i, bytes(range(least + i)), "k" * (least + 1)))
                for i in range(20)
            ],
            first=False,
            Shift="x" * shift,
        )
        assert cbor_columns_of(body) is not None
        same(body)


@each_style
def test_lengths_in_every_form(style: Style) -> None:
    sizes = [0, 1, 23, 24, 255, 256, 65_535, 65_536, 70_000]
    same(
        style.body(
            [
                style.record(values(i, b"x" * size, "k" * (size % 300)))
                for i, size in enumerate(sizes)
            ]
        )
    )
    longer = style.record(values(0, b"abc")).replace(b"\x43abc", b"\x58\x03abc")
    same(
        style.body(
            [
                longer,
                style.record(values(1, b"abc")),
                longer.replace(b"\x58\x03", b"\x5a\x00\x00\x00\x03"),
            ]
        )
    )


@each_style
def test_data_that_looks_like_records(style: Style) -> None:
    """The lengths reveal it; then a parser reads the body."""
    hidden = style.record(values(5, b"hidden"))
    for data in (hidden, hidden * 3, hidden[:20], b"\x67Records" + hidden):
        records = [style.record(values(i, data if i else b"plain")) for i in range(3)]
        for body in (
            style.body(records),
            style.body(records[::-1]),
            style.body(records, first=True),
        ):
            page = decode_page(body, CBOR_CONTENT_TYPE, "orders", "shard-0")
            assert page.records.equals(by_parser(body).records)
            assert sorted(page.records.column("data").to_pylist()) == sorted([b"plain", data, data])


R = [PLAIN.record(values(i, b"data")) for i in range(3)]


@pytest.mark.parametrize(
    "body",
    [
        PLAIN.body([*R, PLAIN.record(values(3, b"x", order=FIELDS))]),
        PLAIN.body([*R, PLAIN.record(values(3, b"x", order=FIELDS[:4][::-1]))]),
        PLAIN.body([PLAIN.record(values(0, b"x", order=FIELDS)), *R]),
        PLAIN.body([*R, PLAIN.record(values(3, b"x", ApproximateArrivalTimestamp=7))]),
        PLAIN.body([PLAIN.record(values(3, b"x", ApproximateArrivalTimestamp=1_760_000_000.5))]),
        PLAIN.body([PLAIN.record(values(0, b"x") | {"More": 1}), *R]),
        PLAIN.body([*R, Style(endless_maps=True).record(values(3, b"x"))]),
        PLAIN.body([R[0].replace(b"\x44data", b"\x5f\x42da\x42ta\xff"), *R]),
        PLAIN.body([*R, R[0].replace(b"\x44data", b"\x5f\x42da\x42ta\xff")]),
        PLAIN.body([*R, PLAIN.record(values(3, b"x", EncryptionType=None, order=FIELDS))]),
        PLAIN.body([]),
    ],
)
def test_what_is_written_otherwise_is_left_to_the_parser(body: bytes) -> None:
    assert cbor_columns_of(body) is None
    assert decode_page(body, CBOR_CONTENT_TYPE, "orders", "shard-0").records.equals(
        by_parser(body).records
    )


@pytest.mark.parametrize(
    "broken",
    [
        PLAIN.body([*R, PLAIN.record(values(3, b"x", SequenceNumber="12x"))]),
        PLAIN.body([*R, PLAIN.record(values(3, b"x", SequenceNumber=""))]),
        PLAIN.body([*R, PLAIN.record(values(3, b"x", Data="text"))]),
        PLAIN.body(R).replace(b"\x63key", b"\x63k\xffy", 1),
        PLAIN.body([*R, *R])[:-40],
        PLAIN.body(
            [
                PLAIN.record(
                    values(i, b"x" * 100_000, order=("SequenceNumber", "PartitionKey", "Data"))
                )
                for i in range(3)
            ]
        )[:-90_000],
        PLAIN.body(R).replace(b"\x83\xa4", b"\x84\xa4"),
        b"\xa1" + PLAIN.body(R)[1:],
    ],
)
def test_what_is_wrong_is_refused(broken: bytes) -> None:
    with pytest.raises(UnavailableError, match="cannot be read"):
        decode_page(broken, CBOR_CONTENT_TYPE, "orders", "shard-0")


@each_style
def test_a_body_that_was_cut_short_has_no_columns(style: Style) -> None:
    for order in (("SequenceNumber", "PartitionKey", "Data"), FIELDS[:4], FIELDS[::-1]):
        body = style.body([style.record(values(i, b"x" * 40, order=order)) for i in range(3)])
        same(body)
        assert [
            size
            for size in range(len(body))
            if cbor_columns_of(body[:size]) is not None and len(body) - size > 1
        ] == []


@each_style
@pytest.mark.parametrize("changes", [200, pytest.param(800, marks=pytest.mark.long)])
def test_a_body_that_was_changed_anywhere_is_read_as_the_parser_reads_it_or_refused(
    style: Style, changes: int
) -> None:
    rng = random.Random(7)
    sound = style.body(
        [style.record(values(i, rng.randbytes(i * 9), f"key-{i}", FIELDS)) for i in range(6)]
    )
    marks = (b"", b"\xff", b"\xa4", b"\xbf", b"\x58", b"\xc1\x1b")
    read = page_parsers.changed_bodies_read_alike(
        sound, marks, changes, CBOR_CONTENT_TYPE, "cbor_columns_of"
    )
    assert read > changes / 20


@pytest.mark.parametrize("length", [2**32 - 1, 2**32 - 16, 2**31, 1_000])
@pytest.mark.parametrize("head", [b"\x5a", b"\x7a"])
def test_a_length_beyond_the_body_is_refused(length: int, head: bytes) -> None:
    """The last value of the last record: no record behind it shows that its length is wrong."""
    name, value = ("Data", b"abc") if head == b"\x5a" else ("PartitionKey", "abc")
    fields = {"SequenceNumber": "1", "Data": b"abc", "PartitionKey": "abc"}
    last = fields.pop(name)
    assert last == value
    first = cbor2.dumps({**fields, name: value * 100})
    record = cbor2.dumps({**fields, name: value})
    body = b"\xa1\x67Records\x82" + first + record
    assert cbor_columns_of(body) is not None
    broken = body[: -len(cbor2.dumps(value))] + head + length.to_bytes(4, "big") + b"abc"
    assert cbor_columns_of(broken) is None
    with pytest.raises(UnavailableError):
        decode_page(broken, CBOR_CONTENT_TYPE, "orders", "shard-0")


@given(st.integers(16, 300), st.lists(st.integers(0, 40), max_size=12), st.integers(0, 7))
def test_every_place_of_the_first_bytes_is_found_in_order(
    size: int, gaps: list[int], start: int
) -> None:
    """Also at the ends of pieces and of a body of odd length, and beside other bytes of them."""
    first = b"\xa4nSequen"
    body = bytearray(b"nS\xa4n" * 100)[:size]
    for gap in gaps:
        body += b"\xa4n" * gap + first
    found = cbor_columns._find_words(bytes(body), start, first).tolist()
    places = [at for at in range(start, len(body)) if body.startswith(first, at)]
    assert set(places) <= set(found)
    assert found == sorted(set(found))
    assert all(start <= at <= len(body) - len(first) for at in found)
