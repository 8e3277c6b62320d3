"""Create the lifecycle of a worker's shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.identity_check import is_removed
from kcl_pipeline.leases.store import MapCallable
from kcl_pipeline.worker.commit.protocol import CommitProtocol
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.shards.admission import Admission
from kcl_pipeline.worker.shards.ended import EndedLeases
from kcl_pipeline.worker.shards.lifecycle import Lifecycle
from kcl_pipeline.worker.shards.losses import LossCheck
from kcl_pipeline.worker.shards.parents import ParentCheck
from kcl_pipeline.worker.shards.streams import LeaseStreams
from kcl_pipeline.worker.sources.batch_source import BatchSource


def make_lifecycle(
    parts: WorkerDependencies,
    worker_id: str,
    streams: LeaseStreams,
    leases: HeldLeases,
    source: BatchSource,
    protocol: CommitProtocol,
    check_application: Callable[[], None],
    map: MapCallable,  # noqa: A002 (it stands for the builtin)
) -> Lifecycle:
    """Create the lifecycle from the dependencies of the worker.

    Args:
        parts: The dependencies.
        worker_id: Names the worker in events.
        streams: The streams of the leases.
        leases: The leases that are held.
        source: Reads the shards.
        protocol: Resolves and checkpoints.
        check_application: Raises if the application has other streams or another sink now.
        map: Runs reads and writes of several lease rows.
    """
    settings, clock, events = parts.settings, parts.clock, parts.events
    table, kinesis = parts.lease_table, parts.kinesis
    removed, of = partial(is_removed, parts.coordinator_table), streams.shard_sync_of
    losses = LossCheck(
        worker_id,
        settings,
        table,
        kinesis,
        clock,
        events,
        removed,
        of,
        positions=lambda: protocol.stored is not None,
    )
    return Lifecycle(
        worker_id=worker_id,
        settings=settings,
        streams=streams,
        table=table,
        leases=leases,
        source=source,
        protocol=protocol,
        parents=ParentCheck(
            worker_id, of, table, leases, kinesis, clock, events, lambda: protocol.stored
        ),
        losses=losses,
        ended=EndedLeases(settings.shard_sync, table, leases, clock, events),
        clock=clock,
        events=events,
        admits=Admission(check_application, clock, events).admits,
        map=map,
    )
