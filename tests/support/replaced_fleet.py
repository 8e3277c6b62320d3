"""A leader sensor, and runs, workers and a leader that a test plays, in virtual time.

A tick takes five seconds. The leader moves each lease to its successor at one tick, and its shard
is read at the next one. A worker that is asked to end does so at the next tick: it deletes its row.
Its run ends at the tick after that.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterEventType as Kind
from dagster import DagsterRunStatus as S

from kcl_pipeline.orchestration.runs import ACTIVE
from kcl_pipeline.worker_status import PausedLease, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import FakeFleet, FakePipeline, leases, worker
from tests.support.sensor_stage import Stage

SHARDS = 4


class Fleet:
    """The runs of one application. Each started run has a worker until it ends.

    Attributes:
        alive: The runs whose workers live.
        ending: The runs whose workers have ended, and how they will end.
        broken: Versions whose workers pause a shard as soon as they have read it.
        is_busy: Whether records arrive, so that a worker commits what it has read.
        reads: Whether the shards can be read.
        follows: Whether a leader moves leases to a successor. No Java leader does.
        log: What happened: starts and ends, with the version of the worker.
        most: Largest number of active runs.
        moves: Number of moves of leases.
    """

    def __init__(
        self,
        instance: dg.DagsterInstance,
        version: str = "one",
        settings: dict[str, Any] | None = None,
        **fleet: Any,
    ) -> None:
        self.instance = instance
        self.settings = settings or {}
        self.fleet = {"min": 2, "max": 2, "rolling_replacement": True, **fleet}
        self.alive: list[dg.DagsterRun] = []
        self.broken: set[str] = set()
        self.is_busy, self.reads, self.follows = True, True, True
        self.log: list[str] = []
        self.most = self.moves = 0
        self.table = leases(SHARDS, [None])
        self.read: set[tuple[str, str]] = set()
        self.started: dict[str, float] = {}
        self.ending: list[tuple[dg.DagsterRun, Kind]] = []
        self.deploy(version)

    def deploy(self, version: str) -> None:
        """Load the code again: nothing of the sensor's memory but the cursor stays."""
        before = getattr(self, "stage", None)
        fleet = FakeFleet(code_version=version, **self.fleet)
        self.stage = Stage(self.instance, FakePipeline(workers=fleet, overrides=self.settings))
        self.stage.clock.now = time.time() if before is None else before.clock.now
        if before is not None:
            self.stage.cursor, self.stage.workers = before.cursor, before.workers
        self.stage.leases.leases = self.table
        self.version = version

    def tick(self, *, status: S = S.STARTED, fails: bool = False) -> dg.SensorResult:
        """Let the leader, the workers and the sensor do one step each.

        Args:
            status: Status of the runs that the sensor starts.
            fails: These runs fail at once.
        """
        self._end_drained()
        self._move()
        for run in self.alive:
            self._report(run)
        result = self.stage()
        self.stage.workers.drained.clear()
        for request in result.run_requests or ():
            run = self.stage.run(status, **request.tags)
            self.log.append(f"start {self._version(run)}")
            if fails:
                self.instance.report_run_failed(run)
            elif status is S.STARTED:
                self._note(run, Kind.RUN_START)
                self.started[run.run_id] = self.stage.clock.now
                self.alive.append(run)
        active = self.instance.get_runs_count(dg.RunsFilter(statuses=list(ACTIVE)))
        self.most = max(self.most, active)
        return result

    def settle(self, log: list[str], *, within: int, **given: Any) -> list[dg.SensorResult]:
        """Tick until the log is this one, then ten more times; return the results of all ticks.

        Args:
            log: What is to happen, and nothing afterwards.
            within: So many ticks at most.
            given: Arguments of each tick.
        """
        results: list[dg.SensorResult] = []
        while self.log != log and len(results) < within:
            results.append(self.tick(**given))
        results += [self.tick(**given) for _ in range(10)]
        assert self.log == log
        return results

    def _note(self, run: dg.DagsterRun, kind: Kind) -> None:
        """Let a run start or end at this moment of the virtual time."""
        now = datetime.fromtimestamp(self.stage.clock.now, UTC)
        event = dg.DagsterEvent(event_type_value=kind.value, job_name=run.job_name)
        self.instance.run_storage.handle_run_event(run.run_id, event, now)

    def kill(self, run: dg.DagsterRun) -> None:
        """As kill -9: the row stays, and Dagster does not notice it."""
        self.alive.remove(run)
        self.log.append(f"kill {self._version(run)}")

    def versions(self) -> list[str]:
        """The versions of the workers that live."""
        return sorted(self._version(run) for run in self.alive)

    def owners(self) -> dict[str, int]:
        """Number of leases by owner."""
        names = [lease.owner or "" for lease in self.table]
        return {name: names.count(name) for name in names}

    def _version(self, run: dg.DagsterRun) -> str:
        return run.tags.get("kcl/version", "none")

    def _end_drained(self) -> None:
        while self.ending:
            self._note(*self.ending.pop())
        for run in list(self.alive):
            worker_id = self.stage.worker_of(run)
            row = self.stage.workers.rows.get(worker_id)
            if row is not None and row.drain_requested:
                held = self.owners().get(worker_id, 0)
                self.log.append(f"end {self._version(run)}" + (f" with {held}" if held else ""))
                self.alive.remove(run)
                del self.stage.workers.rows[worker_id]
                self._give(worker_id, None)
                is_paused = row.status is not None and row.status.paused_leases
                self.ending.append((run, Kind.RUN_FAILURE if is_paused else Kind.RUN_SUCCESS))

    def _move(self) -> None:
        """What the leader does: free leases are spread, those of a former worker are moved."""
        names = [self.stage.worker_of(run) for run in self.alive]
        rows = self.stage.workers.rows
        living = [name for name in names if name in rows and not rows[name].drain_requested]
        former = {rows[name].replaces: name for name in living if self.follows}
        for name, successor in former.items():
            if name in names:
                self._give(name, successor)
        takers = [name for name in living if name not in former]
        for index, lease in enumerate(self.table):
            if (lease.owner is None or lease.owner not in names) and takers:
                owners = self.owners()
                taker = min(takers, key=lambda name: owners.get(name, 0))
                self.table[index] = lease.with_(owner=taker)

    def _give(self, former: str, successor: str | None) -> None:
        for index, lease in enumerate(self.table):
            if lease.owner == former:
                self.moves += successor is not None
                self.table[index] = lease.with_(owner=successor)

    def _report(self, run: dg.DagsterRun) -> None:
        worker_id = self.stage.worker_of(run)
        held = [lease.lease_key for lease in self.table if lease.owner == worker_id]
        read = [key for key in held if (worker_id, key) in self.read]
        if self.reads:
            self.read |= {(worker_id, key) for key in held}
        paused: tuple[PausedLease, ...] = ()
        if read and self._version(run) in self.broken:
            paused = (PausedLease(read[0], "ValueError: x", 1.0),)
        waits = self.is_busy and bool(held) and (not read or bool(paused))
        status = WorkerStatus(
            lag_millis=9_000 if waits else 0,
            paused=paused,
            paused_leases=len(paused),
            totals=WorkerTotals(
                dead_letters=5 * len(paused),
                seconds=self.stage.clock.now - self.started[run.run_id],
                batches=int(self.is_busy and bool(read) and not paused),
            ),
            read_leases=len(read),
        )
        row = self.stage.workers.rows.get(worker_id) or worker(worker_id, run_id=run.run_id)
        self.stage.workers.rows[worker_id] = replace(
            row,
            status=status,
            replaces=run.tags.get("kcl/replaces"),
            last_update_seconds=row.last_update_seconds + 1,
        )


@pytest.fixture(name="fleet")
def fleet_fixture(instance: dg.DagsterInstance) -> Fleet:
    """Two workers of version one, and the code of version two."""
    made = Fleet(instance)
    for _ in range(10):
        made.tick()
    assert made.versions() == ["one", "one"]
    made.log.clear()
    made.deploy("two")
    made.most = made.moves = 0
    return made
