"""Define a pipeline: the object that users write.

Example::

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

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kcl_pipeline.arguments import check_text, checked_arguments, function_name
from kcl_pipeline.aws import AwsClients, KinesisSource, open_fan_out, open_kinesis, open_tables
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.delta.arrow_writer import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.delta.storage.storage import table_root
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.application import MAX_SINK
from kcl_pipeline.pipeline_arguments import Fleet, check_arguments, checked_settings
from kcl_pipeline.settings_errors import check_names, without_secrets
from kcl_pipeline.text import printable
from kcl_pipeline.worker.starting import OpenedApplication, open_application

if TYPE_CHECKING:
    import pyarrow as pa
    from dagster import Definitions
    from pyspark.sql import DataFrame, SparkSession

    from kcl_pipeline.batch import BatchWriter, TransactionalSink
    from kcl_pipeline.kinesis.ranges import RangeJobs
    from kcl_pipeline.metrics.provider import MetricProvider
    from kcl_pipeline.spark.executors import TaskSource
    from kcl_pipeline.spark.foreach import ForeachBatchSink
    from kcl_pipeline.worker.worker import Worker

__all__ = ["Fleet", "KinesisPipeline", "SessionFactory", "sink_address"]

SessionFactory = Callable[[], "SparkSession"]


@checked_arguments
@dataclass(frozen=True)
class KinesisPipeline:
    """A KCL application that reads streams, transforms the records and writes them to a sink.

    Set at most one of `transform` and `transform_arrow`. With neither, the sink receives the
    records unchanged.

    Args:
        name: KCL application name. It names the three tables and the Dagster definitions.
        streams: Names or ARNs of the streams.
        sink: A `DeltaSink` (exactly once) or a `spark.foreach.ForeachBatchSink` (at least once).
        transform: Takes and returns a Spark DataFrame. The input has the columns of
            `RECORD_SCHEMA`.
        transform_arrow: Takes and returns a `pyarrow.Table`, without a JVM.
        workers: How many workers the sensor runs.
        settings_overrides: Values for fields of `config.ConsumerSettings`, such as
            `{"lease": {"failover_time_millis": 5000}}`.
        spark_config: Spark properties.

    Raises:
        SettingsError: An argument is wrong. The message says what to write instead.
    """

    name: str
    streams: Sequence[str]
    sink: DeltaSink | ForeachBatchSink
    transform: Callable[[DataFrame], DataFrame] | None = None
    transform_arrow: Callable[[pa.Table], pa.Table] | None = None
    workers: Fleet = field(default_factory=Fleet)
    settings_overrides: Mapping[str, Any] = field(default_factory=dict)
    spark_config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(
            self.name,
            self.streams,
            self.sink,
            self.transform,
            self.transform_arrow,
            self.workers,
            self.spark_config,
        )
        _ = self.settings

    def __repr__(self) -> str:
        return (
            f"KinesisPipeline(name={self.name!r}, streams={list(self.streams)!r}, "
            f"sink={self.sink!r}, transform={function_name(self.transform)}, "
            f"transform_arrow={function_name(self.transform_arrow)}, workers={self.workers!r}, "
            f"settings_overrides={dict(self.settings_overrides)!r}, "
            f"spark_config={without_secrets(self.spark_config)!r})"
        )

    @cached_property
    def settings(self) -> ConsumerSettings:
        """All settings, validated."""
        return checked_settings(self.name, self.streams, self.settings_overrides)

    def definitions(self, **options: Any) -> Definitions:
        """Build the Dagster definitions: assets, checks, jobs, leader sensor and resources.

        Args:
            options: Arguments of `definitions.build_definitions`.
        """
        # Dagster is loaded only where it is used
        from kcl_pipeline.definitions import build_definitions  # noqa: PLC0415

        known = inspect.signature(build_definitions).parameters
        check_names(options, [name for name in known if name != "pipeline"], "an option")
        return build_definitions(self, **options)

    def ensure_tables(
        self,
        *,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
        stop: StopSignal | None = None,
    ) -> None:
        """Create the three tables if they are missing, and wait until they can be used.

        Also looks up the streams, and refuses the tables of another application.

        Raises:
            NotFoundError: A stream does not exist.
            AccessDeniedError: A permission is missing.
            IncompatibleTableError: The tables have another layout or client version.
            OtherApplicationError: The tables belong to another application.
            ThrottledError: AWS throttles the calls, also after retries.
            UnavailableError: AWS cannot be reached, also after retries.
            StoppedWhileRetryingError: `stop` was set during the wait before a retry.
        """
        clock, clients = clock or SystemClock(), clients or AwsClients(self.settings)
        self._open(clients, clock, events, stop or clock.signal())

    def _open(
        self, clients: AwsClients, clock: Clock, events: EventSink, stop: StopSignal
    ) -> OpenedApplication:
        tables = open_tables(self.settings, clients, clock)
        return open_application(
            self.settings,
            open_kinesis(self.settings, clients, clock),
            tables.lease,
            tables.workers,
            tables.coordinator,
            sink_address=sink_address(self.sink),
            clock=clock,
            rng=random.Random(self.name),
            events=events,
            stop=stop,
        )

    def build_leader(
        self,
        owner_name: str,
        *,
        resume_own_name: bool = False,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
    ) -> LeaderCycle:
        """Build a leader of this application. It reads and writes nothing before its first cycle.

        Args:
            owner_name: Name of the leader in the lock row.
            resume_own_name: Continue with a lock that has this owner name, instead of waiting until
                it expires.
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.
            events: Receives the events of the leader.
        """
        clock = clock or SystemClock()
        clients = clients or AwsClients(self.settings)
        tables = open_tables(self.settings, clients, clock)
        kinesis = open_kinesis(self.settings, clients, clock)
        return LeaderCycle(
            self.settings,
            tables.lease,
            tables.workers,
            tables.coordinator,
            kinesis,
            clock,
            events,
            owner_name,
            resume_own_name=resume_own_name,
        )

    def build_worker(
        self,
        worker_id: str,
        *,
        session_factory: SessionFactory | None = None,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
        stop: StopSignal | None = None,
        run_id: str | None = None,
        leads: bool = True,
        leader_patience_seconds: float = 0.0,
    ) -> Worker:
        """Build a worker of this application. Creates its tables and its Spark session.

        Args:
            worker_id: Unique among the running workers of the application.
            session_factory: Creates the Spark session. None: by `spark_config`.
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.
            events: Receives the events of the worker.
            stop: Stops the start-up.
            run_id: Identifies this process. None: derived from the worker id and the time.
            leads: Whether the worker is a standby leader.
            leader_patience_seconds: Time without a leader after which the standby leader leads.

        Raises:
            StoppedWhileRetryingError: `stop` was set before the tables could be used.
            KclError: As in `ensure_tables`.
        """
        check_text("worker_id", worker_id, "Write a name that no other worker has, such as 'w-1'")
        from kcl_pipeline.worker.dependencies import WorkerDependencies  # noqa: PLC0415
        from kcl_pipeline.worker.worker import Worker  # noqa: PLC0415

        clock = clock or SystemClock()
        clients = clients or AwsClients(self.settings)
        # Before anything slow, so that the leader can begin
        application = self._open(clients, clock, events, stop or clock.signal())
        tables = open_tables(self.settings, clients, clock)
        kinesis = open_kinesis(self.settings, clients, clock)
        leader = (
            self.build_leader(worker_id, clients=clients, clock=clock, events=events)
            if leads
            else None
        )
        writer, sink, range_jobs = self._output(session_factory, clients, events)
        dependencies = WorkerDependencies(
            settings=self.settings,
            lease_table=tables.lease,
            worker_table=tables.workers,
            coordinator_table=tables.coordinator,
            kinesis=kinesis,
            writer=writer,
            sink=sink,
            clock=clock,
            # Not seeded by the worker id: processes that share it must draw different numbers
            rng=random.SystemRandom(),
            events=events,
            metric=self._metric(clock, events),
            leader=leader,
            leader_patience_seconds=leader_patience_seconds,
            run_id=run_id or f"{worker_id}@{round(clock.wall() * 1000)}",
            fan_out=open_fan_out(self.settings, clients) if range_jobs is None else None,
            range_jobs=range_jobs,
            takes_dead_letters=isinstance(self.sink, DeltaSink)
            or self.sink.dead_letter_uri is not None,
            sink_address=sink_address(self.sink),
            application=application,
        )
        return Worker(worker_id, dependencies)

    def _metric(self, clock: Clock, events: EventSink) -> MetricProvider | None:
        from kcl_pipeline.metrics.platform import select_provider  # noqa: PLC0415 (it reads files)

        if self.settings.worker.disable_worker_metrics:
            return None
        return select_provider(clock, events=events)

    def _output(
        self,
        session_factory: SessionFactory | None,
        clients: AwsClients,
        events: EventSink = ignore_events,
    ) -> tuple[BatchWriter, TransactionalSink, RangeJobs | None]:
        """Return the writer, the sink, and the jobs of executors that fetch, if they do.

        For a `ForeachBatchSink` the writer and the sink are one object. pyspark is loaded only if a
        session is needed.
        """
        sink = self.sink
        if not isinstance(sink, DeltaSink):
            from kcl_pipeline.spark.foreach import ForeachBatch  # noqa: PLC0415 (it needs pyspark)

            if self.settings.retrieval.fetch_on == "executors":
                raise SettingsError(
                    "retrieval.fetch_on='executors' needs a DeltaSink, and sink is a "
                    "ForeachBatchSink. Write fetch_on='driver'."
                )
            both = ForeachBatch(self._session(session_factory), sink, self.transform, self.name)
            return both, both, None
        committer = DeltaCommitter(sink, self.name, events=events)
        if self.transform is None:
            writer = ArrowBatchWriter(
                self.transform_arrow, sink.uri, sink.partition_by, sink.storage_options
            )
            if not self._executors_fetch(self.spark_config.get("spark.master", "local[*]")):
                return writer, committer, None
            # it needs pyspark
            from kcl_pipeline.spark.executors import ArrowRangeJobs, ship_by_value  # noqa: PLC0415

            session = self._session(session_factory)
            ship_by_value(self.transform_arrow)
            return (
                writer,
                committer,
                ArrowRangeJobs(
                    session,
                    self._source(clients),
                    self.transform_arrow,
                    sink.uri,
                    sink.partition_by,
                    sink.storage_options,
                ),
            )
        from kcl_pipeline.spark.writer import SparkBatchWriter  # noqa: PLC0415 (it needs pyspark)

        session = self._session(session_factory)
        frames = SparkBatchWriter(
            session, self.transform, sink.uri, sink.partition_by, sink.storage_options
        )
        if not self._executors_fetch(session.sparkContext.master or ""):
            return frames, committer, None
        # it needs pyspark
        from kcl_pipeline.spark.executors import FrameRangeJobs, ship_by_value  # noqa: PLC0415

        ship_by_value(self.transform)
        return (
            frames,
            committer,
            FrameRangeJobs(
                session, self._source(clients), frames, self.settings.retrieval.executors_port
            ),
        )

    def _executors_fetch(self, master: str) -> bool:
        """Return whether executors fetch the records.

        Raises:
            SettingsError: Executors fetch, but the settings require subscriptions.
        """
        retrieval = self.settings.retrieval
        executors_fetch = retrieval.fetch_on == "executors" or (
            retrieval.fetch_on == "auto" and not re.match(r"local(\[|$)", master)
        )
        if executors_fetch and retrieval.retrieval_mode == "fan_out":
            raise SettingsError(
                "retrieval.retrieval_mode='fan_out' does not work when executors fetch. "
                "Write fetch_on='driver', or retrieval_mode='polling'."
            )
        return executors_fetch

    def _source(self, clients: AwsClients) -> TaskSource:
        from kcl_pipeline.spark.executors import TaskSource  # noqa: PLC0415 (it needs pyspark)

        return TaskSource(
            KinesisSource.of(self.settings, clients),
            self.settings.retrieval,
            self.settings.shard_sync.initial_timestamp,
        )

    def _session(self, session_factory: SessionFactory | None) -> SparkSession:
        from kcl_pipeline.spark.session import build_session  # noqa: PLC0415 (it needs pyspark)
        from kcl_pipeline.spark.warm import warm_up  # noqa: PLC0415 (it needs pyspark)

        session = (
            session_factory() if session_factory else build_session(self.name, self.spark_config)
        )
        warm_up(session)
        return session


def sink_address(sink: DeltaSink | ForeachBatchSink) -> str:
    """Return the sink as the application record stores it.

    `delta:<root of the table>`, or `foreach_batch`, whose function may write anywhere.
    """
    if not isinstance(sink, DeltaSink):
        return "foreach_batch"
    root = table_root(sink.uri)
    return "delta:" + printable(re.sub(r"^s3a://", "s3://", root), MAX_SINK)
