"""What a leader learns from a Delta table that stores positions."""

import pyarrow as pa

from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import shard_key
from tests.support.delta_tables import NOTHING, commit_entries, entry_of

STREAM = StreamId("s", arn="arn:aws:kinesis:eu-west-1:1:stream/s", created_millis=17_000)
SHARD = "shardId-000000000000"


def pipeline(path):
    return KinesisPipeline(
        name="orders",
        streams=["s"],
        transform_arrow=lambda records: records,
        sink=DeltaSink(str(path)),
    )


def test_the_leader_reads_what_a_worker_commits(tmp_path):
    ask = pipeline(tmp_path / "t").output().stored_shards()
    assert ask(STREAM, [SHARD]) == {}, "there is no table"
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "t")), "orders")
    schema = pa.schema([("data", pa.binary())])
    sink.ensure(schema)
    key, position = shard_key(STREAM, SHARD), Position("5")
    table_id = sink.positions([]).table_id
    entry = entry_of(key, NOTHING_STORED, position)
    assert commit_entries(sink, table_id, NOTHING, [entry]).version
    assert ask(STREAM, [SHARD, "shardId-000000000001"]) == {SHARD: StoredPosition(1, position)}
    ended = entry_of(key, entry.becomes, position, ended=True)
    assert commit_entries(sink, table_id, NOTHING, [ended]).version
    assert ask(STREAM, [SHARD]) == {SHARD: StoredPosition(2, position, ended=True)}
