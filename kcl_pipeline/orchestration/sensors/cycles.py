"""Run the leader cycles of a tick: one, and more if leases can be assigned before the next tick.

Ticks are at least 5 s apart. Without further cycles, a lease that expires a moment after a tick
stays without a living owner until the next one, and so do the leases of a fleet whose first worker
is about to report.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leader.report import CycleReport

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle

LONGEST_SECONDS: Final = 2.0
"""Longest time that a tick waits for the expiry of a lease."""
_LONGEST_SHARE: Final = 0.5
"""The same as a share of the failover time. A living owner has renewed more recently."""
START_SECONDS: Final = 3.0
"""Longest time that a tick waits for a worker that starts. The next tick then continues.

Dagster leaves the next tick out if one lasts longer than the five seconds between two.
"""
_START_STEP_SECONDS: Final = 0.5
_START_DUTY: Final = 3.0
"""The pause between two cycles is at least this multiple of the duration of a cycle."""
_AFTER_EXPIRY_SECONDS: Final = 0.02
_STEP_SECONDS: Final = 0.1


def run_cycles(
    cycle: "LeaderCycle",
    failover_seconds: float,
    deadline_seconds: float,
    clock: Clock,
    is_starting: Callable[[CycleReport], bool] = lambda _: False,
) -> CycleReport:
    """Run a cycle, and others while a worker is about to report or a lease expires shortly.

    There is no further cycle after one that has moved leases, because its report would not be
    reported.

    Args:
        cycle: The leader.
        failover_seconds: The failover time.
        deadline_seconds: Longest duration of all cycles and waits.
        clock: The clock.
        is_starting: Returns whether a worker that the report does not have may report soon. It is
            called only while the application waits for a worker.

    Returns:
        The report of the last cycle.
    """
    began = clock.monotonic()
    report = cycle.run_once(deadline_seconds)
    if report.led and not report.leases and cycle.wait_for_sync(START_SECONDS):
        # The first leases of an application, or those of a stream that was created again
        report = cycle.run_once(deadline_seconds - (clock.monotonic() - began))
    if _misses_workers(cycle, report) and is_starting(report):
        return _until_assigned(cycle, report, began, deadline_seconds, clock, is_starting)
    seconds = clock.monotonic() - began
    if not report.led or _has_news(report):
        return report
    # From the start of the cycle: a lease that expired during the cycle was not seen to expire
    wait_seconds = cycle.next_expiry_seconds(began) - seconds + _AFTER_EXPIRY_SECONDS
    wait_seconds = max(wait_seconds, 0.0)
    if wait_seconds > min(LONGEST_SECONDS, _LONGEST_SHARE * failover_seconds):
        return report
    left_seconds = deadline_seconds - seconds - wait_seconds
    if left_seconds <= seconds or not _wait(wait_seconds, clock, threading.main_thread().is_alive):
        return report
    return cycle.run_once(left_seconds)


def _until_assigned(
    cycle: "LeaderCycle",
    report: CycleReport,
    began: float,
    deadline_seconds: float,
    clock: Clock,
    is_starting: Callable[[CycleReport], bool],
) -> CycleReport:
    """Run cycles until leases are assigned to the worker that starts, or the next tick is due."""
    goes_on = threading.main_thread().is_alive
    while _misses_workers(cycle, report) and is_starting(report):
        pause = max(_START_STEP_SECONDS, _START_DUTY * report.seconds)
        elapsed = clock.monotonic() + pause - began
        if elapsed >= min(START_SECONDS, deadline_seconds) or not _wait(pause, clock, goes_on):
            break
        report = cycle.run_once(deadline_seconds - elapsed)
    return report


def _misses_workers(cycle: "LeaderCycle", report: CycleReport) -> bool:
    """Whether the application waits for a worker, which creates the tables or gets leases."""
    if not report.led:
        return cycle.misses_table
    if report.plan is None or report.plan.moves or report.pause is not None:
        return False
    unowned = any(lease.owner is None and not lease.ended for lease in report.leases)
    return unowned or bool(report.expired)


def _has_news(report: CycleReport) -> bool:
    moves = () if report.plan is None else report.plan.moves
    return report.error is not None or bool(moves or report.created or report.deleted)


def _wait(seconds: float, clock: Clock, goes_on: Callable[[], bool]) -> bool:
    """Wait; return False as soon as the process is to end."""
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0:
        if not goes_on():
            return False
        clock.sleep(min(left, _STEP_SECONDS))
    return goes_on()
