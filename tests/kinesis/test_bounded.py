"""A page of records is cut to a time range, and reading ends after the range."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pydantic import ValidationError

from kcl_pipeline.batch import RECORD_SCHEMA, payload_bytes
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings, ShardSyncSettings
from kcl_pipeline.kinesis.bounded import (
    MOST_BEHIND_MILLIS,
    BoundedKinesis,
    is_past,
    within,
)
from kcl_pipeline.kinesis.client import ARRIVAL_TOLERANCE, RecordsPage
from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import ZERO, new_stream, put
from tests.support.local_aws import client as local_client

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
END = BEGIN + timedelta(hours=1)
TICK = timedelta(microseconds=1)


def page(*times):
    rows = [
        {
            "stream": "s",
            "shard_id": "shardId-000000000000",
            "sequence_number": str(number + 1),
            "sub_sequence_number": 0,
            "partition_key": "k",
            "data": b"%03d" % number,
            "approximate_arrival_timestamp": time,
        }
        for number, time in enumerate(times)
    ]
    records = pa.Table.from_pylist(rows, schema=RECORD_SCHEMA)
    return RecordsPage(records, "next", 5, bytes=payload_bytes(records))


def kept(found):
    return [int(one) for one in found.records.column("sequence_number").to_pylist()]


def test_the_begin_is_inclusive_and_the_end_exclusive_also_out_of_order():
    whole = page(END, BEGIN - TICK, BEGIN, END + TICK, END - TICK)
    found = within(whole, BEGIN, END)
    assert kept(found) == [3, 5]
    assert found.bytes == payload_bytes(found.records) == 8
    assert (found.next_iterator, found.millis_behind_latest) == ("next", 5)
    assert kept(within(whole, None, END)) == [2, 3, 5]
    assert kept(within(whole, BEGIN, None)) == [1, 3, 4, 5]


def test_a_page_within_the_range_stays_as_it_is():
    whole = page(BEGIN, END - TICK)
    assert within(whole, BEGIN, END) is whole
    empty = page()
    assert within(empty, BEGIN, END) is empty


def test_the_lag_of_a_page_outside_the_range_is_limited():
    """So that the reader does not go back once a minute to look for lost records."""
    day = 24 * 3600 * 1000
    whole = replace(page(END, END + TICK), millis_behind_latest=day)
    assert within(whole, BEGIN, END).millis_behind_latest == MOST_BEHIND_MILLIS
    assert within(replace(whole, millis_behind_latest=None), None, END).millis_behind_latest is None
    assert within(replace(whole, millis_behind_latest=0), None, END).millis_behind_latest == 0
    mixed = replace(page(BEGIN, END), millis_behind_latest=day)
    assert within(mixed, BEGIN, END).millis_behind_latest == day


def test_a_shard_is_past_the_range_when_no_record_of_a_page_is_near_it():
    late = END + ARRIVAL_TOLERANCE
    assert is_past(page(late, late + TICK), END)
    assert not is_past(page(late + TICK, late - TICK, late), END)
    assert not is_past(page(), END)
    assert not is_past(page(late), None)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"arrived_before": BEGIN.replace(tzinfo=None)}, "has no time zone"),
        ({"arrived_from": END, "arrived_before": BEGIN}, "is not before"),
        ({"arrived_from": BEGIN, "retrieval_mode": "auto"}, "reads no time range"),
    ],
)
def test_wrong_settings(chosen, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ConsumerSettings(application_name="orders", streams=("s",), retrieval=chosen)


def test_reading_jumps_to_the_end_of_the_shard_after_the_range():
    with EmbeddedAws() as aws:
        client = local_client(aws)
        name = new_stream(client, 1)
        put(client, name, b"inside")
        end = datetime.fromtimestamp(aws.clock.wall(), UTC) + timedelta(seconds=1)
        aws.clock.advance(3600)
        put(client, name, b"past")
        aws.clock.advance(3600)
        put(client, name, *[b"later"] * 5)
        kinesis = BoundedKinesis(
            local_client(aws), RetrievalSettings(arrived_before=end), ShardSyncSettings(), aws.clock
        )
        stream = kinesis.resolve_stream(name, multi_stream=False)
        token = kinesis.get_shard_iterator(stream, ZERO, "TRIM_HORIZON")
        first = kinesis.get_records(stream, ZERO, token, 1)
        assert first.records.column("data").to_pylist() == [b"inside"]
        assert first.millis_behind_latest > 0
        second = kinesis.get_records(stream, ZERO, first.next_iterator, 1)
        assert (second.records.num_rows, second.millis_behind_latest) == (0, 0)
        assert not client.get_records(ShardIterator=second.next_iterator)["Records"]
        shards = client.list_shards(StreamName=name)["Shards"]
        client.split_shard(
            StreamName=name,
            ShardToSplit=shards[0]["ShardId"],
            NewStartingHashKey=str(2**127),
        )
        third = kinesis.get_records(stream, ZERO, second.next_iterator, 1)
        assert third.next_iterator is None
        assert len(third.child_shards) == 2
