"""Dependencies of a worker, and the types that its modules share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kcl_pipeline.batch import BatchWriter
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient
from kcl_pipeline.kinesis.ranges import RangeJobs
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leader.streams import SelectStreams
from kcl_pipeline.leases.application import ApplicationIdentity, Pause, unnamed_labels
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.metrics.reporter import MetricProvider
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import Sink
from kcl_pipeline.threads import Spawn, spawn_thread

Mode = Literal["continuous", "drain"]


@dataclass(frozen=True, slots=True)
class OpenedApplication:
    """An application whose tables are usable and belong to it.

    Attributes:
        streams: The streams of the settings that can be used now.
        identity: The identity that a worker records at its start.
        unavailable: Errors of the other streams of the settings.
        pause: The pause of the application, when it was opened. None: it was not paused.
    """

    streams: tuple[StreamId, ...]
    identity: ApplicationIdentity
    unavailable: Mapping[str, AwsError] = field(default_factory=dict)
    pause: Pause | None = None

    def unnamed(self, recorded: ApplicationIdentity) -> tuple[str, ...]:
        """Return the recorded streams that the settings do not name."""
        arns = (stream.arn or stream.name for stream in self.streams)
        return unnamed_labels(recorded.streams, (*arns, *self.unavailable))


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """The dependencies of a worker.

    Attributes:
        worker_id: Name of the worker, unique in the application.
        settings: The settings of the application.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        kinesis: Reads shards.
        writer: Transforms and writes batches.
        sink: Commits batches.
        clock: Time source.
        rng: Source of random numbers.
        events: Receives the events of the worker.
        metric: Measures CPU. None: no CPU is reported.
        leader: Cycle of the standby leader. None: this worker never leads.
        leader_patience_seconds: How long an absent lock is left to the sensor.
        run_id: Identifies this run in the worker metrics row.
        replaces: Id of the worker whose leases the leader moves to this one. None: of no worker.
        spawn: Starts threads. A simulation replaces it.
        parallel: False: writes of lease rows run one after the other. A simulation sets it.
        fan_out: Client for enhanced fan-out. None: shards are polled.
        range_jobs: Runs executor fetches. None: this process reads the shards.
        takes_dead_letters: Whether the sink can store dead letters.
        idle_seconds: How long the processing thread waits for data before it checks its leases.
        sink_address: Address of the sink, equal for all workers of an application. None: it is not
            compared.
        application: None: the worker opens the application when it starts.
        select: Returns the streams when the worker opens the application. None: the settings name
            them.
        memory: Counts the records and results of the worker. The writer must use the same one.
            None: one of its own, for a writer that counts nothing.
    """

    worker_id: str
    settings: ConsumerSettings
    lease_table: LeaseTable
    worker_table: WorkerMetricsTable
    coordinator_table: CoordinatorStateTable
    kinesis: KinesisClient
    writer: BatchWriter
    sink: Sink
    clock: Clock
    rng: random.Random
    events: EventSink
    metric: MetricProvider | None = None
    leader: LeaderCycle | None = None
    leader_patience_seconds: float = 0.0
    run_id: str | None = None
    replaces: str | None = None
    spawn: Spawn = spawn_thread
    parallel: bool = True
    fan_out: FanOutClient | None = None
    range_jobs: RangeJobs | None = None
    takes_dead_letters: bool = True
    idle_seconds: float = 0.05
    sink_address: str | None = None
    application: OpenedApplication | None = None
    select: SelectStreams | None = None
    memory: MemoryBudget | None = None
