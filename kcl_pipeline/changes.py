"""Remember since when values are unchanged, and for how long something lasts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Known:
    value: object
    since: float
    has_changed: bool


class LastChanges(Generic[K]):
    """Since when the value of each key is unchanged, as its observer saw it.

    Times are monotonic seconds of the observer. Clocks of two hosts are never compared.
    """

    def __init__(self) -> None:
        self._known: dict[K, _Known] = {}

    def observe(self, values: Mapping[K, object], now: float) -> dict[K, object]:
        """Compare all values with the former ones, and forget the keys that are gone.

        Returns:
            The former values of the keys whose value has changed. A new key has not changed.
        """
        before, self._known = self._known, {}
        changed: dict[K, object] = {}
        for key, value in values.items():
            known = before.get(key)
            if known is None:
                known = _Known(value, now, has_changed=False)
            elif known.value != value:
                changed[key] = known.value
                known = _Known(value, now, has_changed=True)
            self._known[key] = known
        return changed

    def note(self, key: K, value: object, now: float) -> None:
        """Note a value that this process has written: it is unchanged since now."""
        self._known[key] = _Known(value, now, has_changed=True)

    def shift(self, seconds: float) -> None:
        """Leave out a time in which the observer saw nothing."""
        self._known = {
            key: replace(known, since=known.since + seconds) for key, known in self._known.items()
        }

    def since(self, key: K) -> float:
        """Return since when the value is unchanged: its last change, or the first look."""
        return self._known[key].since

    def has_changed(self, key: K) -> bool:
        """Return whether a change was seen."""
        return self._known[key].has_changed

    def seconds(self, now: float) -> dict[K, float]:
        """Return for each key for how many seconds its value is unchanged."""
        return {key: max(now - known.since, 0.0) for key, known in self._known.items()}

    def unchanged_for(self, seconds: float, now: float) -> frozenset[K]:
        """Return the keys whose value is unchanged for `seconds` or longer."""
        return frozenset(key for key, known in self._known.items() if now - known.since >= seconds)

    def keys(self) -> frozenset[K]:
        """Return all keys."""
        return frozenset(self._known)

    def __contains__(self, key: K) -> bool:
        return key in self._known


_SHORTEST_GAP_SECONDS: Final = 5.0
"""A time between two looks that counts in full, however short the limit of an observer is."""


class Lasting:
    """For how long something lasts while its observer looks.

    The time between two looks counts up to a quarter of the limit: while a process is paused as a
    whole (SIGSTOP), or its thread is in a batch, nothing can move that it looks at.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._longest_gap_seconds = max(limit_seconds / 4, _SHORTEST_GAP_SECONDS)
        self._looked_at = 0.0
        self.seconds = 0.0

    def begin(self, at: float) -> None:
        """Begin again (monotonic seconds)."""
        self._looked_at, self.seconds = at, 0.0

    def count(self, now: float) -> float:
        """Return the seconds since the begin."""
        self.seconds += min(now - self._looked_at, self._longest_gap_seconds)
        self._looked_at = now
        return self.seconds
