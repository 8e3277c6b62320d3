"""Ranges that executors read are the same rows each time, also after a loss."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis
from kcl_pipeline.kinesis.ranges import RangeReader, ShardFetch
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.spark.executors import FrameRangeJobs, TaskSource, spread
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.write_paths import (  # noqa: F401 (fixtures)
    KEYS,
    ON_CLUSTER,
    Stage,
    arrow_transform,
    aws_fixture,
    executors,
    frame_transform,
    is_executor,
    numbered,
    write_path_fixture,
)


def frame_jobs(
    stage: Stage, transform, fetches: int = 3
) -> tuple[FrameRangeJobs, list[ShardFetch], RangeReader]:
    pipeline = stage.pipeline()
    clients = AwsClients(
        pipeline.settings,
        SessionOptions("us-east-1", None, stage.aws.endpoint_url, "key", "secret"),
    )
    source: TaskSource = pipeline.output().task_source(clients)
    kinesis = open_kinesis(pipeline.settings, clients, stage.clock)
    stream = kinesis.resolve_stream(stage.stream, multi_stream=False)
    shards = kinesis.list_shards(stream)[:fetches]
    jobs = FrameRangeJobs(stage.spark, source, SparkBatchWriter(stage.spark, transform, stage.uri))
    asked = [
        ShardFetch(
            shard.shard_id,
            stream,
            shard.shard_id,
            TRIM_HORIZON,
            shard.hash_key_range,
            10_000,
            1 << 20,
        )
        for shard in shards
    ]
    return jobs, asked, source.reader(stage.clock)


def rows_of(stage: Stage, written) -> list[tuple]:
    tables = (
        [pa.parquet.read_table(f"{stage.uri}/{file.path}") for file in written.files]
        if written.files
        else []
    )
    return sorted(
        tuple(row.values()) for table in tables for row in table.select([*KEYS, "data"]).to_pylist()
    )


def test_a_frame_that_is_evaluated_twice_has_the_same_rows_although_the_stream_grows(
    aws, spark, tmp_path
):
    stage = Stage(aws, spark, tmp_path, "frame executors")
    stage.put(*numbered(200))
    seen = []

    def counts_first(frame):
        seen.append(frame.count())
        stage.put(*numbered(100, f"later-{len(seen)}"))
        seen.append(frame.count())
        return frame.select(*KEYS, "data")

    jobs, fetches, reader = frame_jobs(stage, counts_first)
    try:
        done = jobs.run("b-1", fetches)
    finally:
        jobs.close()
    assert seen == [200, 200]
    assert (
        sum(file.rows for file in done.files) == sum(shard.records for shard in done.shards) == 200
    )
    read = [
        reader.read_exactly(fetch, shard.through, shard.records)
        for fetch, shard in zip(fetches, done.shards, strict=True)
    ]
    assert rows_of(stage, done) == sorted(
        tuple(row.values()) for table in read for row in table.select([*KEYS, "data"]).to_pylist()
    )


def test_shards_are_dealt_out_to_no_more_tasks_than_there_are():
    fetches = list(range(7))
    assert spread(fetches, 3) == [(0, 3, 6), (1, 4), (2, 5)]
    assert spread(fetches[:2], 8) == [(0,), (1,)]
    assert spread(fetches, 0) == [tuple(fetches)]


def _kill_one_executor_once(flag: Path) -> None:
    """Called in a task: the first that comes here takes its executor (the Python worker's
    grandparent or so) down with it.
    """
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return
    for parent in psutil.Process().parents():
        if is_executor(parent):
            os.kill(parent.pid, signal.SIGKILL)
            time.sleep(60)
    raise AssertionError("this is no executor")


@pytest.mark.parametrize("kind", ["frame", "arrow"])
def a_lost_executors_range_is_read_again_with_the_same_rows(aws, spark, tmp_path, kind):
    stage = Stage(aws, spark, tmp_path, f"{kind} executors")
    flag = tmp_path / "killed"

    def kill(batches):
        for batch in batches:
            if batch.num_rows:
                _kill_one_executor_once(flag)
            yield batch

    def lose_arrow(table):
        if table.num_rows:
            _kill_one_executor_once(flag)
        return arrow_transform(table)

    def lose_frame(frame):
        # A shuffle between reading and dying: what the lost executor had read is needed again by
        # the other
        plain = frame_transform(frame).repartition(4, "sequence_number")
        return plain.mapInArrow(kill, plain.schema)

    stage.transform, stage.transform_arrow = (
        (lose_frame, None) if kind == "frame" else (None, lose_arrow)
    )
    stage.put(*numbered(900))
    before = {process.pid for process in executors()}
    stage.drain()
    assert flag.exists()
    assert not before <= {process.pid for process in executors()}, "an executor is gone"
    assert stage.data() == sorted(stage.sent)


# Executors can only be lost where there are some.
if ON_CLUSTER:
    test_a_lost_executors_range_is_read_again_with_the_same_rows = (
        a_lost_executors_range_is_read_again_with_the_same_rows
    )
