"""One suite for every write path into a Delta table: a Spark transform or an Arrow function,
read by the driver or by the executors.

It runs on `local[2]` with all the others, and in `make test-long` on a cluster of two executors,
which are also killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from kcl_pipeline.events import BatchCommitted, ShardEnded
from tests.support.kpl_encoder import aggregate_of
from tests.support.write_paths import (  # noqa: F401 (fixtures)
    CLUSTER,
    ON_CLUSTER,
    WRITE_PATHS,
    Stage,
    aws_fixture,
    numbered,
    write_path_fixture,
)


def with_long(*short: str) -> pytest.MarkDecorator:
    """Two write paths, which have both kinds and both places; `make test-long` has all four."""
    marks = {path: () if path in short else (pytest.mark.long,) for path in WRITE_PATHS}
    every = [pytest.param(path, marks=mark) for path, mark in marks.items()]
    return pytest.mark.parametrize("write_path", every, indirect=True)


@with_long("frame executors", "arrow driver")
def test_every_record_is_in_the_table_once_over_two_workers(aws, spark, tmp_path, write_path):
    stage = Stage(aws, spark, tmp_path, write_path)
    stage.put(*numbered(1500))
    stage.drain()
    stage.put(*numbered(700, "s"))
    stage.drain()
    assert stage.data() == sorted(stage.sent)
    assert stage.table().column("size").to_pylist() == [
        float(len(value)) for value in stage.table().column("data").to_pylist()
    ]
    assert sum(batch.records for batch in stage.of(BatchCommitted)) == 2200
    files = DeltaTable(stage.uri).file_uris()
    assert {pq.read_metadata(file).created_by.split()[0] for file in files} == {
        "parquet-cpp-arrow"
    }, "pyarrow writes on every path, also in the tasks of a cluster"


@with_long("frame driver", "arrow executors")
def test_small_batches_end_inside_aggregates_and_a_reshard_is_followed(
    aws, spark, tmp_path, write_path
):
    stage = Stage(
        aws,
        spark,
        tmp_path,
        write_path,
        shards=1,
        batch={"max_batch_records": 60},
        retrieval={"max_records": 25},
    )
    members = [
        (f"{number}", str(number << 100), f"member-{number:03}".encode()) for number in range(40)
    ]
    stage.put(*numbered(90))
    stage.kinesis.put_record(StreamName=stage.stream, Data=aggregate_of(members), PartitionKey="a")
    stage.put(*numbered(30, "s"))
    shard = stage.kinesis.list_shards(StreamName=stage.stream)["Shards"][0]["ShardId"]
    stage.kinesis.split_shard(
        StreamName=stage.stream, ShardToSplit=shard, NewStartingHashKey=str(2**127)
    )
    stage.put(*numbered(30, "t"))
    stage.drain()
    assert stage.data() == sorted([*stage.sent, *(data for _, _, data in members)])
    assert [event.lease_key for event in stage.of(ShardEnded)] == [shard]


@with_long("frame driver", "arrow executors")
def test_a_record_that_the_transform_cannot_take_goes_to_the_dead_letters(
    aws, spark, tmp_path, write_path
):
    stage = Stage(aws, spark, tmp_path, write_path, shards=2)
    stage.put(*numbered(40), b"bad", *numbered(40, "s"))
    stage.drain()
    letters = DeltaTable(f"{stage.uri}_dead_letters").to_pyarrow_table().to_pylist()
    errors = {letter["error"] for letter in letters if "this is bad" not in letter["error"]}
    assert errors == set(), "what is not the record's fault is taken for it"
    assert [letter["data"] for letter in letters] == [b"bad"]
    assert stage.data() == sorted(value for value in stage.sent if value != b"bad")


@with_long("frame executors", "arrow driver")
def test_partitions_are_kept(aws, spark, tmp_path, write_path):
    stage = Stage(aws, spark, tmp_path, write_path, shards=2, partition_by=("shard_id",))
    stage.put(*numbered(60))
    stage.drain()
    assert stage.data() == sorted(stage.sent)
    assert DeltaTable(stage.uri).metadata().partition_columns == ["shard_id"]


@with_long("frame executors", "arrow driver")
def test_a_worker_that_dies_between_files_and_commit_repeats_nothing(
    aws, spark, tmp_path, write_path
):
    stage = Stage(aws, spark, tmp_path, write_path, shards=2)
    stage.put(*numbered(300))
    dying = stage.worker()
    sink = dying._dependencies.sink

    class Dies(BaseException):
        pass

    def die(*_):
        raise Dies

    sink.commit, commit = die, sink.commit
    with pytest.raises(Dies):
        dying.run(stage.clock.signal(), mode="drain")
    sink.commit = commit
    assert not DeltaTable.is_deltatable(stage.uri) or stage.table().num_rows == 0
    stage.drain()
    assert stage.data() == sorted(stage.sent)


def the_suite_passes_on_a_cluster() -> None:
    environment = os.environ | {"KCL_TEST_SPARK_MASTER": CLUSTER}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += [__file__, str(Path(__file__).with_name("test_range_jobs.py"))]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


# On the cluster the suite does not start itself again.
if not ON_CLUSTER:
    test_the_suite_passes_on_a_cluster = pytest.mark.long(the_suite_passes_on_a_cluster)
