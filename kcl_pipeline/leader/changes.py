"""Remember since when values are unchanged, on the clock of the observer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from kcl_pipeline.clock import Clock

K = TypeVar("K", bound=Hashable)


class LastChanges(Generic[K]):
    """Since when the value of each key is unchanged.

    Clocks of two hosts are never compared: the time of a change is the time at which this process
    saw it, in monotonic seconds.

    Args:
        clock: The clock of the observer.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._values: dict[K, tuple[object, float]] = {}

    def observe(self, values: Mapping[K, object]) -> frozenset[K]:
        """Compare all values with the former ones, and forget the keys that are gone.

        Returns:
            The keys whose value has changed. A new key has not changed.
        """
        now, before = self._clock.monotonic(), self._values
        self._values = {}
        changed = set[K]()
        for key, value in values.items():
            known = before.get(key)
            if known is not None and known[0] == value:
                self._values[key] = known
            else:
                self._values[key] = (value, now)
                if known is not None:
                    changed.add(key)
        return frozenset(changed)

    def ages(self, now: float) -> dict[K, float]:
        """Return for each key the seconds until `now` for which its value is unchanged."""
        return {key: max(now - since, 0.0) for key, (_, since) in self._values.items()}
