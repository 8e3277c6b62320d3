"""The interfaces of the three tables, and the values of their rows.

Each table has two implementations, DynamoDB and in-memory, and one test suite for both. These rules
hold for every method (protocol §1.4, §2.3, §3):

* A write whose condition does not hold returns None or False. It does not raise.
* After `errors.UnavailableError` it is unknown whether a write was applied. The caller repeats the
  call with the same arguments. If the row has exactly the values of this write, the write counts
  as applied, although its condition does not hold any more.
* A row is not read, modified and put back. Unknown attributes are kept.
* Throttling raises `errors.ThrottledError`, a missing table `errors.NotFoundError`, a missing
  permission `errors.AccessDeniedError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kcl_pipeline.leases.application import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.lease import BadRow, Lease, LeaseListing
from kcl_pipeline.leases.store import Check, Item
from kcl_pipeline.leases.worker_status import WorkerStatus
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange


class LeaseTable(Protocol):
    """The lease table of one application.

    A `Lease` argument is the row as the caller knows it. Writes compare its counter or owners with
    those of the row.
    """

    name: str

    def ensure_exists(self) -> bool:
        """Create the table and its index `LeaseOwnerToLeaseKeyIndex` if they are missing.

        Waits until they can be used. Returns whether this call created the table.

        Raises:
            IncompatibleTableError: The table has rows of the single-table layout of KCL 3.5
                (protocol §4.2).
        """
        ...

    def create_lease(self, lease: Lease) -> bool:
        """Put a new row, unless the key exists."""
        ...

    def create_leases(self, leases: Sequence[Lease], proof: Check) -> tuple[str, ...] | None:
        """Put the rows that do not exist, in one transaction whose condition is `proof`.

        Args:
            leases: The new rows, at most 99.
            proof: The condition, see `CoordinatorStateTable.proof_of_lock`.

        Returns:
            The keys that this call created. None if `proof` does not hold; nothing was written.
        """
        ...

    def create_successors(self, lease: Lease, successors: Sequence[Lease]) -> bool:
        """Put the rows of the shards that follow the shard of `lease`, and set its children.

        Rows that exist are not changed. All writes are one transaction. Its condition is that the
        row of `lease` exists and is not at SHARD_END. This proves that no successor was finished
        and deleted before: rows of finished shards are kept as long as a row of a parent (protocol
        §8.2), and a shard starts after the ends of its parents. So a worker that was paused never
        creates a deleted row again.

        False if the condition does not hold; nothing was written.

        Raises:
            ValueError: There are no successors.
        """
        ...

    def restore_parents(self, child: Lease, parents: Sequence[Lease]) -> tuple[str, ...] | None:
        """Put the missing rows of the parents of `child`.

        All writes are one transaction. Its condition is that the row of `child` has the checkpoint
        of `child` and no pending checkpoint. A child at TRIM_HORIZON proves that no leader has
        deleted the rows of its parents (protocol §8.2).

        Returns:
            The keys that this call created. None if the condition does not hold; nothing was
            written.

        Raises:
            ValueError: `child` has no parents.
        """
        ...

    def get(self, lease_key: str, *, consistent: bool = True) -> Lease | None:
        """Return a lease, or None. Raises `UnreadableRowError` if the row cannot be read."""
        ...

    def list_leases(self) -> LeaseListing:
        """Scan all lease rows. Eventually consistent.

        Rows of another entity type are skipped. Unreadable rows are in the listing.
        """
        ...

    def lease_keys_of(self, owner: str) -> tuple[str, ...]:
        """Return the keys whose `leaseOwner` is `owner`, by the index.

        Eventually consistent; the index may lag by seconds.
        """
        ...

    def renew(self, lease: Lease, throughput_kbps: float | None = None) -> Lease | None:
        """Increment the counter if it equals `lease.counter`.

        Also succeeds if a handoff has started since (protocol §1.4.1).

        Returns:
            The current lease; `in_handoff` if a handoff has started. None: the lease is lost.
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
        """Write checkpoint and pending checkpoint, and increment the counter.

        The condition is that counter and checkpoint equal those of `lease`. If the checkpoint
        changes, `ownerSwitchesSinceCheckpoint` becomes 0. The child shard ids and hash range of
        `lease` are written, too. Owners, parents and throughput are not changed.

        Args:
            lease: The row as the caller knows it.
            checkpoint: The new checkpoint.
            pending: The new pending checkpoint. None removes it.
            pending_state: Batch number of the pending checkpoint.

        Returns:
            The new lease. None: the lease is lost.

        Raises:
            ValueError: `checkpoint` is before that of `lease`.
        """
        ...

    def assign(self, lease: Lease, owner: str, *, unrenewed: bool = False) -> Lease | None:
        """Set the owner, remove the checkpoint owner, and increment the counter.

        Args:
            lease: Owner and checkpoint owner of the row must equal those of this lease.
            owner: The new owner.
            unrenewed: The counter must be equal, too.

        Returns:
            The new lease. None if the condition does not hold.
        """
        ...

    def initiate_handoff(self, lease: Lease, owner: str) -> Lease | None:
        """Start a handoff: set the owner, and the former owner as checkpoint owner.

        The counter is not changed. None if the condition (protocol §1.4) does not hold.
        """
        ...

    def evict(self, lease: Lease) -> Lease | None:
        """Remove the owner and increment the counter.

        In a handoff, the handoff is cancelled and the owner stays (protocol §1.4). The condition is
        that owner, checkpoint owner and counter equal those of `lease`. None if it does not hold.
        """
        ...

    def set_child_shard_ids(self, lease_key: str, child_shard_ids: Sequence[str]) -> bool:
        """Set the children of a row, without changing the counter. False if there is no row."""
        ...

    def set_hash_key_range(self, lease_key: str, hash_key_range: HashKeyRange) -> bool:
        """Set the hash range of a row, without changing the counter. False if there is no row."""
        ...

    def delete(self, lease: Lease) -> bool:
        """Delete the row if its checkpoint equals that of `lease`. True: there is no row now."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """A worker metrics row (protocol §2.2).

    A worker without metrics has empty `stats` and `operating_range`. `drain_requested`, `run_id`
    and `status` are our own attributes (`kclpDrain` N 1, `kclpRunId` S, `kclpStatus` S), which Java
    readers ignore.

    Attributes:
        worker_id: Id of the worker.
        last_update_seconds: Time of the last report, in epoch seconds of the writer's clock.
        stats: Up to ten averages of each metric, oldest first; −1 for a failed interval. The keys
            are the short names C, M, NI, NO and T.
        operating_range: `(max utilization percent,)` of each metric.
        support_code: 1 would mean for a Java leader that this worker supports the single table
            (protocol §4.5). This version does not.
        drain_requested: Whether the worker is requested to stop.
        run_id: Identifies the process.
        replaced_run_id: Run id of the row that this report replaced, if it was another one. Not
            stored.
        status: Lag, paused shards and failures.
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
    """The result of a scan: the workers, in no particular order, and the unreadable rows."""

    workers: tuple[WorkerMetrics, ...]
    bad_rows: tuple[BadRow, ...] = ()


class WorkerMetricsTable(Protocol):
    """The worker-metrics table of one application."""

    name: str

    def ensure_exists(self) -> bool:
        """Create the table if it is missing, wait for it, and return whether it was created."""
        ...

    def report(self, row: WorkerMetrics) -> WorkerMetrics:
        """Update the row of this worker. Returns the stored row, with a drain request if any."""
        ...

    def list_workers(self) -> tuple[WorkerMetrics, ...]:
        """Return all rows that can be read. Eventually consistent."""
        ...

    def scan_workers(self) -> WorkerListing:
        """Return all rows, including those that cannot be read. Eventually consistent."""
        ...

    def request_drain(self, worker_id: str) -> bool:
        """Request a worker to stop. False if it has no row."""
        ...

    def delete(self, row: WorkerMetrics) -> bool:
        """Delete the row if its `lut` equals that of `row`. True: there is no row now."""
        ...

    def deregister(self, worker_id: str) -> None:
        """Delete the row of a worker that stops."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderLock:
    """The leader lock (protocol §3.3).

    Attributes:
        owner_name: Name of the leader.
        lease_duration_millis: Time without a heartbeat after which the lock is expired.
        version: Unique string that every heartbeat changes. No time is stored.
        is_released: Whether the owner has released the lock.
    """

    owner_name: str
    lease_duration_millis: int
    version: str
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableLock:
    """A lock row that cannot be read. An unknown process may hold the lock.

    Attributes:
        reason: What is wrong with the row.
        attributes: The attributes of a lock that the row has. If they are equal in two reads, the
            row has not changed.
    """

    reason: str
    attributes: Item


@dataclass(frozen=True, slots=True)
class MigrationState:
    """The client-version row `Migration3.0` (protocol §3.5).

    Attributes:
        client_version: The client version (`cv`).
        modified_by: The worker that wrote it (`mb`).
        modified_millis: When, in epoch milliseconds (`mts`).
        history: Former states (cv, mb, mts), newest first, at most ten.
    """

    client_version: str
    modified_by: str
    modified_millis: int
    history: tuple[tuple[str, str, int], ...] = ()


class CoordinatorStateTable(Protocol):
    """The coordinator-state table of one application."""

    name: str

    def ensure_exists(self) -> bool:
        """Create the table if it is missing, wait for it, and return whether it was created."""
        ...

    def read_lock(self) -> LeaderLock | None:
        """Return the leader lock; None if there is no row. Strongly consistent.

        Raises:
            UnreadableRowError: The row cannot be read.
        """
        ...

    def observe_lock(self) -> LeaderLock | UnreadableLock | None:
        """Return the leader lock, also if its row cannot be read. Strongly consistent."""
        ...

    def put_lock(self, lock: LeaderLock, *, replacing: LeaderLock | UnreadableLock | None) -> bool:
        """Write the whole row.

        Args:
            lock: The new lock.
            replacing: None: there must be no row. A released lock: the row must be released.
                Another lock: the row must have its version. An unreadable lock: the row must have
                its attributes.

        Returns:
            Whether the condition held.
        """
        ...

    def heartbeat_lock(self, lock: LeaderLock, version: str) -> bool:
        """Set a new version and the duration, if version and owner equal those of `lock`."""
        ...

    def proof_of_lock(self, lock: LeaderLock) -> Check:
        """Return the condition that version and owner equal those of `lock`."""
        ...

    def release_lock(self, lock: LeaderLock) -> bool:
        """Delete the row, if version and owner are those of `lock`. False if it is held after."""
        ...

    def read_migration(self) -> MigrationState | None:
        """Return the client version; None if there is no row. Strongly consistent.

        Raises:
            UnreadableRowError: The row cannot be read.
        """
        ...

    def put_migration(self, state: MigrationState, *, replacing: MigrationState | None) -> bool:
        """Write the client version, if the row has the `cv` of `replacing`.

        `replacing` None: there must be no row.
        """
        ...

    def read_application(self) -> ApplicationRecord | None:
        """Return the identity of the application; None if none is recorded. Strongly consistent.

        Raises:
            UnreadableRowError: The record cannot be read.
        """
        ...

    def put_application(
        self, identity: ApplicationIdentity, *, replacing: ApplicationRecord | None
    ) -> bool:
        """Record the identity, if the record equals `replacing`.

        `replacing` None: there must be no record. False also if there is no client-version row,
        which contains the record.
        """
        ...
