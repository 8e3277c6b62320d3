"""What a user writes: one function and one object.

def per_minute(records: DataFrame) -> DataFrame: ...

orders = KinesisPipeline(
    name="orders",
    streams=["orders"],
    transform=per_minute,
    sink=DeltaSink("lake/orders_per_minute"),
    workers=Fleet(min=2, max=8),
)
defs = orders.definitions()
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kcl_pipeline.aws import AwsClients, KinesisSource, open_fan_out, open_kinesis, open_tables
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.spark.arrow_writer import ArrowBatchWriter
from kcl_pipeline.spark.delta import DeltaCommitter, DeltaSink
from kcl_pipeline.worker.starting import patiently

if TYPE_CHECKING:
    import pyarrow as pa
    from dagster import Definitions
    from pyspark.sql import DataFrame, SparkSession

    from kcl_pipeline.batch import BatchWriter, TransactionalSink
    from kcl_pipeline.records.ranges import RangeJobs
    from kcl_pipeline.spark.executors import TaskSource
    from kcl_pipeline.spark.foreach import ForeachBatchSink
    from kcl_pipeline.worker.worker import Worker

SessionFactory = Callable[[], "SparkSession"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers the sensor keeps running: at least `min`, at most `max`. Raises `SettingsError` unless 1 ≤ min ≤ max."""

    min: int = 1
    max: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise SettingsError(f"Fleet(min={self.min}, max={self.max}): write 1 <= min <= max")


@dataclass(frozen=True)
class KinesisPipeline:
    """A KCL application: streams in, a Spark (or Arrow) function, a Delta table out, exactly once.

    `name` is the KCL application name: it names the three tables and the Dagster definitions. `transform` gets a Spark DataFrame with the columns of
    `records.kinesis.RECORD_SCHEMA` and returns one; `transform_arrow` does the same on `pyarrow.Table` without a JVM; give at most one, none
    keeps the records as they are. `sink` is a `DeltaSink` (exactly once) or a `spark.foreach.ForeachBatchSink` (at least once).
    `settings_overrides` changes any field of `config.ConsumerSettings`, e.g. `{"lease": {"failover_time_millis": 5000}}`.
    `spark_config` are Spark properties. Raises `SettingsError`, with what to write instead.
    """

    name: str
    streams: Sequence[str]
    sink: DeltaSink | ForeachBatchSink
    transform: Callable[[DataFrame], DataFrame] | None = None
    transform_arrow: Callable[[pa.Table], pa.Table] | None = None
    workers: Fleet = Fleet()
    settings_overrides: Mapping[str, Any] = field(default_factory=dict)
    spark_config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transform is not None and self.transform_arrow is not None:
            raise SettingsError("transform and transform_arrow are both set; keep one of them")
        if self.transform_arrow is not None and not isinstance(self.sink, DeltaSink):
            raise SettingsError("transform_arrow needs a DeltaSink; a ForeachBatchSink gets a Spark DataFrame: write transform")
        if isinstance(self.streams, str):
            raise SettingsError(f"streams={self.streams!r} is a text; write streams=[{self.streams!r}]")
        if not isinstance(self.streams, Sequence):
            raise SettingsError(f'streams={self.streams!r} is no list; write the names or ARNs of the streams, such as streams=["orders"]')
        _ = self.settings

    @cached_property
    def settings(self) -> ConsumerSettings:
        """All settings, checked."""
        try:
            return ConsumerSettings.model_validate({**self.settings_overrides, "application_name": self.name, "streams": tuple(self.streams)})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(str(p) for p in e['loc'])}={e['input']!r}: {e['msg']}" for e in error.errors())
            raise SettingsError(f"settings of the pipeline {self.name!r}: {problems}") from None

    def definitions(self, **options: Any) -> Definitions:
        """Dagster definitions: assets, consume job, leader sensor, checks, resources. `options` go to `definitions.build_definitions`."""
        from kcl_pipeline.definitions import build_definitions  # noqa: PLC0415 (Dagster is loaded only where it is used)

        return build_definitions(self, **options)

    def ensure_tables(self, *, clients: AwsClients | None = None, clock: Clock | None = None, events: EventSink = ignore_events) -> None:
        """Look up the streams, then create the three tables where they are missing and wait until they are usable.

        Before anything slow, so that the leader can begin. Raises `NotFound` (a stream), `AccessDenied`, `NotACompatibleTable`, `Unavailable`.
        """
        clock, clients = clock or SystemClock(), clients or AwsClients(self.settings)
        kinesis = open_kinesis(self.settings, clients, clock)
        for stream in self.settings.streams:
            kinesis.resolve_stream(stream, multi_stream=self.settings.is_multi_stream)
        tables = open_tables(self.settings, clients, clock)
        for table in (tables.lease, tables.workers, tables.coordinator):
            patiently("look at the tables", table.ensure_exists, clock, random.Random(table.name), events, clock.signal())

    def build_leader(
        self,
        owner_name: str,
        *,
        resume_own_name: bool = False,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
    ) -> LeaderCycle:
        """A leader for this application; nothing is read or written before its first cycle."""
        clock = clock or SystemClock()
        clients = clients or AwsClients(self.settings)
        tables = open_tables(self.settings, clients, clock)
        kinesis = open_kinesis(self.settings, clients, clock)
        return LeaderCycle(self.settings, tables.lease, tables.workers, tables.coordinator, kinesis, clock, events, owner_name, resume_own_name=resume_own_name)

    def build_worker(
        self,
        worker_id: str,
        *,
        session_factory: SessionFactory | None = None,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
        run_id: str | None = None,
        leads: bool = True,
        leader_patience_seconds: float = 0.0,
    ) -> Worker:
        """A worker for this application; creates its tables and its Spark session.

        `leads`: it leads when nobody else does, after `leader_patience_seconds` without any leader.
        """
        from kcl_pipeline.metrics.platform import select_provider  # noqa: PLC0415 (probes the platform)
        from kcl_pipeline.worker.worker import Worker, WorkerParts  # noqa: PLC0415

        clock = clock or SystemClock()
        clients = clients or AwsClients(self.settings)
        self.ensure_tables(clients=clients, clock=clock, events=events)
        tables = open_tables(self.settings, clients, clock)
        kinesis = open_kinesis(self.settings, clients, clock)
        leader = self.build_leader(worker_id, clients=clients, clock=clock, events=events) if leads else None
        writer, sink, range_jobs = self._output(session_factory, clients)
        parts = WorkerParts(
            settings=self.settings,
            lease_table=tables.lease,
            worker_table=tables.workers,
            coordinator_table=tables.coordinator,
            kinesis=kinesis,
            writer=writer,
            sink=sink,
            clock=clock,
            rng=random.Random(worker_id),
            events=events,
            metric=None if self.settings.worker.disable_worker_metrics else select_provider(clock),
            leader=leader,
            leader_patience_seconds=leader_patience_seconds,
            run_id=run_id,
            fan_out=open_fan_out(self.settings, clients) if range_jobs is None else None,
            range_jobs=range_jobs,
        )
        return Worker(worker_id, parts)

    def _output(self, session_factory: SessionFactory | None, clients: AwsClients) -> tuple[BatchWriter, TransactionalSink, RangeJobs | None]:
        """What writes batches, what commits them, and what has executors read them, if they do; for a `ForeachBatchSink` the first two are one object.

        pyspark is loaded only where a session is needed.
        """
        sink = self.sink
        if not isinstance(sink, DeltaSink):
            from kcl_pipeline.spark.foreach import ForeachBatch  # noqa: PLC0415 (it needs pyspark)

            if self.settings.retrieval.fetch_on == "executors":
                raise SettingsError("fetch_on='executors' needs a DeltaSink; with a ForeachBatchSink the driver reads: leave fetch_on out")
            both = ForeachBatch(self._session(session_factory), sink, self.transform)
            return both, both, None
        committer = DeltaCommitter(sink, self.name)
        if self.transform is None:
            writer = ArrowBatchWriter(self.transform_arrow, sink.uri, sink.partition_by, sink.storage_options)
            if not self._executors_fetch(self.spark_config.get("spark.master", "local[*]")):
                return writer, committer, None
            from kcl_pipeline.spark.executors import ArrowRangeJobs, ship_by_value  # noqa: PLC0415 (it needs pyspark)

            session = self._session(session_factory)
            ship_by_value(self.transform_arrow)
            return writer, committer, ArrowRangeJobs(session, self._source(clients), self.transform_arrow, sink.uri, sink.partition_by, sink.storage_options)
        from kcl_pipeline.spark.writer import SparkBatchWriter  # noqa: PLC0415 (it needs pyspark)

        session = self._session(session_factory)
        frames = SparkBatchWriter(session, self.transform, sink.uri, sink.partition_by, sink.storage_options)
        if not self._executors_fetch(session.sparkContext.master or ""):
            return frames, committer, None
        from kcl_pipeline.spark.executors import FrameRangeJobs, ship_by_value  # noqa: PLC0415 (it needs pyspark)

        ship_by_value(self.transform)
        return frames, committer, FrameRangeJobs(session, self._source(clients), frames, self.settings.retrieval.executors_port)

    def _executors_fetch(self, master: str) -> bool:
        """Whether the shards are read by executors. Raises `SettingsError` when they are told to, but shards are to be subscribed to."""
        retrieval = self.settings.retrieval
        found = retrieval.fetch_on == "executors" or (retrieval.fetch_on == "auto" and not re.match(r"local(\[|$)", master))
        if found and retrieval.retrieval_mode == "fan_out":
            raise SettingsError("retrieval_mode='fan_out' needs a process that stays subscribed, but executors fetch; write fetch_on='driver', or polling")
        return found

    def _source(self, clients: AwsClients) -> TaskSource:
        from kcl_pipeline.spark.executors import TaskSource  # noqa: PLC0415 (it needs pyspark)

        return TaskSource(KinesisSource.of(self.settings, clients), self.settings.retrieval, self.settings.shard_sync.initial_timestamp)

    def _session(self, session_factory: SessionFactory | None) -> SparkSession:
        from kcl_pipeline.spark.session import build_session  # noqa: PLC0415 (it needs pyspark)
        from kcl_pipeline.spark.warm import warm_up  # noqa: PLC0415 (likewise)

        session = session_factory() if session_factory else build_session(self.name, self.spark_config)
        warm_up(session)
        return session
