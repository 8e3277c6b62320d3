"""The events that only carry measured values, and those of the exporters of metrics.

A measurement happens all the time, also in normal operation. It is logged at level DEBUG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kcl_pipeline.events.base import Event


@dataclass(frozen=True, slots=True)
class Measurement(Event):
    """Base of the events that only carry measured values.

    Example:
        >>> from kcl_pipeline import Event, Measurement
        >>> def without_measurements(event: Event) -> bool:
        ...     return not isinstance(event, Measurement)
    """


class LeaseTask(StrEnum):
    """A periodic task of a worker.

    RENEWAL: it renewed its leases. DISCOVERY: it looked for leases that were assigned to it.
    REPORT: it wrote its worker metrics row.

    Example:
        >>> from kcl_pipeline import LeaseTask
        >>> LeaseTask.RENEWAL.value
        'renewal'
    """

    RENEWAL = "renewal"
    DISCOVERY = "discovery"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class TaskFinished(Measurement):
    """A worker has finished one run of a periodic task.

    Attributes:
        leases: Leases that were renewed or discovered. 0 for REPORT.
        succeeded: Whether the task made all its calls. A single lease that could not be renewed has
            an event of its own.

    Example:
        >>> from kcl_pipeline import LeaseTask, TaskFinished
        >>> event = TaskFinished(worker_id="w-1", task=LeaseTask.RENEWAL, milliseconds=1.5)
        >>> event.task
        <LeaseTask.RENEWAL: 'renewal'>
    """

    worker_id: str
    task: LeaseTask
    milliseconds: float
    leases: int = 0
    succeeded: bool = True


@dataclass(frozen=True, slots=True)
class LagMeasured(Measurement):
    """A worker has measured the lag of its leases. It does so whenever it renews them.

    Attributes:
        millis_behind_latest: Age of the oldest record that is not committed, by lease key. 0: no
            record waits.
        unknown: Number of leases whose lag is not known yet.

    Example:
        >>> from kcl_pipeline import LagMeasured
        >>> event = LagMeasured(worker_id="w-1", millis_behind_latest={})
        >>> event.millis_behind_latest
        {}
    """

    worker_id: str
    millis_behind_latest: Mapping[str, int]
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class MemoryMeasured(Measurement):
    """A worker has measured the memory of its records and results, whenever it renews its leases.

    Attributes:
        used_bytes: Bytes that are counted (`memory.MemoryBudget`).
        max_bytes: The limit (`worker.record_memory_max_bytes`).

    Example:
        >>> from kcl_pipeline import MemoryMeasured
        >>> event = MemoryMeasured(worker_id="w-1", used_bytes=3, max_bytes=3)
        >>> event.used_bytes
        3
    """

    worker_id: str
    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessorCalled(Measurement):
    """A call of `process_records` of a record processor has returned.

    Attributes:
        records: Number of its records.
        milliseconds: How long it took.
        succeeded: Whether it raised no error.

    Example:
        >>> from kcl_pipeline import ProcessorCalled
        >>> event = ProcessorCalled(
        ...     worker_id="w-1",
        ...     lease_key="shardId-000000000000",
        ...     records=3,
        ...     milliseconds=1.5,
        ...     succeeded=True,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    worker_id: str
    lease_key: str
    records: int
    milliseconds: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class ReadFinished(Measurement):
    """One call for records of a polled shard has ended.

    Fan-out shards and executor fetches do not emit it.

    Example:
        >>> from kcl_pipeline import ReadFinished
        >>> event = ReadFinished(
        ...     lease_key="shardId-000000000000",
        ...     milliseconds=1.5,
        ...     succeeded=True,
        ... )
        >>> event.lease_key
        'shardId-000000000000'
    """

    lease_key: str
    milliseconds: float
    succeeded: bool


@dataclass(frozen=True, slots=True)
class CycleFinished(Measurement):
    """A leader cycle has ended. All attributes but the first four are 0 unless it led.

    Attributes:
        owner_name: Name of this leader in the lock row.
        led: Whether this process led in the cycle.
        milliseconds: Duration of the cycle.
        succeeded: Whether it had no error.
        leases: Number of lease rows.
        expired: Leases whose owner has stopped renewing them.
        unowned: Leases without an owner.
        unreadable: Lease rows that cannot be used.
        workers: Living workers.
        failing_workers: Living workers whose CPU could not be measured in the last interval.
        invalid_workers: Living workers whose metrics have no operating range.
        streams: Streams whose leases the leader manages.
        incomplete_streams: Streams whose leases do not cover all hash keys.
        unavailable_streams: Streams whose last attempt failed.
        sync_skipped: Whether shard sync was due, and the former one was still running.

    Example:
        >>> from kcl_pipeline import CycleFinished
        >>> event = CycleFinished(owner_name="text", led=True, milliseconds=1.5, succeeded=True)
        >>> event.owner_name
        'text'
    """

    owner_name: str
    led: bool
    milliseconds: float
    succeeded: bool
    leases: int = 0
    expired: int = 0
    unowned: int = 0
    unreadable: int = 0
    workers: int = 0
    failing_workers: int = 0
    invalid_workers: int = 0
    streams: int = 0
    incomplete_streams: int = 0
    unavailable_streams: int = 0
    sync_skipped: bool = False


@dataclass(frozen=True, slots=True)
class MetricsEndpointOpened(Event):
    """An exporter serves metrics at this address.

    Example:
        >>> from kcl_pipeline import MetricsEndpointOpened
        >>> event = MetricsEndpointOpened(exporter="text", address="text")
        >>> event.exporter
        'text'
    """

    exporter: str
    address: str


@dataclass(frozen=True, slots=True)
class MetricsExportFailed(Event):
    """An exporter cannot start, or cannot take values. The worker continues without them.

    Example:
        >>> from kcl_pipeline import MetricsExportFailed
        >>> event = MetricsExportFailed(exporter="text", error="the call was throttled")
        >>> event.exporter
        'text'
    """

    exporter: str
    error: str


@dataclass(frozen=True, slots=True)
class MetricsDropped(Event):
    """An exporter has dropped measured values, because its queue was full or a call failed.

    Attributes:
        values: Number of values.

    Example:
        >>> from kcl_pipeline import MetricsDropped
        >>> event = MetricsDropped(exporter="text", values=3, reason="the lease expired")
        >>> event.exporter
        'text'
    """

    exporter: str
    values: int
    reason: str
