"""The tables of leases, workers and moves. They are values; the renderers choose columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.planning.state import is_failing
from kcl_pipeline.status.snapshot import Snapshot, unlisted_lags
from kcl_pipeline.text import counted, duration_text
from kcl_pipeline.worker_status import WorkerStatus

MAX_MOVES: Final = 20


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease.

    Attributes:
        lease_key: Its key.
        worker: The worker that processes the shard. None: no worker.
        owner: The worker that has the lease, or gets it after the handoff.
        state: `ended`, `no owner`, `owner is gone`, `handoff to W`, `paused`, `stalled`,
            `worker is hung` or `held`.
        why: Why it is paused or stalled.
        lag_seconds: Age of the oldest record that is not committed. None: unknown.
        lag_is_upper_bound: Whether the lag is at most this value.
        kbps: Throughput in KiB/s. None: unknown.
        checkpoint: The last position that is processed.
        checkpoint_age: For how long the checkpoint was observed not to change. None: not observed.
        counter: The lease counter.
        parents: Shard ids of the parents.
        hash_keys: First and last hash key, as text, because they have 128 bits.
    """

    lease_key: str
    worker: str | None
    owner: str | None
    state: str
    why: str | None
    lag_seconds: float | None
    lag_is_upper_bound: bool
    kbps: float | None
    checkpoint: str
    checkpoint_age: float | None
    counter: int
    parents: tuple[str, ...]
    hash_keys: tuple[str, str] | None

    @property
    def lag_text(self) -> str:
        """The lag, or why it is not known."""
        if self.state == "ended":
            return ""
        if self.lag_seconds is None:
            return "unknown" if self.worker is None else "not read yet"
        return f"{'≤ ' if self.lag_is_upper_bound else ''}{self.lag_seconds:,.1f} s"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker.

    Attributes:
        worker_id: Its id.
        group: The id up to the separator of groups.
        states: What needs attention. Empty: it works normally.
        leases: Number of unfinished leases that it processes.
        kbps: Sum of their throughput in KiB/s.
        cpu_percent: The last CPU average. None: not measured.
        cpu_limit: The upper end of its operating range. None: not measured.
        lag_seconds: The largest lag of its leases. None: unknown.
        unknown_lags: Number of its leases whose lag is not known.
        last_batch_seconds: Age of its last committed batch. None: no batch, or not known.
        dead_letters: Records that failed since it started.
        report_seconds: Age of its row, as its own clock says.
        run_id: Its run or process.
        version: Version of this package in the worker.
    """

    worker_id: str
    group: str
    states: tuple[str, ...]
    leases: int
    kbps: float
    cpu_percent: float | None
    cpu_limit: int | None
    lag_seconds: float | None
    unknown_lags: int
    last_batch_seconds: float | None
    dead_letters: int
    report_seconds: float
    run_id: str | None
    version: str | None

    @property
    def lag_text(self) -> str:
        """The lag, and how many shards it does not cover."""
        if self.lag_seconds is None:
            return "unknown"
        more = f" ({counted(self.unknown_lags, 'shard')} unknown)" if self.unknown_lags else ""
        return f"{self.lag_seconds:,.1f} s{more}"

    @property
    def state_text(self) -> str:
        """The states as text."""
        return ", ".join(self.states) or "working"


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A change of the owner of a lease, as it was observed.

    Attributes:
        at: When it was observed first, in epoch seconds.
        lease_key: The lease.
        from_worker: The former owner. None: there was none.
        to_worker: The new owner. None: the lease was released.
        reason: Why the leader moved it. Empty: not known here.
    """

    at: float
    lease_key: str
    from_worker: str | None
    to_worker: str | None
    reason: str = ""


@dataclass(slots=True)
class OwnerChanges:
    """The last changes of owners, found by comparing the leases of successive snapshots.

    Attributes:
        owners: The owners of the last snapshot. None: there was none.
        changes: The last changes, newest first.
        reasons: By lease key, why the leader moves it. Kept until the owner has changed.
    """

    owners: dict[str, str | None] | None = None
    changes: list[OwnerChange] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def observe(
        self, snapshot: Snapshot, planned: Mapping[str, str] | None = None
    ) -> list[OwnerChange]:
        """Add a snapshot. Returns the last changes, newest first.

        Args:
            snapshot: The state.
            planned: By lease key, why the leader moves it.
        """
        self.reasons |= planned or {}
        owners = {lease.lease_key: lease.actual_owner for lease in snapshot.unfinished}
        before = owners if self.owners is None else self.owners
        news = [
            OwnerChange(snapshot.at, key, before.get(key), owner, self.reasons.pop(key, ""))
            for key, owner in owners.items()
            if before.get(key) != owner
        ]
        self.owners, self.changes = owners, [*news, *self.changes][:MAX_MOVES]
        return self.changes


def cpu_of(worker: WorkerMetrics) -> float | None:
    """The last CPU average. Intervals whose measurement failed are left out."""
    return next((value for value in reversed(worker.cpu) if value >= 0), None)


def group_of(worker_id: str, separator: str) -> str:
    """The group of a worker: its id up to the first separator."""
    return worker_id.partition(separator)[0]


def states_of(worker: WorkerMetrics, silent: float | None = None) -> tuple[str, ...]:
    """What needs attention in a worker. Empty: it works normally."""
    status, found = worker.status or WorkerStatus(), []
    if silent is not None:
        found.append(f"silent for {duration_text(silent)}")
    if status.hung is not None:
        found.append(f"hung in {status.hung.step} for {duration_text(status.hung.seconds)}")
    if worker.drain_requested:
        found.append("pausing" if worker.drains_for_pause else "draining")
    if is_failing(worker):
        found.append("metrics failing")
    if not worker.stats and not worker.own_cpu:
        found.append("no metrics")
    if status.paused_leases:
        found.append(f"{counted(status.paused_leases, 'shard')} paused")
    if status.stalled_leases:
        found.append(f"{counted(status.stalled_leases, 'shard')} stalled")
    if status.failed_batches:
        found.append(f"the last {counted(status.failed_batches, 'batch', 'batches')} refused")
    return tuple(found)


def worker_rows(snapshot: Snapshot, separator: str) -> list[WorkerRow]:
    """The workers, sorted by id."""
    held = Counter(lease.actual_owner for lease in snapshot.unfinished)
    rates: defaultdict[str | None, float] = defaultdict(float)
    for lease in snapshot.unfinished:
        rates[lease.actual_owner] += lease.throughput_kbps or 0.0
    rows = []
    for worker in snapshot.workers:
        status = worker.status or WorkerStatus()
        limit = worker.operating_range.get("C")
        lag = status.lag_millis
        rows.append(
            WorkerRow(
                worker.worker_id,
                group_of(worker.worker_id, separator),
                states_of(worker, snapshot.silent.get(worker.worker_id)),
                held[worker.worker_id],
                round(rates[worker.worker_id], 1),
                cpu_of(worker),
                limit[0] if limit else None,
                None if lag is None else lag / 1000,
                status.unknown_lags,
                status.last_batch_seconds,
                status.totals.dead_letters,
                round(snapshot.age(worker), 1),
                worker.run_id,
                status.version,
            )
        )
    return rows


def lease_rows(snapshot: Snapshot, *, ended: bool = True) -> list[LeaseRow]:
    """The leases: those without a live owner first, then those with the largest lag.

    Args:
        snapshot: The state.
        ended: Whether to list leases whose shards have ended, too.
    """
    live = {worker.worker_id: worker for worker in snapshot.live}
    unchanged = {} if snapshot.observed is None else snapshot.observed.unchanged
    reasons = _reasons(snapshot.live)
    rows = []
    for lease in snapshot.leases if ended else snapshot.unfinished:
        worker = live.get(lease.actual_owner or "")
        state, why = _state(lease, snapshot, worker, reasons)
        listed = () if worker is None or worker.status is None else worker.status.lags
        lag = None if lease.ended else snapshot.unread.get(lease.lease_key)
        if lag is None and worker is not None and not lease.ended:
            lag = next(iter(unlisted_lags(worker)), None)
        keys = lease.hash_key_range
        rows.append(
            LeaseRow(
                lease.lease_key,
                lease.actual_owner,
                lease.owner,
                state,
                why,
                lag,
                lag is not None and all(one.lease_key != lease.lease_key for one in listed),
                lease.throughput_kbps,
                str(lease.checkpoint),
                unchanged.get(lease.lease_key),
                lease.counter,
                tuple(sorted(lease.parent_shard_ids)),
                None if keys is None else (str(keys.start), str(keys.end)),
            )
        )
    return sorted(rows, key=lambda row: _importance(row, snapshot))


def _importance(row: LeaseRow, snapshot: Snapshot) -> tuple[bool, bool, float, str]:
    is_unowned = row.lease_key in snapshot.unowned
    return row.state == "ended", not is_unowned, -(row.lag_seconds or 0.0), row.lease_key


def _reasons(workers: Iterable[WorkerMetrics]) -> dict[tuple[str, str], tuple[str, str]]:
    """By worker id and lease key: `paused` or `stalled`, and why."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for worker in workers:
        status = worker.status or WorkerStatus()
        for one in status.stalled:
            found[worker.worker_id, one.lease_key] = ("stalled", f"{one.step}: {one.error or ''}")
        for lease in status.paused:
            found[worker.worker_id, lease.lease_key] = ("paused", lease.reason)
    return found


def _state(
    lease: Lease,
    snapshot: Snapshot,
    worker: WorkerMetrics | None,
    reasons: dict[tuple[str, str], tuple[str, str]],
) -> tuple[str, str | None]:
    owner = lease.actual_owner
    if lease.ended:
        return "ended", None
    if owner is None:
        return "no owner", None
    if lease.in_handoff:
        return f"handoff to {lease.owner or 'nobody'}", None
    if lease.lease_key in snapshot.unowned:
        return "owner is gone", None
    if (owner, lease.lease_key) in reasons:
        return reasons[owner, lease.lease_key]
    is_hung = worker is not None and worker.status is not None and worker.status.hung is not None
    return ("worker is hung", None) if is_hung else ("held", None)


@dataclass(frozen=True, slots=True)
class OwnerLoad:
    """What a worker or a group of workers has.

    Attributes:
        name: The worker or group. `(no owner)`: leases that no worker has.
        leases: Number of unfinished leases.
        ended: Number of leases whose shards have ended.
        in_handoff: Number of leases in a handoff.
        kbps: Sum of the throughput in KiB/s.
    """

    name: str
    leases: int
    ended: int
    in_handoff: int
    kbps: float


def load_rows(leases: Sequence[Lease], separator: str | None) -> list[OwnerLoad]:
    """Count the leases per worker; per group with the separator of groups."""
    held: dict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        owner = lease.actual_owner
        name = "(no owner)" if owner is None else owner
        held[name if owner is None or separator is None else group_of(owner, separator)].append(
            lease
        )
    return [
        OwnerLoad(
            name,
            sum(not lease.ended for lease in group),
            sum(lease.ended for lease in group),
            sum(lease.in_handoff for lease in group),
            round(sum(lease.throughput_kbps or 0.0 for lease in group if not lease.ended), 1),
        )
        for name, group in sorted(held.items())
    ]
