"""Replace workers: those whose time is over, and those of another version of the code.

1. The run of a successor starts. Its row names the worker that it replaces, and the leader moves
   the leases of that worker to it.
2. When the successor has read each shard that it got, the former worker is asked to end. It has no
   lease any more.
3. The next one follows. There is one successor at a time.

A successor that is queued or starts ends nobody. One that cannot do its work is asked to end, and
the former worker, which still runs, gets its leases back. If its code has another version than the
former worker, this version replaces no other worker.

`replace` is a pure function of Dagster's runs, of the rows, and of the memory in the cursor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dagster import DagsterRunStatus
from pydantic import BaseModel, ConfigDict

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.runs.problems import early_failures
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.scaling.workers import CountedWorkers
from kcl_pipeline.text import counted, duration_text, printable

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
    letters = 0 if row is None or row.status is None else row.status.dead_letters
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
        dead_letters=0 if status is None else status.dead_letters,
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
    has_committed = status.totals is not None and status.totals.batches > 0
    if status.failed_batches or (status.lag_millis and not has_committed):
        return "has not committed a batch yet"
    return None


def _age(row: WorkerMetrics) -> float:
    """For how long a worker has run, by its own clock."""
    totals = None if row.status is None else row.status.totals
    return 0.0 if totals is None else totals.seconds


def _name(run: RunView) -> str:
    return printable(run.worker_id)
