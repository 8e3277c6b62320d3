"""Check L7: a shard that makes no progress is reported.

`ShardStalled` must report a lease if a healthy process holds it, its shard has work left, and
nothing changes for longer than `worker.shard_stalled_after_millis`. The work that is left comes
from the model of Kinesis and from the sink, not from the worker. A lease whose row was not written
for the failover time counts as not held: its worker waits for a DynamoDB response, and a leader
assigns the lease to another worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kcl_pipeline.events import (
    BatchCommitted,
    Event,
    HandoffCompleted,
    LeaseGained,
    LeaseLost,
    LeaseReleased,
    ShardStalled,
    WorkerStarted,
    WorkerStopped,
)
from kcl_pipeline.leases.row import Lease
from verification.simulation.checks.leases import BrokenInvariantError
from verification.simulation.scenario import FAILOVER_SECONDS, STALLED_SECONDS

if TYPE_CHECKING:
    from verification.simulation.environment.machines import Machine
    from verification.simulation.world import World

LOOK_SECONDS: Final = 0.5
GRACE_SECONDS: Final = 4.0
"""The worker checks when it renews, and several calls can time out before that."""


@dataclass(slots=True)
class Holder:
    """The leases of one process: lease key to the time of its last change or stall report."""

    seen_at: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event, now: float) -> None:
        """Handle an event of the process."""
        match event:
            case WorkerStarted() | WorkerStopped():
                self.seen_at.clear()
            case LeaseGained():
                self.seen_at[event.lease_key] = now
            case LeaseLost() | LeaseReleased() | HandoffCompleted():
                self.seen_at.pop(event.lease_key, None)
            case ShardStalled() if event.lease_key in self.seen_at:
                self.seen_at[event.lease_key] = now
            case BatchCommitted():
                self.seen_at.update({k: now for k in event.lease_keys if k in self.seen_at})
            case _:
                pass

    def silent(
        self, now: float, moved: frozenset[str] | set[str], busy: frozenset[str] | set[str]
    ) -> list[str]:
        """Return the leases that are stalled without a report.

        `moved` are those whose rows, or parents' rows, have changed. `busy` are those whose shards
        have work left.
        """
        for key in self.seen_at:
            if key in moved or key not in busy:
                self.seen_at[key] = now
        limit = STALLED_SECONDS + GRACE_SECONDS
        return sorted(key for key, at in self.seen_at.items() if now - at > limit)

    def disturbed(self, now: float) -> None:
        """Note that the process could not work until now."""
        self.seen_at = dict.fromkeys(self.seen_at, now)


@dataclass(slots=True)
class Renewals:
    """The last renewal of each lease: its counter, and when the counter was first seen."""

    seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def lapsed(self, rows: Iterable[Lease], now: float) -> set[str]:
        """The leases that were not renewed for the failover time."""
        known = self.seen
        self.seen = {
            row.lease_key: known[row.lease_key]
            if row.lease_key in known and known[row.lease_key][0] == row.counter
            else (row.counter, now)
            for row in rows
        }
        return {key for key, (_, at) in self.seen.items() if now - at >= FAILOVER_SECONDS}


def owned_by_others(
    keys: Iterable[str], owners: Mapping[str, str | None], worker_id: str
) -> set[str]:
    """The leases that another worker owns by now.

    They are not held any more, also if the former owner waits for an answer and does not know it
    yet. The new owner is checked.
    """
    return {key for key in keys if owners.get(key) not in (None, worker_id)}


class StillnessWatch:
    """Checks all processes twice a second."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holders: dict[str, Holder] = {}
        self._places: dict[str, object] = {}
        self._renewals = Renewals()

    def take(self, machine: Machine, event: Event) -> None:
        """Handle an event of a worker."""
        holder = self._holders.get(machine.host.name)
        if holder is None:
            holder = self._holders[machine.host.name] = Holder()
        holder.take(event, self._world.scheduler.now)

    def run(self) -> None:
        """Run the check as the body of a task; raises `BrokenInvariantError`."""
        while True:
            self._world.scheduler.pause(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Check once; raises `BrokenInvariantError`."""
        world, now = self._world, self._world.scheduler.now
        rows = world.checks.rows()
        moved, busy = self._moved(rows), self._busy(rows)
        moved |= self._renewals.lapsed(rows, now)
        owners = {row.lease_key: row.actual_owner for row in rows}
        ids = Counter(machine.worker_id for machine in world.workers_at_work())
        shared = {worker_id for worker_id, count in ids.items() if count > 1}
        for machine in world.machines.values():
            host = machine.host
            holder = self._holders.get(host.name)
            if holder is None:
                continue
            if host.crashed or host.paused_until > now or world.weather.reaches_nothing(host):
                holder.disturbed(now)
            if host.hung_until > now and machine.worker_id in shared:
                # The rows do not show that this process waits for an answer: the other renews them
                holder.disturbed(now)
            elsewhere = owned_by_others(holder.seen_at, owners, machine.worker_id)
            for key in holder.silent(now, moved | elsewhere, busy):
                raise BrokenInvariantError(
                    f"L7: {key} has stood still at {host.name} for "
                    f"{now - holder.seen_at[key]:.1f} s without an event"
                )

    def _moved(self, listed: Iterable[Lease]) -> set[str]:
        """The leases whose row, or a parent's row, has a new position since the last check."""
        rows = {row.lease_key: row for row in listed}
        places: Mapping[str, object] = {
            key: (row.checkpoint, row.pending_checkpoint) for key, row in rows.items()
        }
        changed = {key for key in places if self._places.get(key) != places[key]}
        changed |= {key for key in self._places if key not in places}
        self._places = dict(places)
        return changed | {
            key
            for key, row in rows.items()
            if any(row.key_of_sibling(parent) in changed for parent in row.parent_shard_ids)
        }

    def _busy(self, rows: Iterable[Lease]) -> set[str]:
        """The unfinished leases whose shard is closed, or has events that are not committed."""
        checks = self._world.checks
        waiting = {checks.ledger.events[one].lease_name for one in checks.missing()}
        return {
            row.lease_key
            for row in rows
            if not row.ended and (row.unique_key in waiting or not checks.is_open(row))
        }
