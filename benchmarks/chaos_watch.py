"""Read-only observer of `benchmarks.chaos`.

One thread compares the table's rows with the ledger and records the owner of each lease.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.local.demo.table import CommittedRows

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient

LOOK_SECONDS = 0.3
LONGEST_TAKEOVER_SECONDS = 120.0
SLOW_TAKEOVER_SECONDS = 12.0


@dataclass(slots=True)
class Takeover:
    """Leases of a worker that was hit by a fault, until all of them are renewed.

    `over` means that the worker can no longer write. Only then does a changed lease counter prove a
    takeover. `counters` are the counters at the first read after that.
    """

    kind: str
    worker: str
    began: float
    keys: frozenset[str]
    over: bool
    counters: Mapping[str, int] | None = None


@dataclass
class Watch:
    """Progress, commit gaps and takeovers, read three times per second.

    All times are monotonic seconds of this process.
    """

    rows: CommittedRows
    table: LeaseTable
    published: Callable[[], int]
    clock: Clock
    say: Callable[[str], None]
    committed: int = 0
    worst_gap_s: float = 0.0
    worst_gap_at: float = 0.0
    takeovers: dict[str, list[float]] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)
    error: BaseException | None = None
    looks: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open: list[Takeover] = []
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._moved = self.clock.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._moved = self.clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and re-raise its exception."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if self.error is not None:
            raise self.error

    def hit(self, kind: str, worker: str, *, over: bool) -> None:
        """Record that a fault hit a worker.

        Args:
            kind: Kind of the fault.
            worker: Id of the worker.
            over: Whether the worker can no longer write (SIGKILL, SIGSTOP). If False, a later call
                of `ended` reports this.
        """
        keys = frozenset(
            key
            for key, lease in self.leases.items()
            if lease.actual_owner == worker and not lease.ended
        )
        if keys:
            with self._lock:
                self._open = [t for t in self._open if t.worker != worker]
                self._open.append(Takeover(kind, worker, self.clock.monotonic(), keys, over))

    def ended(self, worker: str) -> None:
        """Record that a worker that was hit can no longer write."""
        with self._lock:
            for takeover in self._open:
                takeover.over = takeover.over or takeover.worker == worker

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self.look()
        except BaseException as error:  # noqa: BLE001 (shown by stop)
            self.error = error

    def look(self) -> None:
        """Read the table and the leases once."""
        # Read before the rows: records that are published in between do not count as waiting.
        published = self.published()
        committed = self.rows.count()
        now = self.clock.monotonic()
        if committed > self.committed or committed >= published:
            self._moved = now
        self.committed = committed
        if now - self._moved > self.worst_gap_s:
            self.worst_gap_s, self.worst_gap_at = now - self._moved, self._moved
        try:
            began = self.clock.monotonic()
            self.leases = {lease.lease_key: lease for lease in self.table.list_leases().leases}
        except KclError:
            return
        self.looks += 1
        with self._lock:
            self._open = [t for t in self._open if not self._settled(t, began)]

    def _settled(self, takeover: Takeover, looked: float) -> bool:
        if looked < takeover.began:
            return False
        if takeover.over and takeover.counters is None:
            takeover.counters = {key: lease.counter for key, lease in self.leases.items()}
        waiting = sorted(key for key in takeover.keys if not self._renewed(key, takeover))
        seconds = self.clock.monotonic() - takeover.began
        if waiting and seconds < LONGEST_TAKEOVER_SECONDS:
            return False
        self.takeovers.setdefault(takeover.kind, []).append(seconds)
        if seconds > SLOW_TAKEOVER_SECONDS:
            self.say(
                f"taking over from {takeover.worker} ({takeover.kind}) took {seconds:.1f} s; "
                f"waiting still: {waiting}"
            )
        return True

    def _renewed(self, key: str, takeover: Takeover) -> bool:
        lease = self.leases.get(key)
        if lease is None or lease.ended:
            return True
        moved = takeover.counters is not None and lease.counter > takeover.counters.get(key, 0)
        return lease.actual_owner is not None and (lease.actual_owner != takeover.worker or moved)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the seconds from a fault until all leases were renewed, by kind."""
        return {
            kind: {
                "count": len(times),
                "median_s": round(statistics.median(times), 1),
                "worst_s": round(max(times), 1),
            }
            for kind, times in sorted(self.takeovers.items())
        }


def stuck_leases(
    kinesis: KinesisClient,
    streams: Sequence[str],
    before: Mapping[str, Lease],
    after: Mapping[str, Lease],
) -> list[str]:
    """Return a description of every stuck lease or shard.

    Two reads of the leases are compared, which are further apart than the lease time. Reported are
    an open shard without a lease, a closed shard that is not at its end, and unfinished leases. An
    unfinished lease is stuck if it has no owner, is in a handoff in both reads, or has an unchanged
    counter.
    """
    return [*_stuck_shards(kinesis, streams, after), *_stuck_rows(before, after)]


def _stuck_shards(
    kinesis: KinesisClient, streams: Sequence[str], leases: Mapping[str, Lease]
) -> list[str]:
    stuck = []
    by_shard = {
        ((lease.stream or "::").split(":")[1], lease.shard_id): lease for lease in leases.values()
    }
    for stream in streams:
        shards: list[Any] = [
            shard
            for page in kinesis.get_paginator("list_shards").paginate(StreamName=stream)
            for shard in page["Shards"]
        ]
        for shard in shards:
            closed = "EndingSequenceNumber" in shard["SequenceNumberRange"]
            lease = by_shard.get((stream, shard["ShardId"]))
            if lease is None and not closed:
                stuck.append(f"{stream} {shard['ShardId']} is open and has no lease")
            if lease is not None and closed and not lease.ended:
                stuck.append(
                    f"{stream} {shard['ShardId']} is closed and its lease is at "
                    f"{lease.checkpoint}, owner {lease.actual_owner}"
                )
    return stuck


def _stuck_rows(before: Mapping[str, Lease], after: Mapping[str, Lease]) -> list[str]:
    stuck = []
    for key, lease in after.items():
        old = before.get(key)
        if lease.ended:
            continue
        if lease.actual_owner is None:
            stuck.append(f"{key} has no owner")
        elif lease.in_handoff and old is not None and old.in_handoff and old.owner == lease.owner:
            stuck.append(f"{key} is in a handoff from {lease.checkpoint_owner} to {lease.owner}")
        elif old is not None and old.counter == lease.counter:
            stuck.append(f"{key} of {lease.actual_owner} is not renewed")
    return stuck
