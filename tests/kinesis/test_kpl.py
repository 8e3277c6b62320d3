"""De-aggregation of KPL aggregates: of our encoder, of awslabs' module, and of invalid bytes."""

from __future__ import annotations

import base64
import hashlib
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from aws_kinesis_agg.aggregator import RecordAggregator
from aws_kinesis_agg.deaggregator import deaggregate_records
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import RECORD_SCHEMA, Chunk
from kcl_pipeline.events import AggregatesRejected
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import records_table
from kcl_pipeline.kinesis.reader import (
    KPL_PARTITION_KEY,
    MAGIC,
    UserRecord,
    deaggregate,
    decode_aggregate,
)
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange
from tests.support.examples import examples
from tests.support.kpl_encoder import Aggregate, aggregate_of, delimited, seal, varint

# What `str.isprintable` is true for
PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
KEYS = st.text(PRINTABLE, min_size=1, max_size=20)
HASH_KEYS = st.none() | st.integers(0, MAX_HASH_KEY).map(str)
MEMBERS = st.lists(st.tuples(KEYS, HASH_KEYS, st.binary(max_size=300)), min_size=1, max_size=30)


def page(*values: bytes, first: int = 100, key: str | None = None) -> pa.Table:
    rows = len(values)
    return records_table(
        "orders",
        "shardId-000000000001",
        sequence_numbers=[str(first + i) for i in range(rows)],
        partition_keys=[f"outer-{i}" if key is None else key for i in range(rows)],
        data=list(values),
        arrival_micros=np.arange(rows, dtype=np.int64) * 1_000_000,
        encryption_types=["KMS"] * rows,
    )


def deaggregated(records: pa.Table, hash_keys: HashKeyRange | None) -> Chunk:
    return deaggregate(RecordsPage(records, "next", 0), "shard-1", TRIM_HORIZON, hash_keys)


def rows_of(table: pa.Table) -> list[tuple]:
    return [
        (
            r["sequence_number"],
            r["sub_sequence_number"],
            r["partition_key"],
            r["explicit_hash_key"],
            r["data"],
        )
        for r in table.to_pylist()
    ]


@given(MEMBERS)
@examples(60)
def test_what_was_aggregated_comes_out_in_order(members) -> None:
    assert decode_aggregate(aggregate_of(members)) == tuple(UserRecord(*m) for m in members)


@given(MEMBERS)
@examples(60)
def test_agrees_with_awslabs_in_both_directions(members) -> None:
    theirs = RecordAggregator()
    for key, hash_key, data in members:
        theirs.add_user_record(key, data, hash_key)
    ours = decode_aggregate(theirs.clear_and_get().get_contents()[2])
    assert ours is not None
    assert [(m.partition_key, m.data) for m in ours] == [(key, data) for key, _, data in members]
    assert [m.explicit_hash_key for m in ours if m.explicit_hash_key] == [
        h for _, h, _ in members if h
    ]
    event = {
        "kinesis": {
            "data": base64.b64encode(aggregate_of(members)),
            "partitionKey": "outer",
            "sequenceNumber": "1",
            "kinesisSchemaVersion": "1.0",
        }
    }
    about = (
        "eventSource",
        "eventVersion",
        "eventID",
        "eventName",
        "invokeIdentityArn",
        "awsRegion",
        "eventSourceARN",
    )
    event["kinesis"]["approximateArrivalTimestamp"] = 0
    read_by_them = deaggregate_records([event | dict.fromkeys(about, "x")])
    assert [r["kinesis"]["partitionKey"] for r in read_by_them] == [key for key, _, _ in members]


def test_sub_records_inherit_and_neighbours_stay() -> None:
    table = page(b"plain", aggregate_of([("a", None, b"1"), ("b", "7", b"2")]), b"after")
    done = deaggregated(table, None)
    assert done.records.schema == RECORD_SCHEMA
    assert rows_of(done.records) == [
        ("100", 0, "outer-0", None, b"plain"),
        ("101", 0, "a", None, b"1"),
        ("101", 1, "b", "7", b"2"),
        ("102", 0, "outer-2", None, b"after"),
    ]
    assert [r["encryption_type"] for r in done.records.to_pylist()] == ["KMS"] * 4
    assert [r["approximate_arrival_timestamp"].second for r in done.records.to_pylist()] == [
        0,
        1,
        1,
        2,
    ]
    assert done.through == Position("102")


def test_the_last_index_is_that_of_the_last_record_delivered_or_dropped() -> None:
    outside = aggregate_of([("a", "5", b"1"), ("b", "6", b"2"), ("c", "99", b"3")])
    assert deaggregated(page(b"x", outside), None).through == Position("101", 2)
    dropped = deaggregated(page(b"x", outside, key=KPL_PARTITION_KEY), HashKeyRange(0, 50))
    assert rows_of(dropped.records) == [("100", 0, KPL_PARTITION_KEY, None, b"x")]
    assert dropped.through == Position("101", 2)
    assert dropped.rejected == AggregatesRejected("shard-1", "101", 0, 1, 0)


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(5, 6, 2), (5, 5 + 1, 2), (0, 5, 0), (6, 9, 0), (0, MAX_HASH_KEY, 2)]
)
def test_hash_range_is_inclusive_and_drops_whole_aggregates(low: int, high: int, kept: int) -> None:
    data = aggregate_of([("a", "5", b"1"), ("b", "6", b"2")])
    found = deaggregated(page(data, key=KPL_PARTITION_KEY), HashKeyRange(low, high))
    assert found.records.num_rows == kept


def test_an_aggregate_of_another_aggregator_is_delivered_whole() -> None:
    """Only the KPL sends a user record again that hashes outside of the shard."""
    aggregator = RecordAggregator()
    for number in range(20):
        aggregator.add_user_record(f"user-{number}", b"%d" % number)
    first_key, _, data = aggregator.clear_and_get().get_contents()
    found = deaggregated(page(data, key=first_key), HashKeyRange(0, MAX_HASH_KEY // 64))
    assert [row[4] for row in rows_of(found.records)] == [b"%d" % n for n in range(20)]
    assert found.rejected is None


def bomb(members: int, key: str = "k" * 256, data: bytes = b"") -> bytes:
    """Return an aggregate whose user records all name one long key."""
    record = delimited(3, varint(1 << 3) + varint(0) + delimited(3, data))
    return seal(delimited(1, key.encode()) + record * members)


def test_a_memory_bomb_is_one_plain_record() -> None:
    """540 kB would ask for 12 GB: a long key that very many tiny user records share."""
    data = bomb(60_000, key="k" * 180_000)
    tracemalloc.start()
    found = deaggregated(page(b"before", data, b"after"), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * len(data)
    assert [row[4] for row in rows_of(found.records)] == [b"before", data, b"after"]
    assert found.rejected == AggregatesRejected("shard-1", "101", 1, 0, 0)


@pytest.mark.parametrize(
    ("data", "records"),
    [
        pytest.param(bomb(2, key="k" * 256), 2, id="a key of 256 characters"),
        pytest.param(bomb(2, key="é" * 256), 2, id="a key of 256 characters, 512 bytes"),
        pytest.param(bomb(2, key="k" * 257), 1, id="a key of 257 characters"),
        pytest.param(bomb(50_000, data=b"x"), 50_000, id="one key, data of one byte"),
        pytest.param(bomb(50_000, key="漢" * 256), 1, id="one key of 768 bytes, no data"),
        pytest.param(aggregate_of([("k", "9" * 39, b"")]), 1, id="a hash key of 39 digits"),
        pytest.param(
            aggregate_of([("k", "9" * 40, b""), ("k", None, b"")]), 1, id="a hash key of 40 digits"
        ),
    ],
)
def test_limits_of_an_aggregate(data: bytes, records: int) -> None:
    found = deaggregated(page(data), None)
    assert found.records.num_rows == records
    is_plain = data in found.records["data"].to_pylist()
    assert found.rejected == (AggregatesRejected("shard-1", "100", 1, 0, 0) if is_plain else None)


def test_hash_of_the_partition_key_counts_where_there_is_no_explicit_one() -> None:
    place = int.from_bytes(hashlib.md5("schlüssel".encode()).digest(), "big")
    data = aggregate_of([("schlüssel", None, b"1")])
    assert deaggregated(page(data), HashKeyRange(place, place + 1)).records.num_rows == 1
    behind = HashKeyRange(place + 1, MAX_HASH_KEY)
    assert deaggregated(page(data, key=KPL_PARTITION_KEY), behind).records.num_rows == 0
    assert (
        deaggregated(
            page(aggregate_of([("schlüssel", "not a number", b"1")])),
            HashKeyRange(place, place + 1),
        ).records.num_rows
        == 1
    )


def test_an_index_outside_its_table_loses_no_neighbour() -> None:
    aggregate = Aggregate().add("a", "5", b"1").add("b", None, b"2").add("c", "6", b"3")
    aggregate.keys = aggregate.keys[:1]
    aggregate.hash_keys = aggregate.hash_keys[:1]
    done = deaggregated(page(aggregate.encode()), HashKeyRange(0, 10))
    assert rows_of(done.records) == [
        ("100", 0, "a", "5", b"1"),
        ("100", 1, "outer-0", None, b"2"),
        ("100", 2, "outer-0", None, b"3"),
    ]
    assert done.rejected == AggregatesRejected("shard-1", "100", 0, 0, 2)


GOOD = aggregate_of([("a", None, b"1"), ("b", None, b"2")])


@pytest.mark.parametrize(
    "broken",
    [
        MAGIC,
        MAGIC + b"0" * 16,
        GOOD[:-1],
        GOOD[:-1] + bytes([GOOD[-1] ^ 1]),
        b"\xf3\x89\x9a\xc3" + GOOD[4:],
        seal(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01ab"),
        seal(delimited(3, varint(1 << 3) + varint(0))),
        seal(delimited(3, delimited(3, b"no key index"))),
        seal(b"\x00\x01"),
        seal(b"\x0b\x0c"),
        seal(b"\x80" * 11),
        seal(delimited(1, b"a")[:-1]),
        seal(b"\x09\x01"),
    ],
)
def test_corrupt_aggregates_are_plain_records_and_lose_nothing(broken: bytes) -> None:
    done = deaggregated(page(broken, GOOD, broken), HashKeyRange(0, MAX_HASH_KEY))
    assert [(s, d) for s, _, _, _, d in rows_of(done.records)] == [
        ("100", broken),
        ("101", b"1"),
        ("101", b"2"),
        ("102", broken),
    ]
    assert done.through == Position("102")


def test_unknown_fields_are_skipped_and_an_aggregate_of_nothing_vanishes() -> None:
    noise = b"".join(
        [
            varint(9 << 3) + varint(300),
            varint(10 << 3 | 1) + b"12345678",
            varint(11 << 3 | 5) + b"1234",
            delimited(4, b"tag"),
        ]
    )
    aggregate = Aggregate(noise=noise).add("a", "1", b"x").add("b", None, b"y")
    assert decode_aggregate(seal(aggregate.message() + noise)) == (
        UserRecord("a", "1", b"x"),
        UserRecord("b", None, b"y"),
    )
    nothing = deaggregated(page(b"x", seal(delimited(1, b"key"))), None)
    assert (nothing.records.num_rows, nothing.through) == (1, Position("101"))


def test_a_page_without_the_magic_is_given_back_as_it_is() -> None:
    table = page(b"", b"\xf3", b"\xf3\x89\x9a", b"x" + MAGIC)
    assert deaggregated(table, HashKeyRange(0, 1)).records is table
    empty = page()
    assert deaggregated(empty, None).records is empty


@given(
    st.lists(
        st.binary(max_size=200)
        | st.binary(max_size=80).map(seal)
        | st.binary(max_size=40).map(MAGIC.__add__),
        max_size=8,
    ),
    st.integers(0, MAX_HASH_KEY - 1),
)
@examples(300)
def test_never_raises_on_garbage(values: list[bytes], low: int) -> None:
    table = page(*values)
    done = deaggregated(table, HashKeyRange(low, MAX_HASH_KEY))
    done.records.validate(full=True)
    assert done.records.schema == RECORD_SCHEMA


@given(MEMBERS, st.data())
@examples(150)
def test_never_raises_on_a_good_message_with_flipped_bytes(members, data) -> None:
    message = bytearray(aggregate_of(members)[4:-16])
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    done = deaggregated(page(b"before", seal(bytes(message)), b"after"), None)
    done.records.validate(full=True)
    plain = [d for s, _, _, _, d in rows_of(done.records) if s != "101"]
    assert plain == [b"before", b"after"]
