"""Convert events to values of the instruments.

All functions are pure. A value has the dimensions of its instrument; settings may remove some of
them later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

from kcl_pipeline import events as ev
from kcl_pipeline.events import Event
from kcl_pipeline.events.leader import TOO_MANY_FAILURES
from kcl_pipeline.metrics.instruments.catalogue import errors, leader, leases, processing
from kcl_pipeline.metrics.instruments.instrument import (
    CALL,
    FORCED,
    REASON,
    SHARD,
    STEP,
    STREAM,
    WORKER,
    Attributes,
    Instrument,
    Observation,
)


def observations(event: Event) -> tuple[Observation, ...]:
    """The values of one event; empty for an event without metrics."""
    convert = _CONVERTERS.get(type(event))
    return tuple(convert(event)) if convert else ()


@lru_cache(maxsize=4096)
def dimensions_of(lease_key: str) -> Attributes:
    """The dimensions of a lease. Only keys of several streams name their stream, as in KCL."""
    stream, _, shard = lease_key.rpartition(":")
    return ((SHARD, shard), (STREAM, stream)) if stream else ((SHARD, shard),)


def _committed(e: ev.BatchCommitted) -> Iterator[Observation]:
    millis = e.milliseconds
    whole = sum(millis.values())
    for key in e.lease_keys:
        lease = dimensions_of(key)
        if key in e.records_by_lease:
            yield processing.RECORDS_PROCESSED.of(e.records_by_lease[key], lease)
        if key in e.data_bytes_by_lease:
            yield processing.DATA_BYTES_PROCESSED.of(e.data_bytes_by_lease[key], lease)
        yield processing.PROCESS_SUCCESS.of(1, lease)
        yield processing.PROCESS_TIME.of(whole, lease)
        if "write" in millis:
            yield processing.PROCESS_RECORDS_TIME.of(millis["write"], lease)
        if "prepare" in millis:
            yield processing.UPDATE_LEASE_SUCCESS.of(1, lease)
            yield processing.UPDATE_LEASE_TIME.of(millis["prepare"], lease)
    for phase, instrument in _PHASES.items():
        if phase in millis:
            yield instrument.of(millis[phase], ((WORKER, e.worker_id),))


_PHASES: Final = {
    "job": processing.EXECUTOR_FETCH_TIME,
    "commit": processing.SINK_COMMIT_TIME,
    "rewrite": processing.REWRITE_TIME,
}


def _refused(e: ev.BatchRefused) -> Iterator[Observation]:
    for key in e.lease_keys:
        yield processing.PROCESS_SUCCESS.of(0, dimensions_of(key))
    yield processing.BATCHES_REFUSED.of(1, ((WORKER, e.worker_id),))


def _lag(e: ev.LagMeasured) -> Iterator[Observation]:
    for key, millis in e.millis_behind_latest.items():
        yield processing.MILLIS_BEHIND_LATEST.of(millis, dimensions_of(key))
    if e.millis_behind_latest or not e.unknown:
        yield processing.APPLICATION_LAG.of(max(e.millis_behind_latest.values(), default=0))


def _memory(e: ev.MemoryMeasured) -> Iterator[Observation]:
    worker = ((WORKER, e.worker_id),)
    yield processing.RECORD_MEMORY.of(e.used_bytes, worker)
    yield processing.RECORD_MEMORY_LIMIT.of(e.max_bytes, worker)


def _read(e: ev.ReadFinished) -> Iterator[Observation]:
    lease = dimensions_of(e.lease_key)
    yield processing.GET_RECORDS_SUCCESS.of(int(e.succeeded), lease)
    yield processing.GET_RECORDS_TIME.of(e.milliseconds, lease)


def _dead_letters(e: ev.RecordsDeadLettered) -> Iterator[Observation]:
    instrument = processing.RECORDS_SKIPPED if e.skipped else processing.RECORDS_DEAD_LETTERED
    yield instrument.of(e.records, dimensions_of(e.lease_key))


def _aggregates(e: ev.AggregatesRejected) -> Iterator[Observation]:
    lease = dimensions_of(e.lease_key)
    yield processing.AGGREGATES_OVER_LIMIT.of(e.over_limit, lease)
    yield processing.AGGREGATES_MISPLACED.of(e.misplaced, lease)
    yield processing.USER_RECORDS_WITHOUT_KEY.of(e.unknown_keys, lease)


def _task(e: ev.TaskFinished) -> Iterator[Observation]:
    worker = ((WORKER, e.worker_id),)
    success, time = _TASKS[e.task]
    yield success.of(int(e.succeeded), worker)
    yield time.of(e.milliseconds, worker)
    if e.task is ev.LeaseTask.RENEWAL:
        yield leases.RENEW_LEASE_SUCCESS.of(e.leases, worker)
    if e.task is ev.LeaseTask.REPORT:
        yield leases.REPORT_FAILURE.of(int(not e.succeeded), worker)


_TASKS: Final = {
    ev.LeaseTask.RENEWAL: (leases.RENEW_SUCCESS, leases.RENEW_TIME),
    ev.LeaseTask.DISCOVERY: (leases.DISCOVERY_SUCCESS, leases.DISCOVERY_TIME),
    ev.LeaseTask.REPORT: (leases.REPORT_SUCCESS, leases.REPORT_TIME),
}


def _handoff(e: ev.HandoffCompleted) -> Iterator[Observation]:
    where = ((WORKER, e.from_worker), (FORCED, str(e.forced).lower()))
    yield leases.HANDOFF_SUCCESS.of(int(not e.forced), where)
    yield leases.HANDOFF_TIME.of(e.seconds * 1000, where)


def _cycle(e: ev.CycleFinished) -> Iterator[Observation]:
    yield leader.IS_LEADER.of(int(e.led))
    if not e.led:
        return
    yield leader.ASSIGN_SUCCESS.of(int(e.succeeded))
    yield leader.ASSIGN_TIME.of(e.milliseconds)
    yield leader.TOTAL_LEASES.of(e.leases)
    yield leader.NUM_WORKERS.of(e.workers)
    yield leader.EXPIRED_LEASES.of(e.expired)
    yield leader.UNOWNED_LEASES.of(e.unowned)
    yield leader.UNREADABLE_LEASES.of(e.unreadable)
    yield leader.FAILING_WORKERS.of(e.failing_workers)
    yield leader.INVALID_WORKERS.of(e.invalid_workers)
    yield leader.ACTIVE_STREAMS.of(e.streams)
    yield leader.INCOMPLETE_STREAMS.of(e.incomplete_streams)
    yield leader.UNAVAILABLE_STREAMS.of(e.unavailable_streams)


def _plan(e: ev.PlanMade) -> Iterator[Observation]:
    yield leader.REASSIGNMENTS.of(e.moves)
    yield leader.SPILLOVER.of(e.spilled)
    yield leader.PLAN_TIME.of(e.milliseconds)


def _leadership_lost(e: ev.LeadershipLost) -> Iterator[Observation]:
    if e.reason == TOO_MANY_FAILURES:
        yield leader.FORCED_RELEASES.of(1)


def _started(e: ev.WorkerStarted) -> Iterator[Observation]:
    yield leases.INITIALIZE_SUCCESS.of(1)
    yield processing.HUNG_WORKERS.of(0, ((WORKER, e.worker_id),))


def _hung(e: ev.WorkerHung) -> Iterator[Observation]:
    worker = ((WORKER, e.worker_id),)
    yield processing.WORKER_HUNG.of(1, worker)
    yield processing.HUNG_WORKERS.of(1, worker)


def _stalled(e: ev.ShardStalled) -> Iterator[Observation]:
    yield processing.SHARD_STALLED.of(1, (*dimensions_of(e.lease_key), (STEP, str(e.step))))


def _one_of_worker(instrument: Instrument) -> Callable[[Any], Iterable[Observation]]:
    return lambda e: (instrument.of(1, ((WORKER, e.worker_id),)),)


def _one_of_lease(instrument: Instrument) -> Callable[[Any], Iterable[Observation]]:
    return lambda e: (instrument.of(1, dimensions_of(e.lease_key)),)


def _one(instrument: Instrument) -> Callable[[Any], Iterable[Observation]]:
    return lambda _: (instrument.of(1),)


_CONVERTERS: Final[dict[type[Event], Callable[[Any], Iterable[Observation]]]] = {
    ev.BatchCommitted: _committed,
    ev.BatchRefused: _refused,
    ev.LagMeasured: _lag,
    ev.MemoryMeasured: _memory,
    ev.ReadFinished: _read,
    ev.RecordsDeadLettered: _dead_letters,
    ev.AggregatesRejected: _aggregates,
    ev.ShardPaused: _one_of_lease(processing.SHARD_PAUSED),
    ev.ShardStalled: _stalled,
    ev.WorkerHung: _hung,
    ev.WorkerResumed: lambda e: (processing.HUNG_WORKERS.of(0, ((WORKER, e.worker_id),)),),
    ev.ShardEnded: _one_of_lease(processing.SHUTDOWN_SUCCESS),
    ev.WorkerStarted: _started,
    ev.WorkerIdShared: _one_of_worker(leases.WORKER_ID_SHARED),
    ev.LeaseGained: _one_of_worker(leases.NEW_LEASES),
    ev.LeaseLost: _one_of_worker(leases.LOST_LEASES),
    ev.TaskFinished: _task,
    ev.HandoffCompleted: _handoff,
    ev.CycleFinished: _cycle,
    ev.PlanMade: _plan,
    ev.MoveRefused: _one(leader.FAILED_ASSIGNMENTS),
    ev.LeaderElected: _one(leader.ELECTIONS),
    ev.LeadershipLost: _leadership_lost,
    ev.HoleFound: _one(leader.PARTIAL_STREAMS),
    ev.LeasesCreated: lambda e: (
        leader.LEASES_CREATED.of(len(e.lease_keys), ((STREAM, e.stream),)),
    ),
    ev.LeaseDeleted: _one(leader.LEASES_DELETED),
    ev.StreamUnavailable: lambda e: (leader.STREAM_UNAVAILABLE.of(1, ((STREAM, e.stream),)),),
    ev.RecordsLost: lambda e: (errors.RECORDS_LOST.of(1, ((REASON, str(e.reason)),)),),
    ev.AwsTrouble: lambda e: (errors.AWS_TROUBLE.of(1, ((CALL, e.operation.partition(" ")[0]),)),),
    ev.RowRejected: _one(errors.ROWS_REJECTED),
    ev.AnnouncementRejected: _one(errors.ANNOUNCEMENTS_REJECTED),
    ev.ArrowMemorySkipped: _one(errors.ARROW_MEMORY_SKIPPED),
    ev.CpuSourceSkipped: _one(errors.CPU_SOURCES_SKIPPED),
}


class HeldLeaseCount:
    """Count the leases that each worker of this process holds, from its events."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def after(self, event: Event) -> tuple[Observation, ...]:
        """The new count after an event that changes it; otherwise empty."""
        match event:
            case ev.WorkerStarted(worker_id=worker):
                self._held.setdefault(worker, set())
            case ev.LeaseGained(worker_id=worker, lease_key=key):
                self._held.setdefault(worker, set()).add(key)
            case (
                ev.LeaseLost(worker_id=worker, lease_key=key)
                | ev.LeaseReleased(worker_id=worker, lease_key=key)
                | ev.HandoffCompleted(from_worker=worker, lease_key=key)
            ):
                self._held.setdefault(worker, set()).discard(key)
            case ev.WorkerStopped(worker_id=worker):
                self._held[worker] = set()
            case _:
                return ()
        return (leases.CURRENT_LEASES.of(len(self._held[worker]), ((WORKER, worker),)),)
