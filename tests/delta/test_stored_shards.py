"""What a leader learns from a Delta table that stores positions."""

import pyarrow as pa
import pytest

from kcl_pipeline.batch import CommitEntry, TxnVersions, Written, shard_key
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId

STREAM = StreamId("s", arn="arn:aws:kinesis:eu-west-1:1:stream/s", created_millis=17_000)
SHARD = "shardId-000000000000"


def pipeline(path, protocol):
    return KinesisPipeline(
        name="orders",
        streams=["s"],
        transform_arrow=lambda records: records,
        sink=DeltaSink(str(path)),
        settings_overrides={"batch": {"commit_protocol": protocol}},
    )


def test_the_leader_reads_what_a_worker_commits(tmp_path):
    ask = pipeline(tmp_path / "t", "positions").output().stored_shards()
    assert ask(STREAM, [SHARD]) == {}, "there is no table"
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "t")), "orders")
    schema = pa.schema([("data", pa.binary())])
    sink.ensure_table(schema)
    key = shard_key(SHARD, f"{STREAM.arn}/17/{SHARD}")
    entry = CommitEntry.to(key, TxnVersions(), Position("5"))
    assert sink.commit(Written((), schema, 0), [entry]).version
    assert ask(STREAM, [SHARD, "shardId-000000000001"]) == {SHARD: False}
    assert sink.move(key, entry.sets, Position("5"), ended=True)
    assert ask(STREAM, [SHARD]) == {SHARD: True}


@pytest.mark.parametrize(("protocol", "asks"), [("two_phase", False), ("positions", True)])
def test_only_a_table_that_stores_positions_is_asked(tmp_path, protocol, asks):
    assert (pipeline(tmp_path, protocol).output().stored_shards() is not None) == asks
