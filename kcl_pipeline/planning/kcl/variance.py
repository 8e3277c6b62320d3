"""Implement the algorithm of KCL's WORKER_UTILIZATION_AWARE strategy (protocol §5.5).

As in KCL, the load of a worker is its metrics relative to the mean of all workers that report them,
and a lease adds to it in proportion to its throughput. Three defects of KCL are not reproduced: the
division 0/0, the starvation of workers with equal load, and targets that are removed from the queue
after one lease does not fit.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice

from kcl_pipeline.planning.kcl.fleet import (
    Holder,
    holders,
    lease_weights,
    place,
    waiting_leases,
)
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput

NAME = "kcl_variance"
_SHARE = "share of the load"
_SHARE_LIMIT = 100.0
_NOISE_PERCENT = 1.0
_ROUNDING = 1e-9
_TRIED = 32
"""Number of the least utilized workers that are tried for a lease."""


def kcl_variance(given: PlanInput) -> Plan:
    """Assign leases without an owner to the least utilized workers.

    With `limits.balance`, leases of over-utilized workers move, too.
    """
    weights = lease_weights(given.leases)
    fleet = _Fleet(holders(given, weights), weights, given)
    waiting = waiting_leases(given, weights)
    moves, spilled = place(waiting, fleet.holders, given.limits, fleet.rank, fleet.give)
    if given.limits.balance:
        moves += _balance(fleet, {move.lease_key for move in moves})
        moves += _start_idle_workers(fleet, {move.lease_key for move in moves})
    return Plan(NAME, tuple(moves), tuple(spilled))


class _Fleet:
    """The workers that accept leases, with their metrics after the plan so far.

    The metric of a worker without metrics is its share of the load of the fleet, where 100 is the
    fair share. Its mean is fixed. KCL uses the mean of the workers without metrics, so that a
    single idle one would count as average.
    """

    def __init__(self, fleet: list[Holder], weights: Mapping[str, float], given: PlanInput) -> None:
        self.holders = fleet
        self.limits = given.limits
        self.stop = given.stop
        self.weights = weights
        self.fair = sum(weights.values()) / len(fleet) if fleet else 0.0
        self.values = {
            h.worker_id: dict(h.worker.metrics) or {_SHARE: self._share(h)} for h in fleet
        }
        self.means = self._means()

    def _means(self) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for values in self.values.values():
            for metric, value in values.items():
                found.setdefault(metric, []).append(value)
        means = {metric: sum(values) / len(values) for metric, values in sorted(found.items())}
        if _SHARE in means:
            means[_SHARE] = _SHARE_LIMIT
        return means

    def _share(self, holder: Holder) -> float:
        return 100.0 * holder.weight / self.fair if self.fair else 0.0

    def limit(self, holder: Holder, metric: str) -> float:
        """Return the operating range of a metric in percent; infinite for the share of the load."""
        return float("inf") if metric == _SHARE else holder.worker.limits.get(metric, 100.0)

    def band(self, metric: str) -> float:
        """Return the distance from the mean above which leases move.

        One percentage point of a measured metric is noise.
        """
        return max(
            self.means[metric] * self.limits.re_balance_threshold_percentage / 100,
            0.0 if metric == _SHARE else _NOISE_PERCENT,
        )

    def pressure(self, holder: Holder) -> float:
        """Return the largest ratio of a metric to its mean; 1.0 is average.

        This is KCL's order of priority, without its exception for 0.
        """
        ratios = [
            value / self.means[metric]
            for metric, value in self.values[holder.worker_id].items()
            if self.means[metric] > 0
        ]
        return max(ratios) if ratios else self._share(holder) / 100.0

    def rank(self, holder: Holder) -> tuple[float, int, int, str]:
        """Return the sort key of targets: pressure, number of leases, id.

        The pressure is rounded, so that equal loads compare as equal.
        """
        return (round(self.pressure(holder), 9), *holder.fewest_first())

    def growth(self, lease: LeaseState, metric: str) -> float:
        """Return the increase of a metric by a lease: the mean times its share of the fair load."""
        return self.means[metric] * self.weights[lease.lease_key] / self.fair if self.fair else 0.0

    def give(self, lease: LeaseState, target: Holder, source: Holder | None = None) -> None:
        """Count the lease as moved."""
        weight = self.weights[lease.lease_key]
        if source is not None:
            source.remove(lease, weight)
        target.add(lease, weight)
        values = self.values[target.worker_id]
        for metric in values:
            values[metric] += self.growth(lease, metric)

    def stays_average(self, lease: LeaseState, target: Holder) -> bool:
        """Return whether all metrics stay within mean and operating range with the lease."""
        return target.fits(lease, self.limits) and all(
            value + self.growth(lease, metric)
            <= min(self.means[metric], self.limit(target, metric)) * (1 + _ROUNDING)
            for metric, value in self.values[target.worker_id].items()
        )


@dataclass(frozen=True, slots=True)
class _Source:
    holder: Holder
    metric: str
    value: float
    mean: float
    take: float
    over_limit: bool


def _balance(fleet: _Fleet, placed: set[str]) -> list[Move]:
    """Do KCL's variance step, for the metric with the most load to move.

    Targets are the least utilized workers.
    """
    best: list[_Source] = []
    for metric in fleet.means:
        sources = _sources(fleet, metric)
        if sum(s.take for s in sources) > sum(s.take for s in best):
            best = sources
    moves: list[Move] = []
    ranked = sorted((fleet.rank(holder), holder) for holder in fleet.holders)
    for source in sorted(best, key=lambda s: (-s.take, s.holder.worker_id)):
        for lease in _candidates(fleet, source, placed):
            if fleet.stop():
                return moves
            entry = next(
                (
                    entry
                    for entry in islice(ranked, _TRIED)
                    if entry[1] is not source.holder and fleet.stays_average(lease, entry[1])
                ),
                None,
            )
            if entry is None:
                continue
            target = entry[1]
            ranked.remove(entry)
            fleet.give(lease, target, source.holder)
            insort(ranked, (fleet.rank(target), target))
            reason = (
                f"{source.metric} of {source.holder.worker_id} is {source.value:.1f}, "
                f"the mean is {source.mean:.1f}"
            )
            moves.append(Move(lease.lease_key, source.holder.worker_id, target.worker_id, reason))
    return moves


def _sources(fleet: _Fleet, metric: str) -> list[_Source]:
    """Return the workers above the band of a metric, with the weight to move from each.

    None if all workers are within the band (protocol §5.5 step 1).
    """
    mean = fleet.means[metric]
    band = fleet.band(metric)
    reporting = [
        (h, fleet.values[h.worker_id][metric])
        for h in fleet.holders
        if metric in fleet.values[h.worker_id]
    ]
    over_limit = [(h, v) for h, v in reporting if v > fleet.limit(h, metric)]
    out_of_band = [v for _, v in reporting if abs(v - mean) > band * (1 + _ROUNDING)]
    if not over_limit and not out_of_band:
        return []
    chosen = [(h, v) for h, v in reporting if v >= mean + band or v > fleet.limit(h, metric)]
    if not chosen:
        chosen = [min(reporting, key=lambda item: (-item[1], item[0].worker_id))]
    sources = []
    for holder, value in chosen:
        excess = value - min(mean, fleet.limit(holder, metric))
        take = (
            holder.weight * excess / value * fleet.limits.dampening_percentage / 100
            if value > 0
            else 0.0
        )
        if take > 0:
            sources.append(
                _Source(holder, metric, value, mean, take, value > fleet.limit(holder, metric))
            )
    return sources


def _candidates(fleet: _Fleet, source: _Source, placed: set[str]) -> list[LeaseState]:
    """Return the leases to move from a source: heavy ones first, up to the weight to move.

    With overshoot, the lightest lease if none fits. A lease that moved within `cool_down_seconds`
    stays, because averages are slow and their noise would move it back. The last unfinished lease
    stays, because an idle worker would get another one. Both rules do not apply if the worker is
    above its operating range.
    """
    spare = source.holder.live - (0 if source.over_limit else 1)
    movable = [
        item
        for key, item in source.holder.leases.items()
        if item.movable
        and not item.ended
        and key not in placed
        and (source.over_limit or item.seconds_since_move >= fleet.limits.cool_down_seconds)
    ]
    ordered = sorted(
        movable,
        key=lambda item: (-fleet.weights[item.lease_key], -item.seconds_since_move, item.lease_key),
    )
    remaining = source.take
    chosen: list[LeaseState] = []
    for lease in ordered:
        weight = fleet.weights[lease.lease_key]
        if len(chosen) < spare and remaining - weight > 0:
            chosen.append(lease)
            remaining -= weight
    if not chosen and spare > 0 and ordered and fleet.limits.allow_throughput_overshoot:
        return [min(ordered, key=lambda item: (fleet.weights[item.lease_key], item.lease_key))]
    return chosen


def _start_idle_workers(fleet: _Fleet, moved: set[str]) -> list[Move]:
    """Move one lease to every worker without leases, unless its metrics are above the mean.

    It is the lightest one of a worker with the most leases. Utilization alone does not do this if
    the workers share a host: all report the same CPU.
    """
    moves: list[Move] = []
    idle = sorted((h for h in fleet.holders if not h.live and _is_calm(fleet, h)), key=fleet.rank)
    givers = [((-h.live, h.worker_id), h, _lightest_first(fleet, h, moved)) for h in fleet.holders]
    heapify(givers)
    for holder in idle:
        while givers and not givers[0][2]:
            heappop(givers)
        if not givers or givers[0][1].live <= 1 or fleet.stop():
            break
        _, source, leases = givers[0]
        place = next((k for k, lease in enumerate(leases) if holder.fits(lease, fleet.limits)), -1)
        if place < 0:
            continue
        lease = leases.pop(place)
        fleet.give(lease, holder, source)
        heapreplace(givers, ((-source.live, source.worker_id), source, leases))
        reason = f"{holder.worker_id} holds nothing"
        moves.append(Move(lease.lease_key, source.worker_id, holder.worker_id, reason))
    return moves


def _lightest_first(fleet: _Fleet, holder: Holder, moved: set[str]) -> list[LeaseState]:
    movable = (
        item
        for key, item in holder.leases.items()
        if item.movable and not item.ended and key not in moved
    )
    return sorted(movable, key=lambda item: (fleet.weights[item.lease_key], item.lease_key))


def _is_calm(fleet: _Fleet, holder: Holder) -> bool:
    return all(
        value <= fleet.means[metric] + fleet.band(metric) and value <= fleet.limit(holder, metric)
        for metric, value in fleet.values[holder.worker_id].items()
    )
