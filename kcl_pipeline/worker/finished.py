"""Delete the finished leases of a worker that no leader deletes.

A leader of this package deletes them. A Java leader does not: each Java worker deletes the leases
of the shards that it has finished itself (protocol §8.1). A worker of this package waits twice as
long as the leader of this package, so that it acts only where nobody else does.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import LeaseLostError
from kcl_pipeline.events import AwsTrouble, LeaseDeleted
from kcl_pipeline.leases.held import Held, HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.planning.cleanup import Deletion, completed_leases
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.dependencies import WorkerDependencies

CLEANING_SECONDS: Final = 60.0
"""Time between two deletions of finished leases, as in KCL."""
MAX_DELETIONS: Final = 10
"""Largest number of them. The parents and children of each lease are read one by one."""


class FinishedLeases:
    """Deletes leases at SHARD_END that are not needed any more. Only the processing thread uses it.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases that are held.
    """

    def __init__(self, dependencies: WorkerDependencies, leases: HeldLeases) -> None:
        self._dependencies = dependencies
        self._leases = leases
        cleanup = dependencies.settings.shard_sync
        self._is_wanted = cleanup.cleanup_leases_upon_shard_completion
        self._keep_seconds = 2 * cleanup.completed_lease_cleanup_interval_millis / 1000
        self._finished_at: dict[Held, float] = {}

    def delete(self, finished: Collection[Held], stop: StopSignal) -> list[str]:
        """Delete the leases that were finished long ago, until `stop`; return their keys.

        None are deleted if the settings say so. A lease that could not be deleted is tried again at
        the end of the queue. Call it every `CLEANING_SECONDS`.

        Args:
            finished: The held leases whose shards are finished.
            stop: Ends the calls.
        """
        now, deleted = self._dependencies.clock.monotonic(), list[str]()
        if not self._is_wanted:
            return deleted
        self._finished_at = {held: self._finished_at.get(held, now) for held in finished}
        due = [held for held, at in self._finished_at.items() if now - at >= self._keep_seconds]
        due.sort(key=lambda held: (self._finished_at[held], held.lease_key))
        for held in due[:MAX_DELETIONS]:
            if stop.is_set():
                break
            if self._is_deleted(held):
                deleted.append(held.lease_key)
            self._finished_at[held] = now - self._keep_seconds
        return deleted

    def _is_deleted(self, held: Held) -> bool:
        try:
            deletion = self._deletion(held.lease)
            if deletion is None:
                return False
            self._leases.delete(held)
        except LeaseLostError as error:
            self._leases.drop(held, str(error))
            return False
        except Exception as error:  # noqa: BLE001 (it must not stop the other shards)
            what = f"deletion of {held.lease_key}"
            self._dependencies.events(AwsTrouble(what, described(error, what)))
            return False
        self._dependencies.events(LeaseDeleted(deletion.lease.lease_key, deletion.reason))
        return True

    def _deletion(self, lease: Lease) -> Deletion | None:
        row = self._dependencies.lease_table.get(lease.lease_key)
        if row is None:
            return None  # the next renewal finds out
        family = [row]
        for shard_id in (*row.parent_shard_ids, *row.child_shard_ids):
            other = self._dependencies.lease_table.get(row.key_of_sibling(shard_id))
            family += [] if other is None else [other]
        completed = completed_leases(family, {row.lease_key: math.inf}, self._keep_seconds)
        return completed[0] if completed else None
