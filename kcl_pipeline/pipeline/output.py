"""Build what a pipeline writes with: the batch writer, the sink, and jobs of executors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kcl_pipeline.aws import AwsClients, KinesisSource
from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.delta.storage import table_root
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.foreach import ForeachArrow, ForeachArrowSink, ForeachBatchSink
from kcl_pipeline.leases.application import MAX_SINK, ApplicationIdentity
from kcl_pipeline.leases.stored_shards import SinkShards, StoredShards
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.processors import ProcessorCalls, ProcessorSink
from kcl_pipeline.text import printable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from kcl_pipeline.batch import BatchWriter
    from kcl_pipeline.delta.files import TableColumns
    from kcl_pipeline.kinesis.client import KinesisClient
    from kcl_pipeline.kinesis.ranges import RangeJobs
    from kcl_pipeline.sinks.sink import Sink
    from kcl_pipeline.spark.executors import TaskSource

PipelineSink = DeltaSink | ForeachArrowSink | ForeachBatchSink | ProcessorSink

SessionFactory = Callable[[], "SparkSession"]
"""Returns the Spark session of this process."""


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """The fields of a `KinesisPipeline` that decide how its batches are written."""

    name: str
    settings: ConsumerSettings
    sink: PipelineSink
    transform: Callable[[DataFrame], DataFrame] | None
    transform_arrow: Callable[[pa.Table], pa.Table] | None
    spark_config: Mapping[str, str]

    def open(
        self,
        session_factory: SessionFactory | None,
        clients: AwsClients,
        events: EventSink = ignore_events,
        memory: MemoryBudget | None = None,
    ) -> tuple[BatchWriter, Sink, RangeJobs | None]:
        """Return the writer, the sink, and the jobs of executors that fetch, if they do.

        For a function the writer and the sink are one object. pyspark is loaded only if a session
        is needed. The writer counts what it holds in `memory`.
        """
        sink = self.sink
        if not isinstance(sink, DeltaSink):
            if self.settings.retrieval.fetch_on == "executors":
                raise SettingsError(
                    "retrieval.fetch_on='executors' needs a DeltaSink, and sink is a "
                    f"{type(sink).__name__}. Write fetch_on='driver'."
                )
            if isinstance(sink, ProcessorSink):
                settings = self.settings
                calls = ProcessorCalls(
                    sink,
                    settings.retrieval.max_records,
                    skips_failures=settings.batch.failed_records == "skip",
                    calls_empty=settings.worker.call_process_records_even_for_empty_record_list,
                )
                return calls, calls, None
            if isinstance(sink, ForeachArrowSink):
                arrow = ForeachArrow(sink, self.transform_arrow, memory)
                return arrow, arrow, None
            from kcl_pipeline.spark.foreach import ForeachBatch  # noqa: PLC0415 (it needs pyspark)

            both = ForeachBatch(self._session(session_factory), sink, self.transform)
            return both, both, None
        committer = DeltaCommitter(sink, self.name, events=events)
        if self.transform is None:
            writer, range_jobs = self._open_arrow(
                sink, committer.columns, session_factory, clients, memory
            )
            return writer, committer, range_jobs
        from kcl_pipeline.spark.writer import SparkBatchWriter  # noqa: PLC0415 (it needs pyspark)

        session = self._session(session_factory)
        frames = SparkBatchWriter(
            session,
            self.transform,
            sink.uri,
            sink.partition_by,
            sink.storage_options,
            events,
            memory,
            committer.columns,
        )
        if not self.executors_fetch(session.sparkContext.master or ""):
            frames.prepare()
            return frames, committer, None
        # it needs pyspark
        from kcl_pipeline.spark.executors import FrameRangeJobs, ship_by_value  # noqa: PLC0415

        ship_by_value(self.transform)
        return (
            frames,
            committer,
            FrameRangeJobs(
                session, self.task_source(clients), frames, self.settings.retrieval.executors_port
            ),
        )

    def _open_arrow(
        self,
        sink: DeltaSink,
        columns: Callable[[], TableColumns],
        session_factory: SessionFactory | None,
        clients: AwsClients,
        memory: MemoryBudget | None,
    ) -> tuple[BatchWriter, RangeJobs | None]:
        """Return the writer of the Arrow path, and the jobs of executors that fetch."""
        table = (sink.uri, sink.partition_by, sink.storage_options)
        writer = ArrowBatchWriter(self.transform_arrow, *table, memory=memory, columns=columns)
        if not self.executors_fetch(self.spark_config.get("spark.master", "local[*]")):
            return writer, None
        # it needs pyspark
        from kcl_pipeline.spark.executors import ArrowRangeJobs, ship_by_value  # noqa: PLC0415

        session = self._session(session_factory)
        ship_by_value(self.transform_arrow)
        return writer, ArrowRangeJobs(
            session, self.task_source(clients), self.transform_arrow, *table, columns
        )

    @property
    def takes_dead_letters(self) -> bool:
        """Whether the sink can store dead letters."""
        return isinstance(self.sink, DeltaSink) or dead_letter_address(self.sink) is not None

    def stored_shards(self) -> StoredShards | None:
        """Return what asks the table for positions. None: the sink stores none.

        The table is not opened before the first question.
        """
        sink, name = self.sink, self.name
        if not isinstance(sink, DeltaSink):
            return None
        return SinkShards(cache(lambda: DeltaCommitter(sink, name)))

    def executors_fetch(self, master: str) -> bool:
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

    def task_source(self, clients: AwsClients) -> TaskSource:
        """Return what a task of an executor needs to read the streams."""
        from kcl_pipeline.spark.executors import TaskSource  # noqa: PLC0415 (it needs pyspark)

        return TaskSource(
            KinesisSource.of(self.settings, clients),
            self.settings.retrieval,
            self.settings.shard_sync.initial_timestamp,
        )

    def _session(self, session_factory: SessionFactory | None) -> SparkSession:
        # it needs pyspark
        from kcl_pipeline.spark.session import build_session, warm_up  # noqa: PLC0415

        session = (
            session_factory() if session_factory else build_session(self.name, self.spark_config)
        )
        warm_up(session)
        return session


def sink_address(sink: PipelineSink) -> str:
    """Return the sink as the application record stores it.

    `delta:<root of the table>`, or `function` or `processor`, which may write anywhere.
    """
    if isinstance(sink, ProcessorSink):
        return "processor"
    if not isinstance(sink, DeltaSink):
        return "function"
    return "delta:" + printable(re.sub(r"^s3a://", "s3://", table_root(sink.uri)), MAX_SINK)


def identity_of_settings(
    settings: ConsumerSettings, kinesis: KinesisClient, sink: PipelineSink | None
) -> ApplicationIdentity:
    """Return the streams of the settings and the sink, as the application record stores them.

    Args:
        settings: The settings, which name the streams.
        kinesis: Resolves the streams.
        sink: The sink. None: it is not known.
    """
    is_multi_stream = settings.is_multi_stream
    return ApplicationIdentity.of(
        [kinesis.resolve_stream(name, multi_stream=is_multi_stream) for name in settings.streams],
        is_multi_stream=is_multi_stream,
        sink=None if sink is None else sink_address(sink),
        shard_sync_of=settings.shard_sync_of,
        whole_aggregates=None if sink is None else settings.retrieval.skip_kpl_deaggregation,
    )
