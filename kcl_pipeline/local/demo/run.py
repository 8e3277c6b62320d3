"""Demonstration run: the project in this folder, through reshards and worker changes.

At the end it compares the tables with the published events and prints the result.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from kcl_pipeline.local.demo.processes import Processes, free_port
from kcl_pipeline.local.demo.publisher import ORDERS, TELEMETRY, Publisher
from kcl_pipeline.local.demo.table import CommittedRows, Comparison, compare
from kcl_pipeline.signals import stop_on_signals

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

JOB: Final = "orders_consume"
SECOND_JOB: Final = "telemetry_consume"
SHARDS: Final = 8
LIVE: Final = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")
PROGRESS_SECONDS: Final = 5.0
REPEAT_SECONDS: Final = 30.0
"""A progress line that says nothing new is printed at most once per this time."""


class DemoFailed(KclError):  # noqa: N818 (a sentence for people)
    """The demonstration failed; the message says which condition it waited for."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Size and speed of the demonstration.

    Attributes:
        events: Number of orders.
        per_second: Orders per second.
        folder: Directory of all files. Its content is deleted at the start.
        page_port: Preferred port of the Dagster UI.
        timeout_seconds: Time limit of every single wait.
    """

    events: int = 200_000
    per_second: int = 2_500
    folder: Path = Path(".run/demo")
    page_port: int = 3000
    timeout_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a demonstration. Without numbers it ended before the comparison.

    Attributes:
        exact: Whether the table has exactly the published events.
        failure: Why the demonstration ended early. None: it did not.
        numbers: Counts of events, reshards, handoffs, workers and seconds, by name.
    """

    exact: bool
    failure: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The verdict as one line."""
        return " ".join(["VERDICT", *(f"{name}={n}" for name, n in self.numbers.items())])

    def as_dict(self) -> dict[str, object]:
        """The verdict for JSON output."""
        return {"exact": self.exact, "failure": self.failure, **self.numbers}


@dataclass
class Demo:
    """One demonstration run.

    Attributes:
        options: Size and speed.
        clock: Clock for time limits and rates.
        say: Function that prints a line.
        interrupted: Set when the user interrupts the run.
    """

    options: DemoOptions
    clock: Clock
    say: Callable[[str], None]
    interrupted: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.began = self.clock.monotonic()
        self.folder = self.options.folder.resolve()
        self.lake = self.folder / "lake"
        self.tables_read = {name: str(self.lake / name) for name in (ORDERS, TELEMETRY)}
        self.rows = {name: CommittedRows(uri) for name, uri in self.tables_read.items()}
        self.reshards = 0
        self._last_progress = self.began
        self._last_committed = 0
        self._said: tuple[object, ...] = ()
        self._said_at = self.began
        self._location = ("", "")

    def start(self) -> None:
        """Start the embedded AWS and Dagster, and create the streams."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.processes = Processes(self.folder, self.clock, {"LAKE": str(self.lake)})
        self.say("starting the embedded AWS")
        url = self.processes.start_aws(free_port(4566))
        self.kinesis = self._client(url)
        self.kinesis.create_stream(StreamName=ORDERS, ShardCount=SHARDS)
        self.kinesis.create_stream(StreamName=TELEMETRY, ShardCount=1)
        self.say(
            f"embedded AWS at {url}: streams {ORDERS} ({SHARDS} shards) and {TELEMETRY} (1 shard)"
        )
        self.page = DagsterClient(
            self.processes.start_dagster(None, free_port(self.options.page_port))
        )
        self.say(f"the Dagster UI is at {self.page.url}")
        settings = ConsumerSettings(application_name=ORDERS, streams=(ORDERS,))
        options = SessionOptions(
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="embedded",
            aws_secret_access_key="embedded",  # noqa: S106 (the embedded AWS takes any)
        )
        self.tables = open_tables(settings, AwsClients(settings, options), self.clock)

    def _client(self, url: str) -> KinesisClient:
        session = boto3.Session("embedded", "embedded", region_name="us-east-1")
        return session.client(
            "kinesis",
            endpoint_url=url,
            config=Config(retries={"max_attempts": 5, "mode": "standard"}, proxies={}),
        )

    def run(self) -> Comparison:
        """Run all steps and return the comparison of the table with the published events.

        Raises:
            DemoFailed: A step exceeded its time limit, or the user interrupted the run.
        """
        self.wait_for("Dagster to load the code", self._loaded)
        self.wait_for("the sensor to start two workers", lambda: len(self.live_runs()) >= 2)
        self.wait_for(
            "two workers to hold all leases",
            lambda: len(self.owners()) >= 2 and None not in self.owners(),
        )
        self.publisher = Publisher(
            self.kinesis, self.clock, self.options.events, self.options.per_second, SHARDS
        )
        self.publisher.start()
        total = self.options.events
        self.wait_for("a quarter to be published", lambda: self.publisher.published >= total * 0.25)
        self.split_hot_shard()
        self.wait_for("two fifths to be published", lambda: self.publisher.published >= total * 0.4)
        self.start_third_worker()
        self.wait_for("half to be published", lambda: self.publisher.published >= total * 0.5)
        self.merge_cold_shards()
        self.wait_for("the third worker to hold leases", lambda: len(self.owners() - {None}) >= 3)
        self.wait_for(
            "nine tenths to be published", lambda: self.publisher.published >= total * 0.9
        )
        self.stop_one_worker()
        self.wait_for("everything to be published", lambda: self.publisher.orders_done)
        self.publisher.finish()
        self.say(
            f"published {self.publisher.published:,} events; waiting for the table to have them all"
        )
        self.wait_for(
            "everything published to be in the table",
            lambda: self.committed() >= self.publisher.published,
        )
        self.wait_for(
            "every finished parent to be at SHARD_END or cleaned up", self._parents_finished
        )
        return compare(self.tables_read.values(), self.publisher.ids)

    def committed(self) -> int:
        """Return the number of rows in both tables."""
        return sum(rows.count() for rows in self.rows.values())

    def _loaded(self) -> bool:
        found = self.page.loaded()
        if found is not None:
            self._location = found
        return found is not None

    def live_runs(self) -> list[Run]:
        """Return the worker runs that have not ended, newest first."""
        return [run for run in self.page.runs(JOB) if run.status in LIVE]

    def leases(self) -> tuple[Lease, ...]:
        """Return the lease rows; none before the lease table exists."""
        try:
            return self.tables.lease.list_leases().leases
        except KclError:
            return ()

    def owners(self) -> set[str | None]:
        """Return the distinct owners of unfinished leases; {None} when there are no such leases."""
        return {lease.actual_owner for lease in self.leases() if not lease.ended} or {None}

    def split_hot_shard(self) -> None:
        """Split the shard with the lowest hash keys, which receives a quarter of all orders."""
        shard = self._open_shards()[0]
        low, high = (
            int(shard["HashKeyRange"][end]) for end in ("StartingHashKey", "EndingHashKey")
        )
        self.kinesis.split_shard(
            StreamName=ORDERS,
            ShardToSplit=shard["ShardId"],
            NewStartingHashKey=str((low + high) // 2),
        )
        self.reshards += 1
        self.say(f"split the hot shard {shard['ShardId']}")

    def merge_cold_shards(self) -> None:
        """Merge the two shards with the highest hash keys, which receive few orders."""
        first, second = self._open_shards()[-2:]
        self.kinesis.merge_shards(
            StreamName=ORDERS, ShardToMerge=first["ShardId"], AdjacentShardToMerge=second["ShardId"]
        )
        self.reshards += 1
        self.say(f"merged the cold shards {first['ShardId']} and {second['ShardId']}")

    def _open_shards(self) -> list[Any]:
        shards = self.kinesis.list_shards(StreamName=ORDERS, ShardFilter={"Type": "AT_LATEST"})[
            "Shards"
        ]
        return sorted(shards, key=lambda s: int(s["HashKeyRange"]["StartingHashKey"]))

    def start_third_worker(self) -> None:
        """Launch a worker run, as a user does in the Launchpad."""
        run = self.page.launch(
            *self._location, JOB, {}, {"kcl/application": ORDERS, "kcl/mode": "continuous"}
        )
        self.say(f"launched a third worker: {self.page.url}/runs/{run}")

    def stop_one_worker(self) -> None:
        """Terminate the oldest worker run, as the Terminate button does."""
        oldest = self.live_runs()[-1]
        self.page.terminate(oldest.run_id)
        self.say(f"stopping one worker gracefully: {self.page.url}/runs/{oldest.run_id}")

    def _parents_finished(self) -> bool:
        described = self.kinesis.list_shards(StreamName=ORDERS)["Shards"]
        parents = {
            s["ShardId"] for s in described if "EndingSequenceNumber" in s["SequenceNumberRange"]
        }
        return all(lease.ended for lease in self.leases() if lease.shard_id in parents)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition and print the progress.

        Raises:
            DemoFailed: The condition did not hold in time, or the user interrupted the run.
        """
        deadline = self.clock.monotonic() + self.options.timeout_seconds
        while not condition():
            if self.interrupted.wait(0.5):
                raise DemoFailed("interrupted")
            self.processes.check()
            self.progress(f"waiting for {what}")
            if self.clock.monotonic() > deadline:
                raise DemoFailed(
                    f"waited {self.options.timeout_seconds:.0f} s in vain for {what}; logs "
                    f"are in {self.folder}"
                )

    def progress(self, note: str) -> None:
        """Print a progress line, which ends with `note`, at most every five seconds.

        It contains published and committed events, records per second, the lag of each table that
        has one, and leases per worker.
        """
        now = self.clock.monotonic()
        if now - self._last_progress < PROGRESS_SECONDS:
            return
        rows = {name: table.count() for name, table in self.rows.items()}
        committed = sum(rows.values())
        rate = (committed - self._last_committed) / (now - self._last_progress)
        self._last_progress, self._last_committed = now, committed
        counts = dict(self.publisher.counts) if hasattr(self, "publisher") else {}
        published = sum(counts.values())
        lags = {name: counts.get(name, 0) - count for name, count in rows.items()}
        per_worker = Counter(
            lease.actual_owner or "(no owner)" for lease in self.leases() if not lease.ended
        )
        shown = (
            " ".join(f"{worker}={count}" for worker, count in sorted(per_worker.items()))
            or "none yet"
        )
        lag = ", ".join(f"{count:,} of {name}" for name, count in lags.items() if count > 0) or "0"
        news = (published, committed, shown, note)
        if news == self._said and now - self._said_at < REPEAT_SECONDS:
            return
        self._said, self._said_at = news, now
        self.say(
            f"{now - self.began:5.0f} s  published {published:>9,}  committed "
            f"{committed:>9,}  {rate:>7,.0f} records/s"
            f"  lag {lag}  leases {shown}  {note}"
        )

    def stop(self) -> tuple[int, int]:
        """Stop the workers through Dagster, then all processes.

        Returns:
            The number of handoffs and the number of worker runs.
        """
        handoffs = workers = 0
        try:
            if hasattr(self, "page"):
                self.say("stopping the workers, then Dagster and the embedded AWS")
                runs = self._all_runs()
                self._terminate_all(runs)
                handoffs = round(sum(self.page.sum_of(run.run_id, "run_handoffs") for run in runs))
                workers = len(runs)
        except (OSError, RuntimeError) as error:
            self.say(f"stopping through Dagster failed ({error}); stopping the processes")
        finally:
            self.processes.stop_all()
        return handoffs, workers

    def _all_runs(self) -> list[Run]:
        return [*self.page.runs(JOB), *self.page.runs(SECOND_JOB)]

    def _terminate_all(self, runs: list[Run]) -> None:
        for name in (ORDERS, TELEMETRY):
            self.page.stop_sensor(*self._location, f"{name}_leader")
        for run in runs:
            if run.status in ("QUEUED", "STARTING", "STARTED"):
                self.page.terminate(run.run_id)
        deadline = self.clock.monotonic() + 60
        while (
            any(run.status in LIVE for run in self._all_runs())
            and self.clock.monotonic() < deadline
        ):
            self.clock.sleep(0.5)


def run_demo(
    options: DemoOptions, clock: Clock, say: Callable[[str], None], *, stay_open: bool = False
) -> Verdict:
    """Run the demonstration and return the verdict.

    Args:
        options: Size and speed.
        clock: Clock for time limits and rates.
        say: Function that prints a line.
        stay_open: Keep the Dagster UI open after the comparison, until Ctrl-C.

    Returns:
        Whether the table holds exactly the published events, and the numbers of the run.
    """
    demo = Demo(options, clock, say)
    comparison = failure = None
    with stop_on_signals(demo.interrupted):
        try:
            demo.start()
            comparison = demo.run()
            if stay_open:
                url = demo.page.url
                say(f"everything is in the table; the Dagster UI runs at {url} until Ctrl-C")
                while not demo.interrupted.wait(1.0):
                    demo.processes.check()
                    demo.progress(url)
        except (KclError, BotoCoreError, ClientError) as error:
            failure = str(error)
            say(f"failed: {failure}")
        finally:
            handoffs, workers = demo.stop() if hasattr(demo, "processes") else (0, 0)
    if comparison is None:
        return Verdict(exact=False, failure=failure)
    numbers = {
        "published": len(demo.publisher.ids),
        "committed": comparison.committed,
        "missing": comparison.missing,
        "duplicated": comparison.duplicated,
        "reshards": demo.reshards,
        "handoffs": handoffs,
        "workers": workers,
        "seconds": round(clock.monotonic() - demo.began),
    }
    verdict = Verdict(comparison.exact, failure, numbers)
    say(f"the tables are in {demo.lake}, the logs in {demo.folder}")
    say(verdict.line)
    return verdict
