"""Choose the worker that creates leases in an application without a leader, as KCL 2.x does.

Every worker sorts the owners of leases and shuffles them with the same generator, that of
`java.util.Random`. So all workers that see the same owners choose the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SEED: Final = 1947
"""KCL's seed of the shuffle (protocol §5.7)."""

_MULTIPLIER: Final = 0x5DEECE66D
_INCREMENT: Final = 0xB
_MASK: Final = (1 << 48) - 1
_BITS: Final = 31


def shard_sync_worker(owners: Iterable[str]) -> str | None:
    """Return the worker that creates leases. None: no lease has an owner, and any worker may.

    Args:
        owners: The owners of leases, in any order and also several times.
    """
    # Java compares strings by UTF-16 code units
    ordered = sorted(set(owners), key=lambda owner: owner.encode("utf-16-be", "surrogatepass"))
    random = _JavaRandom(SEED)
    for size in range(len(ordered), 1, -1):
        chosen = random.next_int(size)
        ordered[size - 1], ordered[chosen] = ordered[chosen], ordered[size - 1]
    return ordered[0] if ordered else None


class _JavaRandom:
    """The generator of `java.util.Random`: 48 bits, linear congruential."""

    def __init__(self, seed: int) -> None:
        self._state = (seed ^ _MULTIPLIER) & _MASK

    def next_int(self, bound: int) -> int:
        """Return a number from 0 to `bound` - 1, inclusive."""
        if bound & (bound - 1) == 0:
            return (bound * self._next()) >> _BITS
        while True:
            bits = self._next()
            value = bits % bound
            if bits - value + (bound - 1) < 1 << _BITS:  # otherwise Java's int overflows
                return value

    def _next(self) -> int:
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return self._state >> (48 - _BITS)
