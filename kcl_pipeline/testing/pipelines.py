"""Run a whole pipeline in a test: Kinesis and DynamoDB in memory, the table in a folder."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from deltalake import DeltaTable

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import KclError, SettingsError
from kcl_pipeline.events import Event
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.pipeline import KinesisPipeline, sink_address
from kcl_pipeline.pipeline.output import PipelineSink
from kcl_pipeline.processors import ProcessorCalls, ProcessorSink
from kcl_pipeline.shards import AUTO, USER_PARTITION_KEY
from kcl_pipeline.testing.failures import FailingKinesis, FailingSink, Failures, WorkerProcess
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.records import Payload, encode, spark_session
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.summary import WorkerSummary
from kcl_pipeline.worker.worker import Worker

_E = TypeVar("_E", bound=Event)

_FAST: Final[dict[str, dict[str, Any]]] = {
    "lease": {"failover_time_millis": 500, "lease_discovery_interval_millis": 50},
    "assignment": {"lease_assignment_interval_millis": 50},
    "leader": {"leader_lease_duration_millis": 400, "leader_heartbeat_period_millis": 100},
    "worker": {
        "disable_worker_metrics": True,
        "parent_shard_poll_interval_millis": 50,
        "task_backoff_time_millis": 50,
    },
    "retrieval": {"fetch_on": "driver", "retrieval_mode": "polling"},
    "batch": {"min_batch_interval_millis": 0},
}
"""Times for tests. They replace those of the pipeline; all its other settings apply."""


class EventLog(list[Event]):
    """The events of all workers of a test, in the order in which they were emitted."""

    def of(self, kind: type[_E]) -> list[_E]:
        """Return the events of one class."""
        return [event for event in self if isinstance(event, kind)]


class PipelineTest:
    """A pipeline with its streams, tables and workers in one test. A context manager.

    The transform, the batches, the leases and the commits are those of production. Kinesis and
    DynamoDB are in memory. The Delta table, or the dead-letter table of a function, is in a
    temporary folder. The function of a sink is called. Times such as the failover time are short.

    Args:
        pipeline: The pipeline. It is not changed.
        shards: Number of shards of each stream.
        record_distribution: `AUTO`: the streams take records without a partition key, and choose
            the shard of each record themselves.

    Raises:
        SettingsError: The pipeline selects its streams.
    """

    pipeline: KinesisPipeline
    """The pipeline with the sink and the times of the test."""
    kinesis: KinesisModel
    """Kinesis. `kinesis.call("SplitShard", StreamName=…, …)` makes any call of its API."""
    events: EventLog
    """The events of all workers and leaders."""

    def __init__(
        self,
        pipeline: KinesisPipeline,
        *,
        shards: int = 1,
        record_distribution: Literal["AUTO", "USER_PARTITION_KEY"] = USER_PARTITION_KEY,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kcl-test-")
        self._dead_letters: str | None
        self._uri = str(Path(self._folder.name) / "table")
        sink: PipelineSink
        if isinstance(pipeline.sink, DeltaSink):
            self._dead_letters = f"{self._uri}_dead_letters"
            sink = replace(pipeline.sink, uri=self._uri, dead_letter_uri=None, storage_options={})
        elif isinstance(pipeline.sink, ProcessorSink):
            self._dead_letters, sink = None, pipeline.sink
        else:
            self._dead_letters = pipeline.sink.dead_letter_uri and f"{self._uri}_dead_letters"
            sink = replace(pipeline.sink, dead_letter_uri=self._dead_letters, storage_options={})
        if pipeline.settings.selects_streams:
            raise SettingsError(
                "PipelineTest creates the streams itself. Write streams=['orders'] in the test: "
                "PipelineTest(replace(pipeline, streams=['orders']))."
            )
        self.pipeline = replace(
            pipeline, sink=sink, settings_overrides=_merged(pipeline.settings_overrides, _FAST)
        )
        self.events = EventLog()
        self._clock = SystemClock()
        self.kinesis = KinesisModel(self._clock)
        for stream in pipeline.settings.streams:
            self.kinesis.create_stream(_name(stream), shards, record_distribution)
        self._is_keyless = record_distribution == AUTO
        self._leases = InMemoryLeaseTable(clock=self._clock, exists=False)
        self._metrics = InMemoryWorkerMetricsTable(clock=self._clock, exists=False)
        self._coordinator = InMemoryCoordinatorStateTable(clock=self._clock, exists=False)
        self._failures = Failures()
        self._workers = 0
        self._records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def put(
        self, *payloads: Payload, stream: str | None = None, partition_key: str | None = None
    ) -> None:
        """Put one record per payload.

        Args:
            payloads: The data. A string is encoded as UTF-8, and a mapping as JSON.
            stream: The stream. None: the first one of the pipeline.
            partition_key: The partition key of all records. None: another one for each record, or
                no key if the streams take records without one.
        """
        for payload in payloads:
            self.kinesis.call(
                "PutRecord",
                StreamName=stream or _name(self.pipeline.settings.streams[0]),
                PartitionKey=partition_key
                or (None if self._is_keyless else f"key-{self._records}"),
                Data=encode(payload),
            )
            self._records += 1

    def run(self) -> WorkerSummary:
        """Run one worker until the records that are in the streams now are committed.

        Returns:
            The summary. Its reason is FAILED while a shard is paused.

        Raises:
            KclError: As a worker raises it.
        """
        stop = self._clock.signal()
        return self._worker(WorkerProcess(self._failures, stop)).run(stop, mode="drain")

    def run_and_crash(self, *, before: str | None = None, after: str | None = None) -> None:
        """Run one worker that crashes at a call: it releases nothing and writes nothing more.

        Name one operation: `ensure`, `positions`, `commit` or `write_dead_letters` of the table, or
        one of Kinesis or DynamoDB such as `GetRecords` or `UpdateItem`.

        Args:
            before: Crash before the first call of this operation has its effect.
            after: Crash after it had its effect, and before the worker knows.

        Raises:
            SettingsError: Both or no operation is given.
            AssertionError: The worker did not call the operation.
        """
        operation = before or after
        if operation is None or (before and after):
            raise SettingsError("run_and_crash needs one operation. Write after='commit'.")
        Failures().plan(operation, applied=False)  # refuses unknown operations
        stop = self._clock.signal()
        process = WorkerProcess(self._failures, stop, (operation, after is not None))
        try:
            self._worker(process).run(stop, mode="drain")
        except KclError:
            if not process.crashed:
                raise
        if not process.crashed:
            raise AssertionError(f"the worker ended without a call of {operation}")

    def fail_next(self, operation: str, *, applied: bool = False) -> None:
        """Let the next call of an operation fail once.

        Args:
            operation: As in `run_and_crash`.
            applied: The call has its effect, and only its response is lost.

        Raises:
            SettingsError: There is no such operation.
        """
        self._failures.plan(operation, applied=applied)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows of the table of a `DeltaSink`. Their order is not defined."""
        return _rows(self._uri)

    def dead_letters(self) -> list[dict[str, Any]]:
        """Return all dead letters. Their order is not defined."""
        return _rows(self._dead_letters) if self._dead_letters else []

    def _worker(self, process: WorkerProcess) -> Worker:
        self._workers += 1
        name = f"worker-{self._workers}"
        pipeline, settings = self.pipeline, self.pipeline.settings
        if process.can_crash:  # it releases nothing, so it does not wait for releases either
            lease = settings.lease.model_copy(update={"release_leases_on_shutdown": False})
            settings = settings.model_copy(update={"lease": lease})
        before, after = process.before, process.after
        leases = self._leases.view(before_call=before, after_call=after)
        workers = self._metrics.view(before_call=before, after_call=after)
        coordinator = self._coordinator.view(before_call=before, after_call=after)
        kinesis = FailingKinesis(InMemoryKinesis(self.kinesis), process)
        output = pipeline.output()
        memory, clients = MemoryBudget.of(settings), _no_clients(settings)
        writer, sink, _ = output.open(spark_session, clients, self.events.append, memory)
        return Worker(
            WorkerDependencies(
                worker_id=name,
                settings=settings,
                lease_table=leases,
                worker_table=workers,
                coordinator_table=coordinator,
                kinesis=kinesis,
                writer=writer,
                # A worker makes calls about leases only to the sink of record processors itself
                sink=sink if isinstance(sink, ProcessorCalls) else FailingSink(sink, process),
                clock=self._clock,
                rng=random.Random(self._workers),
                events=self.events.append,
                leader=LeaderCycle(
                    settings,
                    leases,
                    workers,
                    coordinator,
                    kinesis,
                    self._clock,
                    self.events.append,
                    name,
                    rng=random.Random(self._workers),
                    stored=output.stored_shards(),
                ),
                run_id=f"{name}-run",
                idle_seconds=0.01,
                sink_address=sink_address(self.pipeline.sink),
                takes_dead_letters=output.takes_dead_letters,
                memory=memory,
            ),
        )


def _no_clients(settings: ConsumerSettings) -> AwsClients:
    """Clients that nothing uses, because the driver reads and no executor does."""
    return AwsClients(settings)


def _name(stream: str) -> str:
    return stream.rpartition("/")[2]


def _merged(given: Mapping[str, Any], ours: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()
    }
    for section, values in ours.items():
        merged[section] = {**merged.get(section, {}), **values}
    return merged


def _rows(uri: str) -> list[dict[str, Any]]:
    if not DeltaTable.is_deltatable(uri):
        return []
    rows: list[dict[str, Any]] = DeltaTable(uri).to_pyarrow_table().to_pylist()
    return rows
