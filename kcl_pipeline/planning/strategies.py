"""Register and look up assignment strategies (setting `lease_assignment_strategy`)."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.planning.balanced.strategy import balanced
from kcl_pipeline.planning.kcl.lease_count import lease_count_based
from kcl_pipeline.planning.kcl.variance import worker_utilization_aware
from kcl_pipeline.planning.model import Strategy

_REGISTRY: Final[dict[str, Strategy]] = {
    "balanced": balanced,
    "worker_utilization_aware": worker_utilization_aware,
    "lease_count_based": lease_count_based,
}


def register(name: str, strategy: Strategy) -> None:
    """Register a strategy, which must be pure and deterministic. Replaces one of the same name."""
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
