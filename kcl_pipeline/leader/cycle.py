"""One leader cycle: lock → scan → leases of new streams → plan → moves → audit → cleanup (protocol §5, §7, §8).

The sensor calls it at every tick, a worker when nobody else leads; it has no thread. What it remembers may be lost at any time.
"""

from __future__ import annotations

import builtins
import threading
from random import Random, SystemRandom

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError, NotACompatibleTable, NotFound
from kcl_pipeline.events import CycleFailed, EventSink, PlanMade
from kcl_pipeline.leader.cleaning import Cleaning
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leader.moves import MoveWriter
from kcl_pipeline.leader.phase import Deadline, Fence, Map, NotLeadingError, Round, Streams, scan
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.leader.shard_sync import ShardSync
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.model import Plan
from kcl_pipeline.planning.state import Prepared, prepare
from kcl_pipeline.records.kinesis import KinesisClient

_HEARTBEATS_OFF_AFTER_FAILURES = 2


class LeaderCycle:
    """The leader of one application, as a function that is called again and again.

    `owner_name` stands in the lock. `resume_own_name`: see `LeaderElection`. `map` runs independent writes, in parallel if it can.
    `rng` makes lock versions and must not repeat between processes; None: the system's source.
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
        map: Map | None = None,  # noqa: A002 (it takes the place of the builtin)
        rng: Random | None = None,
    ) -> None:
        run: Map = map if map is not None else builtins.map
        self._settings = settings
        self._lease_table = lease_table
        self._worker_table = worker_table
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._events = events
        self._owner_name = owner_name
        self._strategy = strategies.get(settings.assignment.lease_assignment_strategy)
        self._election = LeaderElection(coordinator_table, owner_name, clock, events, settings.leader, rng or SystemRandom(), resume_own_name=resume_own_name)
        fence = Fence(self._election)
        self._fence = fence
        self._liveness = Liveness(settings)
        self._sync = ShardSync(settings, lease_table, kinesis, clock, events, Streams(settings, kinesis), fence, run)
        self._cleaning = Cleaning(settings, lease_table, worker_table, events, fence)
        self._moves = MoveWriter(settings.lease, lease_table, clock, events, self._liveness, fence, run)
        self._balance_due: float | None = None
        self._version_checked = False
        self._failures = 0
        self._leave_alone_until: float | None = None
        self._gate = threading.Lock()
        self._busy = False
        self._lock = clock.lock()

    def run_once(self, deadline_seconds: float | None = None) -> CycleReport:
        """One cycle. Quick when somebody else leads, or when a cycle of this object is still running in another thread.

        After `deadline_seconds` no further phase or group of writes is begun; the next cycle goes on. Errors do not come out of here: they are in the report
        and in `CycleFailed` events, and after `max_consecutive_failures` in a row the leadership is given up. KeyboardInterrupt and the like pass.
        """
        with self._gate:
            if self._busy:
                return CycleReport(led=False, lock_owner=self._election.seen_owner, error="the cycle before is still running")
            self._busy = True
        try:
            with self._lock:
                return self._guarded(deadline_seconds)
        finally:
            self._busy = False

    def release(self) -> None:
        """Give the lock back, if it is held, after a running cycle has ended. Raises the errors of the table."""
        with self._lock:
            self._election.release()

    def _guarded(self, deadline_seconds: float | None) -> CycleReport:
        began = self._clock.monotonic()
        if self._leave_alone_until is not None and began < self._leave_alone_until:
            return CycleReport(led=False, error="leaves the lead to others for a while, after failing")
        self._leave_alone_until = None
        now: Round | None = None
        try:
            if not self._lead():
                return CycleReport(led=False, lock_owner=self._election.seen_owner, seconds=self._clock.monotonic() - began)
            now = self._scan(Deadline(self._clock, deadline_seconds))
            self._phases(now)
        except NotLeadingError:
            return CycleReport(led=False, lock_owner=self._election.seen_owner, seconds=self._clock.monotonic() - began, error="the lock was taken over")
        except NotFound as error:
            if now is None:
                waiting = f"waiting for the first worker, which creates the tables ({error})"
                return CycleReport(led=self._election.held is not None, lock_owner=self._election.seen_owner, error=waiting)
            now.errors.append(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, it counts: a leader that fails for ever and keeps the lock is the worst)
            if now is None:
                return self._failed([error], began, None)
            now.errors.append(error)
        if now.errors:
            return self._failed(now.errors, began, now)
        self._failures = 0
        return self._report(now, began, None)

    def _lead(self) -> bool:
        """Whether this process leads; the client version of the fleet is looked at before the lock is, and again whenever it was won."""
        if not self._version_checked:
            ensure_client_version(self._coordinator_table, self._owner_name, self._clock)
            self._version_checked = True
        led_before = self._election.held is not None
        if not self._election.try_lead():
            return False
        if not led_before:
            try:
                ensure_client_version(self._coordinator_table, self._owner_name, self._clock)
            except NotACompatibleTable as error:
                self._version_checked = False
                self._election.release(str(error))
                raise
        return True

    def _scan(self, deadline: Deadline) -> Round:
        found = scan(self._lease_table, self._worker_table, self._clock, is_multi_stream=self._settings.is_multi_stream)
        self._liveness.observe(found.leases, found.workers, found.asked, found.answered)
        return Round(
            leases={lease.lease_key: lease for lease in found.leases},
            unreadable=found.unreadable,
            workers=self._liveness.living(found.asked),
            asked=found.asked,
            deadline=deadline,
        )

    def _phases(self, now: Round) -> None:
        """New leases before the plan, so that they get their workers at once; what is not urgent after it."""
        self._sync.start(now)
        self._assign(now)
        ended = self._liveness.ended_seconds(now.asked)
        if now.deadline.passed():
            return
        listings = self._sync.audit(now, stale=self._cleaning.stale(ended))
        self._cleaning.finished_leases(now, ended, listings)
        stale_seconds = self._settings.assignment.stale_worker_metrics_entry_cleanup_millis / 1000
        self._cleaning.worker_rows(now, self._liveness.unchanged_for(stale_seconds, now.asked))

    def _assign(self, now: Round) -> None:
        """Leases without a living owner in every cycle; balance every `variance_balancing_frequency` assignment intervals."""
        seen = self._liveness.observation(now.asked)
        now.expired = tuple(sorted(seen.expired))
        began = self._clock.monotonic()
        if self._balance_due is None:
            # Nothing is moved for balance to a worker that may not be there; what has no owner cannot wait.
            self._balance_due = began + self._liveness.settling_seconds
        balance = began >= self._balance_due
        prepared = prepare(
            tuple(now.leases.values()),
            now.workers,
            seen,
            self._settings.assignment,
            group_separator=self._settings.worker.worker_group_separator,
            balance=balance,
        )
        plan = whole_plan(self._strategy(prepared.given), prepared)
        now.plan, now.plan_input = plan, prepared.given
        if plan.moves or plan.spilled:
            unassigned = sum(1 for lease in prepared.given.leases if lease.owner is None)
            millis = (self._clock.monotonic() - began) * 1000
            self._events(PlanMade(plan.strategy, len(plan.moves), unassigned, len(plan.spilled), millis))
        self._moves.write(now, plan.moves, seen)
        if balance and not now.deadline.passed():
            frequency = self._settings.assignment.variance_balancing_frequency
            self._balance_due = began + frequency * self._settings.lease_assignment_interval_millis / 1000

    def _failed(self, errors: list[Exception], began: float, now: Round | None) -> CycleReport:
        self._failures += 1
        sentence = "; ".join(dict.fromkeys(_sentence(error) for error in errors))
        self._events(CycleFailed(sentence, self._failures))
        if self._failures >= self._settings.assignment.max_consecutive_failures:
            self._failures = 0
            self._leave_to_others()
        if now is None:
            owner = self._election.seen_owner
            return CycleReport(led=False, lock_owner=owner, seconds=self._clock.monotonic() - began, error=sentence)
        return self._report(now, began, sentence)

    def _leave_to_others(self) -> None:
        """Give the lock back and stay away from it for two heartbeats, so that a candidate without this trouble can have it."""
        if self._election.held is None:
            return
        away = _HEARTBEATS_OFF_AFTER_FAILURES * self._settings.leader.leader_heartbeat_period_millis / 1000
        self._leave_alone_until = self._clock.monotonic() + away
        try:
            self._election.release("too many cycles in a row failed")
        except KclError as error:
            self._events(CycleFailed(f"release of the leader lock: {_sentence(error)}", 0))

    def _report(self, now: Round, began: float, error: str | None) -> CycleReport:
        return CycleReport(
            led=True,
            lock_owner=self._owner_name,
            leases=tuple(now.leases[key] for key in sorted(now.leases)),
            workers=now.workers,
            expired=now.expired,
            unreadable=tuple(sorted(now.unreadable)),
            coverage=self._sync.coverage(now),
            plan=now.plan,
            plan_input=now.plan_input,
            failed_moves=now.failed_moves,
            created=tuple(now.created),
            deleted=tuple(now.deleted),
            seconds=self._clock.monotonic() - began,
            error=error,
        )


def whole_plan(plan: Plan, prepared: Prepared) -> Plan:
    """The strategy's plan with the handoffs to be finished by force in front."""
    return Plan(plan.strategy, (*prepared.forced, *plan.moves), plan.spilled, plan.notes)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, KclError) else f"{type(error).__name__}: {error}"
