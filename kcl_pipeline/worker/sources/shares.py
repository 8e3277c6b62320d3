"""Divide a batch among shards: those that are behind get what those at their tip do not need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchLimit:
    """What a shard at its tip may bring: twice its last fetch.

    Attributes:
        records: Number of records.
        bytes: Number of bytes.
    """

    records: int
    bytes: int


def shares(total: int, limits: Sequence[int | None]) -> list[int]:
    """Return the share of each shard, at least 1.

    If a shard wants as much as possible, the others get what they want: at least a quarter of an
    even share, so that a shard can bring more than before, and at most an even share. The shards
    that want as much as possible divide the rest evenly, so each gets an even share or more.
    Otherwise all shares are even.

    Args:
        total: Records or bytes of the batch.
        limits: What each shard wants. None: as much as possible.
    """
    if not limits:
        return []
    even = total // len(limits)
    modest = [min(max(one, even // 4), even) for one in limits if one is not None]
    others = len(limits) - len(modest)
    rest = (total - sum(modest)) // others if others else even
    limited = iter(modest if others else [even] * len(limits))
    return [max(rest if one is None else next(limited), 1) for one in limits]
