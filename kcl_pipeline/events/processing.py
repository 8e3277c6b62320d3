"""The events of processing: threads that do not respond, slower ways, and drains beside others."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kcl_pipeline.events.base import Event


class HangStep(StrEnum):
    """What the processing thread of a worker does.

    LEASES: it looks at leases, completes handoffs, and begins and ends shards. READING: it takes
    records that were read; with an executor fetch, it waits for the Spark job that reads and
    transforms them. WRITING: it runs the transform and writes its rows. COMMITTING: it commits
    them. REPORTING: it reports the progress of the worker.

    Example:
        >>> from kcl_pipeline import HangStep
        >>> HangStep.LEASES.value
        'leases'
    """

    LEASES = "leases"
    READING = "reading"
    WRITING = "writing"
    COMMITTING = "committing"
    REPORTING = "reporting"


@dataclass(frozen=True, slots=True)
class WorkerHung(Event):
    """The processing thread of a worker has made no progress for `seconds` while records wait.

    The event is repeated once per `worker.hung_after_millis`. The thread makes progress when it
    begins the next step, for example the transform of the next batch, or of the next part of a
    batch with bad records.

    Attributes:
        step: What the thread does.
        seconds: Time since the step began.
        lease_keys: Held leases that may have records that are not committed.
        stacks: The calls of all threads, the processing thread first. It has names of files and
            functions and line numbers, without variables or source lines, and a bounded length.

    Example:
        >>> from kcl_pipeline import HangStep, WorkerHung
        >>> event = WorkerHung(
        ...     worker_id="w-1",
        ...     step=HangStep.LEASES,
        ...     seconds=1.5,
        ...     lease_keys=("shardId-000000000000",),
        ... )
        >>> event.step
        <HangStep.LEASES: 'leases'>
    """

    worker_id: str
    step: HangStep
    seconds: float
    lease_keys: tuple[str, ...]
    stacks: str = field(default="", metadata={"in_line": False})


@dataclass(frozen=True, slots=True)
class WorkerResumed(Event):
    """A worker that was hung makes progress again, or no record waits any more.

    Example:
        >>> from kcl_pipeline import WorkerResumed
        >>> event = WorkerResumed(worker_id="w-1")
        >>> event.worker_id
        'w-1'
    """

    worker_id: str


@dataclass(frozen=True, slots=True)
class BatchAbandoned(Event):
    """A worker that must end does not wait for its processing thread any longer.

    The batch, if there was one, is read again by the next owners of its leases.

    Attributes:
        step: What the thread does.
        seconds: Time since the step began.

    Example:
        >>> from kcl_pipeline import BatchAbandoned, HangStep
        >>> event = BatchAbandoned(worker_id="w-1", step=HangStep.LEASES, seconds=1.5)
        >>> event.step
        <HangStep.LEASES: 'leases'>
    """

    worker_id: str
    step: HangStep
    seconds: float


@dataclass(frozen=True, slots=True)
class ArrowMemorySkipped(Event):
    """Batches or results of Spark are passed in a slower way than as Arrow columns in memory.

    The rows are the same. The event is emitted again only when the reason changes.

    Example:
        >>> from kcl_pipeline import ArrowMemorySkipped
        >>> event = ArrowMemorySkipped(reason="the lease expired")
        >>> event.reason
        'the lease expired'
    """

    reason: str


@dataclass(frozen=True, slots=True)
class ShardsLeftToOthers(Event):
    """A drain does not wait for the shards that other workers hold and read.

    It is emitted at the start, and at the end if other workers hold other numbers of shards then.

    Attributes:
        worker_id: The worker that drains.
        shards: How many shards are not finished.
        elsewhere: How many of them other workers hold.
        owners: Those workers with their numbers of shards; the first five.

    Example:
        >>> from kcl_pipeline import ShardsLeftToOthers
        >>> event = ShardsLeftToOthers(worker_id="w-1", shards=3, elsewhere=3, owners="text")
        >>> event.shards
        3
    """

    worker_id: str
    shards: int
    elsewhere: int
    owners: str
