"""Incidents of the stream, the tables and the sink.

They are reshards, retention, stale reads, and operators who edit rows by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kcl_pipeline.leases.store import Item
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import ChildShard
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.shards import ShardLog
from kcl_pipeline.testing.kinesis.stream import HOUR_MILLIS, Stream
from verification.simulation.environment.streams import Generation
from verification.simulation.world import World

_READABLE: Final[Item] = {"leaseCounter": {"N": "1"}, "checkpoint": {"S": "TRIM_HORIZON"}}
UNREADABLE_LEASES: Final[tuple[Item, ...]] = (
    {},
    {**_READABLE, "leaseCounter": {"S": "1"}},
    {**_READABLE, "leaseCounter": {"N": "1.5"}},
    {**_READABLE, "leaseCounter": {"N": "9" * 38}},
    {**_READABLE, "checkpoint": {"S": "the middle"}},
    {**_READABLE, "checkpoint": {"N": "1"}},
    {**_READABLE, "parentShardId": {"S": "shardId-000000000000"}},
    {**_READABLE, "startingHashKey": {"S": "9"}, "endingHashKey": {"S": "1"}},
)
"""Attributes of invalid lease rows, as operators and other programs can write them."""

UNREADABLE_WORKERS: Final[tuple[Item, ...]] = (
    {},
    {"lut": {"S": "yesterday"}},
    {"lut": {"N": "1800000000"}, "sts": {"S": "C"}},
)


def child_closed(stream: Stream, child: ChildShard) -> bool:
    """Whether a child is closed, or is gone."""
    shard = stream.shard(child.shard_id)
    return shard is None or not shard.is_open


@dataclass(slots=True)
class DataIncidents:
    """Incidents, one per method."""

    world: World
    rng: Random
    shards: int
    """Initial number of shards of each stream."""
    later: Callable[[float, Callable[[], None]], None]

    def _existing(self) -> Generation | None:
        found = list(self.world.streams.current.values())
        return self.rng.choice(found) if found else None

    def _reshard(self, of: Generation, operation: str, **params: object) -> None:
        model = self.world.streams.model_of(of.ref)
        try:
            model.call(operation, StreamName=of.stream.name, **params)
        except KinesisError as error:
            self.world.note(f"{operation} refused: {error}")

    def split(self) -> None:
        """Split a shard in the middle."""
        of = self._existing()
        shards: list[ShardLog] = [] if of is None else self.world.streams.settled(of).open_shards
        if of is not None and len(shards) < 3 * self.shards:
            shard = self.rng.choice(shards)
            middle = (shard.hash_key_range.start + shard.hash_key_range.end) // 2
            self._reshard(
                of, "SplitShard", ShardToSplit=shard.shard_id, NewStartingHashKey=str(middle)
            )

    def merge(self) -> None:
        """Merge two adjacent shards."""
        of = self._existing()
        shards: list[ShardLog] = [] if of is None else self.world.streams.settled(of).open_shards
        if of is not None and len(shards) > 1:
            at = self.rng.randrange(len(shards) - 1)
            self._reshard(
                of,
                "MergeShards",
                ShardToMerge=shards[at].shard_id,
                AdjacentShardToMerge=shards[at + 1].shard_id,
            )

    def update_shard_count(self) -> None:
        """Reshard a whole stream."""
        of = self._existing()
        if of is None:
            return
        shards = self.world.streams.settled(of).open_shards
        target = max(1, min(len(shards) + self.rng.choice((-1, 1)), 2 * self.shards))
        self._reshard(
            of, "UpdateShardCount", TargetShardCount=target, ScalingType="UNIFORM_SCALING"
        )

    def retention_trim(self) -> None:
        """Trim all records that are older than a moment ago, read or not.

        Closed shards that were read and are older are removed.
        """
        streams = self.world.streams
        cutoff = streams.model.world.now_millis() - self.rng.randint(200, 3_000)
        for of in streams.current.values():
            stream = streams.settled(of)
            later = cutoff + stream.retention_hours * HOUR_MILLIS
            if stream.status == "ACTIVE" and self._all_followed(of):
                stream.settle(later)
            for shard in stream.shards:
                stream.trim(shard, later)
        self.world.checks.trimmed(cutoff)

    def _all_followed(self, of: Generation) -> bool:
        """Whether every closed shard was read to its end and its children have leases.

        Then a closed shard that is removed takes no unread record with it.
        """
        checks, stream = self.world.checks, of.stream
        closed = [shard for shard in stream.shards if not shard.is_open]
        read = all(
            (row := checks.lease(of.lease_name(shard.shard_id))) is None or row.ended
            for shard in closed
        )
        return read and all(
            checks.lease(of.lease_name(child.shard_id)) is not None
            for shard in closed
            for child in shard.children
            if not child_closed(stream, child)
        )

    def poison(self) -> None:
        """Publish a record that the transform cannot process."""
        self.world.producer.publish(1, poison=True)

    def failing_transform(self) -> None:
        """Deploy a transform that fails on every record, then restore the old one."""
        self.world.broken_until = self.world.scheduler.now + self.rng.uniform(1.0, 6.0)

    def unreadable_row(self) -> None:
        """Put invalid rows into the tables."""
        world = self.world
        shard_id = f"shardId-{self.rng.randrange(900, 1000):012d}"
        of = self._existing()
        if of is None:
            return
        key = of.lease_key(shard_id)
        world.note(f"plants an unreadable {key}")
        world.unreadable.add(key)
        world.leases.plant({"leaseKey": {"S": key}, **self.rng.choice(UNREADABLE_LEASES)})
        world.workers.plant({"wid": {"S": shard_id}, **self.rng.choice(UNREADABLE_WORKERS)})

    def slow_transform(self) -> None:
        """Let the transform take longer than the failover time."""
        self.world.slow_until = self.world.scheduler.now + 4.0

    def stale_index(self) -> None:
        """Let the index lag."""
        self.world.index_lag_seconds = self.rng.uniform(0.5, 3.0)
        self.later(4.0, lambda: setattr(self.world, "index_lag_seconds", 0.0))

    def stale_scan(self) -> None:
        """Let eventually consistent scans lag."""
        self.world.scan_lag_seconds = self.rng.uniform(0.2, 2.0)
        self.later(4.0, lambda: setattr(self.world, "scan_lag_seconds", 0.0))

    def _rows(self) -> dict[str, Item]:
        """The lease rows, without the invalid ones."""
        rows = self.world.leases.rows()
        return {key: row for key, row in rows.items() if key not in self.world.unreadable}

    def edit_row(self) -> None:
        """Edit a lease row by hand: remove the owner, change the counter, or add an attribute."""
        rows = self._rows()
        if not rows:
            return
        key = self.rng.choice(sorted(rows))
        item = dict(rows[key])
        change = self.rng.randrange(3)
        if change == 0:
            item.pop("leaseOwner", None)
            item.pop("checkpointOwner", None)
        elif change == 1:
            item["leaseCounter"] = {"N": str(int(item["leaseCounter"]["N"]) + 3)}
        else:
            item["note"] = {"S": "looked at by hand"}
        self.world.note(f"edits {key}, change {change}")
        self.world.checks.edited.add(self._name(key))
        self.world.checks.excuse(key)
        self.world.leases.plant(item)
        self.world.checks.row_written(key, "hand", "")

    def _name(self, key: str) -> str:
        row = self.world.leases.row(key)
        return key if row is None else row.unique_key

    def delete_row(self) -> None:
        """Delete a lease row by hand.

        This does not happen with LATEST, where the loss of the row's records would be correct.
        """
        rows = self._rows()
        if not rows or self.world.scenario.initial_position != "TRIM_HORIZON":
            return
        self._delete(self.rng.choice(sorted(rows)))

    def delete_rows(self) -> None:
        """Delete all lease rows by hand.

        In a fleet that does not store positions, this does not happen with LATEST.
        """
        scenario = self.world.scenario
        if scenario.stores_positions or scenario.initial_position == "TRIM_HORIZON":
            for key in sorted(self._rows()):
                self._delete(key)

    def delete_tables(self) -> None:
        """Delete all three tables, in a fleet that stores positions.

        This does not happen while a process starts that reads other streams: it could record them.
        Nor does it after a single stream was deleted: its next leases could have no recreation time
        then.
        """
        world = self.world
        starting = any(
            one.streams is not None and not one.stop.is_set() and not one.host.crashed
            for one in world.machines.values()
        )
        current = world.streams.current.values()
        is_replaced = len(world.configured) == 1 and (
            not current or any(one.recreated_millis is not None for one in current)
        )
        if not world.scenario.stores_positions or starting or is_replaced:
            return
        self.delete_rows()
        world.note("deletes the tables")
        for table in (world.leases, world.workers, world.coordinator):
            table.store.drop()
        world.lock_watch.look()
        world.streams.forgotten |= {
            ref
            for ref in world.configured
            if not ref.startswith("arn:") and ref not in world.streams.current
        }

    def _delete(self, key: str) -> None:
        self.world.note(f"deletes {key}")
        self.world.leases.erase(key)
        self.world.checks.deleted_by_hand(key)

    def delete_row_under_way(self) -> None:
        """Delete the row of a lease that is in transition.

        The lease is in a handoff, has a pending batch, has no owner, or has not started. This does
        not happen with LATEST, as with `delete_row`.
        """
        if self.world.scenario.initial_position != "TRIM_HORIZON":
            return
        chosen = [
            lease.lease_key
            for lease in self.world.checks.rows()
            if lease.in_handoff
            or lease.pending_checkpoint is not None
            or (lease.owner is None and not lease.ended)
            or lease.checkpoint == TRIM_HORIZON
        ]
        if chosen:
            self._delete(self.rng.choice(chosen))

    def delete_worker_row(self) -> None:
        """Delete the row of a worker by hand."""
        rows = self.world.workers.rows()
        if rows:
            self.world.workers.erase(self.rng.choice(sorted(rows)))

    def delete_lock(self) -> None:
        """Delete the leader's lock by hand."""
        self.world.coordinator.erase("Leader")
        self.world.lock_watch.look()

    def late_commit(self) -> None:
        """Apply the delayed writes to the sink."""
        self.world.sink_table.land_late()
