"""Supervise the runs of workers in each tick of the leader sensor.

In reading order: runs whose worker does not report any more, the count of workers, their load, the
replacement of workers (bounded runs and new versions), the number of runs, and one tick of all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, Self
from uuid import UUID

import dagster as dg
from dagster import DagsterInstance, DagsterRunStatus, DefaultRunLauncher
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kcl_pipeline.clock import LastChanges
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.orchestration.names import APPLICATION_TAG, CONTINUOUS, MODE_TAG, Names
from kcl_pipeline.orchestration.options import DagsterOptions, FleetLike, PipelineLike
from kcl_pipeline.orchestration.runs import (
    ACTIVE,
    RunView,
    early_failures,
    failure_problem,
    queue_problem,
    recent_runs,
    runs_of_version,
    silence_limit_seconds,
)
from kcl_pipeline.status.snapshot import RunProblem
from kcl_pipeline.text import counted, duration_text, printable

# Report the runs whose worker does not report any more.
#
# Dagster's default launcher does not notice a dead worker after the code server that started it has
# ended, and its run monitoring is off by default. A run can also stay in CANCELING while its worker
# never received the signal. Both are detected with the monotonic clock of this process alone: a
# worker is alive if its row *changes*. The time in the row is not used.

MISSING_ROW_SECONDS: Final = 120.0
"""How long a run may have no worker metrics row: a stopping worker deletes it, and then ends."""
START_SECONDS: Final = 300.0
"""How long a run may have had none yet. A worker writes its row after its Spark session exists,
which on a small host, or with packages to load, takes minutes. A run that is closed before is
replaced by one that needs as long.
"""
STUCK_CANCELING_SECONDS: Final = 30.0
LONGEST_GAP_SECONDS: Final = 10.0

Action = Literal["report_failed", "report_canceled", "request_drain"]


@dataclass(frozen=True, slots=True)
class RunMismatch:
    """A run whose status does not match its worker, and the action that corrects it."""

    run_id: str
    worker_id: str
    action: Action
    reason: str


@dataclass(slots=True)
class Heartbeats:
    """How long each worker's row has not changed. Can be built again at any time.

    Only observed time counts: the time between two observations adds at most
    `LONGEST_GAP_SECONDS`. During an outage of the table no worker can report. Afterwards every
    worker has its full time again.

    Attributes:
        rows: By worker id, its last row.
    """

    rows: dict[str, WorkerMetrics | BadRow] = field(default_factory=dict)
    _reported: frozenset[str] = frozenset()
    _observed_at: float = -math.inf
    _heartbeats: LastChanges[str] = field(default_factory=LastChanges)
    _absent: LastChanges[str] = field(default_factory=LastChanges)
    _canceling: LastChanges[str] = field(default_factory=LastChanges)

    def observe(
        self,
        rows: Iterable[WorkerMetrics],
        runs: Sequence[RunView],
        now: float,
        *,
        unreadable: Iterable[BadRow] = (),
    ) -> None:
        """Add one observation of the table and of Dagster's runs at `now` (monotonic seconds).

        A row that cannot be read shows in the same way whether its worker reports.
        """
        observed = (self._heartbeats, self._absent, self._canceling)
        gap = max(now - self._observed_at - LONGEST_GAP_SECONDS, 0.0)
        if math.isfinite(gap):
            for changes in observed:
                changes.shift(gap)
        self._observed_at = now
        self.rows = {row.worker_id: row for row in rows} | {row.key: row for row in unreadable}
        self._reported = (self._reported | self.rows.keys()) & {run.worker_id for run in runs}
        started = [
            r for r in runs if r.status in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
        ]
        canceling = [r for r in started if r.status is DagsterRunStatus.CANCELING]
        absent = [r for r in started if r.worker_id not in self.rows]
        self._heartbeats.observe({key: _heartbeat(row) for key, row in self.rows.items()}, now)
        self._absent.observe({r.run_id: True for r in absent}, now)
        self._canceling.observe({r.run_id: True for r in canceling}, now)

    @property
    def ended(self) -> frozenset[str]:
        """Workers that have deleted their row, and whose run is still active."""
        return self._reported - self.rows.keys()

    def silent_seconds(self, worker_id: str) -> float | None:
        """For how many seconds the row has not changed; None without a row."""
        return self._seconds(self._heartbeats, worker_id)

    def absent_seconds(self, run_id: str) -> float:
        """For how many seconds the worker of a run has had no row."""
        return self._seconds(self._absent, run_id) or 0.0

    def canceling_seconds(self, run_id: str) -> float:
        """For how many seconds a run has been in CANCELING."""
        return self._seconds(self._canceling, run_id) or 0.0

    def _seconds(self, changes: LastChanges[str], key: str) -> float | None:
        return self._observed_at - changes.since(key) if key in changes else None


def _heartbeat(row: WorkerMetrics | BadRow) -> object:
    """What only the worker writes. A drain request is written by others."""
    return row.heartbeat if isinstance(row, BadRow) else (row.last_update_seconds, row.stats)


def find_mismatches(
    heartbeats: Heartbeats, runs: Sequence[RunView], limit_seconds: float
) -> tuple[RunMismatch, ...]:
    """Find runs without a live worker, and runs in CANCELING whose worker keeps running."""
    findings = []
    for run in runs:
        if run.status not in (DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING):
            continue
        canceling = run.status is DagsterRunStatus.CANCELING
        silent = heartbeats.silent_seconds(run.worker_id)
        is_ending = canceling or run.worker_id in heartbeats.ended
        row_limit = MISSING_ROW_SECONDS if is_ending else START_SECONDS
        action: Action = "report_canceled" if canceling else "report_failed"
        if silent is not None and silent > limit_seconds:
            reason = f"has not reported for {silent:.0f} s"
        elif silent is None and heartbeats.absent_seconds(run.run_id) > row_limit:
            reason = f"has had no row for {row_limit:.0f} s"
        elif (
            silent is not None
            and canceling
            and heartbeats.canceling_seconds(run.run_id) > STUCK_CANCELING_SECONDS
        ):
            action, reason = "request_drain", "keeps running while its run is being cancelled"
        else:
            continue
        reason = f"worker {run.worker_id} {reason}"
        findings.append(RunMismatch(run.run_id, run.worker_id, action, reason))
    return tuple(findings)


def apply_findings(
    findings: Sequence[RunMismatch], instance: DagsterInstance, table: WorkerMetricsTable
) -> tuple[str, ...]:
    """Apply the findings and return a log line for each action taken.

    A worker whose run is reported dead also receives a drain request. If it was only paused, it
    must not continue without a run.
    """
    done = []
    for finding in findings:
        requested = table.request_drain(finding.worker_id)
        if finding.action == "request_drain":
            if requested:
                done.append(f"{finding.reason}: requested a drain")
            continue
        run = instance.get_run_by_id(finding.run_id)
        if run is None or run.is_finished:
            continue
        message = f"kcl_pipeline leader: {finding.reason}"
        if finding.action == "report_canceled":
            instance.report_run_canceled(run, message)
        else:
            instance.report_run_failed(run, message)
        done.append(f"{finding.reason}: closed run {finding.run_id[:8]}")
    return tuple(done)


def cancel_queued(instance: DagsterInstance, run_ids: Iterable[str]) -> None:
    """Cancel these runs, unless Dagster has taken them from its queue meanwhile."""
    for run_id in run_ids:
        run = instance.get_run_by_id(run_id)
        if run is not None and run.status is DagsterRunStatus.QUEUED:
            message = "kcl_pipeline leader: there are enough workers without this queued run"
            instance.report_run_canceled(run, message)


# Count the workers of an application: by the rows that move, and by the runs that start.
#
# A worker counts while its row moves, also if this Dagster instance has no run of it. A successor
# and the worker that it replaces count as one.


@dataclass(frozen=True, slots=True)
class CountedWorkers:
    """The continuous workers of an application.

    Attributes:
        runs: The active runs of continuous workers by worker id.
        moving: Ids of the workers whose row moves, without those of drains.
        rows: The rows that can be read by worker id.
        ended: Ids of the workers that have deleted their row, and whose run is still active.
    """

    runs: Mapping[str, RunView] = field(default_factory=dict)
    moving: frozenset[str] = frozenset()
    rows: Mapping[str, WorkerMetrics] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, active: Sequence[RunView], heartbeats: Heartbeats, limit_seconds: float
    ) -> "CountedWorkers":
        """Count the workers of the last observation.

        Args:
            active: All active runs of the application.
            heartbeats: The rows.
            limit_seconds: After this time without a change a row does not move any more.
        """
        rows = {key: row for key, row in heartbeats.rows.items() if isinstance(row, WorkerMetrics)}
        drains = {run.worker_id for run in active if not run.continuous}
        # `kcl-pipeline worker --drain` has no run.
        drains |= {key for key, row in rows.items() if row.status and row.status.is_drain}
        return cls(
            {run.worker_id: run for run in active if run.continuous},
            frozenset(
                key
                for key in heartbeats.rows
                if key not in drains and (heartbeats.silent_seconds(key) or 0.0) <= limit_seconds
            ),
            rows,
            heartbeats.ended,
        )

    @property
    def starting(self) -> tuple[RunView, ...]:
        """The runs whose worker has no row that moves yet. One that is canceled gets none."""
        return tuple(
            run
            for run in self.runs.values()
            if run.worker_id not in self.moving and run.status is not DagsterRunStatus.CANCELING
        )

    @property
    def pairs(self) -> tuple[tuple[RunView, str], ...]:
        """Each run of a successor that is not canceled, with the worker that it replaces.

        Until the run of that worker has ended, too: its row is gone before.
        """
        return tuple(
            (run, run.replaces)
            for run in self.runs.values()
            if run.replaces is not None
            and run.replaces in self._alive
            and run.status is not DagsterRunStatus.CANCELING
        )

    @property
    def paired(self) -> frozenset[str]:
        """Ids of the successors and of the workers that they replace."""
        return frozenset(
            worker_id for run, former in self.pairs for worker_id in (run.worker_id, former)
        )

    @property
    def number(self) -> int:
        """Number of workers. A successor counts only if the worker that it replaces is gone."""
        return len(self._alive - {run.worker_id for run, _ in self.pairs})

    @property
    def leaving(self) -> int:
        """How many of `number` are asked to end or have ended, and are not replaced."""
        return sum(
            self.is_draining(worker_id) or worker_id in self.ended
            for worker_id in self._alive - self.paired
        )

    @property
    def _alive(self) -> frozenset[str]:
        return self.moving | {run.worker_id for run in self.starting}

    def is_draining(self, worker_id: str) -> bool:
        """Whether the worker was asked to end, or its run is being canceled."""
        row, run = self.rows.get(worker_id), self.runs.get(worker_id)
        is_canceled = run is not None and run.status is DagsterRunStatus.CANCELING
        return is_canceled or (row is not None and row.drain_requested)


# Judge whether the workers have too much load, or so little that one can be drained.
#
# The load is the lag of the application, and the CPU of its workers. Both are from the rows of
# the workers, which report them even while a batch hangs. A lag that another worker cannot reduce
# does not count: that of a paused shard, of a hung worker, and of a worker whose batches the sink
# refuses.

CALM_LAG: Final = 0.1
"""Share of the lag limit. A lag at or below it is calm."""
CALM_CPU: Final = 0.9
"""Share of the CPU limit that the other workers may reach after one has been drained."""
CPU_AVERAGES: Final = 4
"""How many of a worker's newest averages count: about two minutes."""
DEFAULT_CPU_PERCENT: Final = 80.0
NO_CPU_PERCENT: Final = 100.0
"""The CPU is never above it, so this limit switches scaling by CPU off."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the workers.

    Attributes:
        lag_millis: Largest lag that another worker can reduce. None: not known.
        cpu_percent: Mean CPU of the workers, 0 to 100. None: not known.
        measured: Number of workers whose CPU is known.
    """

    lag_millis: int | None = None
    cpu_percent: float | None = None
    measured: int = 0

    @classmethod
    def of(cls, lag_millis: int | None, workers: Sequence[WorkerMetrics]) -> "Load":
        """Return the load. Failed intervals of the CPU (−1) and new workers do not count.

        Args:
            lag_millis: Lag of the application. None: not known.
            workers: The live workers.
        """
        found = []
        for worker in workers:
            values = [value for value in worker.cpu[-CPU_AVERAGES:] if value >= 0]
            if len(values) > 1:
                found.append(sum(values) / len(values))
        return cls(
            _reducible(lag_millis, workers), sum(found) / len(found) if found else None, len(found)
        )


def _reducible(lag_millis: int | None, workers: Sequence[WorkerMetrics]) -> int | None:
    """The largest lag without those that another worker cannot reduce."""
    states = [worker.status for worker in workers if worker.status is not None]
    if not any(state.hung or state.failed_batches or state.paused_leases for state in states):
        return lag_millis
    found: list[int | None] = []
    for state in states:
        if state.hung is None and state.failed_batches == 0:
            paused = {lease.lease_key for lease in state.paused}
            found += [lag.millis for lag in state.lags if lag.lease_key not in paused]
            found.append(state.more_lags_millis)
    return max((millis for millis in found if millis is not None), default=None)


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Above which load a worker is started.

    Attributes:
        lag_seconds: Limit of the lag. None: the lag does not count.
        cpu_percent: Limit of the mean CPU. None: the CPU does not count.
    """

    lag_seconds: float | None = None
    cpu_percent: float | None = None

    def excess(self, load: Load) -> str | None:
        """Which limit is exceeded, as a sentence without a period. None: no limit."""
        seconds, percent = self.lag_seconds, self.cpu_percent
        lag, cpu = load.lag_millis, load.cpu_percent
        if seconds is not None and lag is not None and lag > seconds * 1000:
            limit = f"scale_up_lag_seconds ({seconds:g})"
            return f"the lag of {lag / 1000:.0f} s is above {limit}"
        if percent is not None and cpu is not None and cpu > percent:
            limit = f"scale_up_cpu_percent ({percent:g})"
            return f"the mean CPU of the workers, {cpu:.0f} %, is above {limit}"
        return None

    def calm(self, load: Load) -> str | None:
        """Why one worker less is enough, as a phrase. None: it is not, or the load is not known."""
        seconds, percent = self.lag_seconds, self.cpu_percent
        lag, cpu, measured = load.lag_millis, load.cpu_percent, load.measured
        phrases = []
        if seconds is not None:
            if lag is None or lag > seconds * 1000 * CALM_LAG:
                return None
            phrases.append(f"the lag has been at most {seconds * CALM_LAG:g} s")
        if percent is not None and cpu is not None:
            others = measured - 1
            if others < 1 or cpu * measured / others > percent * CALM_CPU:
                return None
            phrases.append(f"the other workers need at most {percent * CALM_CPU:g} % of CPU")
        return " and ".join(phrases) or None

    def is_known(self, load: Load) -> bool:
        """Whether anything that counts is known."""
        lag_is_known = self.lag_seconds is not None and load.lag_millis is not None
        return lag_is_known or (self.cpu_percent is not None and load.cpu_percent is not None)


def cpu_limit(configured: float | None, instance: DagsterInstance) -> float | None:
    """Return the limit of the CPU for runs of this Dagster instance.

    Runs of Dagster's default launcher share the machine of the code server. One worker more adds no
    CPU there.

    Args:
        configured: The option `scale_up_cpu_percent`. None: 80, or no limit on a shared machine.
        instance: Has the launcher.
    """
    if configured is not None:
        return None if configured >= NO_CPU_PERCENT else configured
    return None if shares_machine(instance) else DEFAULT_CPU_PERCENT


def shares_machine(instance: DagsterInstance) -> bool:
    """Whether Dagster's default launcher, or a test, starts the runs.

    The launcher is not loaded: its package may be absent where the code is loaded.
    """
    if instance.is_ephemeral:
        return True
    launcher = instance.get_ref().run_launcher_data
    return launcher is None or launcher.class_name == DefaultRunLauncher.__name__


# Replace workers: those whose time is over, and those of another version of the code.
#
# 1. The run of a successor starts. Its row names the worker that it replaces, and the leader
#    moves the leases of that worker to it.
# 2. When the successor has read each shard that it got, the former worker is asked to end. It has
#    no lease any more.
# 3. The next one follows. There is one successor at a time.
#
# A successor that is queued or starts ends nobody. One that cannot do its work is asked to end,
# and the former worker, which still runs, gets its leases back. If its code has another version
# than the former worker, this version replaces no other worker.
#
# `replace` is a pure function of Dagster's runs, of the rows, and of the memory in the cursor.

STAGGER: Final = 0.1
"""Part of its time by which a worker ends earlier, so that workers of one start do not end at once.
"""
TAKE_OVER_SECONDS: Final = 600.0
"""A successor that has not taken over for so long, and the wait for a batch, cannot do its work."""
RETRY_SECONDS: Final = 3_600.0
"""After a successor of the same version failed, the next one follows after this time."""
NEW_FAILURE_SECONDS: Final = 300.0
"""A run of a new version that fails within this time speaks against the version."""
MOST_NEW_FAILURES: Final = 3
"""After so many failures in a row, no further worker is replaced by the new version."""


class Failed(BaseModel):
    """A version that replaces no other workers.

    Attributes:
        version: The version. None: not known.
        former: The version of the workers that it was to replace.
        reason: Why, as a phrase about the version or its worker.
        worker_id: The worker that failed. None: the runs failed before they reported.
        at: Epoch seconds.
        dead_letters: How many records became dead letters in that worker.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: str | None
    former: str | None
    reason: str
    worker_id: str | None = None
    at: float = 0.0
    dead_letters: int = 0

    @property
    def is_new(self) -> bool:
        """Whether the code is another one than that of the former workers."""
        return self.version != self.former

    def sentence(self, replay: str) -> str:
        """Say what has stopped and why, without a period.

        Args:
            replay: The command that replays dead letters.
        """
        if not self.is_new:
            return f"the replacement of workers whose time is over has stopped: {self.reason}"
        letters = f"{counted(self.dead_letters, 'record')} became dead letters meanwhile"
        again = f"; after a correction, `{replay}` reads them again" if self.dead_letters else ""
        return (
            f"version {self.version} replaces no more workers: {self.reason}; workers of version "
            f"{self.former or 'unknown'} go on; {letters}{again}"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What to do about workers that are to be replaced.

    Attributes:
        start: Id of the worker for which a successor is started. None: none is.
        drain: Ids of the workers to ask to end.
        failed: The version that has failed. None: none has.
        text: What happens, for the sentence of the tick. None: nothing.
    """

    start: str | None = None
    drain: tuple[str, ...] = ()
    failed: Failed | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Code:
    """The code of this code location.

    Attributes:
        version: Its version. None: not known.
        location: The code location. None: not known.
        run_seconds: How long a worker runs. None: without an end.
        replaces_versions: Whether workers of another version are replaced.
    """

    version: str | None = None
    location: str | None = None
    run_seconds: float | None = None
    replaces_versions: bool = True

    def is_outdated(self, run: RunView) -> bool:
        """Whether a run of this code location has another version."""
        return (
            self.replaces_versions
            and self.version is not None
            and run.version != self.version
            and self._is_here(run)
        )

    def _is_here(self, run: RunView) -> bool:
        return self.location is None or run.location is None or run.location == self.location

    def is_over(self, run: RunView, now: float) -> bool:
        """Whether the time of a run of this code location is over. It is staggered by its id."""
        if self.run_seconds is None or not self._is_here(run):
            return False
        began = run.created if run.started is None else run.started
        return now - began >= self.run_seconds * (1 - STAGGER * _fraction(run.run_id))


def _fraction(run_id: str) -> float:
    """A number from 0 to 1 that is the same for a run at all times."""
    try:
        return UUID(run_id).int / (1 << 128)
    except ValueError:
        return 0.0


def is_blocked(failed: Failed | None, workers: CountedWorkers, code: Code) -> bool:
    """Whether no worker starts at all: this version has failed, and workers of others run."""
    return (
        failed is not None
        and failed.is_new
        and failed.version == code.version
        and any(code.is_outdated(run) for run in workers.runs.values())
    )


def replace(
    workers: CountedWorkers,
    recent: Sequence[RunView],
    leases: Sequence[Lease],
    code: Code,
    failed: Failed | None,
    *,
    paused_before: int,
    batch_seconds: float = 0.0,
    follows_succession: bool = True,
    now: float,
) -> Step:
    """Decide the next step.

    Args:
        workers: The workers.
        recent: The newest continuous runs in any status.
        leases: All leases.
        code: The code of this code location.
        failed: The version that has failed, as of the last step.
        paused_before: Number of paused shards when the last successor started.
        batch_seconds: Longest wait for a batch.
        follows_succession: Whether a leader moves the leases to the successor. A Java leader does
            not, and in a leaderless application nobody does: the leases that the former worker
            still has are then free when it ends.
        now: Epoch seconds.
    """
    failed = _still_failed(failed, workers, code, now)
    if workers.pairs:
        return _continued(
            *workers.pairs[0],
            workers,
            leases,
            failed,
            paused_before=paused_before,
            limit_seconds=TAKE_OVER_SECONDS + batch_seconds,
            follows_succession=follows_succession,
            now=now,
        )
    due = _due(workers, code, now)
    if not due or failed is not None:
        return Step(failed=failed)
    failed = _failed_worker(due[0], workers, code, now) or _failed_runs(due[0], recent, code, now)
    if failed is not None:
        return Step(failed=failed, drain=() if failed.worker_id is None else (failed.worker_id,))
    text = _what(due, code)
    if any(workers.is_draining(worker_id) for worker_id in workers.moving):
        return Step(text=f"{text}, one is ending")
    if workers.starting:
        number = len(workers.starting)
        verb = "has" if number == 1 else "have"
        return Step(text=f"{text}, when {counted(number, 'worker')} {verb} started")
    wait = _wait_seconds(recent, now)
    if wait > 0:
        return Step(text=f"{text}: next start in {wait:.0f} s")
    return Step(start=due[0].worker_id, text=f"{text}: starting the successor of {_name(due[0])}")


def _still_failed(
    failed: Failed | None, workers: CountedWorkers, code: Code, now: float
) -> Failed | None:
    """Return the failed version with its dead letters now. None: it is over."""
    if failed is None or failed.version != code.version:
        return None
    if not failed.is_new and now - failed.at >= RETRY_SECONDS:
        return None
    if failed.is_new and not any(code.is_outdated(run) for run in workers.runs.values()):
        return None
    row = workers.rows.get(failed.worker_id or "")
    letters = 0 if row is None or row.status is None else row.status.totals.dead_letters
    return failed.model_copy(update={"dead_letters": max(failed.dead_letters, letters)})


def _due(workers: CountedWorkers, code: Code, now: float) -> list[RunView]:
    """The runs to replace: those of another version first, the oldest first."""
    due = [
        run
        for run in workers.runs.values()
        if run.worker_id in workers.moving
        and run.status is DagsterRunStatus.STARTED
        and not workers.is_draining(run.worker_id)
        and (code.is_outdated(run) or code.is_over(run, now))
    ]
    return sorted(due, key=lambda run: (not code.is_outdated(run), run.created, run.run_id))


def _what(due: Sequence[RunView], code: Code) -> str:
    outdated = sum(code.is_outdated(run) for run in due)
    if outdated:
        return f"replacing {counted(outdated, 'worker')} by version {code.version}"
    return f"replacing {counted(len(due), 'worker')} whose time is over"


def _wait_seconds(recent: Sequence[RunView], now: float) -> float:
    """How long to wait after successors that failed soon after their start."""
    failures = early_failures(recent, now)
    if not failures:
        return 0.0
    last = max(run.ended or 0.0 for run in failures)
    return last + min(10.0 * 2.0 ** len(failures), NEW_FAILURE_SECONDS) - now


def _failed_worker(due: RunView, workers: CountedWorkers, code: Code, now: float) -> Failed | None:
    """Name the first worker of the new version that has paused shards.

    None: there is none, or a worker of another version has paused shards, too.
    """
    if not code.is_outdated(due):
        return None
    paused = [
        key
        for key in sorted(workers.moving & workers.rows.keys())
        if (status := workers.rows[key].status) is not None and status.paused_leases
    ]
    runs = [workers.runs.get(key) for key in paused]
    if not runs or any(run is None or run.version != code.version for run in runs):
        return None
    fault = _paused_text(workers.rows[paused[0]]) or ""
    return _failed(paused[0], fault, code.version, due, workers, now)


def _failed(
    worker_id: str,
    fault: str,
    version: str | None,
    former: RunView | None,
    workers: CountedWorkers,
    now: float,
) -> Failed:
    status = workers.rows[worker_id].status
    return Failed(
        version=version,
        former=version if former is None else former.version,
        reason=f"worker {printable(worker_id)} {fault}",
        worker_id=worker_id,
        at=now,
        dead_letters=0 if status is None else status.totals.dead_letters,
    )


def _failed_runs(due: RunView, recent: Sequence[RunView], code: Code, now: float) -> Failed | None:
    """Say that the last runs of a new version failed. None: they did not."""
    if not code.is_outdated(due):
        return None
    new = [run for run in recent if run.version == code.version]
    failures = early_failures(new, now, NEW_FAILURE_SECONDS)
    if len(failures) < MOST_NEW_FAILURES:
        return None
    reason = f"its last {counted(len(failures), 'run')} failed"
    return Failed(version=code.version, former=due.version, reason=reason, at=now)


def _continued(
    run: RunView,
    former: str,
    workers: CountedWorkers,
    leases: Sequence[Lease],
    failed: Failed | None,
    *,
    paused_before: int,
    limit_seconds: float,
    follows_succession: bool,
    now: float,
) -> Step:
    """The next step after the start of a successor."""
    text = f"{_name(run)} replaces {printable(former)}"
    if workers.is_draining(run.worker_id):
        return Step(failed=failed, text=f"{text} no more, and is ending")
    row = workers.rows.get(run.worker_id)
    if run.worker_id not in workers.moving or row is None:
        state = "queued" if run.status is DagsterRunStatus.QUEUED else "starting"
        return Step(failed=failed, text=f"{text}: it is {state}")
    if workers.is_draining(former) or former not in workers.moving:
        return Step(failed=failed, text=f"{text}, which is ending")
    fault = _fault(row, workers, paused_before)
    waits = _waits_for(row, former, leases, follows_succession=follows_succession)
    if fault is None and waits is not None and _age(row) > limit_seconds:
        fault = f"{waits} for {duration_text(_age(row))}"
    if fault is not None:
        before = workers.runs.get(former)
        failed = _failed(run.worker_id, fault, run.version, before, workers, now)
        return Step(drain=(run.worker_id,), failed=failed, text=f"{text} no more")
    if waits is not None:
        return Step(failed=failed, text=f"{text}: it {waits}")
    return Step(drain=(former,), failed=failed, text=f"{text}: ending {printable(former)}")


def paused_shards(workers: CountedWorkers) -> int:
    """Number of shards that the workers have paused."""
    states = (row.status for key, row in workers.rows.items() if key in workers.moving)
    return sum(state.paused_leases for state in states if state is not None)


def _fault(row: WorkerMetrics, workers: CountedWorkers, paused_before: int) -> str | None:
    """Why a successor cannot do its work, as a phrase. Shards that were paused before are none."""
    return None if paused_shards(workers) <= paused_before else _paused_text(row)


def _paused_text(row: WorkerMetrics) -> str | None:
    status = row.status
    if status is None or not status.paused_leases:
        return None
    reasons = [printable(one.reason) for one in status.paused[:1]]
    return ": ".join([f"has paused {counted(status.paused_leases, 'shard')}", *reasons])


def _waits_for(
    row: WorkerMetrics, former: str, leases: Sequence[Lease], *, follows_succession: bool
) -> str | None:
    """What a successor has not done yet, as a phrase. None: the former worker may end.

    A stream without records has no commit, so a shard counts when it was read. While records wait,
    one batch must be in the table.
    """
    unfinished = [lease for lease in leases if not lease.ended]
    kept = sum(former in (lease.owner, lease.checkpoint_owner) for lease in unfinished)
    if kept and follows_succession:
        return f"has not got {counted(kept, 'shard')} yet"
    status, taken = row.status, sum(le.actual_owner == row.worker_id for le in unfinished)
    read = 0 if status is None else status.read_leases
    if read < taken:
        return f"has not read {counted(taken - read, 'shard')} yet"
    if status is None or status.paused_leases:  # shards that were paused before
        return None
    has_committed = status.totals.batches > 0
    if status.failed_batches or (status.lag_millis and not has_committed):
        return "has not committed a batch yet"
    return None


def _age(row: WorkerMetrics) -> float:
    """For how long a worker has run, by its own clock."""
    return 0.0 if row.status is None else row.status.totals.seconds


def _name(run: RunView) -> str:
    return printable(run.worker_id)


# Decide how many worker runs to start or to drain.
#
# `decide` is a pure function of the workers, their load, and the memory in the sensor's cursor.
#
# * There are never more workers than open shards, because one more would have nothing to read.
# * Only some runs may be on the way at once: queued, starting, or without a worker metrics row.
#   They count as workers, so none is started twice.
# * Runs that fail soon after their start are replaced with a growing delay. Otherwise a transform
#   that always fails would start a run every five seconds.

FIRST_BACKOFF_SECONDS: Final = 10.0
LONGEST_BACKOFF_SECONDS: Final = 300.0
SCALE_COOLDOWN_SECONDS: Final = 120.0
SCALE_DOWN_AFTER_SECONDS: Final = 600.0
FEWER_SHARDS_AFTER_SECONDS: Final = 60.0
"""A smaller number of open shards counts after this time. A reshard changes it several times."""
LONGEST_CALM_SECONDS: Final = 14_400.0
"""Longest calm before a worker is drained, in a fleet that needed the drained worker again."""
NOTHING_KNOWN: Final = Load()
NO_LIMITS: Final = LoadLimits()


class _Value(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class AutoscalerMemory(_Value):
    """State of the autoscaler, stored as JSON in the sensor's cursor.

    Times are epoch seconds of the code server. A backoff that is read from here is never longer
    than `LONGEST_BACKOFF_SECONDS`, even if the clock was changed.

    Attributes:
        desired: Number of workers, limited to the fleet's `min` and `max`. It may be edited in
            the Dagster UI.
        last_death: The newest run that failed early and was counted.
        retry_at: No replacement starts before this time.
        scaled_at: When `desired` was last changed because of the load.
        scaled: How and why it was changed then, for people.
        calm_since: Since when the load is low enough to drain a worker.
        calm_seconds: How long it must be so. It doubles if the worker is needed again soon.
        drained_at: When `desired` was last lowered because of the load.
        open_shards: Number of open shards that limits the workers. None: not known yet.
        fewer_since: Since when fewer shards than `open_shards` are open.
        failed: The version of the code that replaces no other workers. None: no version.
        paused_before: Number of paused shards when the last successor of a worker started.
    """

    desired: int = Field(0, ge=0)
    last_death: str | None = Field(
        None, description="The newest run that failed early and was counted"
    )
    retry_at: float = 0.0
    scaled_at: float = 0.0
    scaled: str | None = None
    calm_since: float | None = None
    calm_seconds: float = Field(SCALE_DOWN_AFTER_SECONDS, gt=0, le=LONGEST_CALM_SECONDS)
    drained_at: float | None = None
    open_shards: int | None = Field(None, ge=0)
    fewer_since: float | None = None
    failed: Failed | None = None
    paused_before: int = Field(0, ge=0)

    @classmethod
    def parse(cls, cursor: str | None) -> Self:
        """Parse a cursor. An invalid one (a wrong edit) gives the default memory."""
        try:
            return cls.model_validate_json(cursor or "{}")
        except ValidationError:
            return cls.model_validate({})


class ScalingDecision(_Value):
    """How many runs to start, which workers to drain, and why.

    Attributes:
        start: Number of runs to start.
        drain: Ids of the workers to drain.
        cancel: Ids of the queued runs to cancel.
        memory: The next cursor.
        reason: A sentence for the log.
        limit: Why there are not more workers, as a sentence without a period. None: nothing limits
            them.
    """

    start: int = 0
    drain: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    memory: AutoscalerMemory
    reason: str
    limit: str | None = None


def backoff_seconds(failures: int, desired: int) -> float:
    """Delay before the next replacement.

    It is 0 until `desired` runs have failed early, then it doubles with every `desired` failures.
    """
    rounds = failures // max(desired, 1)
    return (
        0.0
        if rounds == 0
        else min(FIRST_BACKOFF_SECONDS * 2 ** min(rounds - 1, 10), LONGEST_BACKOFF_SECONDS)
    )


def _scaled(
    memory: AutoscalerMemory,
    load: Load,
    limits: LoadLimits,
    now: float,
    largest: int,
    smallest: int,
) -> AutoscalerMemory:
    desired = min(max(memory.desired, smallest), largest)
    memory = memory.model_copy(update={"desired": desired, "scaled_at": min(memory.scaled_at, now)})
    if not limits.is_known(load) or smallest == 0:
        return memory
    excess = limits.excess(load)
    is_settled = now - memory.scaled_at >= SCALE_COOLDOWN_SECONDS
    if excess is not None and desired < largest and is_settled:
        return _grown(memory, now, excess)
    calm = limits.calm(load)
    if calm is None:
        return memory.model_copy(update={"calm_since": None})
    calm_since = now if memory.calm_since is None else min(memory.calm_since, now)
    if desired > smallest and now - calm_since >= memory.calm_seconds:
        why = f"{calm} for {duration_text(now - calm_since)}"
        memory = memory.model_copy(update={"drained_at": now})
        return _changed(memory, desired - 1, now, why)
    return memory.model_copy(update={"calm_since": calm_since})


def _grown(memory: AutoscalerMemory, now: float, why: str) -> AutoscalerMemory:
    """One worker more. If one was drained not long ago, the next calm must last twice as long."""
    calm_seconds = SCALE_DOWN_AFTER_SECONDS
    if memory.drained_at is not None and now - memory.drained_at <= 2 * memory.calm_seconds:
        calm_seconds = min(2 * memory.calm_seconds, LONGEST_CALM_SECONDS)
    memory = memory.model_copy(update={"calm_seconds": calm_seconds})
    return _changed(memory, memory.desired + 1, now, why)


def _changed(memory: AutoscalerMemory, desired: int, now: float, why: str) -> AutoscalerMemory:
    time = f"{datetime.fromtimestamp(now, UTC):%H:%M} UTC"
    scaled = f"{memory.desired} to {desired} at {time}: {why}"
    calm_since = now if desired < memory.desired else None
    changes = {"desired": desired, "scaled_at": now, "scaled": scaled, "calm_since": calm_since}
    return memory.model_copy(update=changes)


def open_shards(leases: Sequence[Lease]) -> int | None:
    """Count the shards that can be read now; None without any lease.

    A shard whose parent is not finished is left out: it is read after its parent.
    """
    if not leases:
        return None
    unfinished = [lease for lease in leases if not lease.ended]
    known = {(lease.stream, lease.shard_id) for lease in unfinished}
    return sum(
        not any((lease.stream, parent) in known for parent in lease.parent_shard_ids)
        for lease in unfinished
    )


def _with_shards(memory: AutoscalerMemory, open_shards: int | None, now: float) -> AutoscalerMemory:
    """Note the number of open shards. None: unknown, so the last number stays."""
    last = memory.open_shards
    if open_shards is None or open_shards == last:
        return memory.model_copy(update={"fewer_since": None})
    since = now if memory.fewer_since is None else min(memory.fewer_since, now)
    if last is not None and open_shards < last and now - since < FEWER_SHARDS_AFTER_SECONDS:
        return memory.model_copy(update={"fewer_since": since})
    return memory.model_copy(update={"open_shards": open_shards, "fewer_since": None})


def _superfluous(workers: CountedWorkers, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The queued runs to cancel, then the workers to drain: the newest first.

    A queued run has no worker yet. One that is starting can neither be canceled nor drained. A
    worker that is being replaced, and its successor, are left alone.
    """
    free = [
        run
        for run in workers.runs.values()
        if run.worker_id not in workers.paired and not workers.is_draining(run.worker_id)
    ]
    newest = sorted(free, key=lambda run: (run.created, run.run_id), reverse=True)
    queued = [run.run_id for run in newest if run.status is DagsterRunStatus.QUEUED][:number]
    moving = [run.worker_id for run in newest if run.worker_id in workers.moving]
    return tuple(queued), tuple(moving[: number - len(queued)])


def decide(
    workers: CountedWorkers,
    recent: Sequence[RunView],
    memory: AutoscalerMemory,
    *,
    minimum: int,
    maximum: int,
    now: float,
    load: Load = NOTHING_KNOWN,
    limits: LoadLimits = NO_LIMITS,
    shards: int | None = None,
    max_starting: int | None = None,
) -> ScalingDecision:
    """Compare the number of workers with the desired number.

    Args:
        workers: The workers.
        recent: The newest continuous runs of this version in any status.
        memory: The state of the last decision.
        minimum: Smallest number of workers.
        maximum: Largest number of workers.
        now: Epoch seconds.
        load: The load of the workers.
        limits: The load that starts one more worker.
        shards: Number of open shards. None: not known, so the last known number counts.
        max_starting: Largest number of runs on the way; None for no limit. While no number of
            shards is known, it is one worker.
    """
    before = memory
    memory = _with_shards(memory, shards, now)
    largest = max(maximum, minimum)
    if memory.open_shards is not None:
        largest = min(largest, max(memory.open_shards, 1))
    memory = _scaled(memory, load, limits, now, largest, min(minimum, largest))
    text = f"{counted(workers.number, 'worker')}, {memory.desired} desired"
    _, _, why = (memory.scaled or "").rpartition(" UTC: ")
    because = f", because {why}" if memory.scaled != before.scaled else ""
    limit = None if because else _limit(memory, limits.excess(load), largest, minimum)
    most = memory.desired if before.desired > memory.desired else largest
    surplus = workers.number - workers.leaving - most
    cancel, drain = _superfluous(workers, surplus) if surplus > 0 else ((), ())
    if cancel or drain:
        actions = [f"canceling {counted(len(cancel), 'queued run')}"] if cancel else []
        actions += [f"draining {len(drain)}"] if drain else []
        reason = f"{text}: {', '.join(actions)}{because}"
        return ScalingDecision(
            drain=drain, cancel=cancel, memory=memory, reason=reason, limit=limit
        )
    start = memory.desired - workers.number
    if start > 0:
        memory, remaining = _backed_off(memory, recent, now)
        if remaining > 0:  # `failure_problem` says why
            reason = f"{text}: next start in {math.ceil(remaining)} s"
            return ScalingDecision(memory=memory, reason=reason, limit=limit)
    if start > 0 and max_starting is not None:
        budget = max_starting - len(workers.starting)
        start = min(start, budget if memory.open_shards is not None else 1 - workers.number)
    if start <= 0:
        return ScalingDecision(memory=memory, reason=text, limit=limit)
    reason = f"{text}: starting {start}{because}"
    return ScalingDecision(start=start, memory=memory, reason=reason, limit=limit)


def _limit(memory: AutoscalerMemory, excess: str | None, largest: int, minimum: int) -> str | None:
    """Why there are not more workers, although the load or `Fleet.min` asks for them."""
    shards = memory.open_shards
    is_short = shards is not None and largest <= shards < minimum
    if excess is None:
        wanted = f"Fleet.min is {minimum}" if is_short else None
    else:
        wanted = excess if memory.desired >= largest else None
    if wanted is None:
        return None
    if shards is None or largest < shards:
        return f"{wanted}, but Fleet.max is {largest}"
    return f"{wanted}, but only {counted(shards, 'shard')} {'is' if shards == 1 else 'are'} open"


def _backed_off(
    memory: AutoscalerMemory, recent: Sequence[RunView], now: float
) -> tuple[AutoscalerMemory, float]:
    """The memory with the newest early failure, and the remaining delay."""
    failures = early_failures(recent, now)
    backoff = backoff_seconds(len(failures), memory.desired)
    latest = max(failures, key=lambda r: (r.ended or 0.0, r.run_id)).run_id if failures else None
    if latest is not None and latest != memory.last_death:
        memory = memory.model_copy(update={"last_death": latest, "retry_at": now + backoff})
    return memory, min(memory.retry_at - now, backoff)


# Decide in one tick which runs start and which workers end, and say what keeps them from running.
#
# The autoscaler comes first. Workers are replaced while it has nothing to do.

HOUR_SECONDS: Final = 3_600.0
REPLAY_COMMAND: Final = "kcl-pipeline do replay -p MODULE:PIPELINE --dead-letters --in-place"
START_GAP_SECONDS: Final = 30.0
"""On a machine that all runs share, a successor starts so long after the start of a
worker of another application."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The decision of a tick.

    Attributes:
        decision: How many runs to start, and which workers to drain.
        problems: What keeps workers from running, as sentences without a period.
        replacing: What happens to workers that are replaced. None: nothing.
        succeeds: Id of the worker for which a successor starts. None: none does.
        elsewhere: Number of workers without a run of this Dagster instance.
    """

    decision: ScalingDecision
    problems: tuple[str, ...] = ()
    replacing: str | None = None
    succeeds: str | None = None
    elsewhere: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the sentence of the tick says in addition."""
        others = counted(self.elsewhere, "worker")
        elsewhere = f"{others} without a run here" if self.elsewhere else None
        found = (elsewhere, self.replacing, self.decision.limit, *self.problems)
        return tuple(one for one in found if one is not None)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the decision of a tick is made from.

    Attributes:
        active: The active runs.
        heartbeats: The rows of the workers.
        leases: All leases. None: the tables could not be read, so no worker is replaced.
        shards: Number of open shards; None if it is not known.
        load: The load of the workers.
        lock_owner: The leader. None: nobody leads.
        location: This code location; None if it is not known.
        version: The version of the code; None if it is not known.
        now: Epoch seconds.
    """

    active: tuple[RunView, ...]
    heartbeats: Heartbeats
    leases: tuple[Lease, ...] | None
    shards: int | None
    load: Load
    lock_owner: str | None
    location: str | None
    version: str | None
    now: float


def scale(
    instance: dg.DagsterInstance,
    pipeline: PipelineLike,
    names: Names,
    options: DagsterOptions,
    observed: Observed,
    memory: AutoscalerMemory,
) -> Scaling:
    """Read what else the decision needs, and decide."""
    fleet, settings, now = pipeline.workers, pipeline.settings, observed.now
    limit = silence_limit_seconds(settings)
    workers = CountedWorkers.of(observed.active, observed.heartbeats, limit)
    code = code_of(fleet, observed.version, observed.location)
    recent = recent_runs(instance, names.application, settings.worker.worker_group_separator)
    own = runs_of_version(recent, observed.version)  # a corrected version starts without a delay
    decision = decide(
        workers,
        own,
        memory,
        minimum=fleet.min,
        maximum=fleet.max,
        now=now,
        load=observed.load,
        limits=LoadLimits(
            options.scale_up_lag_seconds, cpu_limit(options.scale_up_cpu_percent, instance)
        ),
        shards=observed.shards,
        max_starting=fleet.max_starting,
    )
    if decision.start and is_blocked(memory.failed, workers, code):
        state, _, _ = decision.reason.partition(": ")
        decision = decision.model_copy(update={"start": 0, "reason": state})
    step = Step(failed=memory.failed)
    if observed.leases is not None and not (decision.start or decision.drain or decision.cancel):
        step = replace(
            workers,
            recent,
            observed.leases,
            code,
            memory.failed,
            paused_before=memory.paused_before,
            batch_seconds=settings.batch.min_batch_interval_millis / 1000,
            follows_succession=settings.coordination == "leader"
            and not _is_java(observed.lock_owner, workers),
            now=now,
        )
    if (
        step.start is not None
        and shares_machine(instance)
        and _has_just_started(instance, names, now)
    ):
        step = Step(failed=step.failed, text="a worker has just started on this machine")
    runs = tuple(workers.runs.values())
    problems = (
        queue_problem(runs, instance, {**fleet.run_tags, **names.worker_run_tags}, now),
        failure_problem(own, decision.memory.desired, now),
        None
        if step.failed is None
        else RunProblem("replacement_stopped", step.failed.sentence(REPLAY_COMMAND)),
    )
    changes: dict[str, object] = {"failed": step.failed}
    if step.start is not None:
        changes["paused_before"] = paused_shards(workers)
    return Scaling(
        decision.model_copy(
            update={
                "memory": decision.memory.model_copy(update=changes),
                "drain": (*decision.drain, *step.drain),
            }
        ),
        tuple(one for one in problems if one is not None),
        step.text,
        step.start,
        len(workers.moving - workers.runs.keys()),
    )


def code_of(fleet: FleetLike, version: str | None, location: str | None) -> Code:
    """Return the code of this code location."""
    return Code(
        version,
        location,
        None if fleet.run_hours is None else fleet.run_hours * HOUR_SECONDS,
        fleet.rolling_replacement,
    )


def _is_java(lock_owner: str | None, workers: CountedWorkers) -> bool:
    """Whether a worker of Java leads, which moves no leases to a successor."""
    row = workers.rows.get(lock_owner or "")
    return row is not None and row.run_id is None


def _has_just_started(instance: dg.DagsterInstance, names: Names, now: float) -> bool:
    """Whether a worker of another application was started a moment ago."""
    statuses = sorted(ACTIVE, key=lambda status: status.value)
    since = datetime.fromtimestamp(now - START_GAP_SECONDS, UTC)
    new = dg.RunsFilter(tags={MODE_TAG: CONTINUOUS}, statuses=statuses, created_after=since)
    return any(run.tags.get(APPLICATION_TAG) != names.application for run in instance.get_runs(new))
