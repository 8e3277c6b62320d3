"""State of one held lease in this process."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kcl_pipeline.leases.lease.throughput import Throughput
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import Position


class Held:
    """One incarnation of a held lease.

    When a lease is gained again, it gets a new object, and writes through this one are refused.
    Only `HeldLeases` creates and changes these objects. It alone uses the attributes that are not
    listed.

    Attributes:
        lease: The row as this worker last wrote or read it.
        handoff_deadline: Time-out of the handoff (monotonic seconds). None: no handoff.
        renewed_at: When the last successful read or write of the row began (monotonic seconds).
        unsure: The last write whose outcome is unknown. None: all outcomes are known.
        read_up_to_millis: See `Lease`. The next renewal writes it.
        processed: Last processed position (inclusive). A renewal writes it as the checkpoint. None:
            only `HeldLeases.checkpoint` moves the checkpoint.
        mark: `processed`, if a table has it. It is written together with that checkpoint.
        checkpointed_at: When the checkpoint was last written (monotonic seconds).
    """

    __slots__ = (
        "busy",
        "checkpointed_at",
        "handoff_deadline",
        "handoff_since",
        "lease",
        "lock",
        "mark",
        "processed",
        "read_up_to_millis",
        "renewed_at",
        "throughput",
        "unsure",
    )

    def __init__(self, lease: Lease, read_at: float, lock: AbstractContextManager[object]) -> None:
        self.lease = lease
        self.handoff_since: float | None = None
        self.handoff_deadline: float | None = None
        self.renewed_at = read_at
        self.lock = lock
        self.busy = 0
        self.unsure: object = None
        self.read_up_to_millis = lease.read_up_to_millis
        self.processed: Position | None = None
        self.mark: Position | None = None
        self.checkpointed_at = read_at
        self.throughput = Throughput(read_at, lease.throughput_kbps)

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.lease.lease_key
