"""The in-memory Kinesis as the package's own client, and the clocks it runs on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from kcl_pipeline import errors
from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import ShiftedClock, VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings

ZERO = "shardId-000000000000"


def model_with(shards: int = 1, **settings_: object) -> tuple[KinesisModel, VirtualClock]:
    clock = VirtualClock()
    model = KinesisModel(clock, KinesisSettings(**settings_))  # type: ignore[arg-type]
    model.create_stream("s", shards)
    return model, clock


def token_for(model: KinesisModel, shard: str = ZERO, kind: str = "TRIM_HORIZON") -> str:
    return str(
        model.call("GetShardIterator", StreamName="s", ShardId=shard, ShardIteratorType=kind)[
            "ShardIterator"
        ]
    )


# -- the Arrow client
# ----------------------------------------------------------------------------


def test_client_pages_are_arrow() -> None:
    model, _ = model_with(2)
    client: KinesisClient = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    assert stream == StreamId("s", arn="arn:aws:kinesis:us-east-1:123456789012:stream/s")
    multi = client.resolve_stream(stream.arn or "", multi_stream=True)
    assert multi.serialized == "123456789012:s:1700000000"
    puts = model.put("s", [(f"k{i}", b"%d" % i) for i in range(100)])
    total = 0
    for shard in client.list_shards(stream):
        page = client.get_records(
            stream,
            shard.shard_id,
            client.get_shard_iterator(stream, shard.shard_id, "TRIM_HORIZON"),
            10_000,
        )
        assert page.records.schema.equals(RECORD_SCHEMA)
        page.records.validate(full=True)
        expected = [p.sequence_number for p in puts if p.shard_id == shard.shard_id]
        assert page.records["sequence_number"].to_pylist() == expected
        assert page.bytes == sum(map(len, page.records["data"].to_pylist())) + sum(
            map(len, page.records["partition_key"].to_pylist())
        )
        assert (page.millis_behind_latest, page.child_shards) == (0, ())
        total += page.records.num_rows
        first = page.records.slice(0, 1).to_pylist()[0]
        assert (
            first["stream"],
            first["shard_id"],
            first["sub_sequence_number"],
            first["explicit_hash_key"],
        ) == ("s", shard.shard_id, 0, None)
        assert first["approximate_arrival_timestamp"] == datetime.fromtimestamp(1_700_000_000, UTC)
    assert total == 100


def test_client_shard_end_children_and_filters() -> None:
    model, clock = model_with()
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    start = datetime.fromtimestamp(clock.wall(), UTC)
    clock.advance(5)
    model.split("s", ZERO)
    page = client.get_records(stream, ZERO, client.get_shard_iterator(stream, ZERO, "LATEST"), 10)
    assert page.next_iterator is None
    assert isinstance(page.records, pa.Table)
    assert [c.parents for c in page.child_shards] == [(ZERO,), (ZERO,)]
    shards = client.list_shards(stream)
    assert [s.is_open for s in shards] == [False, True, True]
    assert shards[1].parents == (ZERO,)
    assert [
        s.shard_id for s in client.list_shards(stream, "AT_TIMESTAMP", start + timedelta(seconds=1))
    ] == [ZERO]
    assert [s.shard_id for s in client.list_shards(stream, "AT_TRIM_HORIZON")] == [ZERO]
    assert [s.is_open for s in client.list_shards(stream, "AT_LATEST")] == [True, True]


def test_client_joins_pages_of_shards() -> None:
    model = KinesisModel(VirtualClock(), KinesisSettings(shard_limit=3000))
    model.create_stream("s", 2500)
    client = InMemoryKinesis(model)
    assert (
        len(
            {s.shard_id for s in client.list_shards(client.resolve_stream("s", multi_stream=False))}
        )
        == 2500
    )


def test_client_raises_the_errors_of_the_package() -> None:
    model, clock = model_with(enforce_limits=True)
    client = InMemoryKinesis(model)
    stream = client.resolve_stream("s", multi_stream=False)
    token = client.get_shard_iterator(stream, ZERO, "TRIM_HORIZON")
    for _ in range(5):
        client.get_records(stream, ZERO, token, 1)
    with pytest.raises(errors.ThrottledError):
        client.get_records(stream, ZERO, token, 1)
    clock.advance(301)
    with pytest.raises(errors.ExpiredIteratorError) as expired:
        client.get_records(stream, ZERO, token, 1)
    assert (expired.value.code, expired.value.operation) == (
        "ExpiredIteratorException",
        "GetRecords",
    )
    with pytest.raises(errors.ExpiredIteratorError):
        client.get_records(stream, ZERO, "nonsense", 1)
    with pytest.raises(errors.NotFoundError):
        client.resolve_stream("nobody", multi_stream=False)
    with pytest.raises(errors.NotFoundError):
        client.get_shard_iterator(stream, "shardId-000000000007", "LATEST")
    with pytest.raises(errors.InvalidRequestError):
        client.get_shard_iterator(stream, ZERO, "AT_SEQUENCE_NUMBER", sequence_number="1")


# -- clocks
# ----------------------------------------------------------------------------


def test_shifted_clock() -> None:
    base = VirtualClock(100.0)
    clock = ShiftedClock(base, 5.0)
    assert (clock.wall(), clock.monotonic()) == (105.0, 5.0)
    clock.advance(10)
    clock.sleep(1)
    assert (clock.wall(), clock.monotonic(), base.monotonic(), clock.offset_seconds) == (
        116.0,
        16.0,
        1.0,
        15.0,
    )
    with pytest.raises(ValueError, match="advanced by -1"):
        clock.advance(-1)


def test_virtual_clock() -> None:
    clock = VirtualClock(50.0)
    signal = clock.signal()
    assert signal.wait(2.5) is False
    assert clock.wall() == 52.5
    with pytest.raises(RuntimeError, match="never end"):
        signal.wait()
    signal.set()
    assert signal.wait(100) is True
    assert signal.is_set()
    assert clock.monotonic() == 2.5
    lock = clock.lock()
    with lock, clock.lock(), pytest.raises(RuntimeError, match="taken twice"), lock:
        pass
    with lock:
        pass
    with pytest.raises(ValueError, match="sleep -1"):
        clock.sleep(-1)
