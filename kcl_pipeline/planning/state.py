"""Build the input of a strategy from rows and the observations of the leader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kcl_pipeline.config import AssignmentSettings
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, PlanLimits, WorkerState

_FAILED = -1.0
_DEFAULT_LIMIT = 100.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The observations of the leader, in seconds of its own clock.

    Attributes:
        expired: Keys of expired leases.
        waited_seconds: Time of a lease without a living owner.
        overdue_handoffs: Keys of leases whose handoff takes too long.
        last_owners: Former owners of leases that have no owner.
        moved_seconds: Time since a lease last moved.
        distrusted: Workers of expired leases that have not reported since.
        unconfirmed: Workers that may have stopped, because only their row is known. They get no
            leases.
        unsettled: Keys of leases whose throughput has no weight in a plan yet. Its first samples
            contain the records that had waited for the first owner.
        unreadable: Living workers whose row cannot be read. They get no leases and keep theirs.
    """

    expired: frozenset[str] = frozenset()
    waited_seconds: Mapping[str, float] = field(default_factory=dict)
    overdue_handoffs: frozenset[str] = frozenset()
    last_owners: Mapping[str, str] = field(default_factory=dict)
    moved_seconds: Mapping[str, float] = field(default_factory=dict)
    distrusted: frozenset[str] = frozenset()
    unconfirmed: frozenset[str] = frozenset()
    unsettled: frozenset[str] = frozenset()
    unreadable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input of a strategy, and the moves that no strategy decides.

    Attributes:
        given: The input.
        forced: Moves that end overdue handoffs, or handoffs whose old owner has stopped, and moves
            from a worker that is replaced to its successor.
    """

    given: PlanInput
    forced: tuple[Move, ...]


def prepare(
    leases: Sequence[Lease],
    workers: Sequence[WorkerMetrics],
    observation: Observation,
    settings: AssignmentSettings,
    *,
    group_separator: str = "-",
    balance: bool = True,
) -> Prepared:
    """Build the input of a strategy.

    A lease counts as without an owner if its owner drains, or if the destination of its handoff has
    stopped. A lease in any other handoff counts for its destination and is not movable.

    A worker that another one replaces gets no leases, and each of its leases moves to the
    successor. They count for the successor already, so that no other lease moves because of it.

    Args:
        leases: All leases.
        workers: The living workers.
        observation: The observations.
        settings: The assignment settings.
        group_separator: Separates the group in a worker id.
        balance: Whether leases may move for balance.
    """
    states = {
        row.worker_id: worker_state(
            row,
            settings.worker_metrics_ema_alpha,
            group_separator,
            observation.distrusted | observation.unconfirmed,
        )
        for row in workers
        if is_valid(row)
    }
    living = frozenset(row.worker_id for row in workers) | observation.unreadable
    successors = _successors(workers, states)
    draining = frozenset(
        row.worker_id for row in workers if row.drain_requested and row.worker_id not in successors
    )
    for worker_id in successors.keys() & states.keys():
        states[worker_id] = replace(states[worker_id], accepts_leases=False)
    accepting = frozenset(state.worker_id for state in states.values() if state.accepts_leases)
    described: list[LeaseState] = []
    forced: list[Move] = []
    for lease in leases:
        move = _forced_move(lease, observation, accepting)
        if move is not None:
            forced.append(move)
        state = _lease_state(lease, observation, draining, living, is_forced=move is not None)
        successor = successors.get(lease.owner or "")
        if successor is not None and state.owner == lease.owner and not lease.ended:
            if state.movable:
                forced.append(_succession(lease.lease_key, state.owner, successor))
            state = replace(state, owner=successor, movable=False)
        described.append(state)
    return Prepared(
        given=PlanInput(
            leases=tuple(sorted(described, key=lambda item: item.lease_key)),
            workers=tuple(states[key] for key in sorted(states)),
            limits=limits_of(settings, balance=balance),
        ),
        forced=tuple(sorted(forced, key=lambda item: item.lease_key)),
    )


def limits_of(settings: AssignmentSettings, *, balance: bool) -> PlanLimits:
    """Return the settings of strategies."""
    return PlanLimits(
        max_leases_for_worker=settings.max_leases_for_worker,
        max_throughput_per_host_kbps=settings.max_throughput_per_host_kbps,
        re_balance_threshold_percentage=settings.re_balance_threshold_percentage,
        dampening_percentage=settings.dampening_percentage,
        allow_throughput_overshoot=settings.allow_throughput_overshoot,
        balance=balance,
        balance_target_percentage=settings.balance_target_percentage,
        dead_band_kbps=settings.dead_band_kbps,
        dead_band_cpu_percentage=settings.dead_band_cpu_percentage,
        cool_down_seconds=settings.cool_down_seconds,
        churn_budget_percentage=settings.churn_budget_percentage,
        fresh_lease_quantile=settings.fresh_lease_quantile,
        max_leases_for_group=settings.max_leases_for_group,
        max_throughput_per_group_kbps=settings.max_throughput_per_group_kbps,
    )


def is_valid(row: WorkerMetrics) -> bool:
    """Return whether every metric of a row has an operating range other than 0 (protocol §2.4)."""
    return all(
        metric in row.operating_range
        and row.operating_range[metric]
        and row.operating_range[metric][0] != 0
        for metric in row.stats
    )


def is_failing(row: WorkerMetrics) -> bool:
    """Return whether a metric could not be measured in the last interval (protocol §2.4)."""
    return any(values and values[-1] == _FAILED for values in (*row.stats.values(), row.own_cpu))


def is_hung(row: WorkerMetrics) -> bool:
    """Return whether the worker reports that its processing thread makes no progress.

    Its leases stay: whatever blocks it can block the next worker, too, and the handoff needs the
    thread that blocks. `worker.stop_hung_after_millis` or a drain releases them.
    """
    return row.status is not None and row.status.hung is not None


def moving_average(values: Sequence[float], alpha: float) -> float | None:
    """Return the exponential moving average without failed intervals (protocol §2.4).

    `values` are oldest first. None if all intervals failed.
    """
    average: float | None = None
    for value in values:
        if value == _FAILED or not math.isfinite(value):
            continue
        average = value if average is None else alpha * value + (1 - alpha) * average
    return average


def worker_state(
    row: WorkerMetrics, alpha: float, group_separator: str, distrusted: frozenset[str] = frozenset()
) -> WorkerState:
    """Return one worker for strategies.

    Its group is the id up to the first separator, or the whole id without one.
    """
    averages = {
        metric: moving_average(values, alpha) for metric, values in sorted(row.stats.items())
    }
    metrics = {metric: value for metric, value in averages.items() if value is not None}
    return WorkerState(
        worker_id=row.worker_id,
        group=row.worker_id.partition(group_separator)[0],
        metrics=metrics,
        own_cpu=moving_average(row.own_cpu, alpha),
        limits={
            metric: float(row.operating_range[metric][0])
            if row.operating_range.get(metric)
            else _DEFAULT_LIMIT
            for metric in metrics
        },
        accepts_leases=not row.drain_requested
        and not is_failing(row)
        and not is_hung(row)
        and row.worker_id not in distrusted,
    )


def _successors(
    workers: Sequence[WorkerMetrics], states: Mapping[str, WorkerState]
) -> dict[str, str]:
    """Return the successor of each living worker that is replaced.

    A successor that takes no leases, such as one that drains, is none, and neither is a worker that
    is itself replaced. Then the worker goes on as before.
    """
    named = [
        (row.replaces, row.worker_id)
        for row in workers
        if row.replaces is not None
        and row.worker_id in states
        and states[row.worker_id].accepts_leases
    ]
    living = {row.worker_id for row in workers}
    replaced = {former for former, _ in named if former in living}
    # If two name the same worker, the smaller id is the successor in every plan
    return {
        former: successor
        for former, successor in sorted(named, reverse=True)
        if former in living and successor not in replaced
    }


def _succession(lease_key: str, owner: str | None, successor: str) -> Move:
    return Move(lease_key, owner, successor, f"{successor} replaces {owner}")


def _forced_move(lease: Lease, observation: Observation, accepting: frozenset[str]) -> Move | None:
    """Return the move that ends a handoff whose old owner has stopped or takes too long."""
    if lease.checkpoint_owner is None or lease.owner is None or lease.owner not in accepting:
        return None
    if lease.lease_key in observation.expired:
        return Move(
            lease.lease_key,
            None,
            lease.owner,
            f"{lease.checkpoint_owner} stopped renewing during the handoff",
        )
    if lease.lease_key in observation.overdue_handoffs:
        return Move(
            lease.lease_key,
            lease.checkpoint_owner,
            lease.owner,
            f"the handoff from {lease.checkpoint_owner} is overdue",
        )
    return None


def _lease_state(
    lease: Lease,
    observation: Observation,
    draining: frozenset[str],
    living: frozenset[str],
    *,
    is_forced: bool,
) -> LeaseState:
    key = lease.lease_key
    owner, because, movable = lease.owner, "no owner", True
    if is_forced:
        movable = False
    elif lease.actual_owner is None:
        owner = None
        if (before := observation.last_owners.get(key)) is not None:
            because = f"{before} does not hold it any more"
    elif key in observation.expired:
        owner, because = None, f"its owner {lease.actual_owner} expired"
    elif (
        lease.in_handoff
        and lease.owner in living
        and lease.owner not in draining
        and key not in observation.overdue_handoffs
    ):
        movable = False
    elif lease.in_handoff:
        owner, because = None, f"{lease.owner} does not take it over"
    elif lease.owner in draining:
        owner, because = None, f"its owner {lease.owner} drains"
    return LeaseState(
        lease_key=key,
        owner=owner,
        throughput_kbps=None if key in observation.unsettled else lease.throughput_kbps,
        unowned_because=because,
        waited_seconds=observation.waited_seconds.get(key, 0.0),
        movable=movable,
        ended=lease.ended,
        seconds_since_move=observation.moved_seconds.get(key, math.inf),
    )


def whole_plan(plan: Plan, prepared: Prepared) -> Plan:
    """Return the forced moves, then those of the strategy."""
    return Plan(plan.strategy, (*prepared.forced, *plan.moves), plan.spilled, plan.notes)
