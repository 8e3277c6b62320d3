"""One suite for every way from a stream into a Delta table: a Spark transform or an Arrow function,
read by the driver or by the executors.

It runs on `local[2]` with all the others, and once more as a whole on a cluster of two executors
(`test_the_suite_passes_on_a_cluster`), which are also killed.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import BatchCommitted, ShardEnded
from kcl_pipeline.kinesis.ranges import RangeReader, ShardFetch
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.spark.executors import FrameRangeJobs, TaskSource, spread
from kcl_pipeline.spark.writer import SparkBatchWriter
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker
from tests.support.kpl_encoder import aggregate_of
from tests.support.local_aws import client, fresh_name

CLUSTER = "local-cluster[2,1,1024]"
ON_CLUSTER = os.environ.get("KCL_TEST_SPARK_MASTER") == CLUSTER
WAYS = [
    f"{way} {place}"
    for way in ("frame", "arrow")
    for place in (("executors",) if ON_CLUSTER else ("driver", "executors"))
]
KEYS = ["shard_id", "sequence_number", "sub_sequence_number"]


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


def frame_transform(frame):
    return frame.selectExpr(
        *KEYS,
        "data",
        "length(data) / if(data = cast('bad' as binary), cast(raise_error('this is bad') as "
        "int), 1) as size",
    )


def arrow_transform(table: pa.Table) -> pa.Table:
    if b"bad" in table.column("data").to_pylist():
        raise ValueError("this is bad")
    return table.select([*KEYS, "data"]).append_column(
        "size", pc.cast(pc.binary_length(table.column("data")), pa.float64())
    )


class Stage:
    """A stream, a table, and workers on it; the lease tables are in memory, everything else is
    real.
    """

    def __init__(
        self,
        aws: EmbeddedAws,
        spark,
        folder: Path,
        way: str,
        *,
        shards: int = 3,
        partition_by=(),
        **settings,
    ) -> None:
        kind, place = way.split()
        self.aws, self.spark, self.uri = aws, spark, str(folder / "table")
        self.kinesis = client(aws)
        self.stream = fresh_name("ways")
        self.kinesis.create_stream(StreamName=self.stream, ShardCount=shards)
        self.transform = frame_transform if kind == "frame" else None
        self.transform_arrow = arrow_transform if kind == "arrow" else None
        self.partition_by = partition_by
        self.place = place
        base = {
            "lease": {"failover_time_millis": 1000},
            "batch": {"min_batch_interval_millis": 50, **settings.pop("batch", {})},
        }
        self.settings = (
            base
            | {
                "retrieval": {
                    "fetch_on": place,
                    "idle_time_between_reads_in_millis": 200,
                    **settings.pop("retrieval", {}),
                }
            }
            | settings
        )
        self.clock = SystemClock()
        self.tables = (
            InMemoryLeaseTable(),
            InMemoryWorkerMetricsTable(),
            InMemoryCoordinatorStateTable(),
        )
        self.events: list[object] = []
        self.sent: list[bytes] = []
        self.names = itertools.count(1)

    def put(self, *values: bytes) -> None:
        for begin in range(0, len(values), 400):
            part = values[begin : begin + 400]
            self.kinesis.put_records(
                StreamName=self.stream,
                Records=[
                    {"Data": v, "PartitionKey": f"{len(self.sent) + i}"} for i, v in enumerate(part)
                ],
            )
            self.sent += part

    def pipeline(self) -> KinesisPipeline:
        return KinesisPipeline(
            name=self.stream,
            streams=[self.stream],
            sink=DeltaSink(self.uri, self.partition_by),
            transform=self.transform,
            transform_arrow=self.transform_arrow,
            settings_overrides=self.settings,
        )

    def worker(self) -> Worker:
        pipeline, name = self.pipeline(), f"w-{next(self.names)}"
        clients = AwsClients(
            pipeline.settings,
            SessionOptions("us-east-1", None, self.aws.endpoint_url, "key", "secret"),
        )
        kinesis = open_kinesis(pipeline.settings, clients, self.clock)
        writer, sink, jobs = pipeline._output(lambda: self.spark, clients)
        assert (jobs is not None) == (self.place == "executors")
        parts = WorkerDependencies(
            settings=pipeline.settings,
            lease_table=self.tables[0],
            worker_table=self.tables[1],
            coordinator_table=self.tables[2],
            kinesis=kinesis,
            writer=writer,
            sink=sink,
            clock=self.clock,
            rng=random.Random(name),
            events=self.events.append,
            leader=LeaderCycle(
                pipeline.settings, *self.tables, kinesis, self.clock, self.events.append, name
            ),
            range_jobs=jobs,
        )
        return Worker(name, parts)

    def drain(self) -> None:
        assert self.worker().run(self.clock.signal(), mode="drain").error is None

    def table(self) -> pa.Table:
        return DeltaTable(self.uri).to_pyarrow_table()

    def data(self) -> list[bytes]:
        return sorted(self.table().column("data").to_pylist())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def numbered(count: int, prefix: str = "r") -> list[bytes]:
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


def test_every_record_is_in_the_table_once_over_two_workers(aws, spark, tmp_path, way):
    stage = Stage(aws, spark, tmp_path, way)
    stage.put(*numbered(1500))
    stage.drain()
    stage.put(*numbered(700, "s"))
    stage.drain()
    assert stage.data() == sorted(stage.sent)
    assert stage.table().column("size").to_pylist() == [
        float(len(value)) for value in stage.table().column("data").to_pylist()
    ]
    assert sum(batch.records for batch in stage.of(BatchCommitted)) == 2200


def test_small_batches_end_inside_aggregates_and_a_reshard_is_followed(aws, spark, tmp_path, way):
    stage = Stage(
        aws,
        spark,
        tmp_path,
        way,
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


def test_a_record_that_the_transform_cannot_take_goes_to_the_dead_letters(
    aws, spark, tmp_path, way
):
    stage = Stage(aws, spark, tmp_path, way, shards=2)
    stage.put(*numbered(40), b"bad", *numbered(40, "s"))
    stage.drain()
    letters = DeltaTable(f"{stage.uri}_dead_letters").to_pyarrow_table().to_pylist()
    errors = {letter["error"] for letter in letters if "this is bad" not in letter["error"]}
    assert errors == set(), "what is not the record's fault is taken for it"
    assert [letter["data"] for letter in letters] == [b"bad"]
    assert stage.data() == sorted(value for value in stage.sent if value != b"bad")


def test_partitions_are_kept(aws, spark, tmp_path, way):
    stage = Stage(aws, spark, tmp_path, way, shards=2, partition_by=("shard_id",))
    stage.put(*numbered(60))
    stage.drain()
    assert stage.data() == sorted(stage.sent)
    assert DeltaTable(stage.uri).metadata().partition_columns == ["shard_id"]


def test_a_worker_that_dies_between_files_and_commit_repeats_nothing(aws, spark, tmp_path, way):
    stage = Stage(aws, spark, tmp_path, way, shards=2)
    stage.put(*numbered(300))
    dying = stage.worker()
    sink = dying._parts.sink

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


# -- DataFrames that are evaluated more than once, and executors that are lost
# ------------------------------------------


def frame_jobs(
    stage: Stage, transform, fetches: int = 3
) -> tuple[FrameRangeJobs, list[ShardFetch], RangeReader]:
    pipeline = stage.pipeline()
    clients = AwsClients(
        pipeline.settings,
        SessionOptions("us-east-1", None, stage.aws.endpoint_url, "key", "secret"),
    )
    source: TaskSource = pipeline._source(clients)
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
    assert done.written.rows == sum(shard.records for shard in done.shards) == 200
    read = [
        reader.read_exactly(fetch, shard.through, shard.records)
        for fetch, shard in zip(fetches, done.shards, strict=True)
    ]
    assert rows_of(stage, done.written) == sorted(
        tuple(row.values()) for table in read for row in table.select([*KEYS, "data"]).to_pylist()
    )


def test_shards_are_dealt_out_to_no_more_tasks_than_there_are():
    fetches = list(range(7))
    assert spread(fetches, 3) == [(0, 3, 6), (1, 4), (2, 5)]
    assert spread(fetches[:2], 8) == [(0,), (1,)]
    assert spread(fetches, 0) == [tuple(fetches)]


def executors() -> list[psutil.Process]:
    """The executors of this process's Spark."""
    return [child for child in psutil.Process().children(recursive=True) if is_executor(child)]


def is_executor(process: psutil.Process) -> bool:
    try:
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


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


def the_suite_passes_on_a_cluster():
    environment = os.environ | {"KCL_TEST_SPARK_MASTER": CLUSTER}
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", __file__]
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


# Executors can only be lost where there are some; and there the suite does not begin itself again
if ON_CLUSTER:
    test_a_lost_executors_range_is_read_again_with_the_same_rows = (
        a_lost_executors_range_is_read_again_with_the_same_rows
    )
else:
    test_the_suite_passes_on_a_cluster = the_suite_passes_on_a_cluster
