"""Run the cases of one plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from botocore.exceptions import ClientError

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError
from kcl_pipeline.local.demo.processes import Processes

from .cases import Case, Found
from .catalogue import CASES
from .checks import check_logs, settle
from .fleet import Application, CaseFailedError, InteropFleet
from .java import JavaKcl
from .plans import Plan
from .report import keep_result
from .result import Result


@contextmanager
def running(
    plan: Plan, java: JavaKcl, processes: Processes, clock: Clock
) -> Iterator[InteropFleet]:
    """Create the application of a plan; at the end, stop what it started."""
    application = Application(plan.name, java, plan.first, **plan.options)
    fleet = InteropFleet(application, processes, clock)
    try:
        if plan.prepare is not None:
            plan.prepare(fleet)
        fleet.traffic.start()
        yield fleet
    finally:
        fleet.traffic.stop()
        fleet.stand_in.stop()
        for worker in [*fleet.workers]:
            fleet.kill(worker)


def run_plan(
    plan: Plan,
    cases: Sequence[str],
    java: JavaKcl,
    processes: Processes,
    clock: Clock,
    kept: Path | None,
) -> list[Result]:
    """Run cases of a plan, one after the other, and print each result.

    After a case that failed, the next one begins with new workers. `kept` is the file of results.
    """
    results = []
    with running(plan, java, processes, clock) as fleet:
        for case in (one for one in CASES if one.name in cases):
            result = run_case(plan, case, fleet)
            print(
                f"{plan.name} {case.name}: {'ok' if result.passed else 'FAILED'} "
                f"({result.seconds:.0f} s): {result.remark}",
                file=sys.stderr,
                flush=True,
            )
            results.append(result)
            if kept is not None:
                keep_result(kept, result)
            if not result.passed:
                for worker in [*fleet.workers]:
                    fleet.kill(worker)
                for log in fleet.logs.values():
                    log.unreadable.clear()
    return results


def run_case(plan: Plan, case: Case, fleet: InteropFleet) -> Result:
    """Run one case and check what must hold after it.

    A record may be processed again if its lease was lost without a handoff: after a kill, without
    a leader, or because it expired on a slow machine.
    """
    began = fleet.clock.monotonic()
    before, found, passed = fleet.counted().repeated, Found(""), True
    lost = fleet.lost()
    try:
        found = case.run(fleet)
        settle(fleet)
        check_logs(fleet)
        lost = fleet.lost() - lost
        repeated = {
            one for one in fleet.counted().repeated - before if fleet.shard_of(one) not in lost
        }
        if repeated and not (case.repeats or fleet.application.leaderless):
            passed = False
            found = Found(f"{len(repeated)} records were processed again, such as {min(repeated)}")
    except (CaseFailedError, ClientError, KclError, LookupError) as error:
        found, passed = Found(f"{type(error).__name__}: {error}"), False
    counted = fleet.counted()
    return Result(
        plan.name,
        case.name,
        fleet.application.java.version,
        passed,
        found.text,
        found.seconds,
        fleet.clock.monotonic() - began,
        counted.sent,
        counted.again,
    )
