"""Run the interop suite: `python -m tests.interop [--all] [--plan NAME] [--case NAME] [--json]`.

Without `--all`, the short cases run, in ten minutes at most. The exit code is 1 if a case failed.
Where the jars of Java cannot be fetched, the reason is printed and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.embedded import ROOT, working_folder
from benchmarks.peers.setup import NotAvailable
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.demo.processes import Processes, free_port

from .java import fetch
from .plans import PLANS, Plan
from .report import read_results, table, write
from .result import Result
from .runner import run_plan

JARS = "KCL_PIPELINE_INTEROP_JARS"


def _chosen(plan: Plan, given: argparse.Namespace) -> list[str]:
    if given.plan and plan.name not in given.plan:
        return []
    cases = plan.cases if given.all or given.plan or given.case else plan.short
    return [one for one in cases if not given.case or one in given.case]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite."""
    parser = argparse.ArgumentParser(prog="tests.interop", description=__doc__)
    parser.add_argument("--all", action="store_true", help="all cases, not only the short ones")
    parser.add_argument("--plan", action="append", help="only this application; repeatable")
    parser.add_argument("--case", action="append", help="only this case; repeatable")
    parser.add_argument("--parallel", type=int, default=2, help="applications at a time")
    parser.add_argument("--jars", type=Path, default=Path(os.environ.get(JARS, ".run/interop")))
    parser.add_argument("--folder", type=Path, help="keep tables and logs here")
    parser.add_argument("--results", type=Path, help="add the results to this file, as they come")
    parser.add_argument("--page", type=Path, help="write the results into this page")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    given = parser.parse_args(arguments)
    wanted = [(plan, _chosen(plan, given)) for plan in PLANS]
    wanted = [(plan, cases) for plan, cases in wanted if cases]
    try:
        kcls = {family: fetch(given.jars, family) for family in {plan.family for plan, _ in wanted}}
    except NotAvailable as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    clock = SystemClock()
    os.nice(10)
    with working_folder(given.folder, "interop-") as folder:
        aws = Processes(folder, clock)
        aws.environment["PYTHONPATH"] = str(ROOT)
        aws.start_aws(free_port(0))

        def run(one: tuple[Plan, Sequence[str]]) -> list[Result]:
            plan, cases = one
            place = folder / plan.name
            place.mkdir(exist_ok=True)
            own = Processes(place, clock, dict(aws.environment))
            try:
                return run_plan(plan, cases, kcls[plan.family], own, clock, given.results)
            finally:
                own.stop_all()

        pool = ThreadPoolExecutor(given.parallel)
        try:
            results = [one for found in pool.map(run, wanted) for one in found]
        finally:
            aws.stop_all()  # after Ctrl-C, its absence ends the applications that still run
            pool.shutdown(cancel_futures=True)
    if given.page:
        results = read_results(given.results) if given.results else results
        write(given.page, table(results, datetime.now(UTC).date()))
    if given.json:
        print(json.dumps([asdict(one) for one in results]))
    return int(not all(one.passed for one in results))


if __name__ == "__main__":
    sys.exit(main())
