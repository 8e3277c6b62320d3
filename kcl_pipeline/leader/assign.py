"""Assign leases to workers. Nothing here calls Kinesis (protocol §5).

`LeaseAssignment.run` is called again and again. Each time it

1. holds the lock, or watches the tables while another process leads;
2. reads the record of the application, in which an operator may have paused it;
3. scans leases and workers;
4. decides which leases have expired and which workers live;
5. plans;
6. writes the moves, each on the condition that the row is as it was read.

Then `scanned` has the rows for `sync`, which creates and deletes leases on another thread. A call
to Kinesis may be throttled for a minute, or hang. If it came before a move, the leases of a worker
that stopped would wait for it; if it came before a heartbeat, the next candidate would acquire the
lock and make the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from kcl_pipeline.background import Spawn
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    AwsError,
    IncompatibleTableError,
    KclError,
    NotFoundError,
    OtherApplicationError,
)
from kcl_pipeline.events import CycleFailed, DrainRequested, EventSink, PlanMade
from kcl_pipeline.events.leader import TOO_MANY_FAILURES
from kcl_pipeline.leader.balance_schedule import BalanceSchedule
from kcl_pipeline.leader.kcl2 import (
    TAKE_AND_STEAL,
    UpgradeFrom2x,
    workers_may_be_missing,
    workers_take_leases,
)
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.lock import LeaderElection, NotLeadingError, lock_settings
from kcl_pipeline.leader.moves import MoveWriter
from kcl_pipeline.leader.phase import CycleContext, Deadline, Map, Scan, is_local, scan
from kcl_pipeline.leader.report import CycleReport, error_sentence, report_of
from kcl_pipeline.leader.watch import StandbyWatch
from kcl_pipeline.leases.application.control import NOTHING_WANTED
from kcl_pipeline.leases.application.identity import (
    ACCEPT_STREAMS,
    ApplicationIdentity,
    ApplicationRecord,
    Mode,
    successor,
)
from kcl_pipeline.leases.application.recorded_stream import RecordedStream
from kcl_pipeline.leases.coordinator_keys import LEADER_KEY
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.migration import ClientVersion
from kcl_pipeline.leases.tables import (
    CoordinatorStateTable,
    LeaseTable,
    WorkerMetrics,
    WorkerMetricsTable,
)
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import Move, Plan
from kcl_pipeline.planning.state import prepare, whole_plan

_HEARTBEATS_OFF_AFTER_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Scanned:
    """The rows with which `sync` begins.

    Attributes:
        term: The acquisition of the lock in which they were read.
        scan: The rows, as they were before the moves.
        ended_seconds: For each lease at SHARD_END, the seconds since it was first observed there.
        stopped: Rows of workers that have not reported for so long that they are deleted.
    """

    term: int
    scan: Scan
    ended_seconds: Mapping[str, float]
    stopped: tuple[WorkerMetrics, ...]


class LeaseAssignment:
    """Assigns the leases of one application while this process leads. One thread calls `run`.

    Its memory may be lost at any time: a new leader needs one failover time to learn again which
    leases expire.

    Args:
        settings: All settings.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        clock: The clock.
        events: Receives events.
        owner_name: Name of this process in the lock row.
        version: The client version of the application.
        rng: Creates lock versions, which must be unique among all processes.
        resume_own_name: See `LeaderElection`.
        map_: Runs independent writes, possibly in parallel.
        spawn: Starts the thread of a scan or plan, during which heartbeats are sent. None: they run
            on the calling thread.

    Attributes:
        election: The lock.
        lock_settings: Its duration and heartbeat.
        liveness: Which leases have expired, and which workers live.
        watch: Observes the rows while another process leads.
        scanned: The rows of the last scan. None: this process does not lead.
        control: The requests of an operator.
        record: The application as it is recorded. None: it is not.
        refusal: Why `sync` found that this process must not lead. None: it may.
        has_failed_to_sync: Set by `sync` after too many failures in a row.
        misses_table: Whether a table did not exist in the last run.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        lease_table: LeaseTable,
        worker_table: WorkerMetricsTable,
        coordinator_table: CoordinatorStateTable,
        clock: Clock,
        *,
        events: EventSink,
        owner_name: str,
        version: ClientVersion,
        rng: Random,
        resume_own_name: bool = False,
        map_: Map = map,
        spawn: Spawn | None = None,
    ) -> None:
        self._settings = settings
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._events = events
        self._owner_name = owner_name
        self._version = version
        self._spawn = spawn
        self._strategy = strategies.get(settings.assignment.lease_assignment_strategy)
        self.lock_settings = lock_settings(settings, is_sensor=resume_own_name)
        self.election = LeaderElection(
            coordinator_table,
            owner_name,
            clock,
            events,
            self.lock_settings,
            rng,
            resume_own_name=resume_own_name,
        )
        self.liveness = Liveness(settings, owner_name)
        self.watch = StandbyWatch(
            settings, owner_name, self.liveness, self._scan, worker_table, clock, events
        )
        self._balance = BalanceSchedule.of(settings, self.liveness.sampling_seconds)
        self._upgrade = UpgradeFrom2x(version, lease_table, clock, events)
        self._moves = MoveWriter(
            settings.lease, lease_table, clock, events, self.liveness, self.election, map_
        )
        self._rejected = RejectedRows(events)
        stale_millis = settings.assignment.stale_worker_metrics_entry_cleanup_millis
        self._stopped_seconds = stale_millis / 1000
        self.scanned: Scanned | None = None
        self.control = NOTHING_WANTED
        self.record: ApplicationRecord | None = None
        self.refusal: IncompatibleTableError | None = None
        self.has_failed_to_sync = self.misses_table = False
        self._may_lead = False
        self._failures = 0
        self._not_leading_until: float | None = None
        self._blind_since: float | None = None
        # Leases without a worker are reported when they change, not in every cycle
        self._noted_spilled: tuple[str, ...] = ()

    def run(self, deadline_seconds: float | None = None) -> CycleReport:
        """Assign leases once. Errors are not raised, but reported and emitted as `CycleFailed`.

        After `max_consecutive_failures` in a row, the lock is released, so that a candidate
        without these errors can acquire it.

        Args:
            deadline_seconds: After this time no plan and no group of moves is started. None: no
                limit.
        """
        began = self._clock.monotonic()
        if self._not_leading_until is not None and began < self._not_leading_until:
            return CycleReport(
                led=False, error="does not compete for the lock for a while, after failed cycles"
            )
        self._not_leading_until = None
        self.misses_table = False
        context: CycleContext | None = None
        try:
            if not self._lead():
                return self._watched(began)
            context = self._scanned_rows(Deadline(self._clock, deadline_seconds))
            if not context.deadline.passed():
                self._follow_requests(context)
                self._upgrade.advance(context)
        except NotLeadingError:
            self.scanned = None
            return self._not_led(began, "another process has acquired the lock")
        except NotFoundError as error:
            self.misses_table = True
            if context is None:
                sentence = f"waiting for the first worker, which creates the tables ({error})"
                return self._not_led(began, sentence, led=self.election.held is not None)
            context.errors.append(error)
        except Exception as error:  # noqa: BLE001
            # Every error counts: a leader that always fails must not keep the lock
            if context is None:
                self._note_blind(began)
                return self._failed([error], began, None)
            context.errors.append(error)
        if context.errors:
            return self._failed(context.errors, began, context)
        self._failures = 0
        return self._report(context, began, None)

    # 1. The lock, and 2. the record of the application

    def _lead(self) -> bool:
        """Return whether this process leads.

        Before the first attempt to acquire the lock, and in every run that leads, client version
        and record must allow this process to lead.
        """
        if self.has_failed_to_sync:
            self.has_failed_to_sync = False
            self._stand_back()
            return False
        if not self._may_lead:
            self._version.start()
            self._check_application()
            self._may_lead = True
        term = self.election.term
        self.election.patience_seconds = self.watch.patience_seconds
        if not self.election.try_lead():
            return False
        is_new_term = self.election.term != term
        if is_new_term:
            self.liveness.begin(self._clock.monotonic(), self.election.stolen_from)
            if self.liveness.watching_since is None:
                self._balance.restart()
        try:
            if is_new_term:
                self._version.start()
                self._upgrade.restart()
            self._version.look()
            self._check_application()
        except IncompatibleTableError as error:
            self._may_lead = False
            self.scanned = None
            self.election.release(str(error))
            raise
        return True

    def _check_application(self) -> None:
        """Read the record, and refuse to lead another application.

        The names of the streams are compared here. `sync` describes the streams, and sets `refusal`
        if the application has another stream of the same name.

        Raises:
            OtherApplicationError: The settings do not fit the record.
            AwsError: The record cannot be read.
        """
        record = self._coordinator_table.read_application()
        self.record = record
        self.control = self._coordinator_table.read_control() if record is None else record.control
        if self.refusal is not None:
            raise self.refusal
        if record is None:
            return
        self._refuse_other_names(record.identity)

    def _refuse_other_names(self, recorded: ApplicationIdentity) -> None:
        name, settings = self._settings.application_name, self._settings
        mode: Mode = "multi_stream" if settings.is_multi_stream else "single_stream"
        whole = settings.retrieval.skip_kpl_deaggregation
        if recorded.changing or recorded.mode != mode or whole != bool(recorded.whole_aggregates):
            streams = tuple(RecordedStream(one) for one in settings.streams)
            if mode == "single_stream" or streams:
                successor(
                    name, recorded, ApplicationIdentity(mode, streams, whole_aggregates=whole)
                )
        named = {one.rpartition("/")[2] for one in settings.streams}
        known = {stream.name for stream in recorded.streams}
        if known and named and not known & named:
            raise OtherApplicationError(
                f"the application {name!r} reads {sorted(known)}, but "
                f"streams={list(settings.streams)}; write these streams, or another "
                f"application_name, or stop its workers and run {ACCEPT_STREAMS}"
            )

    def _watched(self, began: float) -> CycleReport:
        """Observe the rows for the time when this process leads."""
        self.scanned = None
        if self.election.seen_owner is not None:
            self.watch.look(self.election.seen_owner)
        reason = self.election.unreadable
        bad = () if reason is None else (BadRow(self._coordinator_table.name, LEADER_KEY, reason),)
        return self._not_led(began, reason, bad_rows=bad)

    # 3. Leases and workers

    def _scan(self) -> Scan:
        """Read both tables, and compare them with what was read before."""
        began = self._clock.monotonic()
        try:
            rows = self._read()
        except Exception:
            self._note_blind(began)
            raise
        # 4. Which leases have expired, and which workers live, follows from all scans so far
        blind_since, self._blind_since = self._blind_since, None
        self.liveness.observe(
            rows.leases,
            rows.workers,
            rows.scan_started,
            rows.scan_finished,
            unreadable=rows.unreadable_workers,
            blind_seconds=0.0 if blind_since is None else rows.scan_started - blind_since,
        )
        return rows

    def _read(self) -> Scan:
        return self.election.keep_during(
            lambda: scan(
                self._lease_table,
                self._worker_table,
                self._clock,
                is_multi_stream=self._settings.is_multi_stream,
                workers_may_be_missing=workers_may_be_missing(self._version),
            ),
            # A process that does not lead has no lock to keep
            self._spawn if self.election.held is not None else None,
        )

    def _note_blind(self, since: float) -> None:
        """Note that an attempt to scan which began at this time has failed."""
        if self._blind_since is None:
            self._blind_since = since

    def _scanned_rows(self, deadline: Deadline) -> CycleContext:
        term, rows = self.election.term, self._scan()
        self._rejected.note_all(rows.bad_rows)
        self.scanned = Scanned(
            term,
            rows,
            self.liveness.ended_seconds(rows.scan_started),
            self.liveness.unchanged_for(self._stopped_seconds, rows.scan_started),
        )
        return CycleContext.of(rows, self.liveness.living(rows.scan_started), deadline)

    # 5. The plan

    def _follow_requests(self, context: CycleContext) -> None:
        """Assign leases, unless an operator has paused the application.

        Raises:
            NotLeadingError: This process does not lead any more.
        """
        if self.control.pause is not None:
            self._request_drains(context)
        else:
            self._assign(context)

    def _request_drains(self, context: CycleContext) -> None:
        """Request the workers to end that have not been requested yet.

        A worker whose start overlapped with the command that paused the application may have missed
        it. A Java worker does not know the request, and does not get one.
        """
        for row in context.workers:
            if row.run_id is None or row.drain_requested:
                continue
            try:
                if self._worker_table.request_drain(row.worker_id, for_pause=True):
                    self._events(DrainRequested(row.worker_id, "the application is paused"))
            except AwsError as error:
                context.errors.append(error)

    def _assign(self, context: CycleContext) -> None:
        """Plan and write moves.

        Leases without a living owner are assigned in every run. The fleet is balanced when a
        worker has joined, and every `variance_balancing_frequency` assignment intervals. In a
        leaderless application the workers take leases themselves.
        """
        if workers_take_leases(self._settings, self._version):
            context.plan = Plan(TAKE_AND_STEAL, ())
            return
        seen = self.liveness.observation(context.scan_started)
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
            prepared, began, self.liveness.settling_seconds, has_settled=not seen.unsettled
        )
        balance = prepared.given.limits.balance
        # The plan of 10,000 leases may take longer than the lock lasts: it is cut off
        end = began + self.lock_settings.leader_lease_duration_millis / 1000 / 3
        given = replace(prepared.given, stop=lambda: self._clock.monotonic() >= end)
        plan = self.election.keep_during(lambda: self._strategy(given), self._spawn)
        plan = self._one_lease_on_probation(whole_plan(plan, prepared))
        context.plan, context.plan_input = plan, given
        self._note_plan(context.plan, sum(lease.owner is None for lease in given.leases), began)
        # 6. The moves
        self._moves.write(context, context.plan.moves, seen)
        if balance and not context.deadline.passed():
            in_handoff = any(lease.in_handoff for lease in context.leases.values())
            is_calm = not (context.plan.moves or in_handoff)
            self._balance.note_balanced(began, is_calm=is_calm)

    def _one_lease_on_probation(self, plan: Plan) -> Plan:
        """Return the plan with at most one move to a worker that has let a lease expire.

        The others are planned again when it has renewed the lease.
        """
        limited, moves, given = self.liveness.on_probation(), list[Move](), set[str]()
        for move in plan.moves:
            if move.to_worker not in given:
                moves.append(move)
            if move.to_worker in limited:
                given.add(move.to_worker)
        return replace(plan, moves=tuple(moves))

    def _note_plan(self, plan: Plan, unassigned: int, began: float) -> None:
        spilled, self._noted_spilled = self._noted_spilled, plan.spilled
        if plan.moves or plan.spilled != spilled:
            millis = (self._clock.monotonic() - began) * 1000
            counts = (len(plan.moves), unassigned, len(plan.spilled))
            self._events(PlanMade(plan.strategy, *counts, millis))

    # Reports and failures

    def _not_led(
        self,
        began: float,
        error: str | None,
        *,
        led: bool = False,
        bad_rows: tuple[BadRow, ...] = (),
    ) -> CycleReport:
        return CycleReport(
            led=led,
            lock_owner=self.election.seen_owner,
            seconds=self._clock.monotonic() - began,
            bad_rows=bad_rows,
            error=error,
        )

    def _report(self, context: CycleContext, began: float, error: str | None) -> CycleReport:
        seconds = self._clock.monotonic() - began
        pause = self.control.pause
        return report_of(context, self._owner_name, error, seconds=seconds, pause=pause)

    def _failed(
        self, errors: list[Exception], began: float, context: CycleContext | None
    ) -> CycleReport:
        """Report the errors, and count the run as failed.

        It is not counted if all errors concern single rows. Then the run has processed the others,
        and another leader would have the same errors.
        """
        is_counted = context is None or not all(is_local(error) for error in errors)
        self._failures = self._failures + 1 if is_counted else 0
        sentence = "; ".join(dict.fromkeys(error_sentence(error) for error in errors))
        self._events(CycleFailed(sentence, self._failures))
        if self._failures >= self._settings.assignment.max_consecutive_failures:
            self._stand_back()
        if context is None:
            return self._not_led(began, sentence)
        return self._report(context, began, sentence)

    def _stand_back(self) -> None:
        """Release the lock and do not compete for it during two heartbeats."""
        self._failures = 0
        self.scanned = None
        if self.election.held is None:
            return
        millis = self.lock_settings.leader_heartbeat_period_millis
        away = _HEARTBEATS_OFF_AFTER_FAILURES * millis / 1000
        self._not_leading_until = self._clock.monotonic() + away
        try:
            self.election.release(TOO_MANY_FAILURES)
        except KclError as error:
            self._events(CycleFailed(f"release of the leader lock: {error_sentence(error)}", 0))
