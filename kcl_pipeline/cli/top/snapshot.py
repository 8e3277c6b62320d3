"""Read what `kcl-pipeline top` shows."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.cli.inspection.leader import describe
from kcl_pipeline.cli.inspection.leases import Lags, Paused, paused_leases, state
from kcl_pipeline.cli.inspection.workers import newest, states
from kcl_pipeline.cli.target import Target
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.state.values import UnreadableLock
from kcl_pipeline.leases.state.worker_status import WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics

MAX_MOVES: Final = 20
HANDOFF: Final = "in handoff"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker.

    Attributes:
        worker_id: Its id.
        leases: Number of leases that it processes.
        throughput_kbps: Sum of their throughput in KiB/s.
        cpu_percent: The last CPU average. None: not measured.
        lag_millis: The largest lag of its leases. None: unknown.
        seconds_since_report: Age of its row.
        states: The states that need attention.
    """

    worker_id: str
    leases: int
    throughput_kbps: float
    cpu_percent: float | None
    lag_millis: int | None
    seconds_since_report: float
    states: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease that has not ended.

    Attributes:
        lease_key: Its key.
        owner: The worker that processes the shard. None: no worker.
        state: Free, held, paused, or a handoff.
        lag_millis: Age of the oldest record that is not committed. None: unknown.
        lag_is_upper_bound: Whether the lag is at most this value.
        throughput_kbps: In KiB/s. None: unknown.
        checkpoint: The position that is processed.
    """

    lease_key: str
    owner: str | None
    state: str
    lag_millis: int | None
    lag_is_upper_bound: bool
    throughput_kbps: float | None
    checkpoint: str


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A change of the owner, as seen between two snapshots.

    Attributes:
        at: When it was seen first, in epoch seconds of this host.
        lease_key: The lease.
        from_worker: The former owner. None: there was none.
        to_worker: The new owner. None: the lease was released.
        outcome: What became of it.
    """

    at: float
    lease_key: str
    from_worker: str | None
    to_worker: str | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one refresh has read. The reads are eventually consistent.

    Attributes:
        application: Its name.
        at: Epoch seconds of this host.
        leader: The leader's lock in one line.
        pause: Since when the application is paused, by whom and why. None: it is not.
        workers: The workers.
        leases: The leases that have not ended.
        ended: Number of leases that have ended.
        moves: The last moves, newest first.
        bad_rows: Number of rows that cannot be parsed.
    """

    application: str
    at: float
    leader: str
    pause: str | None = None
    workers: tuple[WorkerRow, ...] = ()
    leases: tuple[LeaseRow, ...] = ()
    ended: int = 0
    moves: tuple[OwnerChange, ...] = ()
    bad_rows: int = 0


class OwnerChanges:
    """The last moves, found by comparing the leases of two snapshots."""

    def __init__(self) -> None:
        self._owners: dict[str, str | None] | None = None
        self._moves: deque[OwnerChange] = deque(maxlen=MAX_MOVES)

    def follow(self, leases: Iterable[Lease], now: float) -> tuple[OwnerChange, ...]:
        """Add the changes since the last call. Returns the last moves, newest first.

        Args:
            leases: All leases that have not ended.
            now: Epoch seconds.
        """
        owners: dict[str, str | None] = {}
        for lease in sorted(leases, key=lambda lease: lease.lease_key):
            key, owner = lease.lease_key, lease.actual_owner
            owners[key] = owner
            # In the first snapshot only handoffs are known.
            before = owner if self._owners is None else self._owners.get(key)
            if owner != before:
                self._settle(OwnerChange(now, key, before, owner, _outcome(before, owner)))
            elif not lease.in_handoff:
                self._cancel(key)
            if lease.in_handoff and self._open(key) is None:
                self._moves.append(OwnerChange(now, key, owner, lease.owner, HANDOFF))
        for key in {move.lease_key for move in self._moves} - owners.keys():
            self._cancel(key)
        self._owners = owners
        return tuple(reversed(self._moves))

    def _open(self, key: str) -> int | None:
        """The index of the handoff of a lease that goes on."""
        for index, move in enumerate(self._moves):
            if move.lease_key == key and move.outcome == HANDOFF:
                return index
        return None

    def _settle(self, move: OwnerChange) -> None:
        index = self._open(move.lease_key)
        if index is None:
            self._moves.append(move)
        else:
            self._moves[index] = replace(
                self._moves[index], to_worker=move.to_worker, outcome=move.outcome
            )

    def _cancel(self, key: str) -> None:
        index = self._open(key)
        if index is not None:
            self._moves[index] = replace(self._moves[index], outcome="canceled")


def _outcome(before: str | None, after: str | None) -> str:
    if after is None:
        return "released"
    return "assigned" if before is None else "moved"


def read_snapshot(app: Target, moves: OwnerChanges) -> Snapshot:
    """Read the three tables once. Rows that cannot be parsed are counted and left out.

    Raises:
        KclError: A table cannot be read.
    """
    tables = app.tables
    listing = tables.lease.list_leases()
    reported = tables.workers.scan_workers()
    lock = tables.coordinator.observe_lock()
    pause = tables.coordinator.read_control().pause
    now = app.clock.wall()
    open_leases = [lease for lease in listing.leases if not lease.ended]
    paused, lags = paused_leases(reported.workers), Lags(reported.workers, now)
    leader = lock.reason if isinstance(lock, UnreadableLock) else describe(lock, alive=None)
    return Snapshot(
        app.settings.application_name,
        now,
        leader,
        None if pause is None else pause.sentence,
        _workers(reported.workers, open_leases, now),
        tuple(_lease(lease, paused, lags) for lease in open_leases),
        len(listing.leases) - len(open_leases),
        moves.follow(open_leases, now),
        len(listing.bad_rows) + len(reported.bad_rows),
    )


def _workers(
    rows: Iterable[WorkerMetrics], leases: Iterable[Lease], now: float
) -> tuple[WorkerRow, ...]:
    held: Counter[str | None] = Counter()
    rates: defaultdict[str | None, float] = defaultdict(float)
    for lease in leases:
        held[lease.actual_owner] += 1
        rates[lease.actual_owner] += lease.throughput_kbps or 0.0
    return tuple(
        WorkerRow(
            row.worker_id,
            held[row.worker_id],
            round(rates[row.worker_id], 1),
            newest(row),
            (row.status or WorkerStatus()).lag_millis,
            round(now - row.last_update_seconds, 1),
            tuple(states(row)),
        )
        for row in rows
    )


def _lease(lease: Lease, paused: Paused, lags: Lags) -> LeaseRow:
    millis, _, is_upper_bound = lags.of(lease) or (None, None, False)
    return LeaseRow(
        lease.lease_key,
        lease.actual_owner,
        state(lease, paused),
        millis,
        is_upper_bound,
        lease.throughput_kbps,
        str(lease.checkpoint),
    )
