"""Open an application: streams, tables and identity, before any slow step of the start."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.application_check import check_application
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.retry import retry_transient


@dataclass(frozen=True, slots=True)
class OpenedApplication:
    """An application whose tables are usable and belong to it.

    Attributes:
        streams: Streams by the stream part of their lease keys. Key None: the only stream.
        identity: The identity that a worker records at its start.
    """

    streams: Mapping[str | None, StreamId]
    identity: ApplicationIdentity


def open_application(
    settings: ConsumerSettings,
    kinesis: KinesisClient,
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    coordinator_table: CoordinatorStateTable,
    *,
    sink_address: str | None,
    clock: Clock,
    rng: random.Random,
    events: EventSink,
    stop: StopSignal,
) -> OpenedApplication:
    """Look up the streams, create missing tables, and refuse tables of another application.

    Raises:
        NotFoundError: A stream does not exist.
        AccessDeniedError: A permission is missing.
        IncompatibleTableError: The tables are not of this layout or application.
        AwsError: A table stayed unusable for the time of `retry.START_UP`.
        StoppedWhileRetryingError: `stop` was set while a failed step waited.
    """
    is_multi_stream = settings.is_multi_stream
    found = [
        kinesis.resolve_stream(name, multi_stream=is_multi_stream) for name in settings.streams
    ]
    for table in (lease_table, worker_table, coordinator_table):
        retry_transient("look at the tables", table.ensure_exists, clock, rng, events, stop)
    identity = ApplicationIdentity.of(found, is_multi_stream=is_multi_stream, sink=sink_address)
    retry_transient(
        "look at the identity of the application",
        lambda: check_application(settings.application_name, coordinator_table, identity),
        clock,
        rng,
        events,
        stop,
    )
    streams = {stream.serialized if is_multi_stream else None: stream for stream in found}
    return OpenedApplication(streams, identity)
