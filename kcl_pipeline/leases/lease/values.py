"""Values of the lease table: leases, listings and bad rows (protocol §1.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self

from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange


@dataclass(frozen=True, slots=True)
class Lease:
    """One row of the lease table. None means that the attribute is absent.

    Attributes:
        lease_key: Key of the row.
        checkpoint: Last position (inclusive) that is processed.
        counter: Lease counter. Every renewal and most other writes increment it.
        owner: The worker that should own the lease.
        checkpoint_owner: The previous owner, which still processes the shard during a handoff.
        owner_switches_since_checkpoint: KCL's count of changes of the owner.
        pending_checkpoint: Position that a record processor has prepared. The next checkpoint of a
            worker removes it.
        pending_checkpoint_state: State of the record processor at this position.
        parent_shard_ids: Shard ids of the parents.
        child_shard_ids: Shard ids of the children.
        hash_key_range: The hash keys of the shard.
        throughput_kbps: Moving average in KiB/s.
        stream: Stream of a multi-stream lease (`account:name:epoch`).
        recreated_millis: Creation time in epoch milliseconds of a single stream that was deleted
            and created again under this application (our own attribute `kclpStreamCreated` N, which
            Java readers ignore). None: the stream that the application began with.
        read_up_to_millis: All records of the shard that arrived by this time are in the table (our
            own attribute `kclpReadUpTo` N, epoch milliseconds, which Java readers ignore). None:
            unknown.
        initial_millis: Where the shard is read from while the checkpoint is AT_TIMESTAMP or LATEST
            (our own attribute `kclpInitialTimestamp` N, epoch milliseconds, which Java readers
            ignore). None: for AT_TIMESTAMP the time of the settings, for LATEST the end of the
            shard. At TRIM_HORIZON the time when a leader created the row, on the clock of Kinesis.
        table_mark: The last checkpoint that this package wrote and that the table of the sink had
            (our own attribute `kclpTable` S, which Java readers ignore). None: there is none, a
            seek or another sink followed it, or the sink stores no positions.
    """

    lease_key: str
    checkpoint: Position
    counter: int = 0
    owner: str | None = None
    checkpoint_owner: str | None = None
    owner_switches_since_checkpoint: int = 0
    pending_checkpoint: Position | None = None
    pending_checkpoint_state: bytes | None = None
    parent_shard_ids: frozenset[str] = frozenset()
    child_shard_ids: frozenset[str] = frozenset()
    hash_key_range: HashKeyRange | None = None
    throughput_kbps: float | None = None
    stream: str | None = None
    recreated_millis: int | None = None
    read_up_to_millis: int | None = None
    initial_millis: int | None = None
    table_mark: Position | None = None

    @property
    def unique_key(self) -> str:
        """The lease key, with the recreation time of a stream that was created again.

        The shards of such a stream have the same ids as those of the former stream.
        """
        return (
            self.lease_key
            if self.recreated_millis is None
            else f"{self.lease_key}@{self.recreated_millis}"
        )

    @property
    def shard_id(self) -> str:
        """The shard id, which is the last part of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]

    @property
    def actual_owner(self) -> str | None:
        """The worker that processes the shard: `checkpoint_owner` if present, else `owner`."""
        return self.checkpoint_owner or self.owner

    @property
    def in_handoff(self) -> bool:
        """Whether a handoff has started and is not finished."""
        return self.checkpoint_owner is not None

    @property
    def initial_timestamp(self) -> datetime | None:
        """`initial_millis` as a time; None if the row has none."""
        if self.initial_millis is None:
            return None
        return datetime.fromtimestamp(self.initial_millis / 1000, UTC)

    @property
    def ended(self) -> bool:
        """Whether the shard has been processed to its end."""
        return self.checkpoint.is_shard_end

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)

    def key_of_sibling(self, shard_id: str) -> str:
        """Return the lease key of another shard of the same stream."""
        return shard_id if self.stream is None else f"{self.stream}:{shard_id}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        table: Name of the table.
        key: Primary key of the row, with any characters.
        reason: What is wrong; printable.
        heartbeat: Digest of the attributes that a worker's report changes. Empty for rows of
            other tables.
    """

    table: str
    key: str
    reason: str
    heartbeat: str = ""


@dataclass(frozen=True, slots=True)
class LeaseListing:
    """The result of a scan.

    Attributes:
        leases: The leases, in no particular order.
        bad_rows: Rows that have the type of a lease, but cannot be used.
    """

    leases: tuple[Lease, ...]
    bad_rows: tuple[BadRow, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Keys of the rows that cannot be used."""
        return tuple(row.key for row in self.bad_rows)

    def of_form(self, table: str, *, multi_stream: bool) -> LeaseListing:
        """Return the listing with leases of the other form as bad rows (protocol §1.3).

        The form is single-stream or multi-stream.
        """
        leases: list[Lease] = []
        bad_rows = list(self.bad_rows)
        for lease in self.leases:
            reason = other_form(lease, multi_stream=multi_stream)
            if reason is None:
                leases.append(lease)
            else:
                bad_rows.append(BadRow(table, lease.lease_key, reason))
        return LeaseListing(tuple(leases), tuple(bad_rows))


def other_form(lease: Lease, *, multi_stream: bool) -> str | None:
    """Return why the lease has the other form (single-stream or multi-stream); None if not."""
    if (lease.stream is not None) == multi_stream:
        return None
    if lease.stream is None:
        return (
            f"the lease {lease.lease_key} has no stream in its key: it is of a single-stream "
            "application, but the setting streams names several streams"
        )
    return (
        f"the lease {lease.lease_key} has the stream {lease.stream} in its key: it is of a "
        "multi-stream application, but the setting streams names one stream"
    )
