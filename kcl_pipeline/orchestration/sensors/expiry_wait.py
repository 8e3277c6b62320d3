"""Run the leader cycle of a tick, and a second one when a lease expires shortly after the first.

Ticks are at least 5 s apart. Without the second cycle, a lease that expires a moment after a tick
stays without a living owner until the next one.
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
_AFTER_EXPIRY_SECONDS: Final = 0.02
_STEP_SECONDS: Final = 0.1


def run_cycles(
    cycle: "LeaderCycle", failover_seconds: float, deadline_seconds: float, clock: Clock
) -> CycleReport:
    """Run a cycle; if a lease expires shortly, wait for that, and run another one.

    There is no second cycle after one that has changed leases or has failed: its report would
    not be reported.

    Args:
        cycle: The leader.
        failover_seconds: The failover time.
        deadline_seconds: Longest duration of both cycles and the wait.
        clock: The clock.

    Returns:
        The report of the last cycle.
    """
    began = clock.monotonic()
    report = cycle.run_once(deadline_seconds)
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
