"""The lease row as a value (protocol §1.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange


@dataclass(frozen=True, slots=True)
class Lease:
    """One row of the lease table; `None` means that the attribute is absent.

    `owner` is who should own it, `checkpoint_owner` the previous owner that is still draining
    during a graceful handoff. `throughput_kbps` is a moving average in KiB/s. `stream` is the
    serialized stream identifier of a multi-stream lease (`account:name:epoch`), None for
    single-stream ones; `parent_shard_ids` and `child_shard_ids` are bare shard ids in both forms.
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

    @property
    def shard_id(self) -> str:
        """The bare shard id: the last field of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]

    @property
    def actual_owner(self) -> str | None:
        """Who processes the shard now: `checkpoint_owner` if present, else `owner`."""
        return self.checkpoint_owner or self.owner

    @property
    def in_handoff(self) -> bool:
        """Whether a graceful handoff has begun and is not finished."""
        return self.checkpoint_owner is not None

    @property
    def ended(self) -> bool:
        """Whether the shard has been processed to its end."""
        return self.checkpoint.is_shard_end

    def with_(self, **changes: Any) -> Self:
        """A copy with some attributes changed; everything else is kept."""
        return replace(self, **changes)

    def key_of_sibling(self, shard_id: str) -> str:
        """The lease key that another shard of the same stream has."""
        return shard_id if self.stream is None else f"{self.stream}:{shard_id}"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and why.

    Attributes:
        table: Name of the table.
        key: Primary key of the row, as it was found; it may be of any content.
        reason: What is wrong; printable.
    """

    table: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseListing:
    """The result of a scan.

    Attributes:
        leases: The leases, in no particular order.
        bad_rows: Rows that are leases by their type, but cannot be used.
    """

    leases: tuple[Lease, ...]
    bad_rows: tuple[BadRow, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """The keys of the rows that cannot be used."""
        return tuple(row.key for row in self.bad_rows)

    def of_form(self, table: str, *, multi_stream: bool) -> LeaseListing:
        """This listing with leases of the other form, single-stream or multi-stream, as bad rows
        (protocol §1.3).
        """
        good: list[Lease] = []
        bad = list(self.bad_rows)
        for lease in self.leases:
            reason = other_form(lease, multi_stream=multi_stream)
            if reason is None:
                good.append(lease)
            else:
                bad.append(BadRow(table, lease.lease_key, reason))
        return LeaseListing(tuple(good), tuple(bad))


def other_form(lease: Lease, *, multi_stream: bool) -> str | None:
    """Why the lease is not of a single-stream or multi-stream application; None when it is."""
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
