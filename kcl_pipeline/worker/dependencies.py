"""What a worker is made of, and the types that its modules share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kcl_pipeline.background import Spawn, spawn_thread
from kcl_pipeline.batch import BatchWriter, TransactionalSink
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient
from kcl_pipeline.kinesis.ranges import RangeJobs
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.metrics.provider import MetricProvider
from kcl_pipeline.worker.starting import OpenedApplication
from kcl_pipeline.worker.summary import WorkerProgress

Mode = Literal["continuous", "drain"]
ProgressCallback = Callable[[WorkerProgress], None]


@dataclass(frozen=True, slots=True)
class WorkerDependencies:
    """What a worker is made of.

    `metric` None reports no CPU; `leader` None: somebody else leads. `spawn` starts the threads,
    and `parallel` False makes renewals one after the other: a simulation sets both. `fan_out` None:
    shards can only be polled. `range_jobs` None: this process reads the shards itself.
    `takes_dead_letters`: whether the sink has a place for them.
    `idle_seconds`: how long the processing thread waits for data before it looks at its leases
    again. `sink_address`: where the rows go, which all workers of an application have in common;
    None: not compared. `application` None: the worker opens it when it starts.
    """

    settings: ConsumerSettings
    lease_table: LeaseTable
    worker_table: WorkerMetricsTable
    coordinator_table: CoordinatorStateTable
    kinesis: KinesisClient
    writer: BatchWriter
    sink: TransactionalSink
    clock: Clock
    rng: random.Random
    events: EventSink
    metric: MetricProvider | None = None
    leader: LeaderCycle | None = None
    leader_patience_seconds: float = 0.0
    run_id: str | None = None
    spawn: Spawn = spawn_thread
    parallel: bool = True
    fan_out: FanOutClient | None = None
    range_jobs: RangeJobs | None = None
    takes_dead_letters: bool = True
    idle_seconds: float = 0.05
    sink_address: str | None = None
    application: OpenedApplication | None = None
