"""Work as KCL 2.x does: workers take leases from each other (protocol §3.5, §5.7).

This replaces the assignment by a leader in an application that is configured as leaderless, and
while workers of KCL 2.x may run. Every worker decides alone, from one scan of the lease table, and
writes conditionally. The decision (`leases_to_take`) is pure: a random choice comes from the
generator that is passed in. As in KCL, leases of finished shards count.

`UpgradeFrom2x` ends this mode when every worker knows KCL 3.x. After a rollback to 2.x, index and
worker metrics may be missing: see `workers_may_be_missing`, `RollForward` and `LeaseLoop` of the
worker. No other module asks which of the two versions an application has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from kcl_pipeline.clock import Clock, LastChanges
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import (
    AwsTrouble,
    ClientVersionChanged,
    EventSink,
    LeaseMoved,
    MoveRefused,
    PlanMade,
)
from kcl_pipeline.leases.coordinator import CoordinatorStateTable, MigrationState
from kcl_pipeline.leases.layout import VERSION_3X_WITH_ROLLBACK, ClientVersion
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.leases.writes import LeaseTable

TAKE_AND_STEAL: Final = "take_and_steal"
"""Name of the algorithm in plans and events."""

VERY_OLD_FAILOVERS: Final = 3.0
"""A lease that nobody has renewed for this many failover times is taken beyond the target."""


@dataclass(frozen=True, slots=True)
class SeenLease:
    """One lease as a worker has seen it.

    Attributes:
        lease_key: The lease.
        owner: Its owner (`leaseOwner`). None: it has none.
        age_seconds: Time since its counter was last seen to change. inf: a new lease that never had
            an owner.
        ended: Whether it is at SHARD_END. Such a lease is stolen last.
        in_handoff: Whether it is in a handoff between living workers. Then it is not stolen.
    """

    lease_key: str
    owner: str | None
    age_seconds: float
    ended: bool = False
    in_handoff: bool = False


@dataclass(frozen=True, slots=True)
class TakeLimits:
    """The settings of the decision.

    Attributes:
        failover_seconds: A lease that was not renewed for this time has expired.
        max_leases_for_worker: Most leases of a worker.
        max_leases_to_steal_at_one_time: Most leases that one decision steals.
        enable_priority_lease_assignment: Whether very old leases are taken beyond the target.
    """

    failover_seconds: float
    max_leases_for_worker: int = 2**31 - 1
    max_leases_to_steal_at_one_time: int = 1
    enable_priority_lease_assignment: bool = True


@dataclass(frozen=True, slots=True)
class Take:
    """One lease to take. `from_worker` is the living owner that loses it; None: it has none."""

    lease_key: str
    from_worker: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Takings:
    """The decision of one worker.

    Attributes:
        takes: The leases to take, in this order.
        target: Number of leases that every worker should have.
        spilled: Number of leases above `max_leases_for_worker` in the target, per worker.
        available: Number of leases without a living owner.
    """

    takes: tuple[Take, ...] = ()
    target: int = 0
    spilled: int = 0
    available: int = 0


def leases_to_take(
    worker_id: str, leases: Iterable[SeenLease], limits: TakeLimits, rng: Random
) -> Takings:
    """Return the leases that this worker takes now.

    The target is the number of leases divided by the number of workers, rounded up. Workers are the
    owners of unexpired leases, and this worker.

    1. If there are very old leases, take those, up to `max_leases_for_worker`.
    2. Else, take leases without a living owner, up to the target.
    3. If there are none, steal from the worker with the most leases: what it has above the target,
       or one lease if it has just the target and this worker needs at least two.

    The order of the leases does not matter.

    Args:
        worker_id: The worker that decides.
        leases: All leases.
        limits: The settings.
        rng: Makes the random choices.
    """
    ordered = sorted(leases, key=lambda lease: lease.lease_key)
    available = [lease for lease in ordered if _is_available(lease, limits)]
    if not ordered:
        return Takings()
    counts = _counts(worker_id, ordered, limits)
    wanted = -(-len(ordered) // len(counts))
    target = min(wanted, limits.max_leases_for_worker)
    spilled = wanted - target
    mine = counts[worker_id]
    takes: list[Take] = []
    very_old = _very_old(ordered, limits)
    if very_old:
        room = max(limits.max_leases_for_worker - mine, 0)
        takes = [_take(lease) for lease in _shuffled(very_old, rng)[:room]]
    elif available:
        needed = max(target - mine, 0)
        takes = [_take(lease) for lease in _shuffled(available, rng)[:needed]]
    else:
        takes = _steals(ordered, counts, target, target - mine, limits, rng)
    return Takings(tuple(takes), target, spilled, len(available))


def _is_available(lease: SeenLease, limits: TakeLimits) -> bool:
    return lease.owner is None or lease.age_seconds > limits.failover_seconds


def _very_old(leases: list[SeenLease], limits: TakeLimits) -> list[SeenLease]:
    if not limits.enable_priority_lease_assignment:
        return []
    limit = VERY_OLD_FAILOVERS * limits.failover_seconds
    return [lease for lease in leases if lease.age_seconds > limit]


def _counts(worker_id: str, leases: list[SeenLease], limits: TakeLimits) -> Counter[str]:
    counts = Counter({worker_id: 0})
    counts.update(
        lease.owner
        for lease in leases
        if lease.owner is not None and not _is_available(lease, limits)
    )
    return counts


def _steals(
    leases: list[SeenLease],
    counts: Mapping[str, int],
    target: int,
    needed: int,
    limits: TakeLimits,
    rng: Random,
) -> list[Take]:
    most = max(counts.values())
    if needed <= 0 or most < target:
        return []
    number = min(needed, most - target)
    if needed > 1 and number == 0:
        number = 1
    number = min(number, limits.max_leases_to_steal_at_one_time)
    victim = rng.choice(sorted(owner for owner, count in counts.items() if count == most))
    candidates = [one for one in leases if one.owner == victim and not one.in_handoff]
    chosen = sorted(_shuffled(candidates, rng), key=lambda lease: lease.ended)[:number]
    return [
        Take(lease.lease_key, victim, f"{victim} has {most} leases, the target is {target}")
        for lease in chosen
    ]


def _take(lease: SeenLease) -> Take:
    if lease.owner is None:
        return Take(lease.lease_key, None, "it has no owner")
    return Take(
        lease.lease_key, None, f"{lease.owner} has not renewed it for {lease.age_seconds:.1f} s"
    )


def _shuffled(leases: list[SeenLease], rng: Random) -> list[SeenLease]:
    return rng.sample(leases, len(leases))


@dataclass(frozen=True, slots=True)
class TakeResult:
    """The result of one run.

    Attributes:
        taken: Keys of the leases that now belong to this worker.
        must_repeat: Whether a write was refused or failed, so that a lease may be left over.
    """

    taken: tuple[str, ...]
    must_repeat: bool


class LeaseTaker:
    """Takes leases for one worker. One thread calls it.

    Changes count from the end of a scan, and ages up to its start. So a worker that was paused
    during a scan takes nothing early.

    Args:
        worker_id: The worker.
        settings: All settings.
        table: The lease table.
        clock: The clock.
        events: Receives `PlanMade`, `LeaseMoved`, `MoveRefused` and errors of single leases.
        rng: Makes the random choices.
    """

    def __init__(
        self,
        worker_id: str,
        settings: ConsumerSettings,
        table: LeaseTable,
        clock: Clock,
        events: EventSink,
        rng: Random,
    ) -> None:
        self._worker_id = worker_id
        self._is_multi_stream = settings.is_multi_stream
        self._table = table
        self._clock = clock
        self._events = events
        self._rng = rng
        assignment = settings.assignment
        self._limits = TakeLimits(
            settings.lease.failover_time_millis / 1000,
            assignment.max_leases_for_worker,
            assignment.max_leases_to_steal_at_one_time,
            assignment.enable_priority_lease_assignment,
        )
        self._renewals = LastChanges[str]()
        self._spilled = 0

    def forget(self) -> None:
        """Forget all observations, while somebody leads."""
        self._renewals = LastChanges[str]()

    def run(self) -> TakeResult:
        """Scan the leases, decide, and take leases.

        Raises:
            AwsError: The leases cannot be listed.
        """
        began = self._clock.monotonic()
        listing = self._table.list_leases()
        found = listing.of_form(self._table.name, multi_stream=self._is_multi_stream).leases
        counters = {lease.lease_key: lease.counter for lease in found}
        self._renewals.observe(counters, self._clock.monotonic())
        seen = [self._with_age(lease, began) for lease in found]
        takings = leases_to_take(self._worker_id, seen, self._limits, self._rng)
        # A plan without moves is reported once: each run would repeat it.
        is_news = takings.spilled and takings.spilled != self._spilled
        self._spilled = takings.spilled
        if takings.takes or is_news:
            millis = (self._clock.monotonic() - began) * 1000
            counts = (len(takings.takes), takings.available, takings.spilled)
            self._events(PlanMade(TAKE_AND_STEAL, *counts, millis))
        leases = {lease.lease_key: lease for lease in found}
        taken = [one.lease_key for one in takings.takes if self._take(one, leases[one.lease_key])]
        return TakeResult(tuple(taken), must_repeat=len(taken) < len(takings.takes))

    def _with_age(self, lease: Lease, now: float) -> SeenLease:
        key = lease.lease_key
        is_new = lease.owner is None and not self._renewals.has_changed(key)
        return SeenLease(
            key,
            lease.owner,
            math.inf if is_new else now - self._renewals.since(key),
            ended=lease.ended,
            in_handoff=lease.in_handoff,
        )

    def _take(self, take: Take, lease: Lease) -> bool:
        """Take one lease, if nobody has written it since. After an error the next run decides."""
        try:
            current: Lease | None = lease
            if take.from_worker is not None:
                # Its owner renews it all the time, so that its counter may have moved
                current = self._table.get(lease.lease_key)
                if current is None or current.owner != lease.owner or current.in_handoff:
                    current = None
            row = current and self._table.assign(current, self._worker_id, unrenewed=True)
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble(f"taking {lease.lease_key}", str(error)))
            return False
        if row is None:
            self._events(MoveRefused(lease.lease_key, self._worker_id))
            return False
        self._renewals.note(row.lease_key, row.counter, self._clock.monotonic())
        self._events(
            LeaseMoved(
                lease.lease_key, lease.owner, self._worker_id, graceful=False, reason=take.reason
            )
        )
        return True


class Creatable(Protocol):
    """A table of the application."""

    def ensure_exists(self) -> object:
        """Create it, if it does not exist."""


READY_SECONDS: Final = 600.0
"""Time for which an application must be ready without a break, as in KCL."""
CHECK_SECONDS: Final = 60.0
"""Time between two checks, as in KCL."""


def workers_take_leases(settings: ConsumerSettings, version: ClientVersion) -> bool:
    """Return whether workers take leases from each other, so that a leader assigns none."""
    return settings.coordination == "leaderless" or version.is_leaderless


def workers_may_be_missing(version: ClientVersion) -> bool:
    """Return whether there may be no table of worker metrics: KCL's rollback deletes it."""
    return version.is_2x


class RollForward:
    """Creates index and worker-metrics table again after a roll forward from the version 2X.

    KCL's migration tool deletes both in a rollback. The index may take minutes.

    Args:
        version: The client version of this process.
        tables: The tables.
        events: Receives errors.
        spawn: Starts the thread that creates them.
    """

    def __init__(
        self,
        version: ClientVersion,
        tables: Sequence[Creatable],
        events: EventSink,
        spawn: Callable[[str, Callable[[], None]], object],
    ) -> None:
        self._version = version
        self._tables = tables
        self._events = events
        self._spawn = spawn
        self._was_2x = False

    def look(self) -> None:
        """Begin to create the tables, if the version has just been 2X."""
        was_2x, self._was_2x = self._was_2x, self._version.is_2x
        if was_2x and not self._was_2x:
            self._spawn("tables", self._create)

    def _create(self) -> None:
        for table in self._tables:
            try:
                table.ensure_exists()
            except AwsError as error:
                self._events(AwsTrouble("creation of tables", str(error)))


def followed_version(
    settings: ConsumerSettings,
    table: CoordinatorStateTable,
    process: str,
    clock: Clock,
    events: EventSink,
) -> ClientVersion:
    """Return the client version of a process, which reports each change as an event."""

    def changed(before: MigrationState, after: MigrationState) -> None:
        versions = (before.client_version, after.client_version)
        events(ClientVersionChanged(process, *versions, after.modified_by))

    return ClientVersion(table, process, clock, settings.client_version_config, changed)


class UpgradeFrom2x:
    """Changes the client version from UPGRADE_FROM_2X to 3X_WITH_ROLLBACK.

    An application is ready when every unfinished lease has an owner, every owner reports worker
    metrics, and the index of the lease table can be queried.

    Args:
        version: The client version of this process.
        lease_table: The lease table.
        clock: The clock.
        events: Receives errors.
    """

    def __init__(
        self, version: ClientVersion, lease_table: LeaseTable, clock: Clock, events: EventSink
    ) -> None:
        self._version = version
        self._lease_table = lease_table
        self._clock = clock
        self._events = events
        self._next_check = 0.0
        self.ready_since: float | None = None

    def restart(self) -> None:
        """Count the time anew, because others may have led meanwhile."""
        self.ready_since = None
        self._next_check = 0.0

    def advance(self, leases: Iterable[Lease], workers: Iterable[WorkerMetrics]) -> None:
        """Check whether the application is ready, and change the version after `READY_SECONDS`.

        Args:
            leases: All leases.
            workers: The living workers.
        """
        now = self._clock.monotonic()
        if not self._version.is_upgrading or now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            if not self._is_ready(leases, workers):
                self.ready_since = None
            elif self.ready_since is None:
                self.ready_since = now
            elif now - self.ready_since >= READY_SECONDS:
                self._version.write(VERSION_3X_WITH_ROLLBACK)
        except AwsError as error:
            self.ready_since = None
            self._events(AwsTrouble("migration from KCL 2.x", str(error)))

    def _is_ready(self, leases: Iterable[Lease], workers: Iterable[WorkerMetrics]) -> bool:
        owners = {lease.owner for lease in leases if not lease.ended}
        if not owners or not owners <= {row.worker_id for row in workers}:
            return False
        self._lease_table.lease_keys_of(next(iter(sorted(filter(None, owners)))))
        return True
