"""Chaos benchmark: a fleet of worker processes under faults.

It checks that the table holds exactly the published events, and that no lease is stuck at the end.
Two streams of the embedded AWS are consumed by `kcl-pipeline worker` processes and by runs of the
Dagster sensor, which is also the leader. Meanwhile processes are killed, paused and stopped, the
Dagster daemon is killed, shards are split and merged, and tables are throttled. One seed determines
the random choices.

    python -m benchmarks.chaos --minutes 5 [--seed 1] [--spark] [--json] [--folder F]

The last line of the output is JSON:

- `missing`, `duplicated`: Differences between acknowledged ids and the rows of the table.
- `stuck_leases`: Number of problems that `stuck_leases` reports.
- `kills`: Signals that ended or paused a process; `by_kind` counts them by kind.
- `worst_gap_s`: Longest time without a commit while data was waiting.

The exit code is 0 if `passed` accepts the report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config

from benchmarks.chaos_fleet import APPLICATION, DagsterHost, Workers
from benchmarks.chaos_menu import Menu
from benchmarks.chaos_watch import Watch, stuck_leases
from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.local.demo.processes import Processes, free_port
from kcl_pipeline.local.demo.publisher import ORDERS, TELEMETRY, Publisher
from kcl_pipeline.local.demo.table import CommittedRows, Comparison, compare
from kcl_pipeline.signals import stop_on_signals

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

ROOT: Final = Path(__file__).resolve().parent.parent
SHARDS: Final = 6
KILLS_PER_MINUTE: Final = 14.0
"""Target rate; `passed` requires ten."""
SETTLE_SECONDS: Final = 120.0
RENEWED_WITHIN_SECONDS: Final = 7.0
"""Time between the two reads of the leases; more than twice the lease time."""


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The benchmark was interrupted by Ctrl-C or SIGTERM."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    minutes: float
    seed: int
    spark: bool
    per_second: int
    folder: Path


class Chaos:
    """One run of the benchmark, from start to report."""

    def __init__(self, options: Options, interrupted: threading.Event) -> None:
        self.options = options
        self.clock = SystemClock()
        self.began = self.clock.monotonic()
        self.interrupted = interrupted
        self.rng = random.Random(options.seed)
        self.processes = Processes(options.folder, self.clock)
        self.workers_processes = Processes(options.folder, self.clock)
        self.storm_seconds = 0.0
        self.unreleased: list[str] = []
        self.stopped_well = False

    def say(self, text: str) -> None:
        """Write a progress line to standard error and to the log in the directory."""
        line = f"{self.clock.monotonic() - self.began:7.1f} s  {text}"
        print(line, file=sys.stderr, flush=True)
        with (self.options.folder / "story.log").open("a") as story:
            story.write(line + "\n")

    def wait(self, seconds: float) -> None:
        """Wait while child processes are supervised.

        Raises:
            Interrupted: The user interrupted the run.
        """
        deadline = self.clock.monotonic() + seconds
        while True:
            self.workers.tick()
            self.dagster.tick()
            if self.interrupted.is_set():
                raise Interrupted
            if self.clock.monotonic() >= deadline:
                return
            self.clock.sleep(min(0.1, max(deadline - self.clock.monotonic(), 0.0)))

    def wait_for(self, what: str, condition: Any, seconds: float) -> bool:
        """Wait until a condition holds; return False and print a line after the time limit."""
        deadline = self.clock.monotonic() + seconds
        while not condition():
            if self.clock.monotonic() > deadline:
                self.say(f"waited {seconds:.0f} s in vain for {what}")
                return False
            self.wait(0.3)
        return True

    def start(self) -> None:
        """Start the embedded AWS, streams, Dagster, workers, publisher and watch."""
        options = self.options
        lake = options.folder / "lake"
        environment = {
            "CHAOS_LAKE": str(lake),
            "CHAOS_SPARK": str(int(options.spark)),
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        }
        self.processes.environment |= environment
        url = self.processes.start_aws(free_port(0))
        self.workers_processes.environment |= self.processes.environment
        self.kinesis = self._kinesis(url)
        self.kinesis.create_stream(StreamName=ORDERS, ShardCount=SHARDS)
        self.kinesis.create_stream(StreamName=TELEMETRY, ShardCount=1)
        settings = ConsumerSettings(application_name=APPLICATION, streams=(ORDERS, TELEMETRY))
        session = SessionOptions(
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="embedded",
            aws_secret_access_key="embedded",
        )
        table = open_tables(settings, AwsClients(settings, session), self.clock).lease
        count = round(options.per_second * 60 * (options.minutes + 5))
        self.publisher = Publisher(
            self.kinesis, self.clock, count, options.per_second, SHARDS, seed=options.seed
        )
        self.table_uri = str(lake / "events")
        self.watch = Watch(
            CommittedRows(self.table_uri),
            table,
            lambda: self.publisher.published,
            self.clock,
            self.say,
        )
        self.dagster = DagsterHost(self.processes, free_port(0), self.clock, self.say)
        names = tuple(f"chaos-{letter}" for letter in "abc")
        self.workers = Workers(
            names, self.workers_processes, self.clock, self.rng, self.say, self.watch.ended
        )
        self.menu = Menu(
            self.rng,
            self.workers,
            self.dagster,
            self.kinesis,
            self.watch,
            url,
            self.say,
            spark=options.spark,
        )
        self.say(
            f"embedded AWS at {url}, Dagster at {self.dagster.page.url}, logs in "
            f"{options.folder}, seed {options.seed}"
        )
        if not self.wait_for("Dagster to load the code", self.dagster.loaded, 120):
            raise RuntimeError("Dagster did not come up; see dagster.log")
        self.publisher.start()
        self.watch.start()
        everybody = len(names) + 1
        self.wait_for(
            f"{everybody} workers to hold leases",
            lambda: len(self.owners() - {None}) >= everybody and self.watch.committed > 0,
            120,
        )

    def _kinesis(self, url: str) -> KinesisClient:
        session = boto3.Session("embedded", "embedded", region_name="us-east-1")
        # A put retried after a time-out would publish records twice that the ledger has once.
        return session.client(
            "kinesis",
            endpoint_url=url,
            config=Config(retries={"max_attempts": 1, "mode": "standard"}),
        )

    def owners(self) -> set[str | None]:
        """Return the owners of unfinished leases at the last read."""
        return {lease.actual_owner for lease in self.watch.leases.values() if not lease.ended}

    def storm(self) -> None:
        """Inject faults for the requested number of minutes."""
        began = self.clock.monotonic()
        last_line = began
        # The worst gap measures faults, so the start of the fleet does not count.
        self.watch.worst_gap_s = 0.0
        while (passed := self.clock.monotonic() - began) < self.options.minutes * 60:
            self.menu.step(kills_due=1 + int(KILLS_PER_MINUTE * passed / 60))
            if self.publisher.error is not None:
                raise self.publisher.error
            if self.clock.monotonic() - last_line >= 15:
                last_line = self.clock.monotonic()
                held = Counter(
                    str(lease.actual_owner)
                    for lease in self.watch.leases.values()
                    if not lease.ended
                )
                shown = " ".join(f"{name}={count}" for name, count in sorted(held.items()))
                progress = (
                    f"published {self.publisher.published:,} committed "
                    f"{self.watch.committed:,} kills {self.menu.kills}"
                )
                self.say(f"{progress} worst gap {self.watch.worst_gap_s:.1f} s  {shown}")
            self.wait(self.rng.uniform(0.2, 1.2))
        self.storm_seconds = self.clock.monotonic() - began

    def calm(self) -> tuple[Comparison, list[str]]:
        """Stop the faults, wait until the fleet recovers, and compare the table."""
        self.say("the storm is over")
        self.menu.end()
        self.workers.wake_all()
        self.publisher.finish()
        total = self.publisher.published
        self.wait_for(
            f"{total:,} rows in the table", lambda: self.watch.committed >= total, SETTLE_SECONDS
        )
        deadline = self.clock.monotonic() + SETTLE_SECONDS
        while True:
            before = self.watch.leases
            self.wait(RENEWED_WITHIN_SECONDS)
            stuck = stuck_leases(self.kinesis, (ORDERS, TELEMETRY), before, self.watch.leases)
            if not stuck or self.clock.monotonic() > deadline:
                break
        for line in stuck:
            self.say(f"stuck: {line}")
        return compare(self.table_uri, self.publisher.ids), stuck

    def finish(self) -> None:
        """Stop every worker gracefully and record leases that still have an owner."""
        self.wait_for("the Dagster UI", self.dagster.loaded, 90)
        self.dagster.stopping = True
        ended = self.dagster.stop_workers(60)
        self.stopped_well = self.workers.stop(60) and ended
        self.watch.look()
        self.unreleased = sorted(
            key for key, lease in self.watch.leases.items() if lease.owner is not None
        )
        for key in self.unreleased:
            self.say(f"not released: {key} of {self.watch.leases[key].owner}")

    def close(self) -> None:
        """Stop all processes and threads that this run started."""
        if hasattr(self, "workers"):
            self.workers.wake_all()
        if hasattr(self, "publisher"):
            self.publisher._stop.set()  # noqa: SLF001 (`finish` would raise what is raised already)
        if hasattr(self, "watch"):
            self.watch._stop.set()  # noqa: SLF001 (likewise)
        self.workers_processes.stop_all()
        dagster = getattr(self, "dagster", None)
        if dagster is not None:
            dagster.stopping = True
        self.processes.stop_all()
        if dagster is not None and (left := dagster.kill_orphans()):
            self.say(f"ended {len(left)} processes that Dagster left behind")

    def report(self, comparison: Comparison, stuck: list[str]) -> dict[str, Any]:
        """Return the values of the last line."""
        return {
            "published": len(self.publisher.ids),
            "committed": comparison.committed,
            "missing": comparison.missing,
            "duplicated": comparison.duplicated,
            "unknown": comparison.unknown,
            "stuck_leases": len(stuck),
            "unreleased_leases": len(self.unreleased),
            "kills": self.menu.kills,
            "by_kind": dict(sorted(self.menu.by_kind.items())),
            "kills_per_minute": round(self.menu.kills / max(self.storm_seconds / 60, 1e-9), 1),
            "worst_gap_s": round(self.watch.worst_gap_s, 1),
            "worst_gap_at_s": round(self.watch.worst_gap_at - self.began, 1),
            "crashes": len(self.workers.crashes),
            "disturbances": dict(sorted(self.menu.others.items())),
            "takeovers": self.watch.figures(),
            "dagster_restarts": self.dagster.restarts,
            "stopped_well": self.stopped_well,
            "minutes": round(self.storm_seconds / 60, 2),
            "seed": self.options.seed,
            "spark": self.options.spark,
        }


def passed(report: dict[str, Any]) -> bool:
    """Return whether the run passed.

    No event is missing, duplicated or unknown. No lease is stuck or unreleased. No worker crashed,
    all workers stopped in time, and at least ten kills per minute occurred.
    """
    zero = ("missing", "duplicated", "unknown", "stuck_leases", "unreleased_leases", "crashes")
    return (
        all(report[name] == 0 for name in zero)
        and report["stopped_well"]
        and report["kills_per_minute"] >= 10
    )


def run(options: Options) -> dict[str, Any] | None:
    """Run the benchmark once and return the report, or None when interrupted.

    All processes are stopped in every case.
    """
    interrupted = threading.Event()
    chaos = Chaos(options, interrupted)
    with stop_on_signals(interrupted):
        try:
            chaos.start()
            chaos.storm()
            comparison, stuck = chaos.calm()
            chaos.finish()
            return chaos.report(comparison, stuck)
        except Interrupted:
            chaos.say("interrupted")
            return None
        finally:
            chaos.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description="A fleet under real faults, and a ledger against the table",
    )
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--spark",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="workers with a Spark transform, whose JVMs are killed too",
    )
    parser.add_argument(
        "--per-second",
        type=int,
        default=1_000,
        help="records published a second (default: %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="logs and table; kept (default: a temporary one, kept when something is wrong)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="only the last line goes to the output; the story always goes to the error output",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.minutes <= 24 * 60:
        parser.error(f"--minutes {options.minutes}: write more than 0 and at most 1440")
    folder = (
        Path(tempfile.mkdtemp(prefix="chaos-"))
        if options.folder is None
        else options.folder.resolve()
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = run(Options(options.minutes, options.seed, options.spark, options.per_second, folder))
    if report is None:
        return 130
    if not options.json:
        for name, value in report.items():
            print(f"{name:>18}: {value}")
    print(json.dumps(report), flush=True)
    if passed(report) and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
