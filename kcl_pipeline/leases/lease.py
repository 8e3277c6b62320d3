"""The lease row as a value (protocol §1.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from kcl_pipeline.sequence import Position
from kcl_pipeline.shards import HashKeyRange


@dataclass(frozen=True, slots=True)
class Lease:
    """One row of the lease table; `None` means that the attribute is absent.

    `owner` is who should own it, `checkpoint_owner` the previous owner that is still draining during a graceful handoff.
    `throughput_kbps` is a moving average in KiB/s. `stream` is the serialized stream identifier of a multi-stream lease
    (`account:name:epoch`), None for single-stream ones; `parent_shard_ids` and `child_shard_ids` are bare shard ids in both forms.
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
class LeaseListing:
    """The result of a scan: the leases in no particular order, and the keys of rows that could not be read."""

    leases: tuple[Lease, ...]
    unreadable: tuple[str, ...] = ()
