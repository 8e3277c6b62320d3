"""Cutting batches, and parts of them by lease."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest

from kcl_pipeline.batch import RECORD_SCHEMA, Batch, Chunk
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.application import RecordedStream
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.failures import only, without
from kcl_pipeline.worker.sources import joined
from kcl_pipeline.worker.streams import LeaseStreams

SETTINGS = ConsumerSettings(application_name="app", streams=("orders", "clicks"))
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def table(
    shard: str, numbers: list[int], stream: str = "orders", data: list[bytes] | None = None
) -> pa.Table:
    rows = [
        {
            "stream": stream,
            "shard_id": shard,
            "sequence_number": str(n),
            "sub_sequence_number": 0,
            "partition_key": "k",
            "explicit_hash_key": None,
            "data": data[i] if data else b"ok",
            "approximate_arrival_timestamp": NOW,
            "encryption_type": None,
        }
        for i, n in enumerate(numbers)
    ]
    return pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)


def chunk(key: str, after: Position, numbers: list[int], through: int | None = None) -> Chunk:
    last = Position(str(through or numbers[-1])) if (numbers or through) else after
    return Chunk(key, table(key.rsplit(":", 1)[-1], numbers), after, last, 10)


def spans(batch: Batch) -> list[tuple[str, Position, Position, int]]:
    return [(part.lease_key, part.after, part.through, part.bytes) for part in batch.ranges]


def test_chunks_of_a_lease_join_into_one_range():
    batch = joined(
        "b",
        [
            chunk("s1", TRIM_HORIZON, [1, 2]),
            chunk("s2", Position("7"), [8]),
            chunk("s1", Position("2"), [3]),
        ],
        {"s1": TRIM_HORIZON, "s2": Position("7")},
    )
    assert spans(batch) == [
        ("s1", TRIM_HORIZON, Position("3"), 20),
        ("s2", Position("7"), Position("8"), 10),
    ]
    assert batch.records["sequence_number"].to_pylist() == ["1", "2", "3", "8"]


def test_streams_of_one_name_in_two_accounts_are_told_apart():
    arns = [f"arn:aws:kinesis:us-east-1:{account}:stream/orders" for account in "12"]
    streams = LeaseStreams(SETTINGS)
    streams.open(
        [StreamId("orders", account, 5, arn) for account, arn in zip("12", arns, strict=True)]
    )
    leases = [
        Lease(f"{account}:orders:5:s1", TRIM_HORIZON, stream=f"{account}:orders:5")
        for account in "12"
    ]
    columns = [streams.of(lease).column for lease in leases]
    assert columns == arns
    tables = [table("s1", [1, 2], columns[0]), table("s1", [3], columns[1])]
    records = pa.concat_tables(tables)
    ranges = tuple(
        Chunk(one.lease_key, rows, TRIM_HORIZON, Position("3"), 0)
        for one, rows in zip(leases, tables, strict=True)
    )
    found = [only(Batch("b", ranges, records), [lease.lease_key]).records for lease in leases]
    assert [one["sequence_number"].to_pylist() for one in found] == [["1", "2"], ["3"]]
    rest = without(Batch("b", ranges, records), [leases[0].lease_key])
    assert rest.records["sequence_number"].to_pylist() == ["3"]
    alone = LeaseStreams(SETTINGS)
    alone.open([StreamId("orders", "1", 5, arns[0])])
    assert alone.of(leases[0]).column == "orders"
    assert alone.of(leases[1]).column == arns[1]


def test_a_stream_whose_name_another_one_had_before_has_its_arn_in_every_worker():
    """The worker knows none of the two from its settings, or one of them is missing."""
    arns = [f"arn:aws:kinesis:us-east-1:{account}:stream/orders" for account in "12"]
    lease = Lease("2:orders:5:s1", TRIM_HORIZON, stream="2:orders:5")
    for opened in (StreamId("clicks", "1", 5, arns[0].replace("orders", "clicks")), None):
        streams = LeaseStreams(SETTINGS)
        streams.open([opened or StreamId("orders", "2", 5, arns[1])])
        assert streams.of(lease).column == "orders"
        streams.note_record(map(RecordedStream, arns))
        assert streams.of(lease).column == arns[1]


def test_rows_of_a_former_stream_are_not_those_of_the_one_that_has_its_name_now():
    former, now = (f"1:orders:{epoch}:s1" for epoch in (5, 9))
    chunks = [chunk(key, TRIM_HORIZON, numbers) for key, numbers in ((former, [1, 2]), (now, [7]))]
    batch = joined("b", chunks, {former: TRIM_HORIZON, now: TRIM_HORIZON})
    assert only(batch, [now]).records["sequence_number"].to_pylist() == ["7"]
    rest = without(batch, [former])
    assert rest.records["sequence_number"].to_pylist() == ["7"]
    assert without(rest, [now]).records.num_rows == 0


def test_a_chunk_that_does_not_follow_on_is_left_out():
    batch = joined(
        "b",
        [
            chunk("s1", Position("5"), [6]),
            chunk("s2", TRIM_HORIZON, [1]),
            chunk("s2", Position("3"), [4]),
        ],
        {"s1": Position("4"), "s2": TRIM_HORIZON},
    )
    assert spans(batch) == [("s2", TRIM_HORIZON, Position("1"), 10)]
    assert batch.records.num_rows == 1


def test_a_chunk_of_an_unknown_lease_is_left_out():
    assert joined("b", [chunk("s1", TRIM_HORIZON, [1])], {}).ranges == ()


def test_a_range_may_move_without_rows_but_one_that_does_not_move_is_no_range():
    batch = joined(
        "b",
        [chunk("s1", Position("1"), [], through=9), chunk("s2", Position("1"), [])],
        {"s1": Position("1"), "s2": Position("1")},
    )
    assert spans(batch) == [("s1", Position("1"), Position("9"), 10)]


def test_a_batch_whose_rows_are_not_those_of_its_ranges_is_refused():
    both = pa.concat_tables([table("shard-0", [1], "orders"), table("shard-0", [2], "clicks")])
    key = "1:clicks:5:shard-0"
    part = Chunk(key, both.slice(0, 1), TRIM_HORIZON, Position("2"), 0)
    batch = Batch("b", (part,), both)
    with pytest.raises(ValueError, match="b has 2 rows, not 1"):
        without(batch, [key])


def test_a_batch_without_some_leases_has_neither_their_ranges_nor_their_records():
    both = pa.concat_tables([table("shard-0", [1], "orders"), table("shard-0", [2], "clicks")])
    ranges = (
        Chunk("1:orders:5:shard-0", both.slice(0, 1), TRIM_HORIZON, Position("1"), 0),
        Chunk("1:clicks:5:shard-0", both.slice(1, 1), TRIM_HORIZON, Position("2"), 0),
    )
    rest = without(Batch("b", ranges, both), ["1:orders:5:shard-0"])
    assert rest.ranges == ranges[1:]
    assert rest.records["sequence_number"].to_pylist() == ["2"]
    assert only(rest, []).records.num_rows == 0
