"""What this process knows of one lease that it holds."""

from __future__ import annotations

from contextlib import AbstractContextManager

from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.throughput import Throughput


class Held:
    """One incarnation of a held lease: gained anew, the same key is another object, and this one is
    refused from then on.

    `lease` is the row as this worker last wrote or read it; `handoff_deadline` (monotonic seconds)
    is set while it is to go to another worker. The other attributes are for `HeldLeases`, which
    alone makes and changes these objects: `unsure` names the last write whose answer was lost.
    """

    __slots__ = (
        "busy",
        "handoff_deadline",
        "handoff_since",
        "lease",
        "lock",
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
        self.throughput = Throughput(read_at, lease.throughput_kbps)

    @property
    def lease_key(self) -> str:
        """The key of the lease."""
        return self.lease.lease_key
