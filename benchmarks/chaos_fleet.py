"""Fleet of `benchmarks.chaos`: supervised worker processes and `dagster dev`.

Workers that end are restarted, as a supervisor does. `dagster dev` runs the leader sensor.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import psutil
import requests

from kcl_pipeline.clock import Clock
from kcl_pipeline.local.demo.dagster_client import DagsterClient, Run
from kcl_pipeline.local.demo.processes import Processes, session_members

MODULE: Final = "benchmarks.chaos_pipeline"
APPLICATION: Final = "chaos"
JOB: Final = "chaos_consume"
SENSOR: Final = "chaos_leader"
LIVE: Final = ("QUEUED", "NOT_STARTED", "STARTING", "STARTED", "CANCELING")
STOP_SECONDS: Final = 45.0
"""Time limit after SIGTERM. A worker that still runs afterwards is a defect."""

Say = Callable[[str], None]
PAGE_ERRORS: Final = (requests.RequestException, RuntimeError, KeyError)


@dataclass(slots=True)
class CliWorker:
    """One `kcl-pipeline worker`, across its restarts.

    `told` is the signal that was sent to end the current process. Times are monotonic seconds.
    """

    name: str
    process: subprocess.Popen[bytes] | None = None
    told: int | None = None
    told_at: float = 0.0
    start_at: float = 0.0
    wake_at: float | None = None
    lives: int = 0

    @property
    def up(self) -> bool:
        """Whether the process runs and is neither paused nor about to end."""
        return self.process is not None and self.told is None and self.wake_at is None


@dataclass
class Workers:
    """All CLI workers.

    Workers that ended are restarted, and paused workers are continued. `crashes` lists unexpected
    exits and workers that did not stop in time.
    """

    names: tuple[str, ...]
    processes: Processes
    clock: Clock
    rng: random.Random
    say: Say
    on_end: Callable[[str], None]
    crashes: list[str] = field(default_factory=list)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.all = [CliWorker(name) for name in self.names]

    def up(self) -> list[CliWorker]:
        """Return the workers that can receive a fault."""
        return [worker for worker in self.all if worker.up]

    def tick(self) -> None:
        """Supervise every worker once without waiting."""
        for worker in self.all:
            now = self.clock.monotonic()
            if worker.wake_at is not None and now >= worker.wake_at:
                self._wake(worker)
            if worker.process is not None:
                self._look(worker, now)
            elif not self.stopping and now >= worker.start_at:
                self._start(worker)

    def _start(self, worker: CliWorker) -> None:
        worker.lives += 1
        worker.told = None
        worker.process = self.processes.start(
            worker.name,
            [
                "-m",
                "kcl_pipeline.cli",
                "worker",
                "-p",
                f"{MODULE}:chaos",
                "--worker-id",
                worker.name,
                "--leader-patience-seconds",
                "20",
            ],
        )

    def _look(self, worker: CliWorker, now: float) -> None:
        if worker.process is None:
            return
        code = worker.process.poll()
        if code is None:
            if worker.told == signal.SIGTERM and now - worker.told_at > STOP_SECONDS:
                self.crashes.append(
                    f"{worker.name} did not end within {STOP_SECONDS:.0f} s of SIGTERM"
                )
                self.say(self.crashes[-1])
                worker.process.kill()
                worker.told = signal.SIGKILL
            return
        # SIGTERM can arrive before the handlers are installed. The worker has no lease then, and
        # the signal ends the process directly.
        expected: dict[int | None, tuple[int, ...]] = {
            None: (),
            signal.SIGTERM: (0, -signal.SIGTERM),
            signal.SIGKILL: (-signal.SIGKILL,),
            signal.SIGUSR1: (0, 1),
        }
        if code not in expected[worker.told]:
            tail = "\n    ".join(self.processes.log_text(worker.name).splitlines()[-12:])
            self.crashes.append(f"{worker.name} ended by itself with exit code {code}:\n    {tail}")
            self.say(self.crashes[-1])
        worker.process = None
        worker.start_at = now + self.rng.uniform(0.0, 4.0)
        self.on_end(worker.name)

    def _wake(self, worker: CliWorker) -> None:
        worker.wake_at = None
        if worker.process is not None and worker.process.poll() is None:
            worker.process.send_signal(signal.SIGCONT)

    def end(self, worker: CliWorker, number: int) -> None:
        """Send a signal that ends the worker's process."""
        if worker.process is not None:
            worker.told, worker.told_at = number, self.clock.monotonic()
            worker.process.send_signal(number)

    def pause(self, worker: CliWorker, seconds: float) -> None:
        """Send SIGSTOP now, and SIGCONT after `seconds`."""
        if worker.process is not None:
            worker.process.send_signal(signal.SIGSTOP)
            worker.wake_at = self.clock.monotonic() + seconds

    def kill_jvm(self, worker: CliWorker) -> bool:
        """Send SIGKILL to the worker's JVM; return False when the worker has no JVM yet.

        The worker may then exit with an error. It is restarted.
        """
        if worker.process is None:
            return False
        for child in psutil.Process(worker.process.pid).children(recursive=True):
            if child.name() == "java":
                worker.told, worker.told_at = signal.SIGUSR1, self.clock.monotonic()
                child.kill()
                return True
        return False

    def wake_all(self) -> None:
        """Continue all paused workers."""
        for worker in self.all:
            if worker.wake_at is not None:
                self._wake(worker)

    def stop(self, seconds: float) -> bool:
        """Send SIGTERM to all workers; return whether all of them ended without error in time."""
        self.stopping = True
        before = len(self.crashes)
        self.wake_all()
        for worker in self.all:
            self.end(worker, signal.SIGTERM)
        deadline = self.clock.monotonic() + seconds
        while any(worker.process for worker in self.all) and self.clock.monotonic() < deadline:
            self.tick()
            self.clock.sleep(0.1)
        return len(self.crashes) == before and not any(worker.process for worker in self.all)


@dataclass
class DagsterHost:
    """`dagster dev` and its runs.

    `dagster dev` ends when its daemon is killed. It is then started again.
    """

    processes: Processes
    port: int
    clock: Clock
    say: Say
    restarts: int = 0
    stopping: bool = False
    sessions: set[int] = field(default_factory=set)
    dev: subprocess.Popen[bytes] | None = None
    location: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.page = DagsterClient(f"http://127.0.0.1:{self.port}")

    def tick(self) -> None:
        """Start `dagster dev` when it does not run."""
        if self.stopping or (self.dev is not None and self.dev.poll() is None):
            return
        if self.dev is not None:
            self.restarts += 1
            self.say("dagster dev has gone down; starting it again")
        self.dev = self.processes.launch_dagster(MODULE, self.port)
        # A child starts its own session. The session exists until all of its processes have ended,
        # so its id identifies processes that the child leaves behind.
        self.sessions.add(self.dev.pid)

    def loaded(self) -> bool:
        """Return whether the webserver responds and the code is loaded."""
        try:
            self.location = self.page.loaded()
        except PAGE_ERRORS:
            return False
        return self.location is not None

    def live_runs(self) -> list[Run]:
        """Return the worker runs that have not ended; none when the webserver does not respond."""
        try:
            return [run for run in self.page.runs(JOB) if run.status in LIVE]
        except PAGE_ERRORS:
            return []

    def kill_daemon(self) -> bool:
        """Send SIGKILL to the daemon; return False when there is none.

        `dagster dev` then ends within seconds.
        """
        if self.dev is None or self.dev.poll() is not None:
            return False
        for child in psutil.Process(self.dev.pid).children():
            if "dagster._daemon" in child.cmdline():
                child.kill()
                return True
        return False

    def kill_run(self, run: Run) -> bool:
        """Send SIGKILL to the process of a run; return False when it has none."""
        try:
            pid = self.page.pid_of(run.run_id)
        except PAGE_ERRORS:
            return False
        if pid is None or not psutil.pid_exists(pid) or os.getsid(pid) not in self.sessions:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def terminate_run(self, run: Run) -> bool:
        """Terminate a run through Dagster; return False when the request fails."""
        try:
            self.page.terminate(run.run_id)
        except PAGE_ERRORS as error:
            self.say(f"terminating {run.run_id[:8]} failed: {error}")
            return False
        return True

    def stop_workers(self, seconds: float) -> bool:
        """Stop the sensor, terminate every run, and return whether all runs ended in time."""
        try:
            if self.location is not None:
                self.page.stop_sensor(*self.location, SENSOR)
        except PAGE_ERRORS as error:
            self.say(f"the sensor could not be stopped: {error}")
        deadline = self.clock.monotonic() + seconds
        asked: set[str] = set()
        while (runs := self.live_runs()) and self.clock.monotonic() < deadline:
            for run in runs:
                if (
                    run.status in ("QUEUED", "STARTING", "STARTED")
                    and run.run_id not in asked
                    and self.terminate_run(run)
                ):
                    asked.add(run.run_id)
            self.clock.sleep(0.5)
        return not self.live_runs()

    def kill_orphans(self) -> list[str]:
        """Stop the processes that `dagster dev` left behind and return their process ids."""
        left = [process for session in self.sessions for process in session_members(session)]
        for process in left:
            try:
                process.send_signal(signal.SIGTERM)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=10)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return [f"{process.pid}" for process in left]
