"""The leader of one application: `assign` and `sync`, and the thread on which `sync` runs."""

from __future__ import annotations

import builtins
import math
import threading
from dataclasses import replace
from random import Random, SystemRandom
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import CycleFinished, EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.assign import CycleReport, LeaderDependencies, LeaseAssignment, Map
from kcl_pipeline.leader.streams import Streams, StreamSelection
from kcl_pipeline.leader.sync import Sync
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.planning.state import is_failing, is_valid
from kcl_pipeline.threads import Joinable, Spawn

SYNC_SECONDS: Final = 1.0
"""Shortest time between two runs of `sync`."""
_SYNC_DUTY: Final = 3.0
_LONGEST_PAUSE_SECONDS: Final = 5.0
"""A run of `sync` for many leases takes a quarter of the time. After a call that hung, the pause
does not grow with it.
"""


class LeaderCycle:
    """The leader of one application. The caller runs `run_once` repeatedly.

    Args:
        settings: All settings.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        kinesis: The Kinesis client.
        clock: The clock.
        events: Receives events.
        owner_name: Name of this leader in the lock row.
        resume_own_name: See `LeaderElection`.
        map: Runs independent writes, possibly in parallel. None: the built-in `map`.
        rng: Creates lock versions, which must be unique among all processes. None: the system's
            source of random numbers.
        selection: The streams, if the settings do not name them.
        spawn: Starts the threads of `sync` and of long scans and plans. None: everything runs on
            the calling thread.
        stored: Asks the table for positions of shards. None: it stores none.

    Attributes:
        lock_settings: Duration and heartbeat of the lock.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        coordinator_table: CoordinatorStateTable,
        kinesis: KinesisClient,
        clock: Clock,
        events: EventSink,
        owner_name: str,
        *,
        resume_own_name: bool = False,
        map: Map | None = None,  # noqa: A002 (it replaces the builtin)
        rng: Random | None = None,
        selection: StreamSelection | None = None,
        spawn: Spawn | None = None,
        stored: StoredShards | None = None,
    ) -> None:
        self.dependencies = deps = LeaderDependencies(
            settings,
            lease_table,
            worker_table,
            coordinator_table,
            clock,
            events,
            owner_name,
            rng or SystemRandom(),
            resume_own_name=resume_own_name,
            map=map or builtins.map,
            spawn=spawn,
        )
        self._assignment = LeaseAssignment(deps)
        self.lock_settings = self._assignment.lock_settings
        streams = Streams(settings, kinesis, clock, events, owner_name, selection, rng=deps.rng)
        self._sync = Sync(deps, self._assignment, kinesis, streams, stored)
        self._syncing: Joinable | None = None
        self._next_sync = -math.inf
        self._synced_term: int | None = None
        # `_lock` is held during an assignment; `_gate` lets a second caller know without a wait
        self._gate, self._lock = threading.Lock(), clock.lock()
        self._is_busy = False

    def run_once(self, deadline_seconds: float | None = None) -> CycleReport:
        """Assign leases, and start `sync` unless it is still running.

        Returns at once if another process leads, or if another thread runs a cycle of this object.
        Errors are not raised: they are in the report and in `CycleFailed` events.

        Args:
            deadline_seconds: After this time no plan and no group of moves is started. None: no
                limit.
        """
        with self._gate:
            if self._is_busy:
                return CycleReport(
                    led=False,
                    lock_owner=self._assignment.election.seen_owner,
                    error="the former cycle is still running",
                )
            self._is_busy = True
        try:
            with self._lock:
                report = self._assignment.run(deadline_seconds)
                if self.dependencies.spawn is None:
                    self._sync.run()
                    if self._sync.created or (report.led and self._assignment.scanned is None):
                        report = self._assignment.run(deadline_seconds)
                    is_skipped = False
                else:
                    is_skipped = self._start_sync(self.dependencies.spawn)
                report = replace(self._with_synced(report), sync_skipped=is_skipped)
                self._note(report)
                return report
        finally:
            self._is_busy = False

    def _start_sync(self, spawn: Spawn) -> bool:
        """Start `sync` on its thread if it is due; return whether the former one still runs."""
        scanned, now = self._assignment.scanned, self.dependencies.clock.monotonic()
        term = None if scanned is None else scanned.term
        # At once in a new term: the first leases of an application wait for it
        if now < self._next_sync and term == self._synced_term:
            return False
        self._next_sync = now + SYNC_SECONDS
        if self._syncing is not None and self._syncing.is_alive():
            return True
        self._synced_term = term
        self._syncing = spawn("leader-sync", self._sync_once)
        return False

    def _sync_once(self) -> None:
        began = self.dependencies.clock.monotonic()
        self._sync.run()
        ended = self.dependencies.clock.monotonic()
        pause = min(_SYNC_DUTY * (ended - began), _LONGEST_PAUSE_SECONDS)
        self._next_sync = ended + max(SYNC_SECONDS, pause)

    def _with_synced(self, report: CycleReport) -> CycleReport:
        """Return the report with the results of the last `sync`."""
        if not report.led:
            return report
        synced, created, deleted = self._sync.result, self._sync.created, self._sync.deleted
        errors = dict.fromkeys(error for error in (report.error, synced.error) if error)
        return replace(
            report,
            coverage=synced.coverage,
            unavailable=synced.unavailable,
            streams=synced.streams,
            # The thread of `sync` may add keys meanwhile, which the next report has
            created=tuple(created.pop(0) for _ in range(len(created))),
            deleted=tuple(deleted.pop(0) for _ in range(len(deleted))),
            error="; ".join(errors) or None,
        )

    def _note(self, report: CycleReport) -> None:
        self.dependencies.events(
            CycleFinished(
                self.dependencies.owner_name,
                report.led,
                report.seconds * 1000,
                report.error is None,
                leases=len(report.leases),
                expired=len(report.expired),
                unowned=sum(lease.owner is None and not lease.ended for lease in report.leases),
                unreadable=len(report.unreadable),
                workers=len(report.workers),
                failing_workers=sum(1 for row in report.workers if is_failing(row)),
                invalid_workers=sum(1 for row in report.workers if not is_valid(row)),
                streams=len(report.coverage),
                incomplete_streams=sum(1 for one in report.coverage if not one.complete),
                unavailable_streams=len(report.unavailable),
                sync_skipped=report.sync_skipped,
            )
        )

    def wait_for_sync(self, seconds: float) -> bool:
        """Wait for the running `sync`; return whether it ended and created leases."""
        if self._syncing is None:
            return False
        self._syncing.join(seconds)
        return not self._syncing.is_alive() and bool(self._sync.created)

    @property
    def is_watcher(self) -> bool:
        """Whether this process, which does not lead, scans the tables all the time."""
        return self._assignment.watch.is_watcher

    @property
    def misses_table(self) -> bool:
        """Whether a table did not exist in the last cycle."""
        return self._assignment.misses_table

    def is_a_lease_silent(self) -> bool:
        """Return whether the last read shows a lease whose owner may have stopped."""
        return self._assignment.liveness.is_a_lease_silent()

    def next_expiry_seconds(self, now: float | None = None) -> float:
        """Return the seconds from `now` until the next lease expires unrenewed; inf for none."""
        return self._assignment.liveness.next_expiry_seconds(
            self.dependencies.clock.monotonic() if now is None else now
        )

    def release(self) -> None:
        """Release the lock, if it is held, after the end of a running assignment.

        A running `sync` writes nothing more afterwards.

        Raises:
            AwsError: A call to the table failed.
        """
        with self._lock:
            self._assignment.scanned = None
            self._assignment.election.release()
