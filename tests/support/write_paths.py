"""A stream, its workers and their table, for each write path."""

from __future__ import annotations

import itertools
import os
import random
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
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker
from tests.support.local_aws import client, fresh_name

CLUSTER = "local-cluster[2,1,1024]"


ON_CLUSTER = os.environ.get("KCL_TEST_SPARK_MASTER") == CLUSTER


WRITE_PATHS = [
    f"{write_path} {place}"
    for write_path in ("frame", "arrow")
    for place in (("executors",) if ON_CLUSTER else ("driver", "executors"))
]


KEYS = ["shard_id", "sequence_number", "sub_sequence_number"]


@pytest.fixture(scope="module", name="aws")
def aws_fixture() -> Iterator[EmbeddedAws]:
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
        write_path: str,
        *,
        shards: int = 3,
        partition_by=(),
        **settings,
    ) -> None:
        kind, place = write_path.split()
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
        writer, sink, jobs = pipeline.output().open(lambda: self.spark, clients)
        assert (jobs is not None) == (self.place == "executors")
        parts = WorkerDependencies(
            worker_id=name,
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
        return Worker(parts)

    def drain(self) -> None:
        assert self.worker().run(self.clock.signal(), mode="drain").error is None

    def table(self) -> pa.Table:
        return DeltaTable(self.uri).to_pyarrow_table()

    def data(self) -> list[bytes]:
        return sorted(self.table().column("data").to_pylist())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(params=WRITE_PATHS, name="write_path")
def write_path_fixture(request: pytest.FixtureRequest) -> str:
    return request.param


def numbered(count: int, prefix: str = "r") -> list[bytes]:
    return [f"{prefix}-{number:06}".encode() for number in range(count)]


def executors() -> list[psutil.Process]:
    """The executors of this process's Spark."""
    return [child for child in psutil.Process().children(recursive=True) if is_executor(child)]


def is_executor(process: psutil.Process) -> bool:
    try:
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False
