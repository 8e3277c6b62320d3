"""The three tables as protocols. Each has two twins, DynamoDB and in-memory, and one behaviour
suite for both.

Rules that hold for every method (protocol §1.4, §2.3, §3):

* A write whose condition does not hold returns None or False; it never raises.
* A write is right when it was "applied but timed out": a condition failure is checked against a
  strongly consistent read, and when the row is exactly what this very write would have made, the
  write counts as done. `errors.UnavailableError` means "unknown": calling the same method again
  with the same arguments gives the true answer.
* Nothing is read, modified and put back; unknown attributes survive.
* Throttling raises `errors.ThrottledError`, a missing table `errors.NotFoundError`, a missing
  permission `errors.AccessDeniedError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.leases.application import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.lease import BadRow, Lease, LeaseListing
from kcl_pipeline.leases.store import Item
from kcl_pipeline.leases.worker_status import WorkerStatus
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange


class LeaseTable(Protocol):
    """The lease table of one application. A `Lease` argument is the caller's view of the row;
    `counter` is its fencing token.
    """

    name: str

    def ensure_exists(self) -> bool:
        """Create table and index `LeaseOwnerToLeaseKeyIndex` where missing, and wait until usable;
        returns whether the table was created here.

        Raises `errors.IncompatibleTableError` when rows of the single-table layout (KCL 3.5) are
        found in it (protocol §4.2).
        """
        ...

    def create_lease(self, lease: Lease) -> bool:
        """Put a new row with `entityType` LEASE unless the key exists; an owner is written only if
        set.
        """
        ...

    def create_successors(self, lease: Lease, successors: Sequence[Lease]) -> bool:
        """Put the rows of the shards that follow the one of `lease`, each unless its key exists,
        and note them as its children; all at one instant at which the row of `lease` is there and
        not at SHARD_END. False: it is not, and nothing was written.

        The row proves that none of them was finished and deleted before: the rows of finished
        shards stay as long as a parent's (protocol §8.2), and a shard begins after its parents'
        ends. A worker that was paused therefore never brings one back. Raises `ValueError` for no
        successors at all.
        """
        ...

    def restore_parents(self, child: Lease, parents: Sequence[Lease]) -> tuple[str, ...] | None:
        """Put the rows of parents of `child`, each unless its key exists; all at one instant at
        which the row of `child` is at the checkpoint of `child` and has no pending checkpoint.
        Returns the keys that were created by this call. None: the row is not as it was, and nothing
        was written.

        A child at TRIM_HORIZON proves that no leader has deleted its parents' rows (protocol §8.2).
        Raises `ValueError` for a child without parents.
        """
        ...

    def get(self, lease_key: str, *, consistent: bool = True) -> Lease | None:
        """The row, or None when there is none.

        A row that cannot be read raises `ValueError` with the reason.
        """
        ...

    def list_leases(self) -> LeaseListing:
        """All lease rows (eventually consistent scan); rows of another entity type are skipped,
        unreadable ones reported.
        """
        ...

    def lease_keys_of(self, owner: str) -> tuple[str, ...]:
        """Keys whose `leaseOwner` is `owner`, by the index: eventually consistent, may lag by
        seconds.
        """
        ...

    def renew(self, lease: Lease, throughput_kbps: float | None = None) -> Lease | None:
        """Heartbeat: counter + 1 if the counter is still `lease.counter`; handles a handoff that
        began meanwhile as protocol §1.4.1 says.

        Returns the lease as it is now (perhaps with `checkpoint_owner` and a new `owner`: a handoff
        has begun), None when it is lost.
        """
        ...

    def update_checkpoint(
        self,
        lease: Lease,
        *,
        checkpoint: Position,
        pending: Position | None = None,
        pending_state: bytes | None = None,
    ) -> Lease | None:
        """Write checkpoint and pending checkpoint together (`pending` None removes it) with counter
        + 1, if counter and checkpoint are still those of `lease`.

        Resets `ownerSwitchesSinceCheckpoint` to 0 when `checkpoint` differs from
        `lease.checkpoint`; also writes the child shard ids and hash range of `lease`. Owner,
        checkpoint owner, parents and throughput stay as they are. Returns the new lease, None when
        it is lost. Raises `ValueError` for a checkpoint before that of `lease`.
        """
        ...

    def assign(self, lease: Lease, owner: str, *, unrenewed: bool = False) -> Lease | None:
        """Set the owner, remove the checkpoint owner, counter + 1, if owner and checkpoint owner
        are still those of `lease`; with `unrenewed` only if the counter is, too.
        """
        ...

    def initiate_handoff(self, lease: Lease, owner: str) -> Lease | None:
        """Begin a graceful handoff: owner = `owner`, checkpoint owner = `lease.owner`; the counter
        is untouched. Condition as protocol §1.4.
        """
        ...

    def evict(self, lease: Lease) -> Lease | None:
        """Make the lease ownerless, counter + 1, if owner, checkpoint owner and counter are still
        those of `lease`.

        With a checkpoint owner the handoff is cancelled but the owner stays (protocol §1.4).
        """
        ...

    def set_child_shard_ids(self, lease_key: str, child_shard_ids: Sequence[str]) -> bool:
        """Meta update of an existing row; the counter is unchanged. False when the row is gone."""
        ...

    def set_hash_key_range(self, lease_key: str, hash_key_range: HashKeyRange) -> bool:
        """Meta update of an existing row; the counter is unchanged. False when the row is gone."""
        ...

    def delete(self, lease: Lease) -> bool:
        """Delete the row if its checkpoint is still that of `lease`; True when it is gone
        afterwards.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """One row of the worker-metrics table (protocol §2.2).

    `stats` maps a metric's short name (C, M, NI, NO, T) to up to ten averages, oldest first, −1 for
    a failed interval; `operating_range` maps it to `(max utilization percent,)`. Both empty: a
    worker without metrics. `last_update_seconds` is the writer's wall clock. `support_code` 1 would
    tell a Java leader that this worker can move to the single table (protocol §4.5), which it
    cannot yet. `drain_requested`, `run_id` and `status` are our extra attributes (`kclpDrain` N 1,
    `kclpRunId` S, `kclpStatus` S), which Java readers ignore. `replaced_run_id` is the run whose
    report this one replaced, if it was another run; it is not stored.
    """

    worker_id: str
    last_update_seconds: int
    stats: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    operating_range: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    support_code: int | None = None
    drain_requested: bool = False
    run_id: str | None = None
    replaced_run_id: str | None = None
    status: WorkerStatus | None = None


@dataclass(frozen=True, slots=True)
class WorkerListing:
    """The result of a scan: the workers, in no particular order, and the rows that cannot be
    read.
    """

    workers: tuple[WorkerMetrics, ...]
    bad_rows: tuple[BadRow, ...] = ()


class WorkerMetricsTable(Protocol):
    """The worker-metrics table of one application."""

    name: str

    def ensure_exists(self) -> bool:
        """Create the table where missing and wait until usable; returns whether it was created
        here.
        """
        ...

    def report(self, row: WorkerMetrics) -> WorkerMetrics:
        """Write this worker's row (partial update, no condition); returns the row as stored, so
        that a drain request is seen.
        """
        ...

    def list_workers(self) -> tuple[WorkerMetrics, ...]:
        """All rows that can be read (eventually consistent scan)."""
        ...

    def scan_workers(self) -> WorkerListing:
        """As `list_workers`, with the rows that cannot be read."""
        ...

    def request_drain(self, worker_id: str) -> bool:
        """Ask a worker to stop; False when it has no row."""
        ...

    def delete(self, row: WorkerMetrics) -> bool:
        """Delete the row if `lut` is still that of `row`; True when it is gone afterwards."""
        ...

    def deregister(self, worker_id: str) -> None:
        """Delete the row of a worker that stops in good order."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderLock:
    """The leader's lock item (protocol §3.3). `version` changes with every heartbeat; no time is
    stored.
    """

    owner_name: str
    lease_duration_millis: int
    version: str
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableLock:
    """A lock item that cannot be read, so that somebody unknown may hold it.

    Attributes:
        reason: What is wrong with it, naming the row.
        attributes: The attributes of a lock as they were found; absent ones are missing. Two
            equal values mean that the item has not changed.
    """

    reason: str
    attributes: Item


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The client-version item `Migration3.0` (protocol §3.5).

    `history` is newest first, at most ten of (cv, mb, mts).
    """

    client_version: str
    modified_by: str
    modified_millis: int
    history: tuple[tuple[str, str, int], ...] = ()


class CoordinatorStateTable(Protocol):
    """The coordinator-state table of one application."""

    name: str

    def ensure_exists(self) -> bool:
        """Create the table where missing and wait until usable; returns whether it was created
        here.
        """
        ...

    def read_lock(self) -> LeaderLock | None:
        """The lock item, strongly consistent; None when there is none.

        Raises `errors.UnreadableRowError` for an item that cannot be read.
        """
        ...

    def observe_lock(self) -> LeaderLock | UnreadableLock | None:
        """As `read_lock`, with an item that cannot be read as a value."""
        ...

    def put_lock(self, lock: LeaderLock, *, replacing: LeaderLock | UnreadableLock | None) -> bool:
        """Write the whole item: if absent (`replacing` None), if released, if its version is still
        that of `replacing`, or if an unreadable item has the same attributes as before.
        """
        ...

    def heartbeat_lock(self, lock: LeaderLock, version: str) -> bool:
        """Set a new version and the duration, if version and owner are still those of `lock`."""
        ...

    def release_lock(self, lock: LeaderLock) -> bool:
        """Delete the item, if version and owner are still those of `lock`; True when it is ours no
        longer.
        """
        ...

    def read_migration(self) -> MigrationState | None:
        """The client-version item, strongly consistent."""
        ...

    def put_migration(self, state: MigrationState, *, replacing: MigrationState | None) -> bool:
        """Write it if absent (`replacing` None), or if its `cv` is still that of `replacing`."""
        ...

    def read_application(self) -> ApplicationRecord | None:
        """What the application is, strongly consistent; None before the first start recorded it.

        Raises `errors.UnreadableRowError`.
        """
        ...

    def put_application(
        self, identity: ApplicationIdentity, *, replacing: ApplicationRecord | None
    ) -> bool:
        """Record it if nothing is recorded (`replacing` None), or if the record is still that of
        `replacing`. False also when there is no client-version item to record it in.
        """
        ...
