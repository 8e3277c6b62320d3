"""Streams with the record distribution strategy AUTO: records without a key, and KPL aggregates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble, Event
from kcl_pipeline.kinesis.boto import BotoKinesis
from kcl_pipeline.kinesis.distribution import KEPT_SECONDS, RecordDistribution
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import AUTO, MAX_HASH_KEY, USER_PARTITION_KEY, HashKeyRange
from tests.support.kpl_encoder import aggregate_of
from tests.support.local_aws import client, refused
from tests.support.reader_world import World, drain, values

HALF = HashKeyRange(2**127, MAX_HASH_KEY)
OUTSIDE, INSIDE = "0", str(2**127)
MIXED = aggregate_of([("a", OUTSIDE, b"outside"), ("b", INSIDE, b"inside")])


class Stream(World):
    """A stream of one shard whose strategy can change, and what its reader asks."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.change(strategy)
        self.stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        self.kinesis.described = 0
        self.distribution = RecordDistribution(self.kinesis, self.clock, self.events.append)

    def change(self, strategy: str) -> None:
        self.model.stream("orders").mode = "ON_DEMAND"
        self.model.call(
            "UpdateStreamRecordDistributionStrategy",
            StreamARN=self.model.stream("orders").arn,
            RecordDistributionStrategy=strategy,
        )

    def put_keyless(self, data: bytes) -> None:
        self.model.call("PutRecord", StreamName="orders", Data=data)

    def half(self) -> ShardReader:
        """A reader of the shard as if it had the upper half of the hash keys."""
        return self.reader(TRIM_HORIZON, hash_key_range=HALF, distribution=self.distribution)


def test_a_record_without_a_key_is_read_with_a_null_key() -> None:
    world = Stream(AUTO)
    world.put_keyless(b"one")
    world.put(b"two", key="k")
    world.put_keyless(MIXED)
    (chunk,) = drain(world.half())
    assert chunk.records.column("partition_key").to_pylist() == [None, "k", "a", "b"]
    assert values([chunk]) == [b"one", b"two", b"outside", b"inside"]
    chunk.records.validate(full=True)
    assert chunk.bytes == sum(map(len, (b"one", b"two", b"k", b"outside", b"a", b"inside", b"b")))
    assert world.kinesis.described == 0, "the strategy was read with the stream"


def test_without_a_key_of_its_own_a_user_record_has_that_of_its_aggregate() -> None:
    world = Stream(AUTO)
    world.put_keyless(MIXED)
    world.put(MIXED, key="a")
    (chunk,) = drain(world.half())
    assert chunk.rejected is None
    assert values([chunk]) == [b"outside", b"inside"] * 2


def test_aggregates_are_dropped_by_their_hash_keys_where_the_key_chooses_the_shard() -> None:
    world = Stream(USER_PARTITION_KEY)
    world.put(MIXED, key="a")
    (chunk,) = drain(world.half())
    assert values([chunk]) == []
    assert chunk.rejected is not None
    assert (chunk.rejected.misplaced, world.kinesis.described) == (1, 0)


def test_a_change_is_noticed_after_ten_minutes() -> None:
    world = Stream(USER_PARTITION_KEY)
    reader = world.half()
    world.change(AUTO)
    world.put(MIXED, key="a")
    assert values(drain(reader)) == []
    world.clock.advance(KEPT_SECONDS)
    world.put(MIXED, key="a")
    assert values(drain(reader)) == [b"outside", b"inside"]
    world.change(USER_PARTITION_KEY)
    world.put(MIXED, key="a")
    assert values(drain(reader)) == [b"outside", b"inside"]
    world.clock.advance(KEPT_SECONDS)
    world.put(MIXED, key="a")
    assert values(drain(reader)) == []
    assert world.kinesis.described == 2


def test_a_change_is_noticed_at_once_by_a_record_without_a_key_and_asked_for_once() -> None:
    world = Stream(USER_PARTITION_KEY)
    reader = world.half()
    world.change(AUTO)
    world.put(MIXED, key="a")
    world.put_keyless(b"now")
    assert values(drain(reader)) == [b"outside", b"inside", b"now"], "also those before it"
    for _ in range(3):
        world.put_keyless(b"later")
        drain(reader)
    assert world.kinesis.described == 1


def test_old_records_without_a_key_do_not_ask_again_and_again() -> None:
    world = Stream(AUTO)
    for number in range(20):
        world.put_keyless(b"%d" % number)
    world.change(USER_PARTITION_KEY)
    world.stream = world.kinesis.resolve_stream("orders", multi_stream=False)
    world.kinesis.described = 0
    reader = world.reader(
        TRIM_HORIZON, hash_key_range=HALF, distribution=world.distribution, max_records=1
    )
    assert len(values(drain(reader))) == 20
    assert world.kinesis.described == 1


def test_nothing_is_dropped_while_the_strategy_is_not_known() -> None:
    world = Stream(AUTO)
    world.clock.advance(KEPT_SECONDS)
    world.put(MIXED, key="a")
    reader = world.half()
    world.kinesis.describe_error = UnavailableError("no answer")
    for _ in range(3):
        with pytest.raises(UnavailableError):
            reader.read()
    world.kinesis.describe_error = None
    assert values(drain(reader)) == [b"outside", b"inside"]


def test_a_failed_question_of_a_record_without_a_key_does_not_stop_it() -> None:
    world = Stream(USER_PARTITION_KEY)
    world.change(AUTO)
    world.put_keyless(b"one")
    world.kinesis.describe_error = UnavailableError("no answer")
    reader = world.half()
    assert values(drain(reader)) == [b"one"]
    assert [type(event) for event in world.events] == [AwsTrouble]
    world.kinesis.describe_error = None
    world.put(MIXED, key="a")
    assert values(drain(reader)) == [b"outside", b"inside"], "the next decision asks again"


def test_streams_do_not_share_an_answer() -> None:
    world = Stream(AUTO)
    world.model.create_stream("other", 1)
    other = world.kinesis.resolve_stream("other", multi_stream=False)
    assert world.distribution.is_automatic(world.stream)
    assert not world.distribution.is_automatic(other)


@pytest.fixture(name="aws")
def aws_fixture() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as aws:
        yield aws


def test_the_embedded_aws_creates_and_changes_such_streams(aws: EmbeddedAws) -> None:
    kinesis = client(aws)
    on_demand = {"StreamMode": "ON_DEMAND"}
    kinesis.create_stream(
        StreamName="new", StreamModeDetails=on_demand, RecordDistributionStrategy="AUTO"
    )
    kinesis.create_stream(StreamName="old", ShardCount=1)

    def summary(name: str) -> dict[str, object]:
        found = kinesis.describe_stream_summary(StreamName=name)["StreamDescriptionSummary"]
        return dict(found)

    assert summary("new")["RecordDistributionStrategy"] == "AUTO"
    assert "RecordDistributionStrategy" not in summary("old"), "it is provisioned"
    arn = summary("old")["StreamARN"]
    change = kinesis.update_stream_record_distribution_strategy
    refused("ValidationException", kinesis.put_record, StreamName="old", Data=b"x")
    refused("ValidationException", change, StreamARN=arn, RecordDistributionStrategy="AUTO")
    kinesis.update_stream_mode(StreamARN=arn, StreamModeDetails=on_demand)
    assert summary("old")["RecordDistributionStrategy"] == "USER_PARTITION_KEY"
    refused("ValidationException", change, StreamARN=arn, RecordDistributionStrategy="EVEN")
    change(StreamARN=arn, RecordDistributionStrategy="AUTO")
    assert summary("old")["RecordDistributionStrategy"] == "AUTO"
    kinesis.put_record(StreamName="old", Data=b"x")
    change(StreamARN=arn, RecordDistributionStrategy="USER_PARTITION_KEY")
    text = refused(
        "ValidationException", kinesis.put_records, StreamName="old", Records=[{"Data": b"x"}]
    )
    assert "records.1.member.partitionKey" in text


@pytest.mark.parametrize("body_format", ["json", "cbor"])
def test_the_embedded_aws_spreads_records_and_keeps_the_keys_that_were_given(
    aws: EmbeddedAws, body_format: str
) -> None:
    aws.kinesis.create_stream("orders", 4, AUTO)
    kinesis = client(aws)
    for number in range(4):
        kinesis.put_record(StreamName="orders", Data=b"%d" % number)
    entries = [{"Data": b"same", "PartitionKey": "k"} for _ in range(4)]
    kinesis.put_records(StreamName="orders", Records=[*entries, {"Data": b"4"}])
    found: dict[bytes, set[str | None]] = {}
    settings = RetrievalSettings(body_format=body_format)
    reading = BotoKinesis(kinesis, settings, ShardSyncSettings(), SystemClock())
    stream = reading.resolve_stream("orders", multi_stream=False)
    assert stream.record_distribution == AUTO
    for shard_id in aws.kinesis.open_shard_ids("orders"):
        iterator = reading.get_shard_iterator(stream, shard_id, "TRIM_HORIZON")
        page = reading.get_records(stream, shard_id, iterator, 100)
        assert b"same" in page.records.column("data").to_pylist()
        for row in page.records.to_pylist():
            found.setdefault(row["data"], set()).add(row["partition_key"])
    assert found == {b"%d" % number: {None} for number in range(5)} | {b"same": {"k"}}


def test_all_readers_of_a_stream_share_an_answer_for_ten_minutes() -> None:
    world = Stream(USER_PARTITION_KEY)
    world.put(MIXED, key="a")
    for described in (0, 1, 2):
        assert all(world.half().read() is not None for _ in range(50))
        assert world.kinesis.described == described
        world.clock.advance(KEPT_SECONDS)
