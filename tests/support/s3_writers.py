"""Writers of one table in an object store: threads with a sink each, as workers have one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from benchmarks.commits import repeated
from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.position import Position, StoredPosition

SCHEMA = pa.schema([("id", pa.int64())])


def key_of(writer: int) -> str:
    """The shard that a writer commits."""
    return f"arn:aws:kinesis:us-east-1:111122223333:stream/orders/1760000000/shard-{writer}"


def write(
    uri: str, options: Mapping[str, str], application: str, writer: int, commits: int
) -> StoredPosition:
    """Commit so many batches of one row each; the id of a row is `1000 * writer + turn`."""
    sink = DeltaCommitter(DeltaSink(uri, storage_options=options), application)
    files = ArrowBatchWriter(None, uri, storage_options=options)
    repeated(lambda: sink.ensure(SCHEMA))
    known = repeated(lambda: sink.positions([key_of(writer)]))
    stored = known.shards[key_of(writer)]
    for turn in range(1, commits + 1):
        rows = pa.table({"id": pa.array([1000 * writer + turn], pa.int64())})
        written = repeated(partial(files.write, Batch(f"{writer}-{turn}", (), rows)))
        key, becomes = key_of(writer), stored.moved(Position(str(turn)))
        commit = partial(
            sink.commit,
            known.table_id,
            written.written_files,
            {key: stored},
            {key: becomes},
            written.output_schema,
        )
        outcome = repeated(commit)
        assert outcome.version is not None, f"writer {writer} was refused on its own shard"
        stored = becomes
    return stored


def write_at_once(
    uri: str, options: Mapping[str, str], application: str, writers: range, commits: int
) -> list[int]:
    """Run these writers at the same time. Returns the ids of the rows that they committed."""
    with ThreadPoolExecutor(len(writers)) as pool:
        ended = [pool.submit(write, uri, options, application, n, commits) for n in writers]
        assert {one.result().number for one in ended} == {commits}
    return [1000 * writer + turn for writer in writers for turn in range(1, commits + 1)]
