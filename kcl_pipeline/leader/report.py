"""The result of one leader cycle."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.events import CycleFinished, EventSink
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.values import BadRow, Lease
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.planning.state import is_failing, is_valid
from kcl_pipeline.shards import StreamId
from kcl_pipeline.unexpected import described


@dataclass(frozen=True, slots=True)
class StreamCoverage:
    """The hash-range coverage of one stream.

    Attributes:
        stream: The serialized stream.
        complete: Whether the leases cover all hash keys.
        hole: Description of the first gap. None: there is none.
        confidence: Number of audits in a row that found this gap.
    """

    stream: str
    complete: bool
    hole: str | None = None
    confidence: int = 0


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of `LeaderCycle.run_once`.

    If `led` is False, only `lock_owner`, `bad_rows`, `seconds` and `error` may have values.

    Attributes:
        led: Whether this process led in the cycle.
        lock_owner: Owner of the leader lock. None: unknown, or none.
        leases: The leases after the writes of this cycle, sorted by key.
        workers: The living workers, sorted by id.
        expired: Keys of expired leases, sorted.
        unreadable: Keys of lease rows that cannot be used.
        bad_rows: Rows of both tables that cannot be used.
        coverage: Hash-range coverage of each stream.
        unavailable: Streams whose last attempt failed.
        streams: Streams that are resolved, with their retention period.
        plan: The plan. None: none was computed.
        plan_input: The input of the plan.
        created: Keys of leases that `sync` has created since the last report.
        deleted: Keys of leases that `sync` has deleted since the last report.
        seconds: Duration of the assignment.
        error: Errors of the cycle. Other parts of the cycle may have succeeded.
        sync_skipped: Whether `sync` was due and still running.
        pause: The pause of the application, in which no lease is assigned. None: not paused.
    """

    led: bool
    lock_owner: str | None = None
    leases: tuple[Lease, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()
    expired: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    coverage: tuple[StreamCoverage, ...] = ()
    unavailable: tuple[UnavailableStream, ...] = ()
    streams: tuple[StreamId, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    created: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    pause: Pause | None = None
    sync_skipped: bool = False


def noted(report: CycleReport, owner_name: str, events: EventSink) -> CycleReport:
    """Emit `CycleFinished` of a cycle, and return its report."""
    events(
        CycleFinished(
            owner_name,
            report.led,
            report.seconds * 1000,
            report.error is None,
            leases=len(report.leases),
            expired=len(report.expired),
            unowned=sum(1 for lease in report.leases if lease.owner is None and not lease.ended),
            unreadable=len(report.unreadable),
            workers=len(report.workers),
            failing_workers=sum(1 for row in report.workers if is_failing(row)),
            invalid_workers=sum(1 for row in report.workers if not is_valid(row)),
            streams=len(report.coverage),
            incomplete_streams=sum(1 for one in report.coverage if not one.complete),
            unavailable_streams=len(report.unavailable),
            sync_skipped=report.sync_skipped,
        )
    )
    return report


def error_sentence(error: Exception) -> str:
    """Return an error in one sentence. The log has the traceback of an unexpected one."""
    return described(error, "a leader cycle")


def report_of(
    context: CycleContext,
    owner_name: str,
    error: str | None,
    *,
    seconds: float,
    pause: Pause | None,
) -> CycleReport:
    """Return the report of an assignment that led."""
    return CycleReport(
        led=True,
        lock_owner=owner_name,
        leases=tuple(context.leases[key] for key in sorted(context.leases)),
        workers=context.workers,
        expired=context.expired,
        unreadable=tuple(sorted(context.unreadable)),
        bad_rows=context.bad_rows,
        plan=context.plan,
        plan_input=context.plan_input,
        created=tuple(context.created),
        deleted=tuple(context.deleted),
        error=error,
        seconds=seconds,
        pause=pause,
    )
