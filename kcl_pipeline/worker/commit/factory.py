"""Choose and create the commit protocol of a worker: the recorded one, if one is recorded."""

from __future__ import annotations

from kcl_pipeline.batch import PositionStore
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.worker.commit.positions import PositionsCommit
from kcl_pipeline.worker.commit.protocol import CommitProtocol
from kcl_pipeline.worker.commit.two_phase import TwoPhaseCommit
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.threads import Pools


def make_protocol(
    parts: WorkerDependencies,
    leases: HeldLeases,
    stop: StopSignal,
    pools: Pools,
    *,
    recorded: bool | None,
) -> CommitProtocol:
    """Create the commit protocol.

    Args:
        parts: The dependencies of the worker.
        leases: The leases of the worker.
        stop: Ends waits.
        pools: Run writes of several rows.
        recorded: Whether the table stores positions, as the application is recorded. None: that is
            not recorded, and the settings decide.
    """
    settings = parts.settings
    own = (leases, parts.sink, parts.clock, parts.events, parts.worker_id)
    wanted = settings.batch.commit_protocol != "two_phase" if recorded is None else recorded
    if wanted and isinstance(parts.sink, PositionStore):
        lag = settings.lease.checkpoint_lag
        is_short = lag < settings.lease.renewal_interval_millis
        return PositionsCommit(
            *own,
            rng=parts.rng,
            stop=stop,
            map=pools.map_commits,
            flush_seconds=lag / 1000 if is_short else None,
        )
    return TwoPhaseCommit(
        *own, rng=parts.rng, stop=stop, map=pools.map_commits, prepare_pool=pools.prepare
    )
