"""Assign leases to workers. Nothing here calls Kinesis (protocol §5).

`LeaseAssignment.run` is called again and again. Each time it

1. holds the lock, or watches the tables while another process leads;
2. reads the record of the application, in which an operator may have paused it;
3. scans leases and workers;
4. decides which leases have expired and which workers live;
5. plans;
6. writes the moves, each on the condition that the row is as it was read;
7. reports.

Then `scanned` has the rows for `sync`, which creates and deletes leases on another thread. A call
to Kinesis may be throttled for a minute, or hang. If it came before a move, the leases of a worker
that stopped would wait for it; if it came before a heartbeat, the next candidate would acquire the
lock and make the same call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Final, Literal

from kcl_pipeline.clock import Clock, LastChanges
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    STREAM_OPERATIONS,
    AccessDeniedError,
    AwsError,
    IncompatibleTableError,
    InvalidRequestError,
    KclError,
    NotFoundError,
    OtherApplicationError,
    ShardSyncError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import (
    TOO_MANY_FAILURES,
    AwsTrouble,
    CycleFailed,
    DrainRequested,
    EventSink,
    LeaseMoved,
    MoveRefused,
    PlanMade,
)
from kcl_pipeline.leader.kcl2 import (
    TAKE_AND_STEAL,
    UpgradeFrom2x,
    followed_version,
    workers_may_be_missing,
    workers_take_leases,
)
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.lock import (
    WRITES_AT_ONCE,
    LeaderElection,
    NotLeadingError,
    lock_settings,
)
from kcl_pipeline.leases.application import (
    ACCEPT_STREAMS,
    NOTHING_WANTED,
    ApplicationIdentity,
    ApplicationRecord,
    Mode,
    Pause,
    RecordedStream,
    successor,
)
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.row import LEADER_KEY, BadRow, Lease, RejectedRows
from kcl_pipeline.leases.workers import WorkerListing, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, WorkerState
from kcl_pipeline.planning.state import Observation, Prepared, prepare, whole_plan
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import Spawn
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker_status import UnavailableStream

_HEARTBEATS_OFF_AFTER_FAILURES: Final = 2
_PLAN_SHARE: Final = 1 / 3
"""Share of the duration of the lock after which a plan is cut off."""

JOIN_SECONDS: Final = 15.0
"""How long a worker that has joined causes balancing in every run."""

WATCHERS: Final = 2
"""Processes that scan while they do not lead."""
_FIRST_WATCHERS: Final = 8
"""Processes that scan until they know whose row moves. Rows of workers that stopped may be among
those of the smallest ids.
"""
_SCANS_PER_FAILOVER: Final = 5
_DUTY: Final = 4.0
"""A scan of a watcher takes at most a fifth of the time."""
_LOOK_SECONDS: Final = 60.0
_LOOK_SECONDS_PER_WORKER: Final = 3.0
"""The time between two looks of the others grows with the fleet; the reads of all do not."""
_LIVING_SECONDS: Final = 90.0
"""A worker whose row has not changed for this time is not one of the two: three periods of KCL."""
_PATIENCE_SECONDS: Final = 1.5
"""How long the others leave a free lock to the two, who look at it twice a second."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or a parallel version with results in order, such as `ThreadPoolExecutor.map`."""
How = Literal["assign", "hand off", "leave"]


@dataclass(frozen=True, slots=True)
class LeaderDependencies:
    """What both functions of a leader work with.

    Attributes:
        settings: All settings.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        coordinator_table: The coordinator-state table.
        clock: The clock.
        events: Receives events.
        owner_name: Name of this process in the lock row.
        rng: Creates lock versions, which must be unique among all processes.
        resume_own_name: See `LeaderElection`.
        map: Runs independent writes, possibly in parallel.
        spawn: Starts the threads of `sync`, and of long scans and plans, during which heartbeats
            are sent. None: everything runs on the calling thread.
    """

    settings: ConsumerSettings
    lease_table: LeaseTable
    worker_table: WorkerMetricsTable
    coordinator_table: CoordinatorStateTable
    clock: Clock
    events: EventSink
    owner_name: str
    rng: Random
    resume_own_name: bool = False
    map: Map = map
    spawn: Spawn | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of both tables.

    Attributes:
        leases: The leases.
        unreadable: Keys of lease rows that cannot be used.
        bad_rows: Rows of both tables that cannot be used.
        workers: The worker metrics rows.
        unreadable_workers: Worker metrics rows that cannot be used. `bad_rows` contains them too.
        scan_started: Start of the scan in monotonic seconds.
        scan_finished: End of the scan in monotonic seconds.
    """

    leases: tuple[Lease, ...]
    unreadable: frozenset[str]
    bad_rows: tuple[BadRow, ...]
    workers: tuple[WorkerMetrics, ...]
    unreadable_workers: tuple[BadRow, ...]
    scan_started: float
    scan_finished: float


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


@dataclass(frozen=True, slots=True)
class StreamCoverage:
    """The hash-range coverage of one stream.

    Attributes:
        stream: The serialized stream.
        complete: Whether the leases cover all hash keys.
        hole: Description of the first gap. None: there is none.
        confidence: Number of audits in a row that found this gap.
    """

    stream: str
    complete: bool
    hole: str | None = None
    confidence: int = 0


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The result of `LeaderCycle.run_once`.

    If `led` is False, only `lock_owner`, `bad_rows`, `seconds` and `error` may have values.

    Attributes:
        led: Whether this process led in the cycle.
        lock_owner: Owner of the leader lock. None: unknown, or none.
        leases: The leases after the moves of this cycle, sorted by key.
        workers: The living workers, sorted by id.
        expired: Keys of expired leases, sorted.
        unreadable: Keys of lease rows that cannot be used.
        bad_rows: Rows of both tables that cannot be used.
        coverage: Hash-range coverage of each stream.
        unavailable: Streams whose last attempt failed.
        streams: Streams that are resolved, with their retention period.
        plan: The plan. None: none was computed.
        plan_input: The input of the plan.
        created: Keys of leases that `sync` has created since the last report.
        deleted: Keys of leases that `sync` has deleted since the last report.
        seconds: Duration of the assignment.
        error: Errors of the cycle. Other parts of the cycle may have succeeded.
        sync_skipped: Whether `sync` was due and still running.
        pause: The pause of the application, in which no lease is assigned. None: not paused.
    """

    led: bool
    lock_owner: str | None = None
    leases: tuple[Lease, ...] = ()
    workers: tuple[WorkerMetrics, ...] = ()
    expired: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    coverage: tuple[StreamCoverage, ...] = ()
    unavailable: tuple[UnavailableStream, ...] = ()
    streams: tuple[StreamId, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    created: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    pause: Pause | None = None
    sync_skipped: bool = False


@dataclass(slots=True)
class _Run:
    """One run that leads.

    Attributes:
        scan: What it has read.
        leases: The leases by key, as its moves change them.
        workers: The living workers, sorted by id.
        end: After this time no plan and no group of moves is started (monotonic seconds).
        expired: Keys of expired leases, sorted.
        plan: The plan, if one was computed.
        plan_input: Its input.
        errors: Errors of single rows, and at most one of the run.
    """

    scan: Scan
    leases: dict[str, Lease]
    workers: tuple[WorkerMetrics, ...]
    end: float
    expired: tuple[str, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    errors: list[Exception] = field(default_factory=list)


class LeaseAssignment:
    """Assigns the leases of one application while this process leads. One thread calls `run`.

    Its memory may be lost at any time: a new leader needs one failover time to learn again which
    leases expire.

    Attributes:
        election: The lock.
        lock_settings: Its duration and heartbeat.
        liveness: Which leases have expired, and which workers live.
        watch: Observes the rows while another process leads.
        scanned: The rows of the last scan. None: this process does not lead.
        control: The requests of an operator.
        refusal: Why `sync` found that this process must not lead. None: it may.
        has_failed_to_sync: Set by `sync` after too many failures in a row.
        misses_table: Whether a table did not exist in the last run.
    """

    def __init__(self, dependencies: LeaderDependencies) -> None:
        self._deps = deps = dependencies
        settings = deps.settings
        self._strategy = strategies.get(settings.assignment.lease_assignment_strategy)
        self._version = followed_version(
            settings, deps.coordinator_table, deps.owner_name, deps.clock, deps.events
        )
        self._upgrade = UpgradeFrom2x(self._version, deps.lease_table, deps.clock, deps.events)
        self.lock_settings = lock_settings(settings, is_sensor=deps.resume_own_name)
        self.election = LeaderElection(
            deps.coordinator_table,
            deps.owner_name,
            deps.clock,
            deps.events,
            self.lock_settings,
            deps.rng,
            resume_own_name=deps.resume_own_name,
        )
        self.liveness = Liveness(settings, deps.owner_name)
        self.watch = StandbyWatch(deps, self.liveness, self._scan)
        intervals = settings.assignment.variance_balancing_frequency
        self._balance = BalanceSchedule(
            intervals * settings.lease_assignment_interval_millis / 1000,
            self.liveness.sampling_seconds,
        )
        self._rejected = RejectedRows(deps.events)
        self.scanned: Scanned | None = None
        self.control = NOTHING_WANTED
        self.refusal: IncompatibleTableError | None = None
        self.has_failed_to_sync = self.misses_table = False
        self._may_lead = False
        self._failures = 0
        self._not_leading_until = -math.inf
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
        began = self._deps.clock.monotonic()
        if began < self._not_leading_until:
            return CycleReport(
                led=False, error="does not compete for the lock for a while, after failed cycles"
            )
        self.misses_table = False
        run: _Run | None = None
        try:
            if not self._lead():
                return self._watched(began)
            run = self._scanned_rows(math.inf if deadline_seconds is None else deadline_seconds)
            if self._deps.clock.monotonic() < run.end:
                self._follow_requests(run)
                self._upgrade.advance(run.leases.values(), run.workers)
        except NotLeadingError:
            self.scanned = None
            return self._not_led(began, "another process has acquired the lock")
        except NotFoundError as error:
            self.misses_table = True
            if run is None:
                sentence = "waiting for the first worker, which creates the tables"
                return self._not_led(began, sentence, led=self.election.held is not None)
            run.errors.append(error)
        except Exception as error:  # noqa: BLE001
            # Every error counts: a leader that always fails must not keep the lock
            if run is None:
                self._note_blind(began)
                return self._failed([error], began, None)
            run.errors.append(error)
        if run.errors:
            return self._failed(run.errors, began, run)
        self._failures = 0
        return self._report(run, began, None)

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
        # A candidate that must not lead must not acquire the lock either: each attempt would take
        # it from those that may
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
            self.liveness.begin(self._deps.clock.monotonic(), self.election.stolen_from)
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
        table = self._deps.coordinator_table
        record: ApplicationRecord | None = table.read_application()
        self.control = table.read_control() if record is None else record.control
        if self.refusal is not None:
            raise self.refusal
        if record is not None:
            self._refuse_other_names(record.identity)

    def _refuse_other_names(self, recorded: ApplicationIdentity) -> None:
        settings = self._deps.settings
        name = settings.application_name
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
        reason, table = self.election.unreadable, self._deps.coordinator_table
        bad = () if reason is None else (BadRow(table.name, LEADER_KEY, reason),)
        return self._not_led(began, reason, bad_rows=bad)

    # 3. Leases and workers

    def _scan(self) -> Scan:
        """Read both tables, and compare them with what was read before."""
        deps, began = self._deps, self._deps.clock.monotonic()
        try:
            rows = self.election.keep_during(
                lambda: scan(
                    deps.lease_table,
                    deps.worker_table,
                    deps.clock,
                    is_multi_stream=deps.settings.is_multi_stream,
                    workers_may_be_missing=workers_may_be_missing(self._version),
                ),
                # A process that does not lead has no lock to keep
                deps.spawn if self.election.held is not None else None,
            )
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

    def _note_blind(self, since: float) -> None:
        """Note that an attempt to scan which began at this time has failed."""
        if self._blind_since is None:
            self._blind_since = since

    def _scanned_rows(self, deadline_seconds: float) -> _Run:
        # The term before the scan: if the lock is lost and acquired again meanwhile, `sync` must
        # not write with rows that were read before others have led
        term, began = self.election.term, self._deps.clock.monotonic()
        rows = self._scan()
        self._rejected.note_all(rows.bad_rows)
        stale_millis = self._deps.settings.assignment.stale_worker_metrics_entry_cleanup_millis
        self.scanned = Scanned(
            term,
            rows,
            self.liveness.ended_seconds(rows.scan_started),
            self.liveness.unchanged_for(stale_millis / 1000, rows.scan_started),
        )
        leases = {lease.lease_key: lease for lease in rows.leases}
        living = self.liveness.living(rows.scan_started)
        return _Run(rows, leases, living, began + deadline_seconds)

    # 5. The plan

    def _follow_requests(self, run: _Run) -> None:
        """Assign leases, unless an operator has paused the application.

        Raises:
            NotLeadingError: This process does not lead any more.
        """
        if self.control.pause is not None:
            self._request_drains(run)
        else:
            self._assign(run)

    def _request_drains(self, run: _Run) -> None:
        """Request the workers to end that have not been requested yet.

        A worker whose start overlapped with the command that paused the application may have missed
        it. A Java worker does not know the request, and does not get one.
        """
        for row in run.workers:
            if row.run_id is None or row.drain_requested:
                continue
            try:
                if self._deps.worker_table.request_drain(row.worker_id, for_pause=True):
                    self._deps.events(DrainRequested(row.worker_id, "the application is paused"))
            except AwsError as error:
                run.errors.append(error)

    def _assign(self, run: _Run) -> None:
        """Plan and write moves.

        Leases without a living owner are assigned in every run. The fleet is balanced when a
        worker has joined, and every `variance_balancing_frequency` assignment intervals. In a
        leaderless application the workers take leases themselves.
        """
        deps = self._deps
        if workers_take_leases(deps.settings, self._version):
            run.plan = Plan(TAKE_AND_STEAL, ())
            return
        seen = self.liveness.observation(run.scan.scan_started)
        run.expired = tuple(sorted(seen.expired))
        began = deps.clock.monotonic()
        prepared = prepare(
            tuple(run.leases.values()),
            run.workers,
            seen,
            deps.settings.assignment,
            group_separator=deps.settings.worker.worker_group_separator,
            balance=False,
        )
        prepared = self._balance.applied(
            prepared, began, self.liveness.settling_seconds, has_settled=not seen.unsettled
        )
        # The plan of 10,000 leases may take longer than the lock lasts. It is cut off with the
        # moves that it has; those of leases without a living owner are always among them
        end = began + _PLAN_SHARE * self.lock_settings.leader_lease_duration_millis / 1000
        given = replace(prepared.given, stop=lambda: deps.clock.monotonic() >= end)
        plan = self.election.keep_during(lambda: self._strategy(given), deps.spawn)
        plan = self._one_lease_on_probation(whole_plan(plan, prepared))
        run.plan, run.plan_input = plan, given
        spilled, self._noted_spilled = self._noted_spilled, plan.spilled
        if plan.moves or plan.spilled != spilled:
            millis = (deps.clock.monotonic() - began) * 1000
            unassigned = sum(lease.owner is None for lease in given.leases)
            counts = (len(plan.moves), unassigned, len(plan.spilled))
            deps.events(PlanMade(plan.strategy, *counts, millis))
        self._write_moves(run, plan.moves, seen)
        if given.limits.balance and deps.clock.monotonic() < run.end:
            in_handoff = any(lease.in_handoff for lease in run.leases.values())
            self._balance.note_balanced(began, is_calm=not (plan.moves or in_handoff))

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

    # 6. The moves

    def _write_moves(self, run: _Run, moves: Sequence[Move], observation: Observation) -> None:
        """Write the moves in their order, as handoffs from living owners, else at once.

        The next run plans a refused move again. After an error of one move, the others are written.
        """
        wanted: list[tuple[Move, Lease, How]] = []
        for move in moves:
            lease = run.leases.get(move.lease_key)
            if lease is not None:
                how = how_to_move(
                    lease,
                    move.to_worker,
                    observation,
                    graceful_enabled=self._deps.settings.lease.is_graceful_lease_handoff_enabled,
                    has_to_move=move.from_worker is None,
                )
                if how != "leave":
                    wanted.append((move, lease, how))
        write = partial(self._write_one, observation.expired)
        for begin in range(0, len(wanted), WRITES_AT_ONCE):
            if self._deps.clock.monotonic() >= run.end:
                return
            # A leader that was paused must not write what it has planned before
            self.election.check()
            group = wanted[begin : begin + WRITES_AT_ONCE]
            for item, outcome in zip(group, self._deps.map(write, group), strict=True):
                self._note_written(run, *item, outcome)

    def _write_one(
        self, expired: frozenset[str], item: tuple[Move, Lease, How]
    ) -> Lease | Exception | None:
        """Write one move. Return the new row, an error, or None if the write was refused.

        The condition of a write is the owners of the row. That of an expired lease has its counter,
        too: an owner that has renewed since keeps it.
        """
        move, lease, how = item
        try:
            if self.election.may_have_expired():
                return None
            table = self._deps.lease_table
            if how == "hand off":
                return table.initiate_handoff(lease, move.to_worker)
            return table.assign(lease, move.to_worker, unrenewed=lease.lease_key in expired)
        except Exception as error:  # noqa: BLE001 (the run counts and reports it)
            return error

    def _note_written(
        self, run: _Run, move: Move, before: Lease, how: How, outcome: Lease | Exception | None
    ) -> None:
        if isinstance(outcome, Exception):
            run.errors.append(outcome)
            return
        if outcome is None:
            self._deps.events(MoveRefused(move.lease_key, move.to_worker))
            return
        run.leases[move.lease_key] = outcome
        self.liveness.note_move(outcome, self._deps.clock.monotonic())
        self._deps.events(
            LeaseMoved(
                move.lease_key,
                before.actual_owner,
                move.to_worker,
                how == "hand off",
                move.reason,
            )
        )

    # 7. Reports and failures

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
            seconds=self._deps.clock.monotonic() - began,
            bad_rows=bad_rows,
            error=error,
        )

    def _report(self, run: _Run, began: float, error: str | None) -> CycleReport:
        return CycleReport(
            led=True,
            lock_owner=self._deps.owner_name,
            leases=tuple(run.leases[key] for key in sorted(run.leases)),
            workers=run.workers,
            expired=run.expired,
            unreadable=tuple(sorted(run.scan.unreadable)),
            bad_rows=run.scan.bad_rows,
            plan=run.plan,
            plan_input=run.plan_input,
            error=error,
            seconds=self._deps.clock.monotonic() - began,
            pause=self.control.pause,
        )

    def _failed(self, errors: list[Exception], began: float, run: _Run | None) -> CycleReport:
        """Report the errors, and count the run as failed.

        It is not counted if all errors concern single rows. Then the run has processed the others,
        and another leader would have the same errors.
        """
        is_counted = run is None or not all(is_local(error) for error in errors)
        self._failures = self._failures + 1 if is_counted else 0
        sentence = error_sentence(errors)
        self._deps.events(CycleFailed(sentence, self._failures))
        if self._failures >= self._deps.settings.assignment.max_consecutive_failures:
            self._stand_back()
        if run is None:
            return self._not_led(began, sentence)
        return self._report(run, began, sentence)

    def _stand_back(self) -> None:
        """Release the lock and do not compete for it during two heartbeats."""
        self._failures = 0
        self.scanned = None
        if self.election.held is None:
            return
        millis = self.lock_settings.leader_heartbeat_period_millis
        away = _HEARTBEATS_OFF_AFTER_FAILURES * millis / 1000
        self._not_leading_until = self._deps.clock.monotonic() + away
        try:
            self.election.release(TOO_MANY_FAILURES)
        except KclError as error:
            sentence = f"release of the leader lock: {error_sentence([error])}"
            self._deps.events(CycleFailed(sentence, 0))


def scan(
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    clock: Clock,
    *,
    is_multi_stream: bool,
    workers_may_be_missing: bool = False,
) -> Scan:
    """Read both tables. A lease of the other form, single-stream or multi-stream, is a bad row.

    `workers_may_be_missing`: a missing worker-metrics table counts as empty.
    """
    scan_started = clock.monotonic()
    listing = lease_table.list_leases().of_form(lease_table.name, multi_stream=is_multi_stream)
    try:
        workers = worker_table.scan_workers()
    except NotFoundError:
        if not workers_may_be_missing:
            raise
        workers = WorkerListing(())
    return Scan(
        leases=listing.leases,
        unreadable=frozenset(listing.unreadable),
        bad_rows=(*listing.bad_rows, *workers.bad_rows),
        workers=workers.workers,
        unreadable_workers=workers.bad_rows,
        scan_started=scan_started,
        scan_finished=clock.monotonic(),
    )


def how_to_move(
    lease: Lease,
    to_worker: str,
    observation: Observation,
    *,
    graceful_enabled: bool,
    has_to_move: bool,
) -> How:
    """Return the write that a move needs (protocol §5.4).

    A running handoff is not changed until it is overdue, unless the plan cancels it because its
    destination has stopped. An expired lease is assigned even to its own owner, which starts a new
    failover time.

    Args:
        lease: The row.
        to_worker: Destination of the move.
        observation: Observations of this cycle.
        graceful_enabled: Whether handoffs are enabled.
        has_to_move: Whether the plan cancels a running handoff.
    """
    expired = lease.lease_key in observation.expired
    if lease.in_handoff and not (
        expired or has_to_move or lease.lease_key in observation.overdue_handoffs
    ):
        return "leave"
    if lease.owner == to_worker and not lease.in_handoff and not expired:
        return "leave"
    if (
        graceful_enabled
        and lease.owner is not None
        and not lease.in_handoff
        and not lease.ended
        and not expired
    ):
        return "hand off"
    return "assign"


def is_local(error: Exception) -> bool:
    """Return whether an error concerns one row or stream, so that every leader would have it.

    Errors of this process (network, permissions for the tables, defects) are not local.
    """
    if isinstance(error, AccessDeniedError | ThrottledError | UnavailableError):
        # Limits are those of the account
        return error.operation in STREAM_OPERATIONS
    return isinstance(error, _LOCAL_ERRORS)


_LOCAL_ERRORS: Final = (
    InvalidRequestError,
    NotFoundError,
    StreamReplacedError,
    ShardSyncError,
    UnreadableRowError,
    ValueError,
)


def error_sentence(errors: Iterable[Exception]) -> str:
    """Return errors in one sentence. The log has the traceback of an unexpected one."""
    return "; ".join(dict.fromkeys(described(error, "a leader cycle") for error in errors))


class BalanceSchedule:
    """The times at which leases may move for balance.

    A worker joins when it accepts leases and has none, while another one has several. The fleet is
    then balanced in every run until a plan has no moves and no handoff runs, at most for
    `JOIN_SECONDS`.

    It is balanced once more when the throughputs have settled: `again_seconds` after the last join,
    or up to that time later while the throughput of a lease is too new. If they have settled, those
    leases that were moved without a throughput may move again at once.

    Args:
        interval_seconds: Time between two other times.
        again_seconds: See above.
    """

    def __init__(self, interval_seconds: float, again_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._again_seconds = again_seconds
        self.restart()

    def restart(self) -> None:
        """Forget everything, at the start of a term without earlier observations."""
        self._due_at: float | None = None
        self._empty: frozenset[str] = frozenset()
        self._joining_until = -math.inf
        self._again_at = math.inf
        self._was_blind = False

    def applied(
        self, prepared: Prepared, now: float, settling_seconds: float, *, has_settled: bool
    ) -> Prepared:
        """Return the input of a plan in which leases may move for balance if that is due.

        Args:
            prepared: The input without balance. A lease in a handoff has its new owner.
            now: Time in monotonic seconds.
            settling_seconds: Time after the start of a term without balance at intervals. A lease
                is not moved for balance to a worker that may have stopped.
            has_settled: Whether no throughput is too new.
        """
        given = prepared.given
        self._note_joins(now, given.workers, given.leases)
        if self._due_at is None:
            self._due_at = now + settling_seconds
        is_joining = now < self._joining_until
        self._was_blind |= is_joining and not has_settled
        is_again = now >= self._again_at + (0.0 if has_settled else self._again_seconds)
        if now < self._due_at and not is_joining and not is_again:
            return prepared
        limits = replace(given.limits, balance=True)
        if is_again:
            if self._was_blind and has_settled:
                limits = replace(limits, cool_down_seconds=0.0)
            self._again_at, self._was_blind = math.inf, False
        return replace(prepared, given=replace(given, limits=limits))

    def note_balanced(self, now: float, *, is_calm: bool) -> None:
        """Note that a plan with balance was written.

        Args:
            now: Time in monotonic seconds.
            is_calm: Whether it has no moves and no handoff runs.
        """
        if is_calm:
            self._joining_until = -math.inf
        if self._due_at is not None and now >= self._due_at:
            self._due_at = now + self._interval_seconds

    def _note_joins(
        self, now: float, workers: Iterable[WorkerState], leases: Iterable[LeaseState]
    ) -> None:
        counts = Counter(lease.owner for lease in leases if not lease.ended)
        has_spare = max((n for owner, n in counts.items() if owner is not None), default=0) > 1
        empty = frozenset(
            worker.worker_id
            for worker in workers
            if has_spare and worker.accepts_leases and not counts[worker.worker_id]
        )
        if empty - self._empty:
            self._joining_until = now + JOIN_SECONDS
            self._again_at = now + self._again_seconds
        self._empty = empty


class StandbyWatch:
    """Reads for one process that does not lead, so that it knows at once who has stopped.

    The two smallest worker ids whose row moves scan the tables. The others read the worker rows
    once in a while, to learn whether they are one of the two. In a fleet that starts, no row has
    moved yet: a process scans if its id is one of the eight smallest.

    Args:
        dependencies: Those of the leader.
        liveness: Has observed the scans.
        scan: Reads and observes both tables.
    """

    def __init__(
        self, dependencies: LeaderDependencies, liveness: Liveness, scan: Callable[[], Scan]
    ) -> None:
        self._deps = dependencies
        self._liveness = liveness
        self._scan = scan
        self._reports = LastChanges[str]()
        self._moving: set[str] | None = None
        self._next_look = -math.inf
        self._workers = 0
        self.is_watcher = True
        """Whether this process is one of the two. Before its first look it counts as one."""

    @property
    def patience_seconds(self) -> float:
        """How long this process leaves a free or expired lock to others."""
        return 0.0 if self.is_watcher else _PATIENCE_SECONDS

    def look(self, leader: str) -> None:
        """Read the tables if it is time to.

        An error is reported as an event. The next look tries again.

        Args:
            leader: Owner of the lock.
        """
        clock = self._deps.clock
        began = clock.monotonic()
        if began < self._next_look:
            return
        try:
            if self._moving is None:
                self._begin(leader)
            elif not self.is_watcher:
                self._choose(self._deps.worker_table.scan_workers().workers, leader, set())
            if self.is_watcher:
                self._liveness.forget_after_pause(began)
                rows = self._scan()
                owners = {lease.actual_owner for lease in rows.leases}
                self._choose(rows.workers, leader, owners)
        except (KclError, ValueError) as error:
            self._deps.events(AwsTrouble("scan of a standby leader", str(error)))
        ended = clock.monotonic()
        if self.is_watcher:
            failover_seconds = self._deps.settings.lease.failover_time_millis / 1000
            pause = max(failover_seconds / _SCANS_PER_FAILOVER, _DUTY * (ended - began))
        else:
            pause = max(_LOOK_SECONDS, _LOOK_SECONDS_PER_WORKER * self._workers)
        self._next_look = ended + pause

    def _begin(self, leader: str) -> None:
        """Decide from the worker rows whether to scan the leases in the first look, too."""
        rows = self._deps.worker_table.scan_workers().workers
        known = {row.worker_id for row in rows}
        if len(self._before_own(known - {leader})) >= _FIRST_WATCHERS:
            self._choose(rows, leader, known)

    def _before_own(self, others: set[str]) -> list[str]:
        """Return the ids before the own one. A process without a row comes after all others."""
        own_id = self._deps.owner_name
        return [key for key in others if key < own_id or own_id not in others]

    def _choose(
        self, rows: Iterable[WorkerMetrics], leader: str, owners: Collection[str | None]
    ) -> None:
        """Decide whether this process is one of the two smallest ids that move.

        In the first look the owners of leases count as moving.
        """
        now = self._deps.clock.monotonic()
        moved = self._reports.observe(
            {row.worker_id: (row.last_update_seconds, row.stats) for row in rows}, now
        )
        known = self._reports.keys()
        before = {key for key in known if key in owners} if self._moving is None else self._moving
        silent = self._reports.unchanged_for(_LIVING_SECONDS, now)
        # This process runs, whether or not it has seen its own row move
        self._moving = (before | moved.keys() | {self._deps.owner_name}) & (known - silent)
        others = self._moving - {leader}
        self._workers = len(others)
        self.is_watcher = len(self._before_own(others)) < WATCHERS
