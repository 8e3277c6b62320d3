"""Delete the leases of shards that this worker has finished, if no leader does.

A leader of this package deletes them. A Java leader does not: each Java worker deletes the leases
of the shards that it has finished itself (protocol §8.1). This worker waits twice as long as the
leader of this package, so that it acts only where nobody else does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import LeaseLostError
from kcl_pipeline.events import AwsTrouble, LeaseDeleted
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.planning.cleanup import Deletion, completed_leases
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies

PAUSE_SECONDS: Final = 60.0
"""Time between two passes, as in KCL."""
MAX_LEASES: Final = 10
"""Largest number of leases of a pass. Their parents and children are read one by one."""


class EndedLeases:
    """Deletes finished leases that are held and not needed any more.

    Only the processing thread uses it.

    Args:
        dependencies: The dependencies of the worker.
        leases: The leases held by this worker.
    """

    def __init__(self, dependencies: WorkerDependencies, leases: HeldLeases) -> None:
        settings = dependencies.settings.shard_sync
        self._keep_seconds = 2 * settings.completed_lease_cleanup_interval_millis / 1000
        self._is_on = settings.cleanup_leases_upon_shard_completion
        self._dependencies = dependencies
        self._leases = leases
        self._ended_at: dict[str, float] = {}
        self._next_pass = -math.inf

    def clean(
        self,
        consumers: Mapping[str, ShardConsumer],
        stop: StopSignal,
        forget: Callable[[str], object],
    ) -> None:
        """Delete what is due, at most once a minute, until `stop` is set.

        A lease that could not be deleted is tried again at the end of the queue.

        Args:
            consumers: The consumers of the held leases by lease key.
            stop: Ends the pass before the next lease.
            forget: Called with the key of each deleted lease.
        """
        now = self._dependencies.clock.monotonic()
        if not self._is_on or now < self._next_pass:
            return
        self._next_pass = now + PAUSE_SECONDS
        ended = {k: c for k, c in consumers.items() if c.state is ConsumerState.ENDED}
        self._ended_at = {key: self._ended_at.get(key, now) for key in ended}
        due = sorted(k for k, at in self._ended_at.items() if now - at >= self._keep_seconds)
        for key in sorted(due, key=self._ended_at.__getitem__)[:MAX_LEASES]:
            if stop.is_set():
                return
            if self._delete(ended[key]):
                forget(key)
            self._ended_at[key] = now - self._keep_seconds

    def _delete(self, consumer: ShardConsumer) -> bool:
        try:
            deletion = self._deletion(consumer.held.lease)
            if deletion is None:
                return False
            self._leases.delete(consumer.held)
        except LeaseLostError as error:
            self._leases.drop(consumer.held, str(error))
            return False
        except Exception as error:  # noqa: BLE001 (it must not stop the other shards)
            what = f"deletion of {consumer.lease_key}"
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
        found = completed_leases(family, {row.lease_key: math.inf}, self._keep_seconds)
        return found[0] if found else None
