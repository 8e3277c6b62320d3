"""Run leader cycles (protocol §5, §7, §8).

The phases of a cycle are: lock, scan, leases of new streams, plan, moves, audit, cleanup. The
sensor runs a cycle at every tick, and a standby leader when there is no other leader. The cycle has
no thread. The state that it keeps in memory may be lost at any time.
"""

from __future__ import annotations

import builtins
import threading
from dataclasses import replace
from random import Random, SystemRandom

from kcl_pipeline.background import Spawn
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import IncompatibleTableError, KclError, NotFoundError
from kcl_pipeline.events import CycleFailed, EventSink, PlanMade
from kcl_pipeline.events.leader import TOO_MANY_FAILURES
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.balance_schedule import BalanceSchedule
from kcl_pipeline.leader.cleaning import Cleaning
from kcl_pipeline.leader.election.kept import KeptKinesis
from kcl_pipeline.leader.election.lock import LeaderElection, NotLeadingError
from kcl_pipeline.leader.election.times import lock_settings
from kcl_pipeline.leader.liveness.liveness import Liveness
from kcl_pipeline.leader.migration.client_version import UpgradeFrom2x, followed_version
from kcl_pipeline.leader.moves import MoveWriter
from kcl_pipeline.leader.phase import CycleContext, Deadline, Map, is_local
from kcl_pipeline.leader.reads.schedule import LeaderReads
from kcl_pipeline.leader.reads.standby import StandbyWatch
from kcl_pipeline.leader.reads.tables import LEASES_PER_PROBE, TableReads
from kcl_pipeline.leader.report import CycleReport, error_sentence, noted, report_of
from kcl_pipeline.leader.requests import OperatorRequests
from kcl_pipeline.leader.streams.application import ApplicationGuard
from kcl_pipeline.leader.streams.former import FormerStreams
from kcl_pipeline.leader.streams.selection import StreamSelection
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leader.sync.deleted_rows import DeletedRows
from kcl_pipeline.leader.sync.shards import ShardSync
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.cleanup import former_leases
from kcl_pipeline.planning.kcl.take import TAKE_AND_STEAL
from kcl_pipeline.planning.model import Plan
from kcl_pipeline.planning.state import prepare, whole_plan

_HEARTBEATS_OFF_AFTER_FAILURES = 2


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
        spawn: Starts the threads of calls to Kinesis; see `KeptKinesis`.
        leases_per_probe: See `LEASES_PER_PROBE`.
        stored: Asks the table for positions of shards. None: it stores none.
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
        leases_per_probe: int = LEASES_PER_PROBE,
        stored: StoredShards | None = None,
    ) -> None:
        run: Map = map or builtins.map
        self._settings = settings
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._events = events
        self._owner_name = owner_name
        self.lock_settings = lock_settings(settings, is_sensor=resume_own_name)
        self._strategy = strategies.get(settings.assignment.lease_assignment_strategy)
        self._election = LeaderElection(
            coordinator_table,
            owner_name,
            clock,
            events,
            self.lock_settings,
            rng or SystemRandom(),
            resume_own_name=resume_own_name,
        )
        self._liveness = Liveness(settings, owner_name)
        self._is_releasing = False
        kinesis = KeptKinesis(kinesis, self._election, lambda: self._is_releasing, spawn)
        self._streams = streams = Streams(
            settings, kinesis, clock, events, owner_name, selection, rng=rng or SystemRandom()
        )
        known = (coordinator_table, lease_table, kinesis, streams)
        self._application = ApplicationGuard(settings, *known)
        led = (streams, self._election, stored)
        self._sync = ShardSync(settings, lease_table, kinesis, clock, events, *led)
        self._deleted_rows = DeletedRows(lease_table, kinesis, events, *led)
        self._cleaning = Cleaning(
            settings, lease_table, worker_table, events, self._election, clock
        )
        self._former = FormerStreams(
            settings, coordinator_table, clock, streams, self._election, self._cleaning
        )
        self._moves = MoveWriter(
            settings.lease, lease_table, clock, events, self._liveness, self._election, run
        )
        self._version = followed_version(settings, coordinator_table, owner_name, clock, events)
        own = (lease_table, worker_table, clock, self._liveness, run, self._version)
        reads = TableReads(settings, *own, leases_per_probe)
        self._watch = StandbyWatch(settings, owner_name, self._liveness, reads, clock, events)
        self._balance = BalanceSchedule.of(settings, self._liveness.sampling_seconds)
        self._requests = OperatorRequests(
            self._application,
            coordinator_table,
            worker_table,
            self._balance,
            self._election,
            events,
        )
        seen = (self._liveness, streams, self._sync, self._balance)
        self._reads = LeaderReads(settings, reads, *seen, clock, events)
        self._upgrade = UpgradeFrom2x(self._version, lease_table, clock, events)
        self._may_lead = self._busy = self.misses_table = False
        self._failures = 0
        self._not_leading_until: float | None = None
        self._gate, self._lock = threading.Lock(), clock.lock()

    def run_once(self, deadline_seconds: float | None = None) -> CycleReport:
        """Run one cycle.

        Returns at once if another process leads, or if another thread runs a cycle of this object.
        Errors are not raised: they are in the report and in `CycleFailed` events. After
        `max_consecutive_failures` in a row, the lock is released.

        Args:
            deadline_seconds: After this time, no phase or group of writes is started; the next
                cycle continues. None: no limit.
        """
        with self._gate:
            if self._busy:
                return CycleReport(
                    led=False,
                    lock_owner=self._election.seen_owner,
                    error="the former cycle is still running",
                )
            self._busy = True
        try:
            with self._lock:
                return noted(self._guarded(deadline_seconds), self._owner_name, self._events)
        finally:
            self._busy = False

    @property
    def is_watcher(self) -> bool:
        """Whether this process, which does not lead, scans the tables all the time."""
        return self._watch.is_watcher

    @property
    def led_at(self) -> float:
        """When this process last knew that somebody leads. See `LeaderElection`."""
        return self._election.led_at

    def is_a_lease_silent(self) -> bool:
        """Return whether the last read shows a lease whose owner may have stopped."""
        return self._liveness.is_a_lease_silent()

    def next_expiry_seconds(self, now: float | None = None) -> float:
        """Return the seconds from `now` until the next lease expires unrenewed; inf for none."""
        return self._liveness.next_expiry_seconds(self._clock.monotonic() if now is None else now)

    def release(self) -> None:
        """Release the lock, if it is held, after the end of a running cycle.

        A running cycle does not wait for Kinesis any more.

        Raises:
            AwsError: A call to the table failed.
        """
        self._is_releasing = True
        try:
            with self._lock:
                self._election.release()
        finally:
            self._is_releasing = False

    def _guarded(self, deadline_seconds: float | None) -> CycleReport:
        began = self._clock.monotonic()
        if self._not_leading_until is not None and began < self._not_leading_until:
            return CycleReport(
                led=False, error="does not compete for the lock for a while, after failed cycles"
            )
        self._not_leading_until = None
        context: CycleContext | None = None
        self.misses_table = False
        try:
            if not self._lead():
                if self._election.seen_owner is not None:
                    self._watch.look(self._election.seen_owner, self._election.unchanged_share())
                return CycleReport(
                    led=False,
                    lock_owner=self._election.seen_owner,
                    seconds=self._clock.monotonic() - began,
                    bad_rows=self._unreadable_lock(),
                    error=self._election.unreadable,
                )
            deadline = Deadline(self._clock, deadline_seconds)
            context = self._reads.read(deadline, must_scan=self._requests.are_open)
            self._phases(context)
        except NotLeadingError:
            return CycleReport(
                led=False,
                lock_owner=self._election.seen_owner,
                seconds=self._clock.monotonic() - began,
                error="another process has acquired the lock",
            )
        except NotFoundError as error:
            self.misses_table = True
            if context is None:
                return CycleReport(
                    led=self._election.held is not None,
                    lock_owner=self._election.seen_owner,
                    error=f"waiting for the first worker, which creates the tables ({error})",
                )
            context.errors.append(error)
        except Exception as error:  # noqa: BLE001
            # Every error counts: a leader that always fails must not keep the lock
            if context is None:
                return self._failed([error], began, None)
            context.errors.append(error)
        if context.errors:
            return self._failed(context.errors, began, context)
        self._failures = 0
        self._note_cycle(context, began)
        return self._report(context, began, None)

    def _unreadable_lock(self) -> tuple[BadRow, ...]:
        reason = self._election.unreadable
        return () if reason is None else (BadRow(self._coordinator_table.name, LEADER_KEY, reason),)

    def _lead(self) -> bool:
        """Return whether this process leads.

        The client version and the identity are checked before the first attempt to acquire the
        lock. The version is checked again after every acquisition, the identity in every cycle.
        """
        if not self._may_lead:
            self._version.start()
            self._application.check()
            self._may_lead = True
        term = self._election.term
        if not self._election.try_lead():
            return False
        is_new_term = self._election.term != term
        if is_new_term:
            self._reads.restart()
            self._liveness.begin(self._clock.monotonic(), self._election.stolen_from)
            if self._liveness.watching_since is None:
                self._balance.restart()
        try:
            if is_new_term:
                self._version.start()
                self._upgrade.restart()
            self._version.look()
            self._application.check()
        except IncompatibleTableError as error:
            self._may_lead = False
            self._election.release(str(error))
            raise
        return True

    def _note_cycle(self, context: CycleContext, began: float) -> None:
        if context.age_seconds is None:
            self._election.note_cycle(self._clock.monotonic() - began)

    def _phases(self, context: CycleContext) -> None:
        if context.age_seconds is not None:
            return
        # The leases of a worker that has stopped are assigned before any call to Kinesis, which may
        # be throttled for minutes, and before deletions, of which there may be thousands.
        self._deleted_rows.restore(context)
        self._requests.assign(context, self._assign)
        if self._streams.refresh():
            self._application.check()
        former = former_leases(context.leases.values(), self._streams.known())
        self._cleaning.delete_leases(context, former)
        self._former.clean(context)
        self._sync.start(context)
        if context.created:
            self._requests.assign(context, self._assign)
        ended = self._liveness.ended_seconds(context.scan_started)
        if context.deadline.passed():
            return
        listings = self._sync.audit(context, stale=self._cleaning.stale(ended))
        self._cleaning.finished_leases(context, ended, listings)
        stale_seconds = self._settings.assignment.stale_worker_metrics_entry_cleanup_millis / 1000
        self._cleaning.worker_rows(
            context, self._liveness.unchanged_for(stale_seconds, context.scan_started)
        )
        self._reads.note_scan(context)
        self._upgrade.advance(context)

    def _assign(self, context: CycleContext) -> None:
        """Plan and write moves.

        Leases without a living owner are assigned in every cycle. The fleet is balanced when a
        worker has joined, and every `variance_balancing_frequency` assignment intervals. In a
        leaderless application the workers take leases themselves.
        """
        if self._settings.coordination == "leaderless" or self._version.is_leaderless:
            context.plan = Plan(TAKE_AND_STEAL, ())
            return
        seen = self._liveness.observation(context.scan_started)
        context.expired = tuple(sorted(seen.expired))
        began = self._clock.monotonic()
        prepared = prepare(
            tuple(context.leases.values()),
            context.workers,
            seen,
            self._settings.assignment,
            group_separator=self._settings.worker.worker_group_separator,
            balance=False,
        )
        prepared = self._balance.applied(
            prepared, began, self._liveness.settling_seconds, has_settled=not seen.unsettled
        )
        balance = prepared.given.limits.balance
        plan = whole_plan(self._strategy(prepared.given), prepared)
        context.plan, context.plan_input = plan, prepared.given
        if plan.moves or plan.spilled:
            unassigned = sum(1 for lease in prepared.given.leases if lease.owner is None)
            millis = (self._clock.monotonic() - began) * 1000
            self._events(
                PlanMade(plan.strategy, len(plan.moves), unassigned, len(plan.spilled), millis)
            )
        self._moves.write(context, plan.moves, seen)
        if balance and not context.deadline.passed():
            is_calm = not (plan.moves or any(one.in_handoff for one in context.leases.values()))
            self._balance.note_balanced(began, is_calm=is_calm)

    def _failed(
        self, errors: list[Exception], began: float, context: CycleContext | None
    ) -> CycleReport:
        """Report the errors, and count the cycle as failed.

        It is not counted if all errors concern single rows or streams. Then the cycle has processed
        the others, and another leader would have the same errors.
        """
        is_counted = context is None or not all(is_local(error) for error in errors)
        self._failures = self._failures + 1 if is_counted else 0
        sentence = "; ".join(dict.fromkeys(error_sentence(error) for error in errors))
        self._events(CycleFailed(sentence, self._failures))
        if self._failures >= self._settings.assignment.max_consecutive_failures:
            self._failures = 0
            self._stand_back()
        if context is None:
            owner = self._election.seen_owner
            return CycleReport(
                led=False, lock_owner=owner, seconds=self._clock.monotonic() - began, error=sentence
            )
        return self._report(context, began, sentence)

    def _stand_back(self) -> None:
        """Release the lock and do not compete for it during two heartbeats.

        So a candidate without these errors can acquire it.
        """
        if self._election.held is None:
            return
        millis = self.lock_settings.leader_heartbeat_period_millis
        away = _HEARTBEATS_OFF_AFTER_FAILURES * millis / 1000
        self._not_leading_until = self._clock.monotonic() + away
        try:
            self._election.release(TOO_MANY_FAILURES)
        except KclError as error:
            self._events(CycleFailed(f"release of the leader lock: {error_sentence(error)}", 0))

    def _report(self, context: CycleContext, began: float, error: str | None) -> CycleReport:
        return replace(
            report_of(context, self._owner_name, error),
            coverage=self._sync.coverage(context),
            unavailable=self._streams.unavailable(),
            streams=self._streams.known(),
            pause=self._application.control.pause,
            seconds=self._clock.monotonic() - began,
        )
