"""The boto3 implementation of `KinesisClient` against the embedded AWS.

Its requests, its handling of errors, and that it reads the same as the in-memory implementation.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import urllib3

from kcl_pipeline import errors
from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis
from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings
from kcl_pipeline.kinesis.boto import account_of, receive_in_one_piece
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.position import LATEST, TRIM_HORIZON
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from tests.support.kinesis_over_http import (  # noqa: F401 (fixtures)
    SHARD,
    Side,
    aws_fixture,
    iterator_of,
    side_fixture,
)


@pytest.mark.parametrize("body_format", ["json", "cbor"])
def test_reads_the_same_as_the_in_memory_client(side: Side, body_format: str) -> None:
    stream = side.stream("orders", records=5)
    ours = side.adapter(body_format=body_format).get_records(
        stream, SHARD, iterator_of(side, stream), 3
    )
    memory = InMemoryKinesis(side.aws.kinesis)
    theirs = memory.get_records(
        stream, SHARD, memory.get_shard_iterator(stream, SHARD, "TRIM_HORIZON"), 3
    )
    assert ours.records.schema == RECORD_SCHEMA
    assert ours.records.drop_columns(["encryption_type"]) == theirs.records.drop_columns(
        ["encryption_type"]
    )
    assert (ours.bytes, ours.child_shards, ours.millis_behind_latest is not None) == (
        theirs.bytes,
        (),
        True,
    )
    rest = side.kinesis.get_records(stream, SHARD, ours.next_iterator or "", 10_000)
    assert (rest.records.num_rows, rest.millis_behind_latest) == (2, 0)


@pytest.mark.parametrize("body_format", ["json", "cbor"])
def test_the_end_of_a_shard_has_its_children(side: Side, body_format: str) -> None:
    stream = side.stream("orders", records=1)
    side.client.split_shard(StreamName="orders", ShardToSplit=SHARD, NewStartingHashKey=str(2**127))
    page = side.adapter(body_format=body_format).get_records(
        stream, SHARD, iterator_of(side, stream), 10
    )
    assert page.next_iterator is None
    assert [(c.shard_id, c.parents, c.hash_key_range.start) for c in page.child_shards] == [
        ("shardId-000000000001", (SHARD,), 0),
        ("shardId-000000000002", (SHARD,), 2**127),
    ]


def test_other_users_of_the_client_get_what_botocore_gives(side: Side) -> None:
    stream = side.stream("orders", records=2)
    side.kinesis.get_records(stream, SHARD, iterator_of(side, stream), 10)
    plain = side.client.get_records(ShardIterator=iterator_of(side, stream))
    assert [r["Data"] for r in plain["Records"]] == [b"\x00\xff\x00", b"\x01\xff\x00"]
    assert "KclPipelineBody" not in plain


def test_a_reader_over_http_reads_everything_once(side: Side) -> None:
    stream = side.stream("orders", records=30)
    settings = RetrievalSettings(max_records=7)
    reader = ShardReader(
        side.kinesis, stream, SHARD, SHARD, TRIM_HORIZON, None, settings, side.clock
    )
    chunks = [c for c in (reader.read() for _ in range(6)) if c is not None]
    assert [v[0] for c in chunks for v in c.records.column("data").to_pylist()] == list(range(30))


def test_streams_by_name_and_by_arn(side: Side) -> None:
    side.stream("orders")
    side.aws.kinesis.world.streams["orders"].created_millis = 1_700_000_123_999
    arn = "arn:aws:kinesis:us-east-1:123456789012:stream/orders"
    assert side.kinesis.resolve_stream("orders", multi_stream=False) == StreamId("orders", arn=arn)
    assert side.kinesis.resolve_stream(arn, multi_stream=True) == StreamId(
        "orders", "123456789012", 1_700_000_123, arn
    )
    assert [params for _, params in side.calls] == [
        {"StreamName": "orders"},
        {"StreamName": "orders", "StreamARN": arn},
    ]
    with pytest.raises(errors.NotFoundError, match="DescribeStreamSummary on missing"):
        side.kinesis.resolve_stream("missing", multi_stream=False)
    with pytest.raises(errors.SettingsError, match="is not the ARN of a stream"):
        account_of("arn:aws:s3:::bucket")


def test_the_arn_goes_with_every_request_about_a_known_stream(side: Side) -> None:
    side.stream("orders", records=1)
    stream = side.kinesis.resolve_stream("orders", multi_stream=True)
    side.calls.clear()
    side.kinesis.list_shards(stream)
    page = side.kinesis.get_records(stream, SHARD, iterator_of(side, stream), 5)
    assert page.records.column("stream").to_pylist() == ["orders"]
    assert [(name, params.get("StreamARN")) for name, params in side.calls] == [
        ("ListShards", stream.arn),
        ("GetShardIterator", stream.arn),
        ("GetRecords", stream.arn),
    ]


def test_pages_of_shards_are_followed_by_the_token_alone(side: Side, monkeypatch) -> None:
    stream = side.stream("orders", shards=7)
    listing = type(side.client).list_shards
    monkeypatch.setattr(
        type(side.client),
        "list_shards",
        lambda self, **kw: listing(self, **kw, **({} if "NextToken" in kw else {"MaxResults": 3})),
    )
    shards = side.kinesis.list_shards(stream, "AT_LATEST")
    assert [s.shard_id for s in shards] == [f"shardId-{i:012d}" for i in range(7)]
    sent = [set(params) for name, params in side.calls if name == "ListShards"]
    assert sent == [{"StreamName", "ShardFilter", "MaxResults"}, {"NextToken"}]
    monkeypatch.undo()
    assert shards == InMemoryKinesis(side.aws.kinesis).list_shards(stream)


def test_a_listing_whose_token_expires_begins_again(side: Side, monkeypatch) -> None:
    stream = side.stream("orders", shards=7)
    listing = type(side.client).list_shards
    expired = iter([True, False, True, False, False])

    def paged(self, **request):
        if "NextToken" not in request:
            return listing(self, **request, MaxResults=3)
        if next(expired, False):
            side.fault("ListShards", "throttle", count=1, code="ExpiredNextTokenException")
        return listing(self, **request)

    monkeypatch.setattr(type(side.client), "list_shards", paged)
    shards = side.kinesis.list_shards(stream)
    assert [s.shard_id for s in shards] == [f"shardId-{i:012d}" for i in range(7)]
    expired = iter([True] * 100)
    with pytest.raises(errors.UnavailableError, match="took longer than its token is valid"):
        side.kinesis.list_shards(stream)


def test_the_strategy_of_a_stream_is_read_also_with_an_older_botocore(side: Side) -> None:
    side.aws.kinesis.create_stream("spread", 1, "AUTO")
    side.stream("orders")
    shape = side.client.meta.service_model.shape_for("StreamDescriptionSummary")
    shape.members.pop("RecordDistributionStrategy", None)
    found = [side.kinesis.resolve_stream(name, multi_stream=False) for name in ("spread", "orders")]
    assert [stream.record_distribution for stream in found] == ["AUTO", "USER_PARTITION_KEY"]


def test_filters_reach_the_service(side: Side) -> None:
    stream = side.stream("orders", records=1)
    side.client.split_shard(StreamName="orders", ShardToSplit=SHARD, NewStartingHashKey=str(2**127))
    assert len(side.kinesis.list_shards(stream)) == 3
    parent, *children = side.kinesis.list_shards(stream)
    assert not parent.is_open
    assert [c.parents for c in children] == [(SHARD,), (SHARD,)]
    assert {s.shard_id for s in side.kinesis.list_shards(stream, "AT_LATEST")} == {
        c.shard_id for c in children
    }
    assert [s.shard_id for s in side.kinesis.list_shards(stream, "AT_TRIM_HORIZON")] == [SHARD]
    now = datetime.fromtimestamp(side.aws.clock.wall(), UTC)
    assert {s.shard_id for s in side.kinesis.list_shards(stream, "AT_TIMESTAMP", now)} == {
        c.shard_id for c in children
    }


def test_latest_is_made_again_by_the_clock_of_the_service(side: Side) -> None:
    """The clock of this host is wrong by decades. No record is repeated or skipped."""
    stream = side.stream("orders", records=1)
    advance = side.aws.clock.advance  # type: ignore[attr-defined]
    advance(3)
    assert abs(side.clock.wall() - side.aws.clock.wall()) > 1_000_000
    settings = RetrievalSettings()
    reader = ShardReader(side.kinesis, stream, SHARD, SHARD, LATEST, None, settings, side.clock)
    assert reader.read() is None
    side.aws.kinesis.call("PutRecord", StreamName="orders", PartitionKey="k", Data=b"between")
    advance(301)
    chunk = reader.read()
    assert chunk is not None
    assert chunk.records.column("data").to_pylist() == [b"between"]
    kinds = [more["ShardIteratorType"] for name, more in side.calls if name == "GetShardIterator"]
    assert kinds == ["LATEST", "AT_TIMESTAMP"]


def test_the_time_of_latest_is_before_the_request_was_sent(side: Side) -> None:
    """The service may determine the position at the start of the request; it rounds times down."""
    stream = side.stream("orders")
    inner = side.client.get_shard_iterator
    waited = 7.0

    def slow(**request):
        response = inner(**request)
        side.clock.advance(waited)
        return response

    before = side.aws.clock.wall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side.client, "get_shard_iterator", slow)
        since = side.kinesis.latest_iterator(stream, SHARD).since
    assert since is not None
    assert before - waited - 1 <= since.timestamp() <= side.aws.clock.wall() - waited


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_a_response_without_a_time(side: Side, date: str | None) -> None:
    stream = side.stream("orders")
    inner = side.client.get_shard_iterator

    def undated(**request):
        response = inner(**request)
        response["ResponseMetadata"]["HTTPHeaders"] = {} if date is None else {"date": date}
        return response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side.client, "get_shard_iterator", undated)
        latest = side.kinesis.latest_iterator(stream, SHARD)
    assert latest.since is None
    assert latest.iterator


def test_the_time_of_the_service_leads_to_what_arrives_later(side: Side) -> None:
    stream = side.stream("orders", records=1)
    side.aws.clock.advance(3)  # type: ignore[attr-defined]
    since = side.kinesis.service_time(stream)
    assert since is not None
    assert side.aws.clock.wall() - 1 <= since.timestamp() <= side.aws.clock.wall()
    side.aws.kinesis.call("PutRecord", StreamName="orders", PartitionKey="k", Data=b"later")
    iterator = side.kinesis.get_shard_iterator(stream, SHARD, "AT_TIMESTAMP", timestamp=since)
    page = side.kinesis.get_records(stream, SHARD, iterator, 10)
    assert page.records.column("data").to_pylist() == [b"later"]


def test_opened_from_the_applications_settings(aws: EmbeddedAws, side: Side) -> None:
    side.stream("orders", records=1)
    options = SessionOptions(
        region_name=aws.region,
        endpoint_url=aws.endpoint_url,
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )
    settings = ConsumerSettings(application_name="orders-app", streams=("orders",))
    clients = AwsClients(settings, options)
    kinesis = open_kinesis(settings, clients, side.clock)
    stream = kinesis.resolve_stream("orders", multi_stream=False)
    page = kinesis.get_records(
        stream, SHARD, kinesis.get_shard_iterator(stream, SHARD, "TRIM_HORIZON"), 5
    )
    assert page.records.num_rows == 1
    clients.close()


def test_bodies_are_received_in_one_piece_once_per_client_and_only_by_us(side: Side) -> None:
    stream = side.stream("orders", records=2)
    wrapped = side.client._endpoint._send
    side.adapter()
    assert side.client._endpoint._send is wrapped
    pieces: list[object] = []
    original = urllib3.response.HTTPResponse.stream
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            urllib3.response.HTTPResponse,
            "stream",
            lambda self, *a, **k: pieces.append(self) or original(self, *a, **k),
        )
        iterator = iterator_of(side, stream)
        pieces.clear()
        assert side.kinesis.get_records(stream, SHARD, iterator, 5).records.num_rows == 2
        assert pieces == []
        assert len(side.client.get_records(ShardIterator=iterator)["Records"]) == 2
        assert len(pieces) == 1


def test_another_botocore_is_left_as_it_is() -> None:
    receive_in_one_piece(object())  # type: ignore[arg-type]
