"""The leader of one application: `assign` and `sync`, and the thread on which `sync` runs."""

from __future__ import annotations

import builtins
import math
import threading
from dataclasses import replace
from random import Random, SystemRandom
from typing import Final

from kcl_pipeline.background import Joinable, Spawn
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.assign import LeaseAssignment
from kcl_pipeline.leader.kcl2 import followed_version
from kcl_pipeline.leader.phase import Map
from kcl_pipeline.leader.report import CycleReport, noted
from kcl_pipeline.leader.streams.selection import StreamSelection
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leader.sync import Sync
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable

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
        rng = rng or SystemRandom()
        self._clock = clock
        self._events = events
        self._owner_name = owner_name
        self._spawn = spawn
        self._assignment = LeaseAssignment(
            settings,
            lease_table,
            worker_table,
            coordinator_table,
            clock,
            events=events,
            owner_name=owner_name,
            version=followed_version(settings, coordinator_table, owner_name, clock, events),
            rng=rng,
            resume_own_name=resume_own_name,
            map_=map or builtins.map,
            spawn=spawn,
        )
        self.lock_settings = self._assignment.lock_settings
        self._sync = Sync(
            settings,
            self._assignment,
            lease_table,
            worker_table,
            coordinator_table,
            kinesis,
            clock=clock,
            events=events,
            streams=Streams(settings, kinesis, clock, events, owner_name, selection, rng=rng),
            stored=stored,
        )
        self._syncing: Joinable | None = None
        self._next_sync = -math.inf
        self._synced_term: int | None = None
        self._is_busy = False
        self._gate, self._lock = threading.Lock(), clock.lock()

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
                if self._spawn is None:
                    self._sync.run()
                    if self._sync.created or (report.led and self._assignment.scanned is None):
                        report = self._assignment.run(deadline_seconds)
                is_skipped = self._start_sync()
                report = replace(self._with_synced(report), sync_skipped=is_skipped)
                return noted(report, self._owner_name, self._events)
        finally:
            self._is_busy = False

    def _start_sync(self) -> bool:
        """Start `sync` on its thread if it is due; return whether the former one still runs."""
        scanned, now = self._assignment.scanned, self._clock.monotonic()
        term = None if scanned is None else scanned.term
        if self._spawn is None or (now < self._next_sync and term == self._synced_term):
            return False
        self._next_sync = now + SYNC_SECONDS
        if self._syncing is not None and self._syncing.is_alive():
            return True
        self._synced_term = term
        self._syncing = self._spawn("leader-sync", self._sync_once)
        return False

    def _sync_once(self) -> None:
        began = self._clock.monotonic()
        self._sync.run()
        ended = self._clock.monotonic()
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
            self._clock.monotonic() if now is None else now
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
