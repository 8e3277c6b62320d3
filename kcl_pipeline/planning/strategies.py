"""Register and look up assignment strategies (setting `lease_assignment_strategy`)."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.planning.balanced.strategy import plan_balanced
from kcl_pipeline.planning.kcl.variance import kcl_variance
from kcl_pipeline.planning.model import Plan, PlanInput, Strategy


def balanced(given: PlanInput) -> Plan:
    """Balance throughput and CPU (`docs/planning.md`)."""
    return plan_balanced(given, "balanced")


def worker_utilization_aware(given: PlanInput) -> Plan:
    """Do the same under the name of KCL's strategy that measures load."""
    return plan_balanced(given, "worker_utilization_aware")


def lease_count_based(given: PlanInput) -> Plan:
    """Do the same with a load of 1 for every unfinished lease."""
    return plan_balanced(given, "lease_count_based", measured=False)


_REGISTRY: Final[dict[str, Strategy]] = {
    "balanced": balanced,
    "worker_utilization_aware": worker_utilization_aware,
    "lease_count_based": lease_count_based,
    "kcl_variance": kcl_variance,
}


def register(name: str, strategy: Strategy) -> None:
    """Register a strategy, which must be pure and deterministic. Replaces one of the same name.

    Example:
        >>> from kcl_pipeline import Plan, PlanInput, register_strategy
        >>> def no_moves(given: PlanInput) -> Plan:
        ...     return Plan(strategy="no_moves", moves=())
        >>> register_strategy("no_moves", no_moves)  # doctest: +SKIP
    """
    _REGISTRY[name] = strategy


def get(name: str) -> Strategy:
    """Return the strategy of this name, also in KCL's spelling in capitals.

    Raises:
        SettingsError: There is no such strategy. The message names all strategies.
    """
    for candidate in (name, name.lower()):
        if candidate in _REGISTRY:
            return _REGISTRY[candidate]
    raise SettingsError(
        f"lease_assignment_strategy={name!r} is not known; write one of "
        f"{', '.join(names())}, or register it"
    )


def names() -> tuple[str, ...]:
    """Return all names, sorted."""
    return tuple(sorted(_REGISTRY))
